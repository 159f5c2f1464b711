//! What becomes of the memory behind each kind of driver call, and of the calls that are not listened to: docs/driver.md is made of it.

use super::table::Meaning::{self, *};
use cupti_sys::ids::*;

/// How sure it is that the driver behaves like this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evidence {
    /// Read from NVIDIA's headers.
    Header,
    /// Read from NVIDIA's documentation.
    Documentation,
    /// Believed; a check of tests/gpu decides it on hardware.
    Belief,
}

/// A kind of memory, or of event, and the calls that tell of it.
#[derive(Debug)]
pub struct Kind {
    /// What it is called.
    pub name: &'static str,
    /// The meanings of its calls.
    pub meanings: &'static [Meaning],
    /// What is booked, and what is not.
    pub booked: &'static str,
    /// See [`Evidence`].
    pub evidence: &'static [Evidence],
    /// The check of tests/gpu that measures it; empty for none.
    pub check: &'static str,
}

/// Calls that nothing is learned from, and what the report shows of their memory instead.
#[derive(Debug)]
pub struct Unheard {
    /// Callback ids of the driver domain.
    pub ids: &'static [u32],
    /// Why not, and what is shown.
    pub reason: &'static str,
}

const H: Evidence = Evidence::Header;
const D: Evidence = Evidence::Documentation;
const I: Evidence = Evidence::Belief;

/// Every meaning of the table belongs to one of these.
pub const KINDS: &[Kind] = &[
    Kind {
        name: "device memory",
        meanings: &[Alloc, AllocV1],
        booked: "Requested bytes, when the call returns. What the driver adds is `rounding`, a part of Untrackable.",
        evidence: &[H, I],
        check: "sizes.sweep",
    },
    Kind {
        name: "pitched memory",
        meanings: &[AllocPitch, AllocPitchV1],
        booked: "The driver's pitch x height. An allocation inside of the call with the same address is not booked twice.",
        evidence: &[H, I],
        check: "kinds.handles",
    },
    Kind {
        name: "arrays and mipmaps",
        meanings: &[Array2d, Array3d, Array2dV1, Array3dV1, Mipmap],
        booked: "An estimate: pixels of all levels x what the format takes. Tiling and padding stay in Untrackable. Sparse and deferred \
                 arrays take 0 bytes, and so does a format that CUDA 13.5 does not have.",
        evidence: &[H, I],
        check: "kinds.arrays",
    },
    Kind {
        name: "managed memory",
        meanings: &[AllocManaged],
        booked: "Beside the sum: NVML charges it to no process.",
        evidence: &[D],
        check: "kinds.managed",
    },
    Kind {
        name: "pinned and registered host memory",
        meanings: &[AllocHost, AllocHostV1, HostAlloc, HostRegister],
        booked: "Beside the sum: it is host memory.",
        evidence: &[D],
        check: "kinds.pinned",
    },
    Kind {
        name: "stream-ordered memory",
        meanings: &[AllocAsync, AllocFromPool, FreeAsync],
        booked: "Used bytes to the tag; charged is what the pool has reserved. That is read when the pool may have grown or was trimmed, else at \
                 most ten times a second at these calls, and once a second in any case. During a capture the graph owns the bytes.",
        evidence: &[H, D, I],
        check: "pools.default",
    },
    Kind {
        name: "pools",
        meanings: &[PoolCreate, PoolImport, PoolDestroy, PoolTouched, DeviceSetPool, LocationSetPool],
        booked: "Nothing by themselves. A pool gives memory back at a synchronisation, which no callback tells: for up to a second the \
                 figure is too large. Pools of managed and of host memory stand beside the sum.",
        evidence: &[H, D],
        check: "pools.own",
    },
    Kind {
        name: "memory of graphs",
        meanings: &[
            GraphAddAlloc,
            GraphAddFree,
            GraphAddNode,
            GraphAddNodeV2,
            GraphInstantiate,
            GraphUpload,
            GraphExecDestroy,
            GraphMemoryTrim,
        ],
        booked: "What the device's graph memory has reserved, read when graphs are made, uploaded, destroyed and trimmed, and once a second.",
        evidence: &[H],
        check: "pools.graphs",
    },
    Kind {
        name: "virtual memory management",
        meanings: &[MemCreate, MemRelease, MemMap, MemUnmap, MemRetain],
        booked: "The handle's size until it has neither references nor mappings. On the host: beside the sum.",
        evidence: &[D],
        check: "kinds.vmm",
    },
    Kind {
        name: "exported handles",
        meanings: &[MemExport],
        booked: "A handle that was exported to a file descriptor keeps its bytes until the descriptor is closed, which is seen at the next release \
                 or within a second. Where the descriptor was duplicated or sent to another process, what is booked after the close is a lower \
                 bound. Exports to a fabric are not followed.",
        evidence: &[D, I],
        check: "kinds.exported",
    },
    Kind {
        name: "multicast objects",
        meanings: &[MulticastCreate],
        booked: "Nothing: what is bound to one is memory of a handle.",
        evidence: &[D],
        check: "kinds.handles",
    },
    Kind {
        name: "imports",
        meanings: &[
            IpcOpen,
            IpcClose,
            MemImport,
            ExternalImport,
            ExternalBuffer,
            ExternalMipmap,
            PoolImportPointer,
        ],
        booked: "Beside the sum, with the size where the call tells it: the exporter's memory.",
        evidence: &[D, I],
        check: "kinds.ipc",
    },
    Kind {
        name: "frees",
        meanings: &[Free, FreeV1],
        booked: "The address when the call is entered, the bytes when it returned successfully. Result 4 means that the driver is gone, and the \
                 memory with it.",
        evidence: &[D],
        check: "live.threads",
    },
    Kind {
        name: "contexts",
        meanings: &[CtxCreate, CtxCreateV3, CtxCreateV4, PrimaryRetain, GreenCreate],
        booked: "Nothing; the step of NVML's figure around the call is what the context costs. A context that no such call made (libcudart may \
                 use a private table of the driver's; OpenGL and VDPAU have calls of their own) is known from CUPTI's resource callback, \
                 without its caller. A green context is a part of the primary one.",
        evidence: &[D, I],
        check: "gap.context",
    },
    Kind {
        name: "ends of contexts",
        meanings: &[PrimaryReset],
        booked: "A destroyed context, which CUPTI tells as a resource, takes its direct memory along; a reset takes all memory of the device.",
        evidence: &[D],
        check: "kinds.contexts",
    },
    Kind {
        name: "modules and libraries",
        meanings: &[LibraryLoad, ModuleCall],
        booked: "Nothing; loadable bytes are the upper bound of the step of NVML's figure.",
        evidence: &[D, I],
        check: "gap.modules",
    },
    Kind {
        name: "limits and peers",
        meanings: &[SetLimit, PeerAccess],
        booked: "Nothing; stack, printf and heap limits have models of what they cost.",
        evidence: &[D, I],
        check: "gap.limits",
    },
];

