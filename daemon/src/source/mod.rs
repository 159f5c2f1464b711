//! The world -> observations. A source hands over frames of `wire`, as they would lie in a recording; it knows
//! neither the ledger nor the views.

pub(crate) mod agent;
pub(crate) mod kernel;
pub mod nvml;
pub mod process;

pub use crate::aggregator::batch::Batch;
