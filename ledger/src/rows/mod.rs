//! Rows: tables of live memory, and of memory that calls in flight are about to free.

pub(crate) mod in_flight;
pub(crate) mod pool;
pub(crate) mod row;
