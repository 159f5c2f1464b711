//! The world -> observations. A source hands over frames of `wire`, as they would lie in a recording; it knows
//! neither the ledger nor the views.

pub mod agent;
pub mod kernel;
pub mod nvml;
pub mod process;

pub use crate::batch::Batch;
