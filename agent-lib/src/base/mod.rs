//! What needs nothing else of the agent: memory that it shares, descriptors, locks, clocks, settings, and files as they lie in memory.

pub(crate) mod arena_allocator;
pub mod clock;
pub mod descriptor;
pub(crate) mod elf;
pub mod env;
pub(crate) mod fork_mutex;
pub(crate) mod glibc;
pub(crate) mod hot;
pub mod image;
pub(crate) mod maps;
pub mod memfd;
pub mod ring;
pub(crate) mod seccomp;
pub(crate) mod spin_lock;
pub(crate) mod wake;
