//! Which driver calls are listened to, and what each means. Adding one is a line here (and its id and parameters in
//! cupti-sys). None of these is on the path of a kernel launch.
//!
//! # What is booked
//!
//! One rule per kind, and how sure it is: **H** read from the vendor's headers, **D** from its documentation, **X** tried
//! with its libraries, **I** believed; then the check of tests/gpu that settles it on hardware. The ledger's table
//! (ledger/src/lib.rs) says what becomes of each record.
//!
//! | kind | calls | booked | sure | check |
//! |---|---|---|---|---|
//! | device | cuMemAlloc | requested bytes, at EXIT; what the driver adds is `rounding` | H, I: the granule | sizes.sweep |
//! | pitched | cuMemAllocPitch | the driver's pitch x height, at EXIT; an allocation inside of the call with the same address is not booked twice | H, I: whether there is one | kinds.handles |
//! | arrays | cuArrayCreate, cuArray3DCreate, cuMipmappedArrayCreate, and those of CUDA 2 | width x height x depth x texel, all levels, `ESTIMATED`; sparse and deferred ones 0 | H, I: padding; the descriptors of CUDA 2 | kinds.arrays |
//! | sparse arrays | cuMemMapArrayAsync | nothing: the handle's bytes go with its release, too early while an array has it mapped | D; the layout of its list is not settled | - |
//! | managed | cuMemAllocManaged, managed pools | beside the sum: NVML charges it to no process | D | kinds.managed |
//! | pinned, registered | cuMemAllocHost, cuMemHostAlloc, cuMemHostRegister, pools of the host | beside the sum | D | kinds.pinned |
//! | stream-ordered | cuMemAllocAsync, cuMemAllocFromPoolAsync | used bytes to the tag; what is charged is what the pool has reserved, polled at these calls (at once when it may have grown or was trimmed, else ten times a second) and, for pools that cannot be destroyed, each second; on the pool's device, not the context's | H, D, I: steps of growth | pools.default, pools.own |
//! | a program's own pool | cuMemPoolCreate, cuMemPoolDestroy | as above, polled at its calls only: it could be destroyed while another thread asks, and a callback may not wait for that thread | D | pools.own |
//! | captured | the same while a graph node is made inside of the call | nothing: the graph owns the bytes | D, I: that the node is told then | pools.capture |
//! | graph memory | cuGraphAddMemAllocNode, cuGraphAddNode | what the device's graph memory has reserved, polled when graphs are made, destroyed and trimmed, and each second | H | pools.graphs |
//! | VMM | cuMemCreate, cuMemRetainAllocationHandle, cuMemMap, cuMemUnmap, cuMemRelease | the handle's size from create until it has neither references nor mappings; on the host beside the sum. Exported file descriptors are not seen: they keep memory, too | D | kinds.vmm |
//! | addresses | cuMemAddressReserve, cuMemSetAccess | nothing, not listened to: no memory | D | kinds.vmm |
//! | multicast | cuMulticastCreate, mappings and releases of it | nothing: what is bound to it is cuMemCreate's. Whether a binding keeps memory that was released is not known | D, I | - |
//! | imported | cuMemImportFromShareableHandle, cuIpcOpenMemHandle, cuImportExternalMemory, cuMemPoolImportPointer | beside the sum, the size where the call says it: the exporter pays | D, I: that NVML agrees | kinds.ipc |
//! | views of imports | cuExternalMemoryGetMappedBuffer, -MappedMipmappedArray | beside the sum, 0 bytes: the import has them | H | - |
//! | frees | cuMemFree, -Async, cuMemFreeHost, cuMemHostUnregister, cuArrayDestroy, ... | the address at ENTER, the bytes at EXIT if it succeeded; with 4 the driver is gone, and the memory | D | live.threads |
//! | contexts | cuCtxCreate, cuDevicePrimaryCtxRetain if the device has none | nothing; the gap's step between ContextCreating at ENTER and ContextCreated at EXIT is what it costs | D | gap.context |
//! | contexts made by a private call | told by CUPTI as a resource, outside of the calls above: libcudart may use the driver's private tables | nothing; the gap's step at ContextCreated | D, I: that libcudart does | gap.context |
//! | green contexts | cuGreenCtxCreate, cuCtxFromGreenCtx | nothing: a part of the primary one, which it retains | D | kinds.contexts |
//! | ends of contexts | told by CUPTI as a resource: last release, cuCtxDestroy | all direct memory of that context | D | kinds.contexts |
//! | reset | cuDevicePrimaryCtxReset | everything on the device | D | kinds.reset |
//! | modules | told by CUPTI as a resource | nothing; loadable bytes are the upper bound of the gap's step | D, I: lazy loading | gap.modules |
//! | limits | cuCtxSetLimit: stack, printf, heap | nothing; models of the gap | D, I | gap.limits, gap.local_memory |
//! | executable graphs, peers, libraries | cuGraphInstantiate, cuCtxEnablePeerAccess, cuLibraryLoad* | nothing; marks for the gap's steps | I | - |
//! | streams, prefetch, launches | - | not listened to: often called, or no memory that could be told | - | cost.launch |

