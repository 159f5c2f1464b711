//! The past of a process: its counters, ranges, marks, and points of growth.

pub(crate) mod counters;
pub(crate) mod layers;
pub(crate) mod marks;
mod period;
pub(crate) mod ranges;
pub(crate) mod ring;
pub(crate) mod trend;
