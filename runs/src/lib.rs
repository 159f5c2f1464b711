//! Builds, stores, records and exports runs. `gpumem-model` defines what a run is; this crate does not print.
//!
//! ```text
//! input, recording   file -> records
//! builder            records -> ledger -> runs; keeps series and recent readings, see readings and live_series
//! requests           the requests to PyTorch's allocator as a compact stream, kept with a run
//! export             a run as a file, for another machine
//! store              runs in an SQLite file, checkpointed while they are open
//! ```
#![forbid(unsafe_code)]

pub mod builder;
pub mod export;
pub mod input;
mod live_series;
mod readings;
pub mod recording;
pub mod requests;
pub mod store;
mod varint;
