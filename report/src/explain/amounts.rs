//! Rows and columns of bytes.

use super::here::none;
use super::{Word, word};
use crate::Part;
use gpumem_model::run::Class;

pub(super) const WORDS: &[Word] = &[
    word(
        &[
            "used",
            "used (= nvidia-smi)",
            "used, all devices",
            "peak used",
            "uncovered used",
            "peak used time",
        ],
        "What NVML, and so nvidia-smi, charges to the process on a device. It is predates + tracked + Untrackable, to the byte.",
        |here| here.row(Part::Used),
        "gpumemctl report shows what it is made of; --steps why the part that nobody tracks is what it is",
    ),
    word(
        &["tracked", "tracked, all devices", "peak tracked", "of tracked"],
        "Driver allocations of the process that are live, as its agent saw them: direct ones by what was asked for, pools by what they hold. The categories, Others, pool idle and opaque pools are its parts.",
        |here| here.row(Part::Tracked),
        "its peak is exact and needs no NVML sample: compare runs by it (gpumemctl diff A B --of tracked)",
    ),
    word(
        &["predates the agent", "predates"],
        "Bytes that were allocated before the agent came (or the log began). They are part of used, and nobody has names for them.",
        |here| here.row(Part::Predates),
        "start the program under gpumemctl run, or import gpumem first, so that nothing is older",
    ),
    word(
        &[
            "pool idle",
            "idle",
            "pool slack",
            "slack",
            "idle pieces",
            "largest idle",
            "largest block",
            "cached",
        ],
        "Memory that a framework's pool holds from the driver and no live block uses. It is not lost, the pool hands it out again; but no other process and no other library gets it.",
        |here| here.row(Part::PoolIdle),
        "much of it in small pieces is fragmentation: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; torch.cuda.empty_cache() gives whole segments back",
    ),
    word(
        &["opaque pools", "opaque"],
        "Pools whose owner reports no blocks (JAX's preallocation, the driver's memory of graphs): what is in them is neither idle nor named.",
        |here| here.row(Part::Opaque),
        "an owner can report its blocks (docs/c-api.md); JAX: XLA_PYTHON_CLIENT_PREALLOCATE=false",
    ),
    word(
        &["Others", "(no tag)", "nameless", "rest"],
        "Tracked bytes that no rule takes; by tag, those without one. Totals never depend on rules: what these do not name is here.",
        |here| here.row(Part::Others),
        "gpumemctl report names the largest of them; rules of your own: --rules FILE",
    ),
    word(
        &["Untrackable", "gap", "untrackable parts"],
        "used - predates - tracked: what NVML charges and no allocation asked for. Contexts, code, kernels' stacks, what libraries and the driver keep. Signed, never clamped.",
        |here| here.row(Part::Untrackable),
        "gpumemctl report --steps: when it changed, and by what",
    ),
    word(
        &["context"],
        "What creating a CUDA context cost: the step of the gap at that call, hence measured. Some 150 to 500 MiB per process and device, before any tensor.",
        |here| here.part("context"),
        "fewer processes per GPU have fewer contexts; a context on a GPU that is not used is often a stray torch.cuda call",
    ),
    word(
        &["modules"],
        "Code and globals of kernels that were loaded. At most their loadable sections: the driver may load less (upper bound).",
        |here| here.part("modules"),
        "CUDA_MODULE_LOADING=LAZY loads what is called; fewer libraries have less code",
    ),
    word(
        &["local memory"],
        "Stacks of kernels: what each thread that can be resident may need, times all of them. A model from the stack limit, or the step that was measured.",
        |here| here.part("local_memory"),
        "a large cudaLimitStackSize, or one kernel with deep recursion, costs this for the whole life of the context",
    ),
    word(
        &["heaps"],
        "The buffer of printf and the heap of malloc on the device, by their limits: a model.",
        |here| here.part("heaps"),
        "cudaDeviceSetLimit: cudaLimitMallocHeapSize, cudaLimitPrintfFifoSize",
    ),
    word(
        &["rounding", "heaps + rounding"],
        "What the driver adds to sizes that were asked for: granules of 2 MiB, smaller allocations share them. A model, in one row with heaps in texts.",
        |here| here.part("rounding"),
        "many small direct allocations cost most: let a pool carve them",
    ),
    word(
        &["unexplained"],
        "What is left of Untrackable when its other parts are taken off. Some of those are bounds or models, so this is `at least`; below zero they say too much.",
        |here| here.part("unexplained"),
        "gpumemctl report --steps shows its largest steps with the tag and library in force",
    ),
    word(
        &["unaccounted", "rest of the host", "unified"],
        "Device used minus the sum over its processes, from readings that agreed before and after: memory that nobody owns. Other containers' processes, dead contexts, the driver. With unified memory (GB10, Jetson) the device's memory is the host's, and this is what the rest of the host uses.",
        |here| Some(here.device.unaccounted_bytes.map_or("not known".to_owned(), |bytes| here.amount(bytes))),
        "much of it: gpumemctl doctor, and nvidia-smi on the host itself",
    ),
    word(
        &["system", "system reserved"],
        "The driver's own share of the device, as NVML says. In no process's used.",
        |here| here.unsigned(here.device.reading.and_then(|reading| reading.system_reserved_bytes)),
        "",
    ),
    word(
        &["protected"],
        "The part of used that confidential computing protects, as NVML says; gpumemctl ps has it. Absent without confidential computing, and with drivers that do not tell it.",
        |_| None,
        "",
    ),
    word(
        &["free", "device free", "available"],
        "Device memory that nobody holds, as NVML read it; in an OOM, right after the driver had refused.",
        |here| here.unsigned(here.device.reading.map(|reading| reading.free_bytes)),
        "a request may fail with enough free: it must be in one piece of addresses, and limits of pools count too",
    ),
    word(
        &["total", "device", "devices", "GPU", "ordinal", "index", "reading", "read"],
        "One GPU or MIG instance, called by its UUID; its number is NVML's index, which is not always CUDA's ordinal. A reading is its memory at one time.",
        |here| here.unsigned(here.device.total_bytes),
        "--device N or the beginning of the UUID leaves one",
    ),
    word(
        &[
            "tenants",
            "other tenants",
            "holders",
            "others since",
            "allocated since",
            "another process",
            "growth bytes",
            "count",
        ],
        "Other processes on the same device, by pid and used bytes; of other users no more is told. Holders are those of an OOM, with what they grew by before.",
        |here| {
            here.count(
                here.device.tenants.len() as u64 + u64::from(here.device.other_tenants.0),
                "other process on the device",
            )
            .map(|text| {
                text.replace("processs", "processes")
                    .replace("process on the devices", "processes on the device")
            })
        },
        "gpumemctl ps shows all of them",
    ),
    word(
        &[
            "beside",
            "beside the sum",
            "managed",
            "pinned",
            "pinned host",
            "registered",
            "registered host",
            "imported",
            "host VMM",
            "unbooked block",
            "blocks in memory that was not seen",
        ],
        "Memory that is in no sum of the device: managed, pinned and registered host memory, memory of another process, blocks whose allocation nobody saw.",
        |here| {
            let beside = &here.device.beside;
            let kinds = [
                beside.managed_bytes,
                beside.pinned_bytes,
                beside.registered_bytes,
                beside.imported_bytes,
                beside.host_vmm_bytes,
            ];
            Some(here.amount(kinds.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))))
        },
        "",
    ),
    word(
        &["pending", "pending block", "waiting for a stream"],
        "Blocks that their owner has let go and that a stream may still use: they count as idle, and cannot be handed out yet.",
        |here| here.cells(|cell| cell.pending),
        "record_stream and long queues of a side stream keep them",
    ),
    word(
        &["inherited", "process tag"],
        "Bytes that no scope, module or backward node of their thread names: they have the tag of the process (gpumem_process_tag, NVTX ranges with GPUMEM_NVTX_RANGES=1).",
        |here| here.cells(|cell| cell.inherited),
        "a scope on the allocating thread names them itself",
    ),
    word(
        &["direct"],
        "Driver allocations that no pool carves: cudaMalloc of libraries and programs.",
        |here| here.cells(|cell| cell.class == Class::Direct),
        "",
    ),
    word(
        &["block", "blocks", "class", "pool", "pools", "booked", "segment", "parent", "is expandable"],
        "A framework's pool holds segments from the driver and hands out blocks of them. Blocks explain the bytes of tracked; they never add to it.",
        |here| here.cells(|cell| cell.class == Class::Block),
        "",
    ),
    word(
        &[
            "memory allocated",
            "memory reserved",
            "own",
            "bridge",
            "why nvidia-smi says more than torch",
            "check",
        ],
        "PyTorch's own numbers: live blocks, and with idle all that its pool holds. With what is outside torch, and Untrackable, they add up to nvidia-smi's.",
        |here| here.cells(|cell| cell.pool.as_deref() == Some("torch") && cell.class == Class::Block),
        "torch.cuda.memory_allocated() says the same to the byte",
    ),
    word(
        &["outside torch", "outside", "NCCL", "libnccl", "libnccl (outside torch)"],
        "Driver allocations that PyTorch's pool did not make: NCCL's buffers, cuBLAS' and other libraries' own. torch.cuda knows nothing of them.",
        |here| here.cells(|cell| cell.class == Class::Direct),
        "their rows have the library's name",
    ),
    word(
        &["driver accounting", "accounted peak", "driver", "our"],
        "The highest that the driver's own accounting charged, where accounting mode is on, beside our peak.",
        |here| here.unsigned(here.device.details.accounted_peak_bytes),
        "",
    ),
    word(
        &["made in forward"],
        "Blocks that the forward pass made and whose role is not known: mostly activations, and what functions keep without saying so.",
        |here| here.category(&|name| name == "made in forward").map(|(.., numbers)| numbers),
        "gpumem.torch.watch(model, optimizer) makes roles certain",
    ),
    word(
        &["named", "nameable", "held"],
        "Named: bytes with a tag, of those that could have one (direct and block bytes). Held: by name, when memory ran out.",
        none,
        "",
    ),
];
