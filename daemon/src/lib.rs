#![doc = include_str!("../README.md")]

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
