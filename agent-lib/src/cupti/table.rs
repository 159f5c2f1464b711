//! Which driver calls are listened to, and what each means. Adding one is a line here (and its id and parameters in
//! cupti-sys). None of these is on the path of a kernel launch.

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
    HostAlloc,
    HostRegister,
    Array2d,
    Array3d,
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
    MulticastCreate,
    // Memory of others.
    IpcOpen,
    IpcClose,
    ExternalImport,
    ExternalBuffer,
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
    GraphInstantiate,
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
    (cuMemHostAlloc, HostAlloc),
    (cuMemFreeHost, Free),
    (cuMemHostRegister, HostRegister),
    (cuMemHostRegister_v2, HostRegister),
    (cuMemHostUnregister, Free),
    (cuArrayCreate_v2, Array2d),
    (cuArray3DCreate_v2, Array3d),
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
    (cuMulticastCreate, MulticastCreate),
    (cuIpcOpenMemHandle, IpcOpen),
    (cuIpcOpenMemHandle_v2, IpcOpen),
    (cuIpcCloseMemHandle, IpcClose),
    (cuImportExternalMemory, ExternalImport),
    (cuExternalMemoryGetMappedBuffer, ExternalBuffer),
    (cuDestroyExternalMemory, Free),
    (cuGraphAddMemAllocNode, GraphAddAlloc),
    (cuGraphAddMemFreeNode, GraphAddFree),
    (cuGraphAddNode, GraphAddNode),
    (cuGraphAddNode_v2, GraphAddNodeV2),
    (cuGraphAddNode_v3, GraphAddNodeV2),
    (cuGraphInstantiate_v2, GraphInstantiate),
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
];

/// Resource callbacks that are listened to; what they mean is in decode.rs.
pub const RESOURCES: &[u32] = &[
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

/// Whether the call may take device memory: what the watermark calls in flight.
#[inline(always)]
pub fn allocates(meaning: Meaning) -> bool {
    matches!(
        meaning,
        Alloc
            | AllocV1
            | AllocPitch
            | AllocPitchV1
            | Array2d
            | Array3d
            | Mipmap
            | AllocAsync
            | AllocFromPool
            | MemCreate
    )
}
