//! What an NVTX library hands to the one that it was told to load (`InitializeInjectionNvtx2`), and the numbers of its
//! functions. Checked against NVTX 3 headers, the older libnvToolsExt (version 2) and the Python package.
//!
//! A table is an array of places, each of which points to a function pointer of the caller: `*table[id] = function`. How many
//! places there are differs between versions; a number at or beyond the count is not there.

use std::ffi::c_int;

/// Of an export table: the functions.
pub const ETID_CALLBACKS: u32 = 1;
/// Of an export table: the version; not there in version 2.
pub const ETID_VERSION_INFO: u32 = 3;

/// Calls without a domain.
pub const MODULE_CORE: u32 = 1;
/// Calls with one.
pub const MODULE_CORE2: u32 = 5;

/// The array of places.
pub type Table = *mut *mut usize;

/// `getExportTable(ETID_CALLBACKS)`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Callbacks {
    /// Of this structure.
    pub struct_size: usize,
    /// Module -> table and count; 1 if there is one.
    pub get_module_function_table:
        Option<unsafe extern "C" fn(module: u32, table: *mut Table, count: *mut u32) -> c_int>,
}

/// `getExportTable(ETID_VERSION_INFO)`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct VersionInfo {
    /// Of this structure.
    pub struct_size: usize,
    /// Of the caller.
    pub version: u32,
    /// Nothing.
    pub reserved: u32,
    /// Says the version of the library that was loaded.
    pub set_injection_version: Option<unsafe extern "C" fn(version: u32)>,
}

/// What an initialiser is handed.
pub type GetExportTable = unsafe extern "C" fn(id: u32) -> *const std::ffi::c_void;

/// The version that we speak.
pub const VERSION: u32 = 3;

/// Numbers in [`MODULE_CORE`].
#[allow(missing_docs)]
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

/// Numbers in [`MODULE_CORE2`].
#[allow(missing_docs)]
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

/// What `NoPushPopTracking` means as the result of a push or pop.
pub const NOT_TRACKED: c_int = -2;

/// `nvtxEventAttributes_t`: as many bytes as `size` says.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct EventAttributes {
    /// Of NVTX.
    pub version: u16,
    /// Of the structure, as the program knows it.
    pub size: u16,
    /// The program's.
    pub category: u32,
    /// Kind of `color`.
    pub color_type: i32,
    /// To be drawn with.
    pub color: u32,
    /// Kind of `payload`.
    pub payload_type: i32,
    /// Nothing.
    pub reserved: i32,
    /// A number.
    pub payload: u64,
    /// One of the `MESSAGE_` numbers.
    pub message_type: i32,
    /// Nothing.
    pub padding: u32,
    /// A pointer to a text, or the handle of a registered one.
    pub message: usize,
}
const _: () = assert!(size_of::<EventAttributes>() == 48);
const _: () = assert!(std::mem::offset_of!(EventAttributes, message_type) == 32);
const _: () = assert!(std::mem::offset_of!(EventAttributes, message) == 40);

/// UTF-8, ending with 0.
pub const MESSAGE_ASCII: i32 = 1;
/// `wchar_t`, 4 bytes each, ending with 0.
pub const MESSAGE_UNICODE: i32 = 2;
/// What a register call returned.
pub const MESSAGE_REGISTERED: i32 = 3;
