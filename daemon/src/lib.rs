//! The daemon: sources -> ledger -> views.
#![warn(missing_docs)]

pub mod source;
