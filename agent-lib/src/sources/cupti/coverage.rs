//! How each kind of driver call is counted, and why other calls are not subscribed. docs/driver.md is generated from it.

use super::table::Meaning::{self, *};
use cupti_sys::ids::*;

/// Source of a claim about the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evidence {
    /// Read from NVIDIA's headers.
    Header,
    /// Read from NVIDIA's documentation.
    Documentation,
    /// Assumed until a check of tests/gpu measures it on hardware.
    Belief,
}

/// A kind of memory or event, and the calls that report it.
#[derive(Debug)]
pub struct Kind {
    /// Heading on the page.
    pub name: &'static str,
    /// Meanings of its calls in table.rs.
    pub meanings: &'static [Meaning],
    /// Which bytes are counted, and which are not.
    pub counted: &'static str,
    /// Sources of the claims in `counted`.
    pub evidence: &'static [Evidence],
    /// The check of tests/gpu that measures it; empty for none.
    pub check: &'static str,
}

/// Calls that are not subscribed.
#[derive(Debug)]
pub struct Unheard {
    /// Callback ids in the driver domain.
    pub ids: &'static [u32],
    /// Why not, and what the report shows instead.
    pub reason: &'static str,
}

const H: Evidence = Evidence::Header;
const D: Evidence = Evidence::Documentation;
const I: Evidence = Evidence::Belief;

/// Each meaning of table.rs belongs to exactly one of these.
pub const KINDS: &[Kind] = &[
    Kind {
        name: "device memory",
        meanings: &[Alloc, AllocV1],
        counted: "The requested bytes, when the call returns. The driver rounds them up; the difference is `rounding`, a part of Untrackable.",
        evidence: &[H, I],
        check: "sizes.sweep",
    },
    Kind {
        name: "pitched memory",
        meanings: &[AllocPitch, AllocPitchV1],
        counted: "Pitch x height, with the pitch that the driver returns. An allocation inside the call with the same address is counted once.",
        evidence: &[H, I],
        check: "kinds.handles",
    },
    Kind {
        name: "arrays and mipmaps",
        meanings: &[Array2d, Array3d, Array2dV1, Array3dV1, Mipmap],
        counted: "An estimate: the pixels of all levels x the bytes of a pixel in this format. Tiling and padding are in Untrackable. Sparse \
                 and deferred arrays count 0 bytes, and so do formats that CUDA 13.5 does not define.",
        evidence: &[H, I],
        check: "kinds.arrays",
    },
    Kind {
        name: "managed memory",
        meanings: &[AllocManaged],
        counted: "Reported separately, not in the sum: NVML charges it to no process.",
        evidence: &[D],
        check: "kinds.managed",
    },
    Kind {
        name: "pinned and registered host memory",
        meanings: &[AllocHost, AllocHostV1, HostAlloc, HostRegister],
        counted: "Reported separately, not in the sum: it is host memory.",
        evidence: &[D],
        check: "kinds.pinned",
    },
    Kind {
        name: "stream-ordered memory",
        meanings: &[AllocAsync, AllocFromPool, FreeAsync],
        counted: "Tags get the bytes in use; the sum has the bytes that the pool reserves. The agent reads a pool at once when it may have \
                 grown or was trimmed, at other calls at most ten times a second, and otherwise once a second. During a stream capture \
                 the graph owns the bytes.",
        evidence: &[H, D, I],
        check: "pools.default",
    },
    Kind {
        name: "pools",
        meanings: &[PoolCreate, PoolImport, PoolDestroy, PoolTouched, DeviceSetPool, LocationSetPool],
        counted: "No bytes themselves. A pool releases memory at a synchronisation, for which there is no callback: its figure can be too \
                 large for up to a second. Pools of managed and of host memory are reported separately.",
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
        counted: "The bytes that the device's graph memory reserves. The agent reads them when a graph is instantiated, uploaded, destroyed or trimmed, and \
                 once a second.",
        evidence: &[H],
        check: "pools.graphs",
    },
    Kind {
        name: "virtual memory management",
        meanings: &[MemCreate, MemRelease, MemMap, MemUnmap, MemRetain],
        counted: "The handle's size, until it has neither references nor mappings. Host memory is reported separately.",
        evidence: &[D],
        check: "kinds.vmm",
    },
    Kind {
        name: "exported handles",
        meanings: &[MemExport],
        counted: "The handle's size until its file descriptor is closed. The agent checks descriptors at each release and once a second. If a \
                 descriptor was duplicated or sent to another process, the figure after the close is a lower bound. Exports to a fabric \
                 are not followed.",
        evidence: &[D, I],
        check: "kinds.exported",
    },
    Kind {
        name: "multicast objects",
        meanings: &[MulticastCreate],
        counted: "No bytes: memory that is bound to one belongs to a handle.",
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
        counted: "Reported separately with their size: the memory is counted in the exporting process. If NVML charges it to the importer as well, the \
                 difference is in Untrackable, in a step with the cause `memory imported`.",
        evidence: &[D, I],
        check: "kinds.ipc",
    },
    Kind {
        name: "frees",
        meanings: &[Free, FreeV1],
        counted: "The address is noted when the call begins; the bytes are subtracted when it succeeds. Result 4 means that the driver has shut \
                 down, which frees the memory.",
        evidence: &[D],
        check: "live.threads",
    },
    Kind {
        name: "contexts",
        meanings: &[CtxCreate, CtxCreateV3, CtxCreateV4, PrimaryRetain, GreenCreate],
        counted: "No bytes; the change of NVML's figure around the call is the context's cost. For a context from another call (libcudart may use \
                 a private driver table; OpenGL and VDPAU have separate calls), CUPTI's resource callback is used, and its caller is \
                 unknown. A green context is part of the primary context.",
        evidence: &[D, I],
        check: "gap.context",
    },
    Kind {
        name: "ends of contexts",
        meanings: &[PrimaryReset],
        counted: "When CUPTI reports that a context is destroyed, its direct allocations are removed. A reset removes everything on the device.",
        evidence: &[D],
        check: "kinds.contexts",
    },
    Kind {
        name: "modules and libraries",
        meanings: &[LibraryLoad, ModuleCall],
        counted: "No bytes; the loadable bytes are an upper bound for the change of NVML's figure.",
        evidence: &[D, I],
        check: "gap.modules",
    },
    Kind {
        name: "limits and peers",
        meanings: &[SetLimit, PeerAccess],
        counted: "No bytes; the cost of stack, printf and heap limits comes from a model.",
        evidence: &[D, I],
        check: "gap.limits",
    },
];

