//! What the program does through the functions of gpumem.h.

pub mod control;
pub mod counters;
pub mod pools;
pub mod scope;
pub mod snapshot;
pub mod window;
