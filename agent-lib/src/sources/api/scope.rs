//! Scopes, marks, steps, phases and epochs of the C API.

use crate::driver::core::Core;
use crate::record::recorder::{self, RecordContext};
use crate::record::status::report_layer;
use crate::threads::{DEPTH, OwnerData, Thread};
use gpumem_wire::{Body, Edge, Layer, LayerState, Phase};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

static USED: AtomicBool = AtomicBool::new(false);

/// Notes that a scope is opened other than by NVTX.
#[inline(always)]
pub(crate) fn note() {
    if !USED.load(Relaxed) {
        USED.store(true, Relaxed);
    }
}

pub(crate) static STEP: AtomicU64 = AtomicU64::new(0);

/// Reports the layer's state. The sender calls it each round: a short program may end before the next one.
pub(crate) fn look() {
    let (state, reason) = match USED.load(Relaxed) {
        true => (LayerState::Active, ""),
        false => (LayerState::Absent, "the program has opened no scope"),
    };
    report_layer(Layer::Scopes, state, reason);
}

/// Owner number of the C API.
pub(crate) const OURS: u8 = 0;
/// Owner of a scope opened beyond [`DEPTH`], whose real owner was not stored.
const SOMEBODY: u8 = u8::MAX;

/// Returns the tag of the last scope that `owner` opened. Other owners may have opened nested scopes.
#[cold]
#[inline(never)]
fn last_of(own: &OwnerData, thread: &Thread, owner: u8) -> u32 {
    let kept = DEPTH.min(own.depth);
    let last = own.owner.get(..kept).and_then(|owners| owners.iter().rposition(|&other| other == owner));
    // The tag that was in force when the next scope was opened.
    let next = last.map(|last| last + 1).filter(|&next| next < kept);
    next.map_or_else(|| thread.scope.load(Relaxed), |next| own.outer[next])
}

/// Closes a scope of `owner` that is not the innermost one. `left` scopes of the owner stay open, and `own.depth` in all.
#[cold]
#[inline(never)]
fn close_beneath(own: &mut OwnerData, thread: &Thread, owner: u8, left: u16) {
    let kept = DEPTH.min(own.depth + 1);
    let places = own.owner.get(..kept).unwrap_or_default();
    let known = places.iter().filter(|&&other| other == owner).count();
    if own.depth >= DEPTH && known <= usize::from(left) {
        return; // the scope to close was not stored, for lack of room
    }
    let last = |owner: u8| places.iter().rposition(|&other| other == owner);
    let Some(place) = last(owner).or_else(|| last(SOMEBODY)) else { return };
    let outside = own.outer[place];
    own.owner.copy_within(place + 1..kept, place);
    if place + 1 < kept {
        own.outer.copy_within(place + 1..kept, place);
        own.outer[place] = outside;
    } else {
        thread.scope.store(outside, Relaxed);
    }
    if own.depth >= DEPTH {
        // A scope beyond the limit moves into the array; it never had a separate tag.
        (own.owner[DEPTH - 1], own.outer[DEPTH - 1]) = (SOMEBODY, thread.scope.load(Relaxed));
    }
}

impl Core {
    /// Opens the scope `name` inside of the open ones.
    #[inline(always)]
    pub fn push_scope(&self, thread: &Thread, name: &[u8]) {
        let inside =
            |parent: u32| if name.is_empty() { parent } else { self.recorder.names.intern(parent, name) };
        note();
        self.open_scope(thread, OURS, inside);
    }

    /// Closes the innermost scope that `push_scope` opened.
    #[inline(always)]
    pub fn pop_scope(&self, thread: &Thread) {
        self.close_scope(thread, OURS);
    }

    /// Opens a scope of `owner` under `inside` of the current tag, or the current tag for 0. Returns how many it had open.
    #[inline(always)]
    pub(crate) fn open_scope(&self, thread: &Thread, owner: u8, inside: impl FnOnce(u32) -> u32) -> u16 {
        // SAFETY: only the calling thread uses its own data, until this function ends; `inside` only handles names.
        let own = unsafe { thread.own() };
        let parent = thread.scope.load(Relaxed);
        if own.depth < DEPTH {
            own.outer[own.depth] = parent;
            own.owner[own.depth] = owner;
            let tag = inside(parent);
            thread.scope.store(if tag == 0 { parent } else { tag }, Relaxed);
        }
        own.depth += 1;
        let Some(open) = own.open_scopes.get_mut(usize::from(owner)) else { return 0 };
        let level = *open;
        *open = level.saturating_add(1);
        if recorder::records(recorder::RANGES) {
            self.edge(thread, thread.scope.load(Relaxed), Edge::Begin);
        }
        level
    }

    #[cold]
    #[inline(never)]
    fn edge(&self, thread: &Thread, tag: u32, edge: Edge) {
        self.recorder.note(thread, RecordContext::tagged(tag), Body::Scope { edge });
    }

    /// Records the edge of a scope opened in Python, whose tag is in the thread's word.
    pub(crate) fn scope_edge(&self, thread: &Thread, begins: bool) {
        if recorder::records(recorder::RANGES) {
            let edge = if begins { Edge::Begin } else { Edge::End };
            self.edge(thread, thread.scope.load(Relaxed), edge);
        }
    }

    /// Closes the last scope that `owner` opened on this thread. Returns how many of its scopes stay open, if it had one.
    ///
    /// Nested scopes of other owners keep their paths. Closed, they restore the tag in force outside of the closed scope.
    #[inline(always)]
    pub(crate) fn close_scope(&self, thread: &Thread, owner: u8) -> Option<u16> {
        // SAFETY: as in `open_scope`.
        let own = unsafe { thread.own() };
        let open = own.open_scopes.get_mut(usize::from(owner))?;
        let level = open.checked_sub(1)?;
        *open = level;
        if recorder::records(recorder::RANGES) {
            self.edge(thread, last_of(own, thread, owner), Edge::End);
        }
        let top = own.depth.checked_sub(1)?;
        own.depth = top;
        match own.owner.get(top) {
            Some(&last) if last == owner => thread.scope.store(own.outer[top], Relaxed),
            _ => close_beneath(own, thread, owner, level),
        }
        Some(level)
    }

    pub(crate) fn set_process_tag(&self, path: &[u8]) {
        let tag = if path.is_empty() { 0 } else { self.recorder.names.intern(0, path) };
        self.process_tag.store(tag, Relaxed);
    }

    pub(crate) fn step(&self, thread: &Thread, number: u64) {
        STEP.store(number, Relaxed);
        if recorder::records(recorder::MARKS) {
            self.recorder.note(thread, self.here(thread), Body::Step { number });
        }
    }

    pub(crate) fn epoch(&self, thread: &Thread, number: u64) {
        if recorder::records(recorder::MARKS) {
            self.recorder.note(thread, RecordContext::NOWHERE, Body::Epoch { number });
        }
    }

    pub(crate) fn phase(&self, thread: &Thread, phase: i32) {
        let phase = Phase::from_code(u8::try_from(phase).unwrap_or(0));
        if recorder::records(recorder::MARKS) {
            self.recorder.note(thread, self.here(thread), Body::PhaseBegin { phase });
        }
    }

    pub(crate) fn mark(&self, thread: &Thread, name: &[u8]) {
        self.mark_tag(thread, self.recorder.names.intern(0, name));
    }

    /// Records a mark with a tag instead of a name.
    pub(crate) fn mark_tag(&self, thread: &Thread, tag: u32) {
        if recorder::records(recorder::MARKS) {
            self.recorder.note(thread, RecordContext::tagged(tag), Body::Marker {});
        }
    }
}
