//! Functions of libcupti. Call them only while libcuda is loaded: without it CUPTI 13.2 crashes.

use crate::library::Library;
use crate::params::layouts;
use core::ffi::{CStr, c_char, c_void};

/// A CUptiResult. A plain integer, because newer libraries define more values.
pub type CuptiResult = u32;
/// A CUpti_SubscriberHandle: identifies a subscription.
pub type SubscriberHandle = *mut c_void;
/// Type of a function that writes a context's number (as CUPTI counts contexts), or the number of its device.
pub type GetNumber = unsafe extern "C" fn(*const c_void, *mut u32) -> CuptiResult;
/// Type of a callback function. Arguments: `userdata`, domain, id, data.
pub type Callback = unsafe extern "C" fn(*mut c_void, u32, u32, *const c_void);

layouts! {
    /// `CUpti_SubscriberParams`, from CUPTI 13.0.
    SubscriberParams = 40 {
        /// Size of this struct: `BYTES_13_0` or `BYTES_13_2`. CUPTI 13.0 and 13.1 refuse the larger one.
        struct_bytes @ 0: usize,
        /// Name of this subscriber, at most 53 bytes.
        name @ 8: *const c_char,
        /// Buffer of at least 64 bytes for the name of the client that holds the subscription.
        holder @ 16: *mut c_char,
        /// Size of `holder` in bytes.
        holder_bytes @ 24: usize,
        /// Whether other clients may subscribe, too. From CUPTI 13.2.
        allow_multiple @ 32: u8,
    }
}

impl SubscriberParams {
    /// Size of the struct in CUPTI 13.0 and 13.1, in bytes.
    pub const BYTES_13_0: usize = 32;
    /// Size of the struct from CUPTI 13.2 on, in bytes.
    pub const BYTES_13_2: usize = 40;
}

/// Functions of a libcupti. Older versions do not have the optional ones.
#[derive(Debug, Clone, Copy)]
pub struct Api {
    pub subscribe: unsafe extern "C" fn(*mut SubscriberHandle, Callback, *mut c_void) -> CuptiResult,
    pub subscribe_v2: Option<
        unsafe extern "C" fn(
            *mut SubscriberHandle,
            Callback,
            *mut c_void,
            *mut SubscriberParams,
        ) -> CuptiResult,
    >,
    pub unsubscribe: unsafe extern "C" fn(SubscriberHandle) -> CuptiResult,
    /// Arguments: enable, handle, domain, id. Not thread-safe.
    pub enable_callback: unsafe extern "C" fn(u32, SubscriberHandle, u32, u32) -> CuptiResult,
    pub get_version: Option<unsafe extern "C" fn(*mut u32) -> CuptiResult>,
    pub get_context_id: Option<GetNumber>,
    pub get_device_id: Option<GetNumber>,
}

impl Api {
    /// Loads the libcupti at `path`, unless it is loaded already. It stays loaded until the process ends. `None` if the file
    /// is not a libcupti; it is unloaded then.
    pub fn open(path: &CStr) -> Option<Self> {
        let library = Library::open(path)?;
        let api = Self::of(library);
        if api.is_none() {
            library.close();
        }
        api
    }

    fn of(library: Library) -> Option<Self> {
        // SAFETY: each type is that of the function in the headers of CUPTI 11.7 to 13.5.
        unsafe {
            Some(Api {
                subscribe: library.function(c"cuptiSubscribe")?,
                subscribe_v2: library.function(c"cuptiSubscribe_v2"),
                unsubscribe: library.function(c"cuptiUnsubscribe")?,
                enable_callback: library.function(c"cuptiEnableCallback")?,
                get_version: library.function(c"cuptiGetVersion"),
                get_context_id: library.function(c"cuptiGetContextId"),
                get_device_id: library.function(c"cuptiGetDeviceId"),
            })
        }
    }

    /// Returns CUPTI's version: 17 to 28 up to CUDA 12.9, then 130001 and so on; `None` if the call fails.
    pub fn version(&self) -> Option<u32> {
        let mut version = 0;
        // SAFETY: a function of this library, with room for its answer.
        (unsafe { self.get_version?(&mut version) } == 0).then_some(version)
    }
}

/// Returns a text for the user: why CUPTI does not report driver calls. Not cuptiGetResultString, which returns nothing if a
/// library of CUDA 13.3 or later cannot start.
pub fn friendly(result: CuptiResult) -> &'static str {
    match result {
        0 => "ok",
        1 => "CUPTI refused a parameter",
        2 => "this libcupti does not know this GPU: install a newer one",
        15 => "libcupti and the driver are incompatible, or there is no GPU",
        23 => "another profiler has disabled CUPTI",
        27 => "this libcupti does not support it here",
        33 => "profiling is not supported on this virtual GPU",
        35 => "no permission to use CUPTI",
        39 => "another CUPTI client holds the subscription",
        40 => "profiling is not allowed on this virtual GPU",
        41 => "tracing is not allowed under confidential computing",
        43 => "CUPTI is not supported on this MIG instance",
        45 => "CUPTI is not supported on this WSL",
        46 => "this libcupti does not know this chip",
        47 => "hardware event tracing and MPS exclude each other",
        999 => "CUPTI failed (also if there is no driver)",
        _ => "CUPTI failed",
    }
}
