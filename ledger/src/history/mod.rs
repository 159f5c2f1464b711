//! History of a process: its counters, ranges and marks, and points of growth.

pub(crate) mod counters;
mod period;
pub(crate) mod program_data;
pub(crate) mod ranges;
pub(crate) mod ring;
pub(crate) mod trend;
