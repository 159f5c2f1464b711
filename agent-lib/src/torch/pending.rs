//! Blocks that were freed while a stream may still use them (`record_stream`): apart from those that are free.
//!
//! What PyTorch does, read from the wheels' code (2.15.0 `free_locked`, 2.4.1 `free`), per freed block:
//!
//! ```text
//! its size is taken from the totals
//! no other stream used it       -> free_block: it can be handed out again
//! other streams used it         -> insert_events: per stream cudaEventRecord, into a queue
//!     while a graph is captured -> into a list; events follow with the first malloc behind the capture
//! reportMemoryUsageToProfiler   -> us, in all three cases, with the same arguments
//! ```
//!
//! Each malloc begins with process_events: cudaEventQuery of the oldest event of each stream's queue, and free_block when the
//! last event of a block is over. Flushing the cache waits with cudaEventSynchronize instead
//! (`synchronize_and_free_events`; 2.4.1 has it inside release_cached_blocks). All of it under the device's mutex.
//!
//! So the report does not say it, but the calls before it do: an event that PyTorch's library recorded on this thread
//! since its last report means that the block waits for it. Three slots of libc10_cuda tell of the events.
//!
//! **What may be wrong.** c10's own events (`CUDAGuardImpl::record`, for users of c10::Event) are recorded through the same
//! slot: if such a thread's next report is a free, that block seems to wait. It ends when that event is asked for, or at
//! the latest when the block's memory is handed out again. Not told apart: a free during a capture, whose events come
//! later and belong to no block that we could name (2.15.0: `deferred_blocks`, a hash table; the events are recorded
//! under a malloc, and a malloc's report forgets them). It counts as done, so pending is too small by it while the
//! capture lasts. None of this moves a total: a freed block is none of PyTorch's, pending or not.

use super::patch::{self, EVENT_QUERY, EVENT_RECORD, EVENT_SYNCHRONIZE};
use super::report::Report;
use super::state::{Device, EVENTS};
use crate::core::{At, Core};
use crate::ffi::guard;
use crate::live::{Beside, Key};
use crate::threads::Thread;
use gpumem_wire::{Body, FreeState};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering::*};

/// Blocks of a device that can wait at a time; others count as free.
pub const MOST: usize = 1024;
/// cudaErrorUnknown: a slot that held nothing is never patched.
const UNKNOWN: c_int = 999;

/// A block that waits, or a free place.
#[derive(Debug, Default)]
pub struct Waiting {
    /// Of the block; 0 while the place is free.
    address: AtomicU64,
    bytes: AtomicU64,
    /// What it waits for; 0 for what is over.
    events: [AtomicU64; EVENTS],
}

type OnStream = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void) -> c_int;
type OfEvent = unsafe extern "C-unwind" fn(*mut c_void) -> c_int;

/// cudaEventRecord, as PyTorch's library calls it.
///
/// # Safety
/// Its arguments.
pub unsafe extern "C-unwind" fn recorded(event: *mut c_void, stream: *mut c_void) -> c_int {
    let next = patch::next(EVENT_RECORD);
    if next.is_null() {
        return UNKNOWN;
    }
    // SAFETY: what the slot held.
    let result = unsafe { std::mem::transmute::<*mut c_void, OnStream>(next)(event, stream) };
    if result == 0 {
        guard((), |_, thread| thread.torch.note_event(event as u64));
    }
    result
}

/// cudaEventQuery, as PyTorch's library calls it.
///
/// # Safety
/// Its argument.
pub unsafe extern "C-unwind" fn queried(event: *mut c_void) -> c_int {
    // SAFETY: as our caller says.
    unsafe { asked(EVENT_QUERY, event) }
}

/// cudaEventSynchronize, as PyTorch's library calls it.
///
/// # Safety
/// Its argument.
pub unsafe extern "C-unwind" fn synchronized(event: *mut c_void) -> c_int {
    // SAFETY: as our caller says.
    unsafe { asked(EVENT_SYNCHRONIZE, event) }
}

#[inline(always)]
unsafe fn asked(hook: usize, event: *mut c_void) -> c_int {
    let next = patch::next(hook);
    if next.is_null() {
        return UNKNOWN;
    }
    // SAFETY: what the slot held.
    let result = unsafe { std::mem::transmute::<*mut c_void, OfEvent>(next)(event) };
    if result == 0 {
        guard((), |core, thread| core.event_over(thread, event as u64));
    }
    result
}

impl Device {
    /// Those that wait.
    fn waiting(&self) -> impl Iterator<Item = &Waiting> {
        let waits = |place: &&Waiting| place.address.load(Acquire) != 0;
        self.waiting.iter().filter(waits).take(self.pending.load(Relaxed) as usize)
    }
}

impl Core {
    /// A block was freed behind events: it waits for them. False if there is no place to remember that.
    #[cold]
    #[inline(never)]
    pub(super) fn wait(&self, thread: &Thread, device: &Device, pool: u64, report: &Report) -> bool {
        let address = report.address;
        let free = device.waiting.iter().find(|place| place.address.load(Relaxed) == 0);
        let Some(place) = free.filter(|_| address != 0) else {
            self.torch.untold_pending.fetch_add(1, Relaxed);
            return false;
        };
        let events = thread.torch.events().chain(std::iter::repeat(0));
        place.events.iter().zip(events).for_each(|(place, event)| place.store(event, Relaxed));
        place.bytes.store(report.bytes.unsigned_abs(), Relaxed);
        place.address.store(address, Release);
        device.pending.fetch_add(1, Relaxed);
        let body = Body::BlockFree { address, pool, state: FreeState::Pending };
        self.record(thread, At::NOWHERE, body, |core, _| {
            core.live.update(Key::Block(pool, address), 5, |word, beside| {
                beside.flags |= Beside::PENDING;
                word
            });
        });
        true
    }

    /// An event is over, and so may be what waits for it.
    fn event_over(&self, thread: &Thread, event: u64) {
        thread.torch.forget_event(event);
        for (device, pool) in self.torch.with_pools() {
            if device.pending.load(Relaxed) == 0 {
                continue;
            }
            for place in device.waiting() {
                let Some(its) = place.events.iter().find(|its| its.load(Relaxed) == event) else { continue };
                if its.compare_exchange(event, 0, AcqRel, Relaxed).is_ok()
                    && place.events.iter().all(|event| event.load(Relaxed) == 0)
                {
                    self.waited(thread, device, pool, place);
                }
                break; // an event is recorded for one block and stream
            }
        }
    }

    fn waited(&self, thread: &Thread, device: &Device, pool: u64, place: &Waiting) {
        let address = place.address.swap(0, AcqRel);
        if address != 0 {
            device.pending.fetch_sub(1, Relaxed);
            self.block_gone(thread, pool, address);
        }
    }

    /// A block lies where others seemed to wait: they do not.
    #[cold]
    #[inline(never)]
    pub(super) fn reused(&self, thread: &Thread, device: &Device, pool: u64, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes);
        let lies_there = |place: &&Waiting| {
            let start = place.address.load(Relaxed);
            start < end && start.saturating_add(place.bytes.load(Relaxed)) > address
        };
        while let Some(place) = device.waiting().find(lies_there) {
            self.waited(thread, device, pool, place);
        }
    }
}
