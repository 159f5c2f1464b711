//! Sources observe the system and hand records, encoded as frames like in a recording, to the aggregator. A source depends
//! neither on the ledger nor on the views.

pub(crate) mod agent;
pub(crate) mod kernel;
pub mod nvml;
pub mod process;

pub use crate::aggregator::batch::Batch;
pub(crate) use crate::aggregator::batch::frame_of;
