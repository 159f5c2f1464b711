//! Sources: they observe the system and hand frames of `wire` to the aggregator, in the format of a recording. A source depends
//! neither on the ledger nor on the views.

pub(crate) mod agent;
pub(crate) mod kernel;
pub mod nvml;
pub mod process;

pub use crate::aggregator::batch::Batch;
pub(crate) use crate::aggregator::batch::frame_of;