/// Calls with an id here that are not listened to.
pub const UNHEARD: &[Unheard] = &[
    Unheard { ids: &[cuInit, cuGetProcAddress_v2], reason: "They take no device memory." },
    Unheard { ids: &[cuDeviceGetCount], reason: "Listened to only to learn whether callbacks still come." },
    Unheard {
        ids: &[cuCtxDestroy, cuCtxDestroy_v2, cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2],
        reason: "The last release of a context is told as a resource.",
    },
    Unheard {
        ids: &[cuGLCtxCreate, cuGLCtxCreate_v2, cuVDPAUCtxCreate, cuVDPAUCtxCreate_v2],
        reason: "The context is told as a resource: it is booked, without its caller.",
    },
    Unheard {
        ids: &[cuStreamCreate, cuStreamCreateWithPriority, cuUserObjectCreate],
        reason: "Called often, and what they cost has no documented size: it stays in the unexplained part of Untrackable.",
    },
    Unheard {
        ids: &[cuGraphLaunch, cuGraphLaunch_ptsz],
        reason: "On the path of a launch. Graph memory that a launch takes is seen within a second; a shorter peak is not.",
    },
    Unheard {
        ids: &[cuMemAddressReserve, cuMemAddressFree, cuMemSetAccess],
        reason: "Addresses take no memory.",
    },
    Unheard {
        ids: &[cuMemMapArrayAsync, cuMemMapArrayAsync_ptsz],
        reason: "Tiles of sparse arrays take memory of a handle, which is booked until the handle's last release and unmap. While only an array \
                 has it mapped, the report shows too little, and Untrackable is larger by it.",
    },
    Unheard {
        ids: &[
            cuMulticastAddDevice,
            cuMulticastBindMem,
            cuMulticastBindMem_v2,
            cuMulticastBindAddr,
            cuMulticastBindAddr_v2,
            cuMulticastUnbind,
        ],
        reason: "A binding takes no memory of its own. Whether it keeps the memory of a released handle is not documented: if it does, Untrackable \
                 is larger by it.",
    },
    Unheard {
        ids: &[cuLogicalEndpointCreate, cuLogicalEndpointDestroy, cuLogicalEndpointBindMem],
        reason: "As for multicast: the memory is a handle's.",
    },
    Unheard {
        ids: &[cuGraphicsMapResources, cuGraphicsMapResources_ptsz],
        reason: "The resource belongs to OpenGL, Vulkan or Direct3D, and the call tells no size. NVML charges it to the process: it is Untrackable.",
    },
    Unheard {
        ids: &[cuMemAdvise, cuMemPrefetchAsync, cuMemPrefetchAsync_v2, cuMemDiscardBatchAsync],
        reason: "They move managed memory, which NVML charges to no process.",
    },
    Unheard { ids: &[cuIpcGetMemHandle, cuLibraryGetModule], reason: "They take no memory." },
    Unheard {
        ids: &[
            cuMemPoolGetAttribute,
            cuDeviceGetDefaultMemPool,
            cuDeviceGetMemPool,
            cuMemGetDefaultMemPool,
            cuMemGetMemPool,
            cuDeviceGetGraphMemAttribute,
            cuDeviceSetGraphMemAttribute,
        ],
        reason: "They read or reset numbers.",
    },
    Unheard {
        ids: &[cuGreenCtxDestroy, cuCtxFromGreenCtx],
        reason: "A green context is a part of the primary one.",
    },
    Unheard {
        ids: &[cuCheckpointProcessCheckpoint, cuCheckpointProcessRestore],
        reason: "Another process calls them: this one sees nothing. NVML's figure falls below what is tracked; the report shows a negative \
                 Untrackable.",
    },
];
