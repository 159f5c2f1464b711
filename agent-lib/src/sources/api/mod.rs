//! What the program does through the functions of gpumem.h.

pub(crate) mod counters;
pub(crate) mod pools;
pub mod recordings;
pub(crate) mod scope;
pub(crate) mod snapshot;
