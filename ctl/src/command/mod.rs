//! One file or folder per command.

pub mod doctor;
pub mod import;
pub mod mark;
pub mod nvml;
pub mod ps;
pub mod record;
pub mod report;
pub mod run;
pub mod runs;
