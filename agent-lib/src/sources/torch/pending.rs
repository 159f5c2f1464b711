//! Finds pending blocks: freed by the program, while a stream may still use them (`record_stream`).
//!
//! PyTorch does the following for each freed block, according to the code of its wheels (2.15.0 `free_locked`, 2.4.1 `free`):
//!
//! ```text
//! its size is subtracted from the totals
//! no other stream used it       -> free_block: it can be handed out again
//! other streams used it         -> insert_events: cudaEventRecord for each stream, into a queue
//!     while a graph is captured -> into a list; events follow with the first malloc after the capture
//! reportMemoryUsageToProfiler   -> the agent, in all three cases, with the same arguments
//! ```
//!
//! Each malloc begins with process_events. That function calls cudaEventQuery for the oldest event of each stream's queue, and
//! free_block when the last event of a block is over. Flushing the cache waits with cudaEventSynchronize instead
//! (`synchronize_and_free_events`; in 2.4.1 inside release_cached_blocks). All of this happens under the device's mutex.
//!
//! So the report does not show whether a block is pending, but the calls before it do. If PyTorch's library has recorded an
//! event on this thread since the thread's last report, the block may wait for it. The agent's functions in three slots of
//! libc10_cuda see the events.
//!
//! **Which events belong to the free.** PyTorch records other events through the same slot (`CUDAGuardImpl::record`, e.g. of
//! autograd between streams), and the thread's next report may be an unrelated free. The stack distinguishes them: one function
//! calls both insert_events and the report. So at cudaEventRecord the stack pointer is lower than at the report by the frame of
//! insert_events, at most SPAN bytes, or equal if that was inlined. For other events it may have any value. So a call site is
//! ignored from the first time on that its stack pointer is out of range. A block wrongly taken for pending is corrected when
//! its event is queried, or when its memory is handed out again.
//!
//! **Not distinguished:** a free during a capture. Its events come later and cannot be assigned to a block (2.15.0:
//! `deferred_blocks`, recorded in a malloc, whose report discards them). The block counts as free, so the pending bytes are too
//! low while the capture lasts. No total is affected: PyTorch does not count a freed block, pending or not.

use crate::base::fault_injection;
use crate::base::row::Key;
use crate::driver::core::Core;
use crate::driver::guard::guard;
use crate::driver::torch_pools::{Device, PendingBlock, TorchPool};
use crate::record::live::Live;
use crate::record::recorder::RecordContext;
use crate::sources::torch::patch::{self, EVENT_QUERY, EVENT_RECORD, EVENT_SYNCHRONIZE};
use crate::threads::Thread;
use crate::threads::per_feature::Event;
use gpumem_wire::{Body, FreeState};
use std::arch::naked_asm;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::*};

/// Maximum distance, in bytes, of the stack pointers at a call of cudaEventRecord in insert_events and at the report. Measured:
/// 224 in 2.15.0, 208 in 2.4.1 (840 and 836 frees), about that in 2.0.1 and 2.8.0. 1.13.1 has no such slots.
const SPAN: usize = 1024;
/// Return addresses of calls in PyTorch's code that record events which do not belong to frees.
static OTHER_SITES: [AtomicUsize; 8] = [const { AtomicUsize::new(0) }; 8];
/// cudaErrorUnknown: the result if there is no original function. Such a slot is never replaced.
const UNKNOWN: c_int = 999;

type OnStream = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void) -> c_int;
type OfEvent = unsafe extern "C-unwind" fn(*mut c_void) -> c_int;

/// Replacement for cudaEventRecord: passes the return address and the stack pointer as additional arguments to `recorded_at`, to
/// which it jumps.
///
/// # Safety
/// Must be called with cudaEventRecord's arguments.
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
    // SAFETY: the slot held a function of this type.
    let result = unsafe { std::mem::transmute::<*mut c_void, OnStream>(next)(event, stream) };
    if result == 0 && !OTHER_SITES.iter().any(|other| other.load(Relaxed) == site) {
        guard((), |_, thread| {
            fault_injection::at("torch.recorded");
            thread.torch.note_event(event as u64, site, stack);
        });
    }
    result
}

/// Returns a slot's original value. It is written before the slot, but this processor may see the two stores in another order.
fn next(hook: usize) -> *mut c_void {
    (0..1000).map(|_| patch::next(hook)).find(|next| !next.is_null()).unwrap_or_default()
}

/// PyTorch calls this in place of cudaEventQuery. It calls the original, and notes an event that is complete.
///
/// # Safety
/// Must be called with cudaEventQuery's argument.
pub unsafe extern "C-unwind" fn queried(event: *mut c_void) -> c_int {
    // SAFETY: the caller guarantees the argument.
    unsafe { call_original(EVENT_QUERY, event) }
}

