//! Records scopes, marks, steps, phases and epochs that the program reports through the C API.

use crate::driver::core::Core;
use crate::record::recorder::{self, RecordContext};
use crate::record::status::report_layer;
use crate::threads::{DEPTH, OwnerData, Thread};
use gpumem_wire::{Body, Edge, Layer, LayerState, Phase};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Whether the program has opened a scope, other than through NVTX.
static USED: AtomicBool = AtomicBool::new(false);

/// Stores that the program has opened a scope, other than through NVTX.
#[inline(always)]
pub(crate) fn note_used() {
    if !USED.load(Relaxed) {
        USED.store(true, Relaxed);
    }
}

pub(crate) static STEP: AtomicU64 = AtomicU64::new(0);

/// Reports whether the program uses scopes. The sender calls this function in each round: a short program may end soon.
pub(crate) fn report_state() {
    let (state, reason) = match USED.load(Relaxed) {
        true => (LayerState::Active, ""),
        false => (LayerState::Absent, "the program has opened no scope"),
    };
    report_layer(Layer::Scopes, state, reason);
}

/// Number of the C API among the owners of scopes (`threads::OWNERS`).
const C_API: u8 = 0;
/// Owner of a scope opened beyond [`DEPTH`], whose real owner was not stored.
const UNKNOWN_OWNER: u8 = u8::MAX;

/// Returns the tag of the last scope that `owner` opened. Other owners may have opened nested scopes.
#[cold]
#[inline(never)]
fn last_of(own: &OwnerData, thread: &Thread, owner: u8) -> u32 {
    let stored = DEPTH.min(own.depth);
    let last = own.owner.get(..stored).and_then(|owners| owners.iter().rposition(|&other| other == owner));
    // The tag of a scope was in force when the next scope was opened.
    let next = last.map(|last| last + 1).filter(|&next| next < stored);
    next.map_or_else(|| thread.scope.load(Relaxed), |next| own.outer[next])
}

/// Closes the last scope of `owner`, which is not the innermost one of the thread. `left` scopes of the owner stay open.
/// `own.depth` counts all scopes that stay open.
#[cold]
#[inline(never)]
fn close_beneath(own: &mut OwnerData, thread: &Thread, owner: u8, left: u16) {
    let stored = DEPTH.min(own.depth + 1);
    let owners = own.owner.get(..stored).unwrap_or_default();
    let of_owner = owners.iter().filter(|&&other| other == owner).count();
    if own.depth >= DEPTH && of_owner <= usize::from(left) {
        return; // the scope to close was not stored, for lack of room
    }
    let last = |owner: u8| owners.iter().rposition(|&other| other == owner);
    let Some(closed) = last(owner).or_else(|| last(UNKNOWN_OWNER)) else { return };
    let outside = own.outer[closed];
    own.owner.copy_within(closed + 1..stored, closed);
    if closed + 1 < stored {
        own.outer.copy_within(closed + 1..stored, closed);
        own.outer[closed] = outside;
    } else {
        thread.scope.store(outside, Relaxed);
    }
    if own.depth >= DEPTH {
        // A scope beyond the limit moves into the array; it never had a separate tag.
        (own.owner[DEPTH - 1], own.outer[DEPTH - 1]) = (UNKNOWN_OWNER, thread.scope.load(Relaxed));
    }
}

impl Core {
    /// Opens the scope `name` inside the thread's open scopes.
    #[inline(always)]
    pub fn push_scope(&self, thread: &Thread, name: &[u8]) {
        let inside =
            |parent: u32| if name.is_empty() { parent } else { self.recorder.names.intern(parent, name) };
        note_used();
        self.open_scope(thread, C_API, inside);
    }

    /// Closes the innermost scope that `push_scope` opened.
    #[inline(always)]
    pub fn pop_scope(&self, thread: &Thread) {
        self.close_scope(thread, C_API);
    }

    /// Opens a scope of `owner`. Its tag is what `inside` returns for the current tag; 0 keeps the current tag. Returns the
    /// number of scopes that the owner had open before.
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

    /// Records the begin or the end of a scope.
    #[cold]
    #[inline(never)]
    fn edge(&self, thread: &Thread, tag: u32, edge: Edge) {
        self.recorder.note(thread, RecordContext::tagged(tag), Body::Scope { edge });
    }

    /// Records the begin or the end of a scope opened in Python, which has written its tag to `Thread::scope`.
    pub(crate) fn scope_edge(&self, thread: &Thread, begins: bool) {
        if recorder::records(recorder::RANGES) {
            let edge = if begins { Edge::Begin } else { Edge::End };
            self.edge(thread, thread.scope.load(Relaxed), edge);
        }
    }

    /// Closes the last scope that `owner` opened on this thread. Returns the number of the owner's scopes that stay open; `None`
    /// if it had no open scope.
    ///
    /// Scopes of other owners inside of it keep their paths. When they are closed, the tag outside of the closed scope returns.
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

    /// Records a named event at the current time (a mark), whose name is given as a tag.
    pub(crate) fn mark_tag(&self, thread: &Thread, tag: u32) {
        if recorder::records(recorder::MARKS) {
            self.recorder.note(thread, RecordContext::tagged(tag), Body::Marker {});
        }
    }
}
