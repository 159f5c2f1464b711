//! The driver calls that the agent makes, in the libcuda that the process has loaded. The agent never loads libcuda.

use crate::CuResult;
use crate::library::Library;
use core::ffi::{c_char, c_int, c_void};

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

pub mod device_attribute {
    use core::ffi::c_int;

    /// CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT.
    pub const MULTIPROCESSORS: c_int = 16;
    /// CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR.
    pub const THREADS_PER_MULTIPROCESSOR: c_int = 39;
}

/// Declares driver functions. Each has a field, a symbol, a second symbol for drivers without the first one, and parameters.
macro_rules! functions {
    ($( $field:ident = $first:literal $(or $other:literal)? ($($parameter:ty),*) )*) => {
        /// The loaded driver's functions; each may be missing in an old driver.
        #[derive(Debug, Clone, Copy)]
        pub struct Driver {
            $( pub $field: Option<unsafe extern "C" fn($($parameter),*) -> CuResult>, )*
        }

        impl Driver {
            /// Returns the functions of the loaded libcuda; `None` if there is none.
            pub fn loaded() -> Option<Self> {
                let library = Library::loaded(c"libcuda.so.1").or_else(|| Library::loaded(c"libcuda.so"))?;
                // SAFETY: each type is that of the function in cuda.h of CUDA 11.8 to 13.5. A CUdevice is an int, a
                // CUmemoryPool a pointer that is only passed back to the driver.
                Some(unsafe { Driver {
                    $( $field: library.function($first)$( .or_else(|| library.function($other)) )?, )*
                } })
            }
        }
    };
}

functions! {
    driver_get_version = c"cuDriverGetVersion" (*mut c_int)
    device_get_count = c"cuDeviceGetCount" (*mut c_int)
    device_get_uuid = c"cuDeviceGetUuid_v2" or c"cuDeviceGetUuid" (*mut [u8; 16], c_int)
    device_total_mem = c"cuDeviceTotalMem_v2" (*mut usize, c_int)
    device_get_name = c"cuDeviceGetName" (*mut c_char, c_int, c_int)
    device_get_attribute = c"cuDeviceGetAttribute" (*mut c_int, c_int, c_int)
    primary_ctx_get_state = c"cuDevicePrimaryCtxGetState" (c_int, *mut u32, *mut c_int)
    mem_get_address_range = c"cuMemGetAddressRange_v2" (*mut u64, *mut usize, u64)
    ctx_get_device = c"cuCtxGetDevice" (*mut c_int)
    ctx_push_current = c"cuCtxPushCurrent_v2" (*mut c_void)
    ctx_pop_current = c"cuCtxPopCurrent_v2" (*mut *mut c_void)
    mem_get_info = c"cuMemGetInfo_v2" (*mut usize, *mut usize)
    device_get_mem_pool = c"cuDeviceGetMemPool" (*mut u64, c_int)
    pool_get_attribute = c"cuMemPoolGetAttribute" (u64, u32, *mut u64)
    graph_mem_get_attribute = c"cuDeviceGetGraphMemAttribute" (c_int, u32, *mut u64)
}

impl Driver {
    /// Returns the driver's CUDA version, 12040 for 12.4. Works before cuInit has returned.
    pub fn version(&self) -> Option<u32> {
        let mut version = 0;
        // SAFETY: a function of this driver, with room for its answer.
        let result = unsafe { self.driver_get_version?(&mut version) };
        (result == 0).then_some(u32::try_from(version).ok()).flatten()
    }
}
