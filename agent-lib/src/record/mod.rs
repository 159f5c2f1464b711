//! How records are made and kept: names, the table of live rows, its high water, and what the agent reports about itself.

pub mod high_water;
pub mod live;
pub mod names;
pub(crate) mod panic;
pub mod recorder;
pub mod status;
