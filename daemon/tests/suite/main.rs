//! The daemon in this process, on its own sockets.

mod agents;
mod asking;
mod common;
mod config;
mod control;
mod kept;
mod life;
mod limits;
mod memory;
mod metrics;
mod nvml;
mod store;
