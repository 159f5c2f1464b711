//! Ids and layouts of CUPTI, and the few driver calls that the agent makes. NVIDIA's libraries are loaded at run time; the
//! crate contains no NVIDIA code.
//!
//! ```text
//! ids.rs      callback ids of the driver, resource and state domains
//! params.rs   layouts of driver calls' parameters
//! data.rs     arguments of a callback
//! library.rs  dlopen and dlsym
//! api.rs      functions of libcupti, and their results
//! driver.rs   functions of the libcuda that is already loaded in the process
//! nvtx.rs     tables that NVTX passes to an injected library
//! ```
//!
//! Ids and layouts are the same in CUPTI 11.7 to 13.5, so one table is enough for all versions. C enums are plain integers,
//! because a newer library may use values that this crate does not know.

mod api;
mod data;
mod driver;
pub mod ids;
mod library;
pub mod nvtx;
pub mod params;

pub use api::{Api, Callback, CuptiResult, GetNumber, SubscriberHandle, SubscriberParams, friendly};
pub use data::{CallbackData, ENTER, EXIT, GraphData, ModuleResourceData, ResourceData, domain};
pub use driver::{Driver, device_attribute, pool_attribute};
pub use library::Library;

/// A CUresult; 0 is success.
pub type CuResult = u32;
/// cuInit has not returned yet.
pub const CUDA_ERROR_NOT_INITIALIZED: CuResult = 3;
/// The driver has shut down and freed all memory, because the process exits.
pub const CUDA_ERROR_DEINITIALIZED: CuResult = 4;
