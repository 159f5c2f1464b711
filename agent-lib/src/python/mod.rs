//! CPython: the frames of the calling thread, and what the interpreter knows.
//!
//! ```text
//! run.rs       when our code runs in the interpreter        bootstrap.rs  which code, and how
//! ```

pub mod bootstrap;
pub mod run;

use crate::core::Core;
use crate::naming::Here;
use crate::threads::Thread;

/// What the calling thread's Python frames say, if it has any that are known.
#[inline(always)]
pub fn here(_: &Core, _: &Thread) -> Option<Here> {
    None
}
