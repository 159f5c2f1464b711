//! One file or folder per command.

pub mod diff;
pub mod doctor;
pub mod explain;
pub mod export;
pub mod generate;
pub mod import;
pub mod job;
pub mod mark;
pub mod nvml;
pub mod ps;
pub mod record;
pub mod report;
pub mod run;
pub mod runs;
pub mod top;
