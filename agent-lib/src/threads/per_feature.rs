//! Data of features in a thread's place: callers of the driver (naming/callers) and the node of PyTorch's backward pass (naming/autograd.rs).
//! The code that uses it is in these features.

use super::stack::Stack;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Places of calls that a thread remembers: a power of two.
pub(crate) const REMEMBERED: usize = 32;

/// A call whose caller was found: the same words at the same places mean the same one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CachedCaller {
    pub(crate) start: usize,
    pub(crate) near: (usize, usize),
    pub(crate) far: (usize, usize),
    pub(crate) generation: u32,
    pub(crate) call: u16,
    pub(crate) module: u16,
}

/// A thread's cache of callers.
#[derive(Debug)]
pub(crate) struct Callers {
    pub(crate) known: [CachedCaller; REMEMBERED],
    /// Return address of the last call; 0 for none.
    pub site: usize,
    pub(crate) stack: Stack,
}

impl Callers {
    /// Nothing known.
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

/// A thread's state of the backward pass. Written by the thread alone.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct AutogradThread {
    /// The scope in which the running node was begun.
    pub(crate) scope: AtomicU32,
    /// The node that it runs; 0 for none, `UNNAMED` for an unknown one.
    pub(crate) running: AtomicU64,
    /// PyTorch's number of the thread; 0 until it is read.
    pub(crate) id: AtomicU64,
    /// The last one that it ran to its end.
    pub(crate) last: AtomicU64,
    /// The running node, if it is one that accumulates a gradient; 0 for none.
    pub(crate) accumulating: AtomicU64,
}

impl AutogradThread {
    /// For a new thread in an old place.
    pub(crate) fn reset(&self) {
        for word in [&self.id, &self.running, &self.last, &self.accumulating] {
            word.store(0, Relaxed);
        }
        self.scope.store(0, Relaxed);
    }

    /// The scope that was open when the running node was begun: the node's own name stands above it.
    #[inline(always)]
    pub(crate) fn scope(&self) -> u32 {
        self.scope.load(Relaxed)
    }
}
