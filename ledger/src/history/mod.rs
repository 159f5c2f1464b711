pub(crate) mod counters;
mod period;
pub(crate) mod program_data;
pub(crate) mod ranges;
pub(crate) mod ring;
pub(crate) mod trend;
