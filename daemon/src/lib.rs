//! The daemon: sources -> ledger -> views.
//!
//! ```text
//! source      the system -> records: agent (processes that loaded our library), nvml, process (/proc), kernel (its log)
//! aggregator  owns the ledger: takes records, builds runs, publishes the state that views read, writes the recording
//! run_writer  the thread that writes runs to the store
//! view        published state -> clients: prometheus, page and control over http
//! limits      shares of each user: connections, bytes, log lines, time
//! config      configuration file -> settings
//! app         assembles the daemon: the only file that names sources and views
//! service     systemd: notifications, and connections that outlive the daemon
//! ```
//!
//! One thread runs everything except the store and the recording, which have their own threads because they wait for disks. NVML
//! runs in a child process (see source/nvml).
#![warn(missing_docs)]

pub mod agent_command;
pub mod aggregator;
pub mod app;
pub mod clock;
pub mod config;
pub(crate) mod descriptors;
pub(crate) mod limits;
pub mod nvml_status;
pub mod os;
pub mod run_writer;
pub(crate) mod service;
pub mod signals;
pub(crate) mod sockets;
pub mod source;
pub mod stats;
pub mod view;
