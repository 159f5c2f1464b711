//! Parts that depend on no other part of the agent: shared memory, descriptors, locks, clocks, settings, and mapped ELF files.

pub(crate) mod arena_allocator;
pub mod c_text;
pub(crate) mod clock;
pub mod descriptor;
pub(crate) mod elf;
pub mod env;
pub(crate) mod fault_injection;
pub(crate) mod glibc;
pub(crate) mod hot;
pub mod image;
pub(crate) mod loaded_file;
pub(crate) mod locks;
pub(crate) mod memfd;
pub mod own_thread;
pub(crate) mod ring;
pub mod row;
pub(crate) mod seccomp;
pub(crate) mod wake;
