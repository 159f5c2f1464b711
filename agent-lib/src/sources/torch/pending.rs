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
//! since its last report may mean that the block waits for it. Three slots of libc10_cuda tell of the events.
//!
//! **Whose event.** c10's own events (`CUDAGuardImpl::record`, for users of c10::Event: autograd between streams, for one)
//! are recorded through the same slot, and a thread's next report may be a free that has nothing to do with them. The
//! stack tells. insert_events and the report are called by one function, so the stack pointer at cudaEventRecord is lower
//! than at the report by the frame of insert_events, or the same if that was inlined: SPAN bytes at most. Elsewhere it
//! is anywhere. It may lie there by chance, so a call that was elsewhere once is not believed again: its place in the
//! code is that of other events. What is taken for pending in spite of it ends when its event is asked for, and at
//! the latest when the block's memory is handed out again.
//!
//! **Not told apart:** a free during a capture, whose events come later and belong to no block that we could name
//! (2.15.0: `deferred_blocks`, a hash table; they are recorded under a malloc, whose report forgets them). It counts as
//! done, so pending is too small by it while the capture lasts. None of this moves a total: a freed block is none
//! of PyTorch's, pending or not.

use crate::base::fault_injection;
use crate::base::row::{Key, RowExtra};
use crate::driver::core::Core;
use crate::driver::guard::guard;
use crate::driver::torch_pools::Device;
use crate::driver::torch_pools::Waiting;
use crate::record::recorder::RecordContext;
use crate::sources::torch::patch::{self, EVENT_QUERY, EVENT_RECORD, EVENT_SYNCHRONIZE};
use crate::threads::Thread;
use crate::threads::allocator_calls::Event;
use gpumem_wire::{Body, FreeState};
use std::arch::naked_asm;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::*};

/// By how much the stack pointer at a record of insert_events can be lower than at the report: 224 bytes in 2.15.0, 208 in 2.4.1
/// (840 and 836 frees, always the same); by their code about as many in 2.0.1 and 2.8.0. 1.13.1 has the CUDA runtime
/// linked in, and so no such slots.
const SPAN: usize = 1024;
/// Places in PyTorch's code that record other events.
static ELSEWHERE: [AtomicUsize; 8] = [const { AtomicUsize::new(0) }; 8];
/// cudaErrorUnknown: a slot that held nothing is never patched.
const UNKNOWN: c_int = 999;

type OnStream = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void) -> c_int;
type OfEvent = unsafe extern "C-unwind" fn(*mut c_void) -> c_int;

/// cudaEventRecord, as PyTorch's library calls it: two arguments more, where the call returns to and the stack pointer, and
/// on to the function below as if it had been called.
///
/// # Safety
/// Its arguments.
#[unsafe(naked)]
pub unsafe extern "C-unwind" fn recorded(event: *mut c_void, stream: *mut c_void) -> c_int {
    #[cfg(target_arch = "x86_64")]
    naked_asm!("mov rdx, [rsp]", "mov rcx, rsp", "jmp {on}", on = sym recorded_at);
    #[cfg(target_arch = "aarch64")]
    naked_asm!("mov x2, x30", "mov x3, sp", "b {on}", on = sym recorded_at);
}

unsafe extern "C-unwind" fn recorded_at(
    event: *mut c_void,
    stream: *mut c_void,
    site: usize,
    stack: usize,
) -> c_int {
    let next = next(EVENT_RECORD);
    if next.is_null() {
        return UNKNOWN;
    }
    // SAFETY: what the slot held.
    let result = unsafe { std::mem::transmute::<*mut c_void, OnStream>(next)(event, stream) };
    if result == 0 && !ELSEWHERE.iter().any(|other| other.load(Relaxed) == site) {
        guard((), |_, thread| {
            fault_injection::at("torch.recorded");
            thread.torch.note_event(event as u64, site, stack);
        });
    }
    result
}

/// What a slot held: written before the slot was, but read on another processor, perhaps a moment too early.
fn next(hook: usize) -> *mut c_void {
    (0..1000).map(|_| patch::next(hook)).find(|next| !next.is_null()).unwrap_or_default()
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
pub(crate) unsafe extern "C-unwind" fn synchronized(event: *mut c_void) -> c_int {
    // SAFETY: as our caller says.
    unsafe { asked(EVENT_SYNCHRONIZE, event) }
}

#[inline(always)]
unsafe fn asked(hook: usize, event: *mut c_void) -> c_int {
    let next = next(hook);
    if next.is_null() {
        return UNKNOWN;
    }
    // SAFETY: what the slot held.
    let result = unsafe { std::mem::transmute::<*mut c_void, OfEvent>(next)(event) };
    if result == 0 {
        guard((), |core, thread| {
            fault_injection::at(if hook == EVENT_QUERY { "torch.queried" } else { "torch.synchronized" });
            core.event_over(thread, event as u64);
        });
    }
    result
}

/// Whether insert_events can have recorded it for a report at this stack pointer.
fn is_near(event: &Event, stack: usize) -> bool {
    let is = stack.checked_sub(event.stack.load(Relaxed)).is_some_and(|span| span <= SPAN);
    let site = event.site.load(Relaxed);
    if !is && !ELSEWHERE.iter().any(|other| other.load(Relaxed) == site) {
        let is_taken = |other: &&AtomicUsize| other.compare_exchange(0, site, Relaxed, Relaxed).is_ok();
        ELSEWHERE.iter().find(is_taken);
    }
    is
}

impl Device {
    /// Those that wait.
    fn waiting(&self) -> impl Iterator<Item = &Waiting> {
        let waits = |place: &&Waiting| place.address.load(Acquire) != 0;
        self.waiting.iter().filter(waits).take(self.pending.load(Relaxed) as usize)
    }
}

impl Core {
    /// A block was freed behind events: it waits for them. False if they are others', or if there is no place to remember it.
    #[cold]
    #[inline(never)]
    pub(crate) fn wait(
        &self,
        thread: &Thread,
        device: &Device,
        pool: u64,
        address: u64,
        bytes: u64,
        stack: usize,
    ) -> bool {
        let is_its = |event: &&Event| is_near(event, stack);
        if thread.torch.events().filter(is_its).count() == 0 {
            return false;
        }
        let free = device.waiting.iter().find(|place| place.address.load(Relaxed) == 0);
        let Some(place) = free.filter(|_| address != 0) else {
            self.torch.untold_pending.fetch_add(1, Relaxed);
            return false;
        };
        let its = thread.torch.events().filter(is_its);
        let events = its.map(|event| event.handle.load(Relaxed)).chain(std::iter::repeat(0));
        place.events.iter().zip(events).for_each(|(place, event)| place.store(event, Relaxed));
        place.bytes.store(bytes, Relaxed);
        place.address.store(address, Release);
        device.pending.fetch_add(1, Relaxed);
        let body = Body::BlockFree { address, pool, state: FreeState::Pending };
        self.recorder.record(thread, RecordContext::NOWHERE, body, |recorder, _| {
            recorder.live.update(Key::Block(pool, address), 5, |word, beside| {
                beside.flags |= RowExtra::PENDING;
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
    pub(crate) fn reused(&self, thread: &Thread, device: &Device, pool: u64, address: u64, bytes: u64) {
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
