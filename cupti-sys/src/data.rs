//! Arguments of CUPTI callbacks. All layouts are the same in CUPTI 11.7 to 13.5.

use crate::params::layouts;
use core::ffi::{c_char, c_void};

/// Callback domains.
pub mod domain {
    /// Calls of the driver API.
    pub const DRIVER_API: u32 = 1;
    /// Changes of contexts, modules and graphs.
    pub const RESOURCE: u32 = 3;
    /// Errors of CUPTI itself; from CUDA 12.2.
    pub const STATE: u32 = 6;
}

/// Value of `site`: the call is about to be made.
pub const ENTER: u32 = 0;
/// Value of `site`: the call has returned.
pub const EXIT: u32 = 1;

layouts! {
    /// `CUpti_CallbackData`: argument of callbacks for API calls.
    CallbackData = 72 {
        /// [`ENTER`] or [`EXIT`].
        site @ 0: u32,
        /// Name of the function that was called: a static C string.
        function_name @ 8: *const c_char,
        /// The call's parameters, with a layout of params.rs. Valid during the callback only.
        params @ 16: *const c_void,
        /// CUresult of a driver call; valid at EXIT only.
        return_value @ 24: *const u32,
        /// For a kernel launch, the kernel's name.
        symbol_name @ 32: *const c_char,
        /// The thread's current context or null; may differ between ENTER and EXIT.
        context @ 40: *const c_void,
        /// CUPTI's number of the context, unique in the process.
        context_uid @ 48: u32,
        /// Address of a word that the subscriber may use; the same at ENTER and EXIT of one call.
        correlation_data @ 56: *mut u64,
        /// CUPTI's number of the call, the same at ENTER and EXIT.
        correlation_id @ 64: u32,
    }

    /// `CUpti_ResourceData`: argument of callbacks in the RESOURCE domain.
    ResourceData = 24 {
        /// The context that has changed, or that the changed resource belongs to.
        context @ 0: *const c_void,
        /// The stream, if the callback id is about a stream.
        stream @ 8: *const c_void,
        /// Points to [`ModuleResourceData`] or [`GraphData`], depending on the callback id.
        descriptor @ 16: *const c_void,
    }

    /// `CUpti_ModuleResourceData`.
    ModuleResourceData = 24 {
        /// CUPTI's number of the module.
        module_id @ 0: u32,
        /// Size of the ELF image at `cubin`, in bytes.
        cubin_bytes @ 8: usize,
        /// The module's ELF image in host memory; valid during the callback only.
        cubin @ 16: *const u8,
    }

    /// `CUpti_GraphData`.
    GraphData = 56 {
        graph @ 0: *const c_void,
        original_graph @ 8: *const c_void,
        node @ 16: *const c_void,
        original_node @ 24: *const c_void,
        /// CUgraphNodeType: [`GraphData::MEM_ALLOC`], [`GraphData::MEM_FREE`] or another one.
        node_type @ 32: u32,
        dependency @ 40: *const c_void,
        graph_exec @ 48: *const c_void,
    }
}

impl GraphData {
    /// CU_GRAPH_NODE_TYPE_MEM_ALLOC.
    pub const MEM_ALLOC: u32 = 10;
    /// CU_GRAPH_NODE_TYPE_MEM_FREE.
    pub const MEM_FREE: u32 = 11;
}
