//! The daemon: sources -> ledger -> views.
//!
//! ```text
//! source     the world -> records: agent (processes that carry our library), nvml, process (/proc)
//! core       the one owner of the ledger: takes records, makes runs, publishes what views read
//! keeper     the thread that writes runs to the store; recorder: the one that writes a recording
//! view       published state -> the world: prometheus and http, control
//! app        puts them together: with config the only file that names both sides
//! batch      what a source hands to the core
//! fair       who asks all the time waits, and nobody else
//! config     the file as typed -> settings as meant
//! service    what systemd is told and keeps; sockets: own or handed over by it; signals; descriptors: how many there are; stats: what we count about ourselves; namespace: whose pids we see
//! ```
//!
//! One thread runs everything but the store and the recording, which wait for disks. NVML lives in a child
//! process (see source/nvml).
#![warn(missing_docs)]

pub(crate) mod access;
pub mod app;
pub(crate) mod batch;
pub mod clock;
pub mod config;
pub mod core;
pub mod descriptors;
pub(crate) mod fair;
pub mod keeper;
pub mod memory;
mod namespace;
pub(crate) mod recorder;
pub(crate) mod service;
pub mod signals;
pub(crate) mod sockets;
pub mod source;
pub mod stats;
pub mod told;
pub mod view;
