//! The functions of gpumem.h: data that the program reports itself.

pub(crate) mod counters;
pub(crate) mod pools;
pub mod recordings;
pub(crate) mod scope;
pub(crate) mod snapshot;
