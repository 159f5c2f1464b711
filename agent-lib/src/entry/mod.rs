//! Starting and ending, and what exported functions do that needs the sender.

pub mod ask;
pub mod attach;
pub mod control;
pub mod dump;
pub(crate) mod fork;
pub(crate) mod second_copy;
