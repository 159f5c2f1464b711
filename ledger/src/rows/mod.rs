//! Rows: the data of live memory, and of what is on its way out.

pub(crate) mod in_flight;
pub(crate) mod peak_residues;
pub(crate) mod pool;
pub(crate) mod row;
