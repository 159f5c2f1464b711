//! Booking rules: the effect of a record on the rows and books of its process.

mod allocation;
mod derive;
pub(crate) mod holdings;
mod pool;
mod resync;
mod segment;
mod vmm;