use cupti_sys::ids::*;

/// What a call means. The parameters' shapes are those that cupti-sys gives the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // each is the call of its name
pub enum Meaning {
    // Allocations, booked at EXIT.
    Alloc,
    AllocV1,
    AllocPitch,
    AllocPitchV1,
    AllocManaged,
    AllocHost,
    AllocHostV1,
    HostAlloc,
    HostRegister,
    Array2d,
    Array3d,
    Array2dV1,
    Array3dV1,
    Mipmap,
    AllocAsync,
    AllocFromPool,
    GraphAddAlloc,
    GraphAddFree,
    GraphAddNode,
    GraphAddNodeV2,
    // Frees, begun at ENTER.
    Free,
    FreeV1,
    FreeAsync,
    // Handles and mappings.
    MemCreate,
    MemRelease,
    MemMap,
    MemUnmap,
    MemRetain,
    MemImport,
    MemExport,
    MulticastCreate,
    // Memory of others.
    IpcOpen,
    IpcClose,
    ExternalImport,
    ExternalBuffer,
    ExternalMipmap,
    PoolImportPointer,
    // Pools.
    PoolCreate,
    PoolImport,
    PoolDestroy,
    PoolTouched,
    DeviceSetPool,
    LocationSetPool,
    GraphMemoryTrim,
    // Contexts and what moves the gap.
    CtxCreate,
    CtxCreateV3,
    CtxCreateV4,
    PrimaryRetain,
    PrimaryReset,
    SetLimit,
    PeerAccess,
    GreenCreate,
    LibraryLoad,
    /// Nothing by itself: modules that are told inside of it are known to come from its caller.
    ModuleCall,
    GraphInstantiate,
    GraphUpload,
    GraphExecDestroy,
}
use Meaning::*;

