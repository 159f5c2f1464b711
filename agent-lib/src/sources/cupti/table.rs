//! Lists the subscribed driver calls with the meaning of each. A new call takes one line here, and its id and parameters in
//! cupti-sys. No call here is on the path of a kernel launch.
//!
//! docs/driver.md describes how each kind of call is counted, and why other calls are not subscribed. A test requires each call
//! in that page. The table in ledger/README.md describes how each record is applied.

use cupti_sys::ids::*;
use cupti_sys::params;
use gpumem_wire::DriverEventKind::{self, *};
use gpumem_wire::ImportSource::{self, *};
use gpumem_wire::MemoryKind::{self, *};
use std::mem::offset_of;

/// Layout of the parameters that have the size and the address of an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    Bytes,
    BytesV1,
    HostV1,
    /// Existing host memory of the program, at an address that the program passes.
    Existing,
    Pitch,
    PitchV1,
    Array2d,
    Array3d,
    Array2dV1,
    Array3dV1,
    Mipmap,
}
use Request::*;

/// What a driver call does. A number is the offset in bytes of a parameter. cupti-sys has the layouts of the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    // Allocations, recorded at EXIT.
    Alloc(Request, MemoryKind),
    AllocAsync,
    AllocFromPool,
    GraphAddAlloc,
    GraphAddNode(u16),
    // Frees, begun at ENTER.
    Free(u16),
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
    /// Memory of another process or API: the first parameter gets its address.
    Import(ImportSource),
    /// Memory of another API, with its size.
    ExternalImport,
    IpcClose,
    // Pools.
    PoolCreate,
    /// A pool of another process was imported. Its memory is counted in that process.
    PoolImport,
    PoolDestroy,
    /// The pool was trimmed or an attribute was set, so its reserved bytes may have changed.
    PoolTouched,
    DeviceSetPool,
    LocationSetPool,
    GraphMemoryTrim,
    // Contexts, and calls that change memory outside of allocations.
    /// A context is created or retained. The parameter at this offset is the device.
    Context(u16),
    PrimaryReset,
    SetLimit,
    GreenCreate,
    /// The call loads or unloads modules. Callbacks about modules during the call are recorded with the library that made it.
    ModuleCall,
    Event(DriverEventKind),
    GraphEvent(DriverEventKind),
    GraphUpload,
}
use Meaning::*;

/// Id and meaning of every subscribed driver call.
pub const CALLS: &[(u32, Meaning)] = &[
    (cuMemAlloc_v2, Alloc(Bytes, Device)),
    (cuMemAlloc, Alloc(BytesV1, Device)),
    (cuMemAllocPitch_v2, Alloc(Pitch, Pitched)),
    (cuMemAllocPitch, Alloc(PitchV1, Pitched)),
    (cuMemAllocManaged, Alloc(Bytes, Managed)),
    (cuMemFree_v2, Free(0)),
    (cuMemFree, FreeV1),
    (cuMemAllocHost_v2, Alloc(Bytes, Pinned)),
    (cuMemAllocHost, Alloc(HostV1, Pinned)),
    (cuMemHostAlloc, Alloc(Bytes, Pinned)),
    (cuMemFreeHost, Free(0)),
    (cuMemHostRegister, Alloc(Existing, Registered)),
    (cuMemHostRegister_v2, Alloc(Existing, Registered)),
    (cuMemHostUnregister, Free(0)),
    (cuArrayCreate_v2, Alloc(Array2d, Array)),
    (cuArray3DCreate_v2, Alloc(Array3d, Array)),
    (cuArrayCreate, Alloc(Array2dV1, Array)),
    (cuArray3DCreate, Alloc(Array3dV1, Array)),
    (cuArrayDestroy, Free(0)),
    (cuMipmappedArrayCreate, Alloc(Mipmap, Array)),
    (cuMipmappedArrayDestroy, Free(0)),
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
    (cuMemPoolImportPointer, Import(PoolPointer)),
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
    (cuIpcOpenMemHandle, Import(Ipc)),
    (cuIpcOpenMemHandle_v2, Import(Ipc)),
    (cuIpcCloseMemHandle, IpcClose),
    (cuImportExternalMemory, ExternalImport),
    (cuExternalMemoryGetMappedBuffer, Import(External)),
    (cuExternalMemoryGetMappedMipmappedArray, Import(External)),
    (cuDestroyExternalMemory, Free(0)),
    (cuGraphAddMemAllocNode, GraphAddAlloc),
    (cuGraphAddMemFreeNode, Free(offset_of!(params::GraphAddFree, address) as u16)),
    (cuGraphAddNode, GraphAddNode(offset_of!(params::GraphAddNode, parameters) as u16)),
    (cuGraphAddNode_v2, GraphAddNode(offset_of!(params::GraphAddNodeV2, parameters) as u16)),
    (cuGraphAddNode_v3, GraphAddNode(offset_of!(params::GraphAddNodeV2, parameters) as u16)),
    (cuGraphInstantiate, GraphEvent(GraphInstantiated)),
    (cuGraphInstantiate_v2, GraphEvent(GraphInstantiated)),
    (cuGraphUpload, GraphUpload),
    (cuGraphUpload_ptsz, GraphUpload),
    (cuGraphInstantiateWithFlags, GraphEvent(GraphInstantiated)),
    (cuGraphInstantiateWithParams, GraphEvent(GraphInstantiated)),
    (cuGraphInstantiateWithParams_ptsz, GraphEvent(GraphInstantiated)),
    (cuGraphExecDestroy, GraphEvent(GraphDestroyed)),
    (cuDeviceGraphMemTrim, GraphMemoryTrim),
    (cuCtxCreate, Context(offset_of!(params::CtxCreate, device) as u16)),
    (cuCtxCreate_v2, Context(offset_of!(params::CtxCreate, device) as u16)),
    (cuCtxCreate_v3, Context(offset_of!(params::CtxCreateV3, device) as u16)),
    (cuCtxCreate_v4, Context(offset_of!(params::CtxCreateV4, device) as u16)),
    (cuDevicePrimaryCtxRetain, Context(offset_of!(params::PrimaryRetain, device) as u16)),
    (cuDevicePrimaryCtxReset, PrimaryReset),
    (cuDevicePrimaryCtxReset_v2, PrimaryReset),
    (cuCtxSetLimit, SetLimit),
    (cuCtxEnablePeerAccess, Event(PeerAccess)),
    (cuGreenCtxCreate, GreenCreate),
    (cuLibraryLoadData, Event(LibraryLoaded)),
    (cuLibraryLoadFromFile, Event(LibraryLoaded)),
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

/// Upper bound of the ids of calls in `CALLS`.
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
pub(crate) fn meaning(id: u32) -> Option<&'static Meaning> {
    MEANINGS.get(id as usize)?.as_ref()
}

/// Whether the call may take device memory or make a pool release memory. Watermark records state since when such a call is in
/// flight.
#[inline(always)]
pub(crate) fn moves_memory(meaning: &Meaning) -> bool {
    match *meaning {
        Alloc(_, memory) => matches!(memory, Device | Pitched | Array),
        AllocAsync | AllocFromPool | MemCreate | PoolTouched | GraphMemoryTrim => true,
        _ => false,
    }
}
