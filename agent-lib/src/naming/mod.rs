//! Determines the name of an allocation from all sources of names.
//!
//! ```text
//! scope    the innermost open scope of the thread: C API, Python, NVTX              (sources/api/scope.rs, sources/nvtx)
//! module   the module whose Python frame the thread is in                           (python/)
//! node     the name that the forward pass gave the backward node that the thread runs    (autograd.rs)
//! process  the tag of the process, for threads without a scope, module or node: `INHERITED`
//! ```
//!
//! With `GPUMEM_LINES=1` the program's line follows a module's path. A scope and a module together give `scope/module`.
//!
//! The name of a node contains the scope of the forward pass, so only scopes opened inside of the node are added.
//!
//! A node may run a module's frame, as a checkpoint computes its forward pass again. Then the name is the module's.

pub mod autograd;
pub mod callers;
pub(crate) mod gradient;
pub(crate) mod python;
pub(crate) mod sequence;
pub(crate) mod slot;

use crate::base::row::AllocationName;
use crate::driver::core::Core;
use crate::record::recorder::RecordContext;
use crate::threads::Thread;
use gpumem_wire::{Flags, Phase};
use std::sync::atomic::Ordering::Relaxed;

impl Core {
    /// Returns the name for memory that the calling thread allocates now. The autograd node made last on it gets the name, too.
    #[unsafe(link_section = ".text.hot.gpumem")]
    #[inline(never)]
    pub fn named(&self, thread: &Thread) -> AllocationName {
        let frames = python::name();
        let node = autograd::name_of_running(thread);
        // Nearly always either frames or a node give the name, and nothing else does.
        let name = match (frames, node) {
            (Some(name), None) if !self.settings.layers.lines => name,
            (None, Some(name)) => name,
            _ => AllocationName::default(),
        };
        if name.tag == 0 || thread.scope.load(Relaxed) != 0 {
            return self.named_by_all(thread, frames.unwrap_or_default(), node);
        }
        autograd::name_last_node(thread, name.tag);
        name
    }

    /// Returns the record context with the name for memory that the calling thread allocates now.
    #[inline(always)]
    pub(crate) fn here(&self, thread: &Thread) -> RecordContext {
        let AllocationName { tag, flags, .. } = self.named(thread);
        RecordContext { tag, flags, ..RecordContext::NOWHERE }
    }

    /// Appends the program's line that allocates in a module to the module's tag.
    #[cold]
    #[inline(never)]
    fn with_line(&self, tag: u32) -> u32 {
        match python::line(self) {
            0 => tag,
            line => self.recorder.names.join(tag, line),
        }
    }

    /// Like `named`, for every combination of sources of names.
    #[inline(never)]
    fn named_by_all(
        &self,
        thread: &Thread,
        mut frames: AllocationName,
        node: Option<AllocationName>,
    ) -> AllocationName {
        if self.settings.layers.lines && frames.tag != 0 {
            frames.tag = self.with_line(frames.tag);
        }
        let scope = thread.scope.load(Relaxed);
        let own = match (scope, frames.tag, node.map_or(0, |node| node.tag)) {
            (scope, 0, tag) if tag != 0 && scope == thread.autograd.scope() => tag,
            (0, 0, tag) | (0, tag, _) | (tag, 0, 0) => tag,
            (scope, 0, tag) | (scope, tag, _) => self.recorder.names.join(scope, tag),
        };
        if own != 0 || node.is_none() {
            autograd::name_last_node(thread, own);
        }
        let inherited = if own == 0 { self.process_tag.load(Relaxed) } else { 0 };
        let flags = if inherited == 0 { Flags(0) } else { Flags::INHERITED };
        // A hook of a gradient may run an optimizer's step or move a module inside of a node; the phase is that of the hook then.
        let phase = match (frames.phase, node) {
            (Phase::Optimizer | Phase::Setup, _) | (_, None) => frames.phase,
            (_, Some(node)) => node.phase,
        };
        AllocationName { tag: own | inherited, flags, phase, role: frames.role }
    }
}
