//! What an allocation is called: the one place where the sources of names come together.
//!
//! ```text
//! scope    the innermost open scope of the thread: C API, Python, NVTX         (scope.rs, nvtx/)
//! module   the module in whose Python frame the thread is                      (python/)
//!          or whose forward pass the running backward node belongs to          (torch/)
//! process  the tag of the process, for threads that have neither: `INHERITED`
//! ```
//!
//! A scope and a module together give `scope/module`.

use crate::core::Core;
use crate::threads::Thread;
use crate::{python, torch};
use gpumem_wire::{Flags, Phase};
use std::sync::atomic::Ordering::Relaxed;

/// What a source of names says of the calling thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Here {
    /// Tag of the module's path; 0 for none.
    pub tag: u32,
    /// What the thread is doing.
    pub phase: Phase,
}

/// What an allocation that is made now is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Named {
    /// 0 for nothing.
    pub tag: u32,
    /// `INHERITED` or nothing.
    pub flags: Flags,
    /// Unknown where nothing tells it.
    pub phase: Phase,
}

impl Core {
    /// The names in force on the calling thread.
    #[inline(always)]
    pub fn named(&self, thread: &Thread) -> Named {
        let scope = thread.scope.load(Relaxed);
        let Here { tag: module, phase } =
            python::here(self, thread).or_else(|| torch::here(self, thread)).unwrap_or_default();
        let (tag, flags) = match (scope, module) {
            (0, 0) => match self.process_tag.load(Relaxed) {
                0 => (0, Flags(0)),
                tag => (tag, Flags::INHERITED),
            },
            (0, tag) | (tag, 0) => (tag, Flags(0)),
            (scope, module) => (self.names.join(scope, module), Flags(0)),
        };
        Named { tag, flags, phase }
    }
}
