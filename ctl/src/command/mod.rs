//! One file or folder for each command.

pub(crate) mod candidates;
pub(crate) mod diff;
pub(crate) mod doctor;
pub(crate) mod explain;
pub(crate) mod generate;
pub(crate) mod import;
pub(crate) mod job;
pub(crate) mod node;
pub(crate) mod ps;
pub(crate) mod report;
pub(crate) mod requests;
pub(crate) mod run;
pub(crate) mod runs;
pub(crate) mod top;
pub(crate) mod whatif;
pub(crate) mod why;
