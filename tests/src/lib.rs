//! Helpers for tests and benchmarks of more than one crate. Nothing here is part of the product.
//!
//! ```text
//! browser         a real Chromium, without a window
//! examples        one record of every kind, for golden bytes
//! golden          files of expected output under tests/golden
//! live            the whole product on the simulated machine
//! hostile         hostile names that could harm viewers
//! markdown        code blocks of a document
//! node            a small node as a daemon records it
//! pages           example runs for the page: small, huge, with several devices
//! samples         recordings of other tools, if present
//! structure       the project's own source: lines, import cycles, layers
//! bench           measurements, each compared with its floor; run by the program `bench`
//! ```

pub mod bench;
pub mod browser;
pub mod examples;
pub mod golden;
pub mod hostile;
pub mod live;
pub mod markdown;
pub mod node;
pub mod pages;
pub mod samples;
pub mod structure;
