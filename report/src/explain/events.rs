//! What happens to memory: steps of the gap, growth, iterations, memory that runs out.

use super::here::none;
use super::{Word, word};
use gpumem_model::run::OomKind;

pub(super) const WORDS: &[Word] = &[
    word(
        &["steps of the gap", "cause", "also", "largest unexplained step"],
        "A change of Untrackable between two certain samples, booked to the driver events between them.",
        |here| here.count(here.device.details.steps.len() as u64, "step"),
        "gpumemctl report --steps",
    ),
    word(
        &["context created", "context destroyed", "green context created"],
        "A CUDA context came or went: its cost is the step of the gap.",
        |here| here.steps("context created"),
        "",
    ),
    word(
        &["module loaded", "module unloaded", "library loaded"],
        "Code was loaded or unloaded; with lazy loading much of it arrives later, at the first launch.",
        |here| here.steps("module loaded"),
        "",
    ),
    word(
        &["stack limit", "printf limit", "heap limit"],
        "A limit of the context was changed: the driver may take the memory at once, or when a kernel needs it.",
        |here| here.steps("stack limit"),
        "",
    ),
    word(
        &["graph instantiated", "graph destroyed"],
        "An executable CUDA graph was made or destroyed; its memory is opaque.",
        |here| here.steps("graph instantiated"),
        "",
    ),
    word(
        &["memory imported"],
        "Memory of another process was opened here; drivers may charge it to this process, too.",
        |here| here.steps("memory imported"),
        "",
    ),
    word(
        &["stream created", "peer access"],
        "Small costs of the driver: a stream, access to another GPU's memory.",
        |here| here.steps("stream created"),
        "",
    ),
    word(
        &["between events"],
        "The gap changed and nothing that is reported happened: kernels loaded lazily, a library's own memory, the driver. That is no cause.",
        |here| here.steps("between events"),
        "the step's tag and library say what ran then",
    ),
    word(
        &["history lost", "events lost in the gap", "smaller steps"],
        "Why a step has no cause: records were lost, more happened than is kept; or it is the smallest steps together.",
        |here| here.steps("smaller steps"),
        "",
    ),
    word(
        &[
            "growth",
            "verdict",
            "flat",
            "growing",
            "shrinking",
            "one jump",
            "not enough data",
            "jump",
            "grows",
        ],
        "Whether an amount grows over steps, periods or minutes: warm-up and one-time jumps are cut off, the rate is a median of slopes, the verdict a rank test.",
        none,
        "gpumemctl report --growth: each name with its rate",
    ),
    word(
        &["per", "bytes per unit", "period", "minute", "span", "points", "stride", "axis"],
        "What rates of growth are counted in: steps where the program says them, else periods in which memory rises and falls, else minutes.",
        none,
        "",
    ),
    word(
        &[
            "iteration",
            "iterations",
            "step",
            "steps",
            "epoch",
            "first",
            "low high",
            "rows",
            "columns",
            "is cut",
            "open iteration",
        ],
        "What each training step held, by role; neighbours are merged where there are many. The program says its steps (optimizer.step of PyTorch, gpumem.step).",
        |here| here.count(here.coverage().steps, "step"),
        "gpumemctl report --iterations (--columns: each parameter and gradient)",
    ),
    word(
        &["OOM", "ooms", "out of memory error", "what"],
        "An allocation failed and the program's framework gave up: the request, who had the device, what would have helped.",
        |here| here.ooms(|oom| oom.is_true()),
        "gpumemctl oom",
    ),
    word(
        &["pressure", "refusals", "refused"],
        "The driver refused, and the program made room or went on: slow, and a warning.",
        |here| here.ooms(|oom| oom.kind == OomKind::Pressure && !oom.is_true()),
        "gpumemctl oom --all",
    ),
    word(
        &["suspected"],
        "A process without an agent ended near a full device: probably memory ran out, and nobody said so.",
        |here| here.ooms(|oom| oom.is_suspected()),
        "gpumemctl oom --at TIME; start it under gpumemctl run",
    ),
    word(
        &["fatal", "survived", "fate", "after", "said", "is unheard", "FATAL", "ending"],
        "What followed: the process ended with a failure soon after, or it went on. Other ends are told apart: killed for host memory, a fault of the GPU (Xid), a limit.",
        none,
        "",
    ),
    word(
        &["asked", "driver asked", "short", "result", "pool used", "pool reserved"],
        "What was requested, of the pool and (a whole segment) of the driver; short is what was missing as printed.",
        none,
        "",
    ),
    word(
        &["stack", "at"],
        "Where the request was made: tag, phase, step, and the program's own line.",
        none,
        "",
    ),
    word(
        &["fragmented", "fragmentation", "verdict of an OOM"],
        "Idle memory would do for the request, but not in one piece.",
        none,
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    word(
        &["pool gave up", "device refused"],
        "Of an OOM, `kind`: whether the driver refused (device) or the pool had a limit of its own (pool).",
        none,
        "torch.cuda.set_per_process_memory_fraction sets such a limit",
    ),
    word(
        &["faults", "Xid", "host memory"],
        "Faults that the driver reported of the device, and ends that are not about GPU memory: they explain a death near a full device.",
        none,
        "",
    ),
    word(
        &["marks", "mark", "marks_dropped"],
        "Names of moments: gpumemctl mark NAME, or the program's own. The latest are kept; of older ones there is a count.",
        none,
        "gpumemctl report --at NAME",
    ),
    word(
        &["counters", "counter", "value", "changes", "mean", "since", "until", "counters_dropped"],
        "Figures of the program's own (gpumem_counter_set, gpumem.counter): now, least and greatest, and the mean weighted by time.",
        |here| here.count(here.run.own.counters.len() as u64, "counter"),
        "gpumemctl report --counters",
    ),
    word(
        &["ranges", "range", "scopes and their times", "is step", "ranges_dropped", "ranges_broken"],
        "How often and how long the program was in each of its scopes, with those inside of it; and its steps. Scopes have times only where `ranges` is on.",
        |here| here.count(here.run.own.ranges.len() as u64, "name"),
        "gpumem_configure(\"ranges\", \"on\"); gpumemctl report --counters",
    ),
];
