//! Scopes of the C API, and marks, steps, phases and epochs.

use crate::base::row::AllocationName;
use crate::driver::core::Core;
use crate::record::recorder;
use crate::record::recorder::{RecordContext, no_row};
use crate::threads::{DEPTH, OwnerData, Thread};
use gpumem_wire::{Body, Edge, Layer, LayerState, Phase};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};

/// The program has opened a scope, not by NVTX.
static USED: AtomicBool = AtomicBool::new(false);

/// A scope is opened, not by NVTX.
#[inline(always)]
pub(crate) fn note() {
    if !USED.load(Relaxed) {
        USED.store(true, Relaxed);
    }
}

/// Number of the step that is under way.
pub(crate) static STEP: AtomicU64 = AtomicU64::new(0);

/// The value of `USED` that the sender reported last: 1 false, 2 true; 0 before the first report.
static SEEN: AtomicU8 = AtomicU8::new(0);

/// Reports the layer's state if it has changed. The sender calls it each round: a short program may end before the next one.
pub(crate) fn look() {
    let used = USED.load(Relaxed);
    let now = 1 + u8::from(used);
    if SEEN.swap(now, Relaxed) == now {
        return;
    }
    let state = if used { LayerState::Active } else { LayerState::Absent };
    crate::record::status::report_layer(
        Layer::Scopes,
        state,
        if used { "" } else { "the program has opened none" },
    );
}

/// Number of the C API among them.
pub(crate) const OURS: u8 = 0;
/// In the place of an owner that is not known any more: its scope was opened beyond [`DEPTH`].
const SOMEBODY: u8 = u8::MAX;

/// Tag of the last scope that `owner` opened: others may have opened theirs inside of it.
#[cold]
#[inline(never)]
fn last_of(own: &OwnerData, thread: &Thread, owner: u8) -> u32 {
    let kept = DEPTH.min(own.depth);
    let last = own.owner.get(..kept).and_then(|owners| owners.iter().rposition(|&other| other == owner));
    // What was in force when the next one was opened.
    let next = last.map(|last| last + 1).filter(|&next| next < kept);
    next.map_or_else(|| thread.scope.load(Relaxed), |next| own.outer[next])
}

/// The scope to be closed is not the last one. `left` of the owner's stay open, `own.depth` in all.
#[cold]
#[inline(never)]
fn close_beneath(own: &mut OwnerData, thread: &Thread, owner: u8, left: u16) {
    let kept = DEPTH.min(own.depth + 1);
    let places = own.owner.get(..kept).unwrap_or_default();
    let known = places.iter().filter(|&&other| other == owner).count();
    if own.depth >= DEPTH && known <= usize::from(left) {
        return; // one of those that found no place
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
        // What lay beyond moves in: it never had a tag of its own.
        (own.owner[DEPTH - 1], own.outer[DEPTH - 1]) = (SOMEBODY, thread.scope.load(Relaxed));
    }
}

impl Core {
    /// Opens the scope `name` inside of those that are open.
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

    /// Opens a scope of `owner`, whose tag is what `inside` makes of the one in force (0: that one); how many of its own were open.
    #[inline(always)]
    pub(crate) fn open_scope(&self, thread: &Thread, owner: u8, inside: impl FnOnce(u32) -> u32) -> u16 {
        // SAFETY: the caller's own place; the reference ends with this function, and `inside` is about names alone.
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

    /// The scope `tag` begins, or is about to end.
    #[cold]
    #[inline(never)]
    fn edge(&self, thread: &Thread, tag: u32, edge: Edge) {
        self.recorder.record(
            thread,
            RecordContext { tag, ..RecordContext::NOWHERE },
            Body::Scope { edge },
            no_row,
        );
    }

    /// The edge of a scope of Python's, whose tag stands in the thread's word.
    pub(crate) fn scope_edge(&self, thread: &Thread, begins: bool) {
        if recorder::records(recorder::RANGES) {
            let edge = if begins { Edge::Begin } else { Edge::End };
            self.edge(thread, thread.scope.load(Relaxed), edge);
        }
    }

    /// Closes the last scope that `owner` opened on this thread; how many of its own stay open. `None`: it had none.
    ///
    /// Scopes that others opened inside of it keep the paths that they were opened with, and then give back what was in force
    /// outside of it.
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

    /// The tag of threads without open scopes.
    pub(crate) fn set_process_tag(&self, path: &[u8]) {
        let tag = if path.is_empty() { 0 } else { self.recorder.names.intern(0, path) };
        self.process_tag.store(tag, Relaxed);
    }

    fn here(&self, thread: &Thread) -> RecordContext {
        let AllocationName { tag, flags, .. } = self.named(thread);
        RecordContext { tag, flags, ..RecordContext::NOWHERE }
    }

    /// Step `number` begins.
    pub(crate) fn step(&self, thread: &Thread, number: u64) {
        STEP.store(number, Relaxed);
        if recorder::records(recorder::MARKS) {
            self.recorder.record(thread, self.here(thread), Body::Step { number }, no_row);
        }
    }

    /// Epoch `number` begins.
    pub(crate) fn epoch(&self, thread: &Thread, number: u64) {
        if recorder::records(recorder::MARKS) {
            self.recorder.record(thread, RecordContext::NOWHERE, Body::Epoch { number }, no_row);
        }
    }

    /// The process enters a phase.
    pub(crate) fn phase(&self, thread: &Thread, phase: i32) {
        let phase = Phase::from_code(u8::try_from(phase).unwrap_or(0));
        if recorder::records(recorder::MARKS) {
            self.recorder.record(thread, self.here(thread), Body::PhaseBegin { phase }, no_row);
        }
    }

    /// Something worth a mark happened.
    pub(crate) fn mark(&self, thread: &Thread, name: &[u8]) {
        self.mark_tag(thread, self.recorder.names.intern(0, name));
    }

    /// As `mark`, for a tag.
    pub(crate) fn mark_tag(&self, thread: &Thread, tag: u32) {
        if recorder::records(recorder::MARKS) {
            self.recorder.record(
                thread,
                RecordContext { tag, ..RecordContext::NOWHERE },
                Body::Marker {},
                no_row,
            );
        }
    }
}
