//! The subscribed driver calls and the meaning of each. Adding a call takes one line here (and its id and parameters in
//! cupti-sys). No call here is on the path of a kernel launch.
//!
//! docs/driver.md describes how each kind of call is counted, and why other calls are not subscribed: a test requires each call
//! there. The table in ledger/src/lib.rs describes how each record is applied.

use cupti_sys::ids::*;

/// Meaning of a call. Its parameters have the layout that cupti-sys gives the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // each is the call of its name
pub enum Meaning {
    // Allocations, recorded at EXIT.
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
    // Memory of other processes or APIs.
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
    // Contexts, and calls that change memory outside of allocations.
    CtxCreate,
    CtxCreateV3,
    CtxCreateV4,
    PrimaryRetain,
    PrimaryReset,
    SetLimit,
    PeerAccess,
    GreenCreate,
    LibraryLoad,
    /// A call that loads or unloads modules: modules reported during the call get its caller.
    ModuleCall,
    GraphInstantiate,
    GraphUpload,
    GraphExecDestroy,
}
use Meaning::*;

/// Every subscribed call.
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

/// Subscribed resource callbacks; resource.rs handles them.
pub(crate) const RESOURCES: &[u32] = &[
    resource::CONTEXT_CREATED,
    resource::CONTEXT_DESTROY_STARTING,
    resource::MODULE_LOADED,
    resource::MODULE_UNLOAD_STARTING,
    resource::GRAPHNODE_CREATED,
];

pub(crate) const STATES: &[u32] = &[state::FATAL_ERROR, state::ERROR];

/// Larger than every id above.
const IDS: usize = 1024;

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

/// Returns the meaning of the call `id`; `None` if it is not subscribed.
#[inline(always)]
pub(crate) fn meaning(id: u32) -> Option<Meaning> {
    MEANINGS.get(id as usize).copied().flatten()
}

/// Whether the call may take device memory or make a pool release some. The watermark counts such calls as in flight.
#[inline(always)]
pub(crate) fn moves_memory(meaning: Meaning) -> bool {
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
