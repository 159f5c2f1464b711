//! Makes records. Also names, the live table with its high-water mark, and the agent's reports about itself.

pub(crate) mod high_water;
pub(crate) mod live;
pub(crate) mod names;
pub(crate) mod panic;
pub mod recorder;
pub mod status;
