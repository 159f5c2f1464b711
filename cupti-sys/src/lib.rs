//! Numbers and layouts of CUPTI, and of the few driver calls that gpumemd makes; everything is found at run
//! time and nothing of NVIDIA's is in here.
//!
//! ```text
//! ids.rs      callback ids of the driver and resource domains
//! params.rs   what a driver call's parameters look like in memory
//! data.rs     what a callback is handed
//! result.rs   result codes with a text for people
//! library.rs  dlopen and dlsym
//! api.rs      the functions of a libcupti
//! driver.rs   the functions of the libcuda that is in the process already
//! nvtx.rs     what NVTX hands to a library that it loads
//! ```
//!
//! Ids were never renumbered and none of these layouts changed between CUPTI 11.7 and 13.5, so one table
//! serves all of them. C enums are plain integers: a newer library may say numbers that we do not know.

mod api;
mod data;
mod driver;
pub mod ids;
mod library;
pub mod nvtx;
pub mod params;
mod result;

pub use api::{Api, Callback, GetNumber, OpenError, SubscriberHandle, SubscriberParams};
pub use data::{CallbackData, ENTER, EXIT, GraphData, ModuleResourceData, ResourceData, StateData, domain};
pub use driver::{Driver, device_attribute, pool_attribute};
pub use library::Library;
pub use result::{CuptiResult, friendly};

/// A CUresult; 0 is success.
pub type CuResult = u32;
/// CUDA_ERROR_OUT_OF_MEMORY.
pub const CUDA_ERROR_OUT_OF_MEMORY: CuResult = 2;
/// CUDA_ERROR_NOT_INITIALIZED: cuInit has not returned yet.
pub const CUDA_ERROR_NOT_INITIALIZED: CuResult = 3;
/// CUDA_ERROR_DEINITIALIZED: the driver is gone with all memory, the process exits.
pub const CUDA_ERROR_DEINITIALIZED: CuResult = 4;
