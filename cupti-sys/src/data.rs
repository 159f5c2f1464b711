//! Arguments of a callback. All layouts are the same in CUPTI 11.7 to 13.5.

use core::ffi::{c_char, c_void};
use core::mem::{offset_of, size_of};

/// Callback domains.
pub mod domain {
    /// Calls of the driver API.
    pub const DRIVER_API: u32 = 1;
    /// Contexts, modules, graphs.
    pub const RESOURCE: u32 = 3;
    /// CUPTI about itself, from 12.2.
    pub const STATE: u32 = 6;
}

/// The call is about to be made.
pub const ENTER: u32 = 0;
/// The call has returned.
pub const EXIT: u32 = 1;

/// `CUpti_CallbackData`: of an API call.
#[repr(C)]
#[derive(Debug)]
pub struct CallbackData {
    /// [`ENTER`] or [`EXIT`].
    pub site: u32,
    /// Static.
    pub function_name: *const c_char,
    /// A struct of params.rs; valid during the callback only.
    pub params: *const c_void,
    /// CUresult of a driver call; valid at EXIT only.
    pub return_value: *const u32,
    /// Name of the kernel in a kernel launch.
    pub symbol_name: *const c_char,
    /// The thread's current context or null; may differ between ENTER and EXIT.
    pub context: *const c_void,
    /// Unique in the process.
    pub context_uid: u32,
    /// A word shared by ENTER and EXIT of one call.
    pub correlation_data: *mut u64,
    /// Number of the call, equal at ENTER and EXIT.
    pub correlation_id: u32,
}
const _: () = assert!(size_of::<CallbackData>() == 72);
const _: () = assert!(offset_of!(CallbackData, params) == 16 && offset_of!(CallbackData, return_value) == 24);
const _: () = assert!(offset_of!(CallbackData, context) == 40 && offset_of!(CallbackData, context_uid) == 48);
const _: () = assert!(offset_of!(CallbackData, correlation_data) == 56);
const _: () = assert!(offset_of!(CallbackData, correlation_id) == 64);

/// `CUpti_ResourceData`.
#[repr(C)]
#[derive(Debug)]
pub struct ResourceData {
    /// The context that it is about.
    pub context: *const c_void,
    /// The stream, for stream ids.
    pub stream: *const c_void,
    /// [`ModuleResourceData`] or [`GraphData`].
    pub descriptor: *const c_void,
}
const _: () = assert!(size_of::<ResourceData>() == 24 && offset_of!(ResourceData, descriptor) == 16);

/// `CUpti_ModuleResourceData`.
#[repr(C)]
#[derive(Debug)]
pub struct ModuleResourceData {
    /// CUPTI's number for it.
    pub module_id: u32,
    /// Size of the ELF image at `cubin`.
    pub cubin_bytes: usize,
    /// Host memory, valid during the callback only.
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
    /// [`GraphData::MEM_ALLOC`], [`GraphData::MEM_FREE`] and others.
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
