//! Booking rules: what a record does to the rows and books of its process.

mod allocation;
pub(crate) mod derive;
pub(crate) mod holdings;
pub(crate) mod pool;
pub(crate) mod segment;
pub(crate) mod vmm;
