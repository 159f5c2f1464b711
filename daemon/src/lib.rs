//! The daemon: sources -> ledger -> views.
//!
//! ```text
//! source      the world -> records: agent (processes that carry our library), nvml, process (/proc), kernel (its log)
//! aggregator  the one owner of the ledger: takes records, makes runs, publishes what views read; writes the recording
//! run_writer  the thread that writes runs to the store
//! view        published state -> the world: prometheus, page and control over http
//! limits      what one user may take from the others: connections, bytes, log lines, time
//! config      the file as typed -> settings as meant
//! app         puts them together: the only file that names sources and views
//! service     systemd: notifications, and connections that outlive the daemon
//! ```
//!
//! One thread runs everything but the store and the recording, which wait for disks. NVML lives in a child
//! process (see source/nvml).
#![warn(missing_docs)]

pub mod aggregator;
pub mod app;
pub mod clock;
pub mod config;
pub(crate) mod descriptors;
pub mod error_text;
pub(crate) mod limits;
pub mod memory;
pub mod nvml_status;
pub mod os;
pub mod run_writer;
pub(crate) mod service;
pub mod signals;
pub(crate) mod sockets;
pub mod source;
pub mod stats;
pub mod view;
