//! What the program does through the functions of gpumem.h.

pub mod counters;
pub mod pools;
pub mod recordings;
pub mod scope;
pub mod snapshot;
