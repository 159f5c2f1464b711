//! Start and end of the agent, and the work of exported functions that need the sender.

pub(crate) mod ask;
pub mod attach;
pub(crate) mod control;
pub(crate) mod dump;
pub(crate) mod fork;
pub(crate) mod second_copy;
