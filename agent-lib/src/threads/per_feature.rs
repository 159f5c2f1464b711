//! Data of features in a thread's place: callers of the driver (naming/callers), the backward node (naming/autograd.rs).

use super::stack::Stack;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Entries of a thread's cache of callers: a power of two.
pub(crate) const REMEMBERED: usize = 32;

/// A call whose caller was found. The same words at the same places mean the same caller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CachedCaller {
    pub(crate) start: usize,
    pub(crate) near: (usize, usize),
    pub(crate) far: (usize, usize),
    pub(crate) generation: u32,
    pub(crate) call: u16,
    pub(crate) module: u16,
}

#[derive(Debug)]
pub(crate) struct Callers {
    pub(crate) known: [CachedCaller; REMEMBERED],
    /// Return address of the last call; 0 for none.
    pub site: usize,
    pub(crate) stack: Stack,
}

impl Callers {
    pub(crate) const fn new() -> Self {
        let nothing = CachedCaller { start: 0, near: (0, 0), far: (0, 0), generation: 0, call: 0, module: 0 };
        Callers { known: [nothing; REMEMBERED], site: 0, stack: Stack::UNKNOWN }
    }
}

impl Default for Callers {
    fn default() -> Self {
        Self::new()
    }
}

/// A thread's state of the backward pass. Written only by the thread.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct AutogradThread {
    /// The scope that was open when the running node began.
    pub(crate) scope: AtomicU32,
    /// The running node; 0 for none, `UNNAMED` for an unknown one.
    pub(crate) running: AtomicU64,
    /// PyTorch's id of the thread; 0 until it is read.
    pub(crate) id: AtomicU64,
    /// The last node that has ended on the thread.
    pub(crate) last: AtomicU64,
    /// The running node, if it accumulates a gradient; 0 for none.
    pub(crate) accumulating: AtomicU64,
}

impl AutogradThread {
    /// Resets the state for a new thread in a reused place.
    pub(crate) fn reset(&self) {
        for word in [&self.id, &self.running, &self.last, &self.accumulating] {
            word.store(0, Relaxed);
        }
        self.scope.store(0, Relaxed);
    }

    /// Returns the scope that was open when the running node was begun. Its name contains the scope of the forward pass.
    #[inline(always)]
    pub(crate) fn scope(&self) -> u32 {
        self.scope.load(Relaxed)
    }
}
