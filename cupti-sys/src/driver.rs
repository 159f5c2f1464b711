//! The driver calls that we make, in the libcuda that the process has loaded. Never loaded by us.

use crate::CuResult;
use crate::library::Library;
use core::ffi::{c_char, c_int, c_void};

/// Attributes of a driver pool.
pub mod pool_attribute {
    /// CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT.
    pub const RESERVED_CURRENT: u32 = 5;
    /// CU_MEMPOOL_ATTR_USED_MEM_CURRENT.
    pub const USED_CURRENT: u32 = 7;
    /// CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, of a device's graph memory.
    pub const GRAPH_USED_CURRENT: u32 = 0;
    /// CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT.
    pub const GRAPH_RESERVED_CURRENT: u32 = 2;
}

/// Attributes of a device.
pub mod device_attribute {
    use core::ffi::c_int;

    /// CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT.
    pub const MULTIPROCESSORS: c_int = 16;
    /// CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR.
    pub const THREADS_PER_MULTIPROCESSOR: c_int = 39;
}

/// The loaded driver's functions; each may be missing in an old driver.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct Driver {
    pub library: Library,
    pub driver_get_version: Option<unsafe extern "C" fn(*mut c_int) -> CuResult>,
    pub device_get_count: Option<unsafe extern "C" fn(*mut c_int) -> CuResult>,
    pub device_get_uuid: Option<unsafe extern "C" fn(*mut [u8; 16], c_int) -> CuResult>,
    pub device_total_mem: Option<unsafe extern "C" fn(*mut usize, c_int) -> CuResult>,
    pub device_get_name: Option<unsafe extern "C" fn(*mut c_char, c_int, c_int) -> CuResult>,
    pub device_get_attribute: Option<unsafe extern "C" fn(*mut c_int, c_int, c_int) -> CuResult>,
    pub primary_ctx_get_state: Option<unsafe extern "C" fn(c_int, *mut u32, *mut c_int) -> CuResult>,
    pub mem_get_address_range: Option<unsafe extern "C" fn(*mut u64, *mut usize, u64) -> CuResult>,
    pub ctx_get_device: Option<unsafe extern "C" fn(*mut c_int) -> CuResult>,
    pub ctx_get_current: Option<unsafe extern "C" fn(*mut *mut c_void) -> CuResult>,
    pub ctx_push_current: Option<unsafe extern "C" fn(*mut c_void) -> CuResult>,
    pub ctx_pop_current: Option<unsafe extern "C" fn(*mut *mut c_void) -> CuResult>,
    pub mem_get_info: Option<unsafe extern "C" fn(*mut usize, *mut usize) -> CuResult>,
    pub device_get_mem_pool: Option<unsafe extern "C" fn(*mut u64, c_int) -> CuResult>,
    pub pool_get_attribute: Option<unsafe extern "C" fn(u64, u32, *mut u64) -> CuResult>,
    pub graph_mem_get_attribute: Option<unsafe extern "C" fn(c_int, u32, *mut u64) -> CuResult>,
}

impl Driver {
    /// The functions of the loaded libcuda, or `None` if there is none.
    pub fn loaded() -> Option<Self> {
        let library = Library::loaded(c"libcuda.so.1").or_else(|| Library::loaded(c"libcuda.so"))?;
        // SAFETY: each type is that of the function in cuda.h of CUDA 11.8 to 13.5; CUdevice is an int, a
        // CUmemoryPool a pointer that we only hand back.
        unsafe {
            Some(Driver {
                library,
                driver_get_version: library.function(c"cuDriverGetVersion"),
                device_get_count: library.function(c"cuDeviceGetCount"),
                device_get_uuid: library
                    .function(c"cuDeviceGetUuid_v2")
                    .or_else(|| library.function(c"cuDeviceGetUuid")),
                device_total_mem: library.function(c"cuDeviceTotalMem_v2"),
                device_get_name: library.function(c"cuDeviceGetName"),
                device_get_attribute: library.function(c"cuDeviceGetAttribute"),
                primary_ctx_get_state: library.function(c"cuDevicePrimaryCtxGetState"),
                mem_get_address_range: library.function(c"cuMemGetAddressRange_v2"),
                ctx_get_device: library.function(c"cuCtxGetDevice"),
                ctx_get_current: library.function(c"cuCtxGetCurrent"),
                ctx_push_current: library.function(c"cuCtxPushCurrent_v2"),
                ctx_pop_current: library.function(c"cuCtxPopCurrent_v2"),
                mem_get_info: library.function(c"cuMemGetInfo_v2"),
                device_get_mem_pool: library.function(c"cuDeviceGetMemPool"),
                pool_get_attribute: library.function(c"cuMemPoolGetAttribute"),
                graph_mem_get_attribute: library.function(c"cuDeviceGetGraphMemAttribute"),
            })
        }
    }

    /// The driver's CUDA version, 12040 for 12.4; works before cuInit has returned.
    pub fn version(&self) -> Option<u32> {
        let mut version = 0;
        // SAFETY: a function of this driver, with a place for its answer.
        let result = unsafe { self.driver_get_version?(&mut version) };
        (result == 0).then_some(u32::try_from(version).ok()).flatten()
    }
}