/// Every id of cupti-sys that table.rs does not subscribe.
pub const UNHEARD: &[Unheard] = &[
    Unheard { ids: &[cuInit, cuGetProcAddress_v2], reason: "They use no device memory." },
    Unheard { ids: &[cuDeviceGetCount], reason: "Subscribed only to check that callbacks still arrive." },
    Unheard {
        ids: &[cuCtxDestroy, cuCtxDestroy_v2, cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2],
        reason: "CUPTI reports the end of a context as a resource.",
    },
    Unheard {
        ids: &[cuGLCtxCreate, cuGLCtxCreate_v2, cuVDPAUCtxCreate, cuVDPAUCtxCreate_v2],
        reason: "CUPTI reports the context as a resource. It is counted; its caller is unknown.",
    },
    Unheard {
        ids: &[cuStreamCreate, cuStreamCreateWithPriority, cuUserObjectCreate],
        reason: "Frequent, and their cost is not documented: it is in the unexplained part of Untrackable.",
    },
    Unheard {
        ids: &[cuGraphLaunch, cuGraphLaunch_ptsz],
        reason: "They are on the launch path. Graph memory that a launch allocates is seen within a second; shorter peaks are missed.",
    },
    Unheard {
        ids: &[cuMemAddressReserve, cuMemAddressFree, cuMemSetAccess],
        reason: "Address ranges use no memory.",
    },
    Unheard {
        ids: &[cuMemMapArrayAsync, cuMemMapArrayAsync_ptsz],
        reason: "Tiles of sparse arrays use the memory of a handle, which is counted until the handle's last release and unmap. While only an \
                 array maps it, the bytes are in Untrackable.",
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
        reason: "A binding uses no memory. Whether it keeps the memory of a released handle alive is not documented; if so, the bytes are in \
                 Untrackable.",
    },
    Unheard {
        ids: &[cuLogicalEndpointCreate, cuLogicalEndpointDestroy, cuLogicalEndpointBindMem],
        reason: "As for multicast objects, the memory belongs to a handle.",
    },
    Unheard {
        ids: &[cuGraphicsMapResources, cuGraphicsMapResources_ptsz],
        reason: "The resource belongs to OpenGL, Vulkan or Direct3D, and the call has no size. NVML charges it to the process: it is in Untrackable.",
    },
    Unheard {
        ids: &[cuMemAdvise, cuMemPrefetchAsync, cuMemPrefetchAsync_v2, cuMemDiscardBatchAsync],
        reason: "They move managed memory, which NVML charges to no process.",
    },
    Unheard { ids: &[cuIpcGetMemHandle, cuLibraryGetModule], reason: "They use no memory." },
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
        reason: "A green context is part of the primary context.",
    },
    Unheard {
        ids: &[cuCheckpointProcessCheckpoint, cuCheckpointProcessRestore],
        reason: "Another process calls them, so there is no callback here. NVML's figure falls while the tracked bytes stay; doctor reports it.",
    },
];
