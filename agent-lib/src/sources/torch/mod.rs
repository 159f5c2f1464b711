//! PyTorch's caching allocator. naming/autograd.rs has the backward pass.
//!
//! ```text
//! patch.rs     our functions put into PyTorch's slots      report.rs    a block was allocated or freed
//! segments.rs  which driver allocations its pool carves    pending.rs   freed blocks that a stream still uses
//! oom.rs       reports of failed requests                  adopt.rs     memory from before a late agent
//! rename.rs    live memory of modules that have moved      health.rs    state of the layers: the sender's side
//! ```

pub(crate) mod adopt;
pub(crate) mod health;
pub mod oom;
pub mod patch;
pub mod pending;
mod rename;
pub mod report;
pub(crate) mod segments;
