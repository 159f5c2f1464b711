//! One file per command.

pub mod import;
pub mod report;
pub mod runs;
