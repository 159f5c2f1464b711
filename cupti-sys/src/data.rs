//! Arguments of CUPTI callbacks. All layouts are the same in CUPTI 11.7 to 13.5.

use core::ffi::{c_char, c_void};
use core::mem::{offset_of, size_of};

/// Callback domains.
pub mod domain {
    /// Calls of the driver API.
    pub const DRIVER_API: u32 = 1;
    /// Changes of contexts, modules and graphs.
    pub const RESOURCE: u32 = 3;
    /// Errors of CUPTI itself; from CUDA 12.2.
    pub const STATE: u32 = 6;
}

/// The call is about to be made.
pub const ENTER: u32 = 0;
/// The call has returned.
pub const EXIT: u32 = 1;

/// `CUpti_CallbackData`: argument of callbacks for API calls.
#[repr(C)]
#[derive(Debug)]
pub struct CallbackData {
    /// [`ENTER`] or [`EXIT`].
    pub site: u32,
    /// Static C string.
    pub function_name: *const c_char,
    /// The call's parameters, with a layout of params.rs. Valid during the callback only.
    pub params: *const c_void,
    /// CUresult of a driver call; valid at EXIT only.
    pub return_value: *const u32,
    /// For a kernel launch, the kernel's name.
    pub symbol_name: *const c_char,
    /// The thread's current context or null; may differ between ENTER and EXIT.
    pub context: *const c_void,
    /// CUPTI's number of the context, unique in the process.
    pub context_uid: u32,
    /// A word for the subscriber's data: the same at ENTER and EXIT of one call.
    pub correlation_data: *mut u64,
    /// Number of the call, equal at ENTER and EXIT.
    pub correlation_id: u32,
}
const _: () = assert!(size_of::<CallbackData>() == 72);
const _: () = assert!(offset_of!(CallbackData, params) == 16 && offset_of!(CallbackData, return_value) == 24);
const _: () = assert!(offset_of!(CallbackData, context) == 40 && offset_of!(CallbackData, context_uid) == 48);
const _: () = assert!(offset_of!(CallbackData, correlation_data) == 56);
const _: () = assert!(offset_of!(CallbackData, correlation_id) == 64);

/// `CUpti_ResourceData`: argument of callbacks in the RESOURCE domain.
#[repr(C)]
#[derive(Debug)]
pub struct ResourceData {
    /// The context that has changed, or whose resource has.
    pub context: *const c_void,
    /// The stream, if the callback id is about a stream.
    pub stream: *const c_void,
    /// Points to [`ModuleResourceData`] or [`GraphData`], depending on the callback id.
    pub descriptor: *const c_void,
}
const _: () = assert!(size_of::<ResourceData>() == 24 && offset_of!(ResourceData, descriptor) == 16);

/// `CUpti_ModuleResourceData`.
#[repr(C)]
#[derive(Debug)]
pub struct ModuleResourceData {
    /// CUPTI's number of the module.
    pub module_id: u32,
    /// Size of the ELF image at `cubin`, in bytes.
    pub cubin_bytes: usize,
    /// The module's ELF image in host memory; valid during the callback only.
    pub cubin: *const u8,
}
const _: () = assert!(size_of::<ModuleResourceData>() == 24 && offset_of!(ModuleResourceData, cubin) == 16);

/// `CUpti_GraphData`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct GraphData {
    pub graph: *const c_void,
    pub original_graph: *const c_void,
    pub node: *const c_void,
    pub original_node: *const c_void,
    /// CUgraphNodeType: [`GraphData::MEM_ALLOC`], [`GraphData::MEM_FREE`] or another one.
    pub node_type: u32,
    pub dependency: *const c_void,
    pub graph_exec: *const c_void,
}
const _: () = assert!(size_of::<GraphData>() == 56 && offset_of!(GraphData, node_type) == 32);

impl GraphData {
    /// CU_GRAPH_NODE_TYPE_MEM_ALLOC.
    pub const MEM_ALLOC: u32 = 10;
    /// CU_GRAPH_NODE_TYPE_MEM_FREE.
    pub const MEM_FREE: u32 = 11;
}
