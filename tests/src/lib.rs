//! What tests and benchmarks of more than one crate share. Nothing here is part of the product.
//!
//! ```text
//! examples        one record of every kind, for golden bytes
//! golden          files of expected output under tests/golden
//! live            the whole product on the simulated machine
//! node            a small node as a daemon records it
//! samples         recordings of other tools, where they are
//! bench           measurements, each beside its floor; run by the program `bench`
//! ```

pub mod bench;
pub mod examples;
pub mod golden;
pub mod live;
pub mod node;
pub mod samples;
