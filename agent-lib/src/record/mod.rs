//! How records are made and kept: names, the table of live rows, its high water, and what the agent reports about itself.

pub(crate) mod high_water;
pub(crate) mod live;
pub(crate) mod names;
pub(crate) mod panic;
pub mod recorder;
pub mod status;