/// Every call that is listened to.
pub const CALLS: &[(u32, Meaning)] = &[
    (cuMemAlloc_v2, Alloc),
    (cuMemAlloc, AllocV1),
    (cuMemAllocPitch_v2, AllocPitch),
    (cuMemAllocPitch, AllocPitchV1),
    (cuMemAllocManaged, AllocManaged),
    (cuMemFree_v2, Free),
    (cuMemFree, FreeV1),
    (cuMemAllocHost_v2, AllocHost),
    (cuMemAllocHost, AllocHostV1),
    (cuMemHostAlloc, HostAlloc),
    (cuMemFreeHost, Free),
    (cuMemHostRegister, HostRegister),
    (cuMemHostRegister_v2, HostRegister),
    (cuMemHostUnregister, Free),
    (cuArrayCreate_v2, Array2d),
    (cuArray3DCreate_v2, Array3d),
    (cuArrayCreate, Array2dV1),
    (cuArray3DCreate, Array3dV1),
    (cuArrayDestroy, Free),
    (cuMipmappedArrayCreate, Mipmap),
    (cuMipmappedArrayDestroy, Free),
    (cuMemAllocAsync, AllocAsync),
    (cuMemAllocAsync_ptsz, AllocAsync),
    (cuMemAllocFromPoolAsync, AllocFromPool),
    (cuMemAllocFromPoolAsync_ptsz, AllocFromPool),
    (cuMemFreeAsync, FreeAsync),
    (cuMemFreeAsync_ptsz, FreeAsync),
    (cuMemPoolCreate, PoolCreate),
    (cuMemPoolDestroy, PoolDestroy),
    (cuMemPoolTrimTo, PoolTouched),
    (cuMemPoolSetAttribute, PoolTouched),
    (cuMemPoolImportFromShareableHandle, PoolImport),
    (cuMemPoolImportPointer, PoolImportPointer),
    (cuDeviceSetMemPool, DeviceSetPool),
    (cuMemSetMemPool, LocationSetPool),
    (cuMemCreate, MemCreate),
    (cuMemRelease, MemRelease),
    (cuMemMap, MemMap),
    (cuMemUnmap, MemUnmap),
    (cuMemRetainAllocationHandle, MemRetain),
    (cuMemImportFromShareableHandle, MemImport),
    (cuMemExportToShareableHandle, MemExport),
    (cuMulticastCreate, MulticastCreate),
    (cuIpcOpenMemHandle, IpcOpen),
    (cuIpcOpenMemHandle_v2, IpcOpen),
    (cuIpcCloseMemHandle, IpcClose),
    (cuImportExternalMemory, ExternalImport),
    (cuExternalMemoryGetMappedBuffer, ExternalBuffer),
    (cuExternalMemoryGetMappedMipmappedArray, ExternalMipmap),
    (cuDestroyExternalMemory, Free),
    (cuGraphAddMemAllocNode, GraphAddAlloc),
    (cuGraphAddMemFreeNode, GraphAddFree),
    (cuGraphAddNode, GraphAddNode),
    (cuGraphAddNode_v2, GraphAddNodeV2),
    (cuGraphAddNode_v3, GraphAddNodeV2),
    (cuGraphInstantiate, GraphInstantiate),
    (cuGraphInstantiate_v2, GraphInstantiate),
    (cuGraphUpload, GraphUpload),
    (cuGraphUpload_ptsz, GraphUpload),
    (cuGraphInstantiateWithFlags, GraphInstantiate),
    (cuGraphInstantiateWithParams, GraphInstantiate),
    (cuGraphInstantiateWithParams_ptsz, GraphInstantiate),
    (cuGraphExecDestroy, GraphExecDestroy),
    (cuDeviceGraphMemTrim, GraphMemoryTrim),
    (cuCtxCreate, CtxCreate),
    (cuCtxCreate_v2, CtxCreate),
    (cuCtxCreate_v3, CtxCreateV3),
    (cuCtxCreate_v4, CtxCreateV4),
    (cuDevicePrimaryCtxRetain, PrimaryRetain),
    (cuDevicePrimaryCtxReset, PrimaryReset),
    (cuDevicePrimaryCtxReset_v2, PrimaryReset),
    (cuCtxSetLimit, SetLimit),
    (cuCtxEnablePeerAccess, PeerAccess),
    (cuGreenCtxCreate, GreenCreate),
    (cuLibraryLoadData, LibraryLoad),
    (cuLibraryLoadFromFile, LibraryLoad),
    (cuLibraryUnload, ModuleCall),
    (cuModuleLoad, ModuleCall),
    (cuModuleLoadData, ModuleCall),
    (cuModuleLoadDataEx, ModuleCall),
    (cuModuleLoadFatBinary, ModuleCall),
    (cuModuleUnload, ModuleCall),
];

/// Resource callbacks that are listened to; what they mean is in decode.rs.
pub const RESOURCES: &[u32] = &[
    resource::CONTEXT_CREATED,
    resource::CONTEXT_DESTROY_STARTING,
    resource::MODULE_LOADED,
    resource::MODULE_UNLOAD_STARTING,
    resource::GRAPHNODE_CREATED,
];

/// CUPTI about itself.
pub const STATES: &[u32] = &[state::FATAL_ERROR, state::ERROR];

/// Larger than every id above.
const IDS: usize = 1024;

/// By id.
static MEANINGS: [Option<Meaning>; IDS] = {
    let mut meanings = [None; IDS];
    let mut index = 0;
    while index < CALLS.len() {
        let (id, meaning) = CALLS[index];
        assert!(meanings[id as usize].is_none(), "one line per call");
        meanings[id as usize] = Some(meaning);
        index += 1;
    }
    meanings
};

/// What the call `id` means; `None` if it is not listened to.
#[inline(always)]
pub fn meaning(id: u32) -> Option<Meaning> {
    MEANINGS.get(id as usize).copied().flatten()
}

/// Whether the call may take device memory, or make a pool give some back: what the watermark calls in flight.
#[inline(always)]
pub fn moves_memory(meaning: Meaning) -> bool {
    matches!(
        meaning,
        Alloc
            | AllocV1
            | AllocPitch
            | AllocPitchV1
            | Array2d
            | Array3d
            | Array2dV1
            | Array3dV1
            | Mipmap
            | AllocAsync
            | AllocFromPool
            | MemCreate
            | PoolTouched
            | GraphMemoryTrim
    )
}
