//! Runs: made from records, stored, recorded, exported. What a run is, `gpumem-model` says; nothing here prints.
//!
//! ```text
//! input, recording   a file -> records
//! builder            records -> ledger -> runs with their series; kept: series and readings of each process
//! export             a run as a file, for another machine
//! store              runs in an SQLite file, checkpointed while they go on
//! ```
#![forbid(unsafe_code)]

pub mod builder;
pub mod export;
pub mod input;
mod readings;
pub mod recording;
pub mod store;
