//! What an allocation is called: the one place where the sources of names come together.
//!
//! ```text
//! scope    the innermost open scope of the thread: C API, Python, NVTX         (sources/api/scope.rs, sources/nvtx)
//! module   the module in whose Python frame the thread is                      (python/)
//! node     what the forward pass called the node of the backward pass that the thread runs    (autograd.rs)
//! process  the tag of the process, for threads that have none of these: `INHERITED`
//! ```
//!
//! Behind a module's path may stand the line of the program (`GPUMEM_LINES=1`). A scope and a module together give `scope/module`. A node's name has the scope of the forward pass in it already: of scopes
//! that are open meanwhile, those count that were opened inside of the node, by a hook. In a node with a module's frame (a checkpoint that computes its forward pass again, on a thread of the backward pass) the
//! module is the name and the phase is the backward pass.

pub mod autograd;
pub mod callers;
pub(crate) mod gradient;
pub(crate) mod python;
pub(crate) mod sequence;
pub(crate) mod slot;

use crate::base::row::{AllocationName, FrameName};
use crate::driver::core::Core;
use crate::threads::Thread;
use gpumem_wire::{Flags, Phase};
use std::sync::atomic::Ordering::Relaxed;

impl Core {
    /// The names in force on the calling thread. In PyTorch they are from now on those of the node that it made last.
    #[inline(always)]
    pub fn named(&self, thread: &Thread) -> AllocationName {
        let mut frames = python::here(self, thread).unwrap_or_default();
        if self.settings.layers.lines && frames.tag != 0 {
            frames.tag = self.with_line(thread, frames.tag);
        }
        let node = autograd::here(thread);
        // Nearly always one of these two; the rest is the general case.
        let (tag, phase) = match node {
            None => (frames.tag, frames.phase),
            Some(node) if frames == FrameName::default() => (node.tag, node.phase),
            Some(_) => (0, Phase::Unknown),
        };
        if tag == 0 || thread.scope.load(Relaxed) != 0 {
            return self.named_by_all(thread, frames, node);
        }
        autograd::note_forward(thread, tag);
        AllocationName { tag, flags: Flags(0), phase, role: frames.role }
    }

    /// A module's tag, and behind it the line of the program that allocates in it.
    #[cold]
    #[inline(never)]
    fn with_line(&self, thread: &Thread, tag: u32) -> u32 {
        match python::line(self, thread) {
            0 => tag,
            line => self.recorder.names.join(tag, line),
        }
    }

    #[inline(never)]
    fn named_by_all(&self, thread: &Thread, frames: FrameName, node: Option<FrameName>) -> AllocationName {
        let scope = thread.scope.load(Relaxed);
        let phase = phase_of(frames.phase, node);
        let (tag, flags) = match (scope, frames.tag, node.map_or(0, |node| node.tag)) {
            (0, 0, 0) => match self.process_tag.load(Relaxed) {
                0 => (0, Flags(0)),
                tag => (tag, Flags::INHERITED),
            },
            (scope, 0, tag) if tag != 0 && scope == thread.autograd.scope() => (tag, Flags(0)),
            (0, 0, tag) => (tag, Flags(0)),
            (scope, 0, tag) if tag != 0 => (self.recorder.names.join(scope, tag), Flags(0)),
            (0, tag, _) | (tag, 0, _) => (tag, Flags(0)),
            (scope, module, _) => (self.recorder.names.join(scope, module), Flags(0)),
        };
        let own = if flags.0 == 0 { tag } else { 0 };
        if own != 0 || node.is_none() {
            autograd::note_forward(thread, own);
        }
        AllocationName { tag, flags, phase, role: frames.role }
    }
}

/// An optimizer's step, or a module being moved, may be under way inside of a node: hooks of gradients do that.
#[inline(always)]
fn phase_of(frames: Phase, node: Option<FrameName>) -> Phase {
    match (frames, node) {
        (Phase::Optimizer | Phase::Setup, _) | (_, None) => frames,
        (_, Some(node)) => node.phase,
    }
}
