//! PyTorch's caching allocator. The backward pass is in naming/autograd.rs.
//!
//! ```text
//! patch.rs     puts the agent's functions into PyTorch's slots    report.rs    allocation and free of a block
//! segments.rs  driver allocations that its pool carves            pending.rs   freed blocks that a stream still uses
//! oom.rs       reports of failed requests                         adopt.rs     memory from before a late agent
//! rename.rs    live memory of modules that have moved             health.rs    state of the layers, for the sender
//! ```

pub(crate) mod adopt;
pub(crate) mod health;
pub mod oom;
pub mod patch;
pub mod pending;
mod rename;
pub mod report;
pub(crate) mod segments;
