//! History of a process: data that the program reports (counters, ranges, marks), and points for detecting leaks.

pub(crate) mod counters;
mod period;
pub(crate) mod program_data;
pub(crate) mod ranges;
pub(crate) mod ring;
pub(crate) mod trend;
