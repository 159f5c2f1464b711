//! Tags: what the program says it is doing, per thread.

use crate::core::{At, Core, nothing};
use crate::naming::Named;
use crate::threads::{DEPTH, Thread};
use gpumem_wire::{Body, Layer, LayerState, Phase};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Somebody has opened a scope.
static USED: AtomicBool = AtomicBool::new(false);

/// A scope is opened.
#[inline(always)]
pub fn note() {
    if !USED.load(Relaxed) {
        USED.store(true, Relaxed);
    }
}

/// For the sender, now and then.
pub fn look() {
    let used = USED.load(Relaxed);
    let state = if used { LayerState::Active } else { LayerState::Absent };
    crate::layers::set(Layer::Scopes, state, if used { "" } else { "the program has opened none" });
}

impl Core {
    /// Opens the scope `name` inside of those that are open.
    #[inline(always)]
    pub fn push(&self, thread: &Thread, name: &[u8]) {
        // SAFETY: the caller's own place; the reference ends with this function.
        let own = unsafe { thread.own() };
        let parent = thread.scope.load(Relaxed);
        if own.depth < DEPTH {
            own.outer[own.depth] = parent;
            note();
            let tag = if name.is_empty() { parent } else { self.names.intern(parent, name) };
            thread.scope.store(if tag == 0 { parent } else { tag }, Relaxed);
        }
        own.depth += 1;
    }

    /// Closes the innermost scope.
    #[inline(always)]
    pub fn pop(&self, thread: &Thread) {
        // SAFETY: as in `push`.
        let own = unsafe { thread.own() };
        if let Some(&outer) = own.depth.checked_sub(1).and_then(|depth| own.outer.get(depth)) {
            thread.scope.store(outer, Relaxed);
        }
        own.depth = own.depth.saturating_sub(1);
    }

    /// The tag of threads without open scopes.
    pub fn set_process_tag(&self, path: &[u8]) {
        let tag = if path.is_empty() { 0 } else { self.names.intern(0, path) };
        self.process_tag.store(tag, Relaxed);
    }

    fn here(&self, thread: &Thread) -> At {
        let Named { tag, flags, .. } = self.named(thread);
        At { tag, flags, ..At::NOWHERE }
    }

    /// Step `number` begins.
    pub fn step(&self, thread: &Thread, number: u64) {
        self.record(thread, self.here(thread), Body::Step { number }, nothing);
    }

    /// The process enters a phase.
    pub fn phase(&self, thread: &Thread, phase: i32) {
        let phase = Phase::from_code(u8::try_from(phase).unwrap_or(0));
        self.record(thread, self.here(thread), Body::PhaseBegin { phase }, nothing);
    }

    /// Something worth a mark happened.
    pub fn mark(&self, thread: &Thread, name: &[u8]) {
        let tag = self.names.intern(0, name);
        self.record(thread, At { tag, ..At::NOWHERE }, Body::Marker {}, nothing);
    }
}
