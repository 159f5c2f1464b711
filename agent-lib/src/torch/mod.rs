//! PyTorch, as it comes: its allocator's reports, and its backward pass.
//!
//! ```text
//! autograd.rs  which node of the backward pass a thread runs      sequence.rs  what nodes are called
//! slot.rs      functions that PyTorch calls through a slot
//! ```

pub mod autograd;
pub mod sequence;
pub mod slot;

use crate::core::Core;
use crate::naming::Here;
use crate::threads::Thread;

pub use autograd::{is_seen, note_forward};

/// What the calling thread's backward node is named after, if it runs one.
#[inline(always)]
pub fn here(_: &Core, thread: &Thread) -> Option<Here> {
    autograd::here(thread)
}
