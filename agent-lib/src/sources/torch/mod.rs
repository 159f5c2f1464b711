//! PyTorch's caching allocator. The backward pass is in naming/autograd.rs.

pub(crate) mod adopt;
pub(crate) mod health;
pub mod oom;
pub mod patch;
pub mod pending;
mod rename;
pub mod report;
mod request;
pub(crate) mod segments;
