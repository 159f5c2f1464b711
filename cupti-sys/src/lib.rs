#![doc = include_str!("../README.md")]

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