/// Replacement for cudaEventSynchronize in its slot.
///
/// # Safety
/// Must be called with cudaEventSynchronize's argument.
pub(crate) unsafe extern "C-unwind" fn synchronized(event: *mut c_void) -> c_int {
    // SAFETY: the caller guarantees the argument.
    unsafe { call_original(EVENT_SYNCHRONIZE, event) }
}

/// Calls the original function of a hook. If it reports that the event is complete, calls `event_over`.
#[inline(always)]
unsafe fn call_original(hook: usize, event: *mut c_void) -> c_int {
    let next = next(hook);
    if next.is_null() {
        return UNKNOWN;
    }
    // SAFETY: the slot held a function of this type.
    let result = unsafe { std::mem::transmute::<*mut c_void, OfEvent>(next)(event) };
    if result == 0 {
        guard((), |core, thread| {
            fault_injection::at(if hook == EVENT_QUERY { "torch.queried" } else { "torch.synchronized" });
            core.event_over(thread, event as u64);
        });
    }
    result
}

/// Whether insert_events may have recorded the event for the report that PyTorch makes at stack pointer `stack`. If not, adds the
/// event's call site to `OTHER_SITES`.
fn is_near(event: &Event, stack: usize) -> bool {
    let is_near = stack.checked_sub(event.stack.load(Relaxed)).is_some_and(|span| span <= SPAN);
    let site = event.site.load(Relaxed);
    if !is_near && !OTHER_SITES.iter().any(|other| other.load(Relaxed) == site) {
        OTHER_SITES.iter().any(|other| other.compare_exchange(0, site, Relaxed, Relaxed).is_ok());
    }
    is_near
}

impl Device {
    fn waiting(&self) -> impl Iterator<Item = &PendingBlock> {
        let is_used = |place: &&PendingBlock| place.address.load(Acquire) != 0;
        self.waiting.iter().filter(is_used).take(self.pending.load(Relaxed) as usize)
    }
}

impl Core {
    /// Records a freed block as pending if the thread has recorded events for it. Returns false without such events, or without
    /// room for the block.
    #[cold]
    #[inline(never)]
    pub(crate) fn record_pending(
        &self,
        thread: &Thread,
        device: &Device,
        pool: u64,
        address: u64,
        bytes: i64,
        stack: usize,
    ) -> bool {
        let is_its = |event: &&Event| is_near(event, stack);
        // `count` and not `any`: `is_near` also notes the call sites of events that do not belong to a free.
        if thread.torch.events().filter(is_its).count() == 0 {
            return false;
        }
        let free = device.waiting.iter().find(|place| place.address.load(Relaxed) == 0);
        let Some(place) = free.filter(|_| address != 0) else {
            self.torch.unrecorded_pending.fetch_add(1, Relaxed);
            return false;
        };
        let its = thread.torch.events().filter(is_its);
        let events = its.map(|event| event.handle.load(Relaxed)).chain(std::iter::repeat(0));
        place.events.iter().zip(events).for_each(|(place, event)| place.store(event, Relaxed));
        place.bytes.store(bytes.unsigned_abs(), Relaxed);
        place.address.store(address, Release);
        device.pending.fetch_add(1, Relaxed);
        let body = Body::BlockFree { address, pool, state: FreeState::Pending };
        let key = Key::Block(pool, address);
        self.recorder
            .record(thread, RecordContext::NOWHERE, body, |recorder, _| recorder.live.set_pending(key));
        true
    }

    /// Handles the end of an event: frees the block that waited only for it.
    fn event_over(&self, thread: &Thread, event: u64) {
        thread.torch.forget_event(event);
        for pool in self.torch.pools().filter(|pool| pool.device.pending.load(Relaxed) != 0) {
            for place in pool.device.waiting() {
                let Some(its) = place.events.iter().find(|its| its.load(Relaxed) == event) else { continue };
                if its.compare_exchange(event, 0, AcqRel, Relaxed).is_ok()
                    && place.events.iter().all(|event| event.load(Relaxed) == 0)
                {
                    self.free_pending(thread, pool, place);
                }
                break; // an event is recorded for one block and stream
            }
        }
    }

    fn free_pending(&self, thread: &Thread, pool: TorchPool<'_>, place: &PendingBlock) {
        let address = place.address.swap(0, AcqRel);
        if address != 0 {
            pool.device.pending.fetch_sub(1, Relaxed);
            let home = self.recorder.live.expect(Key::Block(pool.id, address));
            self.record_free(thread, pool.id, address, Live::spot_of(home));
        }
    }

    /// Frees pending blocks that overlap a new block: PyTorch has handed out their memory, so they were not pending.
    #[cold]
    #[inline(never)]
    pub(crate) fn free_overlapped(&self, thread: &Thread, pool: TorchPool<'_>, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes);
        let overlaps = |place: &&PendingBlock| {
            let start = place.address.load(Relaxed);
            start < end && start.saturating_add(place.bytes.load(Relaxed)) > address
        };
        while let Some(place) = pool.device.waiting().find(overlaps) {
            self.free_pending(thread, pool, place);
        }
    }
}
