//! Tables that an NVTX library passes to an injected library (`InitializeInjectionNvtx2`), and the ids of its functions.
//! Compared with the NVTX 3 headers, the older libnvToolsExt (version 2) and the Python package.
//!
//! A table points to the caller's function pointers; the injected library replaces them: `*table[id] = function`. Its length
//! differs between versions. An id at or beyond the length does not exist.

use crate::params::layouts;
use std::ffi::c_int;

/// Id of the export table [`Callbacks`].
pub const ETID_CALLBACKS: u32 = 1;
/// Id of the export table [`VersionInfo`], which version 2 does not have.
pub const ETID_VERSION_INFO: u32 = 3;

/// Id of the module with the functions that take no domain.
pub const MODULE_CORE: u32 = 1;
/// Id of the module with the functions that take a domain.
pub const MODULE_CORE2: u32 = 5;

/// Array of pointers to the caller's function pointers.
pub type Table = *mut *mut usize;

/// The export table that `getExportTable(ETID_CALLBACKS)` returns.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Callbacks {
    pub struct_size: usize,
    /// Writes a module's table and its length; returns 1 if the module exists.
    pub get_module_function_table:
        Option<unsafe extern "C" fn(module: u32, table: *mut Table, count: *mut u32) -> c_int>,
}

/// The export table that `getExportTable(ETID_VERSION_INFO)` returns.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct VersionInfo {
    pub struct_size: usize,
    /// NVTX version of the caller.
    pub version: u32,
    /// Unused.
    pub reserved: u32,
    /// Passes the version of the injected library to the caller.
    pub set_injection_version: Option<unsafe extern "C" fn(version: u32)>,
}

/// Type of the argument of `InitializeInjectionNvtx2`: a function that returns an export table by id.
pub type GetExportTable = unsafe extern "C" fn(id: u32) -> *const std::ffi::c_void;

/// NVTX version of the agent.
pub const VERSION: u32 = 3;

/// Ids of functions in [`MODULE_CORE`].
pub mod core {
    pub const MARK_EX: u32 = 1;
    pub const MARK_A: u32 = 2;
    pub const MARK_W: u32 = 3;
    pub const RANGE_START_EX: u32 = 4;
    pub const RANGE_START_A: u32 = 5;
    pub const RANGE_START_W: u32 = 6;
    pub const RANGE_END: u32 = 7;
    pub const RANGE_PUSH_EX: u32 = 8;
    pub const RANGE_PUSH_A: u32 = 9;
    pub const RANGE_PUSH_W: u32 = 10;
    pub const RANGE_POP: u32 = 11;
}

/// Ids of functions in [`MODULE_CORE2`].
pub mod core2 {
    pub const DOMAIN_MARK_EX: u32 = 1;
    pub const DOMAIN_RANGE_START_EX: u32 = 2;
    pub const DOMAIN_RANGE_END: u32 = 3;
    pub const DOMAIN_RANGE_PUSH_EX: u32 = 4;
    pub const DOMAIN_RANGE_POP: u32 = 5;
    pub const DOMAIN_REGISTER_STRING_A: u32 = 10;
    pub const DOMAIN_REGISTER_STRING_W: u32 = 11;
    pub const DOMAIN_CREATE_A: u32 = 12;
    pub const DOMAIN_CREATE_W: u32 = 13;
    pub const DOMAIN_DESTROY: u32 = 14;
}

/// Result of a push or pop while pushes and pops are not tracked (`NVTX_NO_PUSH_POP_TRACKING`).
pub const NOT_TRACKED: c_int = -2;

layouts! {
    /// `nvtxEventAttributes_t`.
    EventAttributes = 48 {
        version @ 0: u16,
        /// Size of this structure in the program's NVTX version, in bytes.
        size @ 2: u16,
        category @ 4: u32,
        color_type @ 8: i32,
        color @ 12: u32,
        payload_type @ 16: i32,
        reserved @ 20: i32,
        payload @ 24: u64,
        /// One of the `MESSAGE_` constants.
        message_type @ 32: i32,
        padding @ 36: u32,
        /// Pointer to a string, or the handle of a registered string.
        message @ 40: usize,
    }
}

/// `message` points to NUL-terminated UTF-8.
pub const MESSAGE_ASCII: i32 = 1;
/// `message` points to NUL-terminated `wchar_t` of 4 bytes each.
pub const MESSAGE_UNICODE: i32 = 2;
/// `message` is a handle that a register call has returned.
pub const MESSAGE_REGISTERED: i32 = 3;
