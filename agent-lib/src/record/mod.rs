//! Makes records; keeps names, the live table with its peaks, and the agent's reports about itself.

pub(crate) mod high_water;
pub(crate) mod live;
pub(crate) mod names;
pub(crate) mod panic;
pub mod recorder;
pub mod status;
