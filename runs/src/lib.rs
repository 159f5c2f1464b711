//! What both programs do with runs: make them from observations, keep them, report them.
//!
//! ```text
//! builder             observations -> ledger -> Run, with its series
//! run, series         the life of one process: what is stored and what is reported
//! store               runs in an SQLite file, checkpointed while they go on
//! ```
#![forbid(unsafe_code)]

pub mod builder;
pub mod run;
pub mod series;
pub mod store;
