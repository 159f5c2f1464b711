//! PyTorch, as it comes: its allocator's reports, and its backward pass.
//!
//! ```text
//! find.rs      slots and functions of mapped files         patch.rs    our functions put into PyTorch's slots
//! report.rs    a block was allocated or freed              segments.rs which driver allocations its pool carves
//! pending.rs   freed blocks that a stream still uses       oom.rs      its word that it is out of memory
//! adopt.rs     what was there before a late agent
//! state.rs     what is kept per device and thread          health.rs   how the layers are: the sender's side
//! autograd.rs  which node of the backward pass runs        sequence.rs what nodes are called
//! rename.rs    live memory of modules that have moved
//! gradient.rs  which block is a gradient
//! slot.rs      the slot of a library that is loaded        maps.rs     whether a page is writable
//! ```

pub mod adopt;
pub mod health;
pub mod oom;
pub mod patch;
pub mod pending;
mod rename;
pub mod report;
pub mod segments;
