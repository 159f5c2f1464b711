//! Out of memory, in the allocator's own words.
//!
//! Three things look alike from outside (frameworks.md 7):
//!
//! | what happens | records, of one thread and in this order |
//! |---|---|
//! | a limit of the pool's own (`set_per_process_memory_fraction`): the driver is not asked | `Oom` with result 0 |
//! | the driver refuses, PyTorch flushes its cache and then gets memory | `AllocFailed`, `Pressure`; no `Oom` |
//! | the driver refuses each time | `AllocFailed`, `Pressure`, perhaps again, then `Oom` with the driver's result |
//!
//! `Oom` says `Fatal`: the request has failed. Whether the program catches that and goes on shows only later.
//! The cudaMallocAsync backend does not report. In 2.4.1 the driver's first refusal is its last word, in 2.15.0 it tries
//! once more behind a flush. So there the first refusal is an `Oom` without totals whose outcome is not told, and those
//! that follow it on the same thread, with no success in between, are the same one.

use super::patch::{self, OUT_OF_MEMORY};
use super::report::ordinal;
use crate::callers;
use crate::core::{At, Core, nothing};
use crate::ffi::guard;
use crate::naming::Named;
use crate::threads::Thread;
use gpumem_wire::{Body, MemoryKind, OomOutcome, Reading};
use std::ffi::c_void;
use std::sync::atomic::Ordering::Relaxed;

/// CUDA_ERROR_OUT_OF_MEMORY.
const REFUSED: u16 = 2;

type Next = unsafe extern "C-unwind" fn(i64, u64, u64, u16);

/// Stands in the slot of reportOutOfMemoryToProfiler: called once per failed request, under the allocator's mutex, after its
/// retries and before PyTorch's own observers.
///
/// # Safety
/// PyTorch's arguments.
pub unsafe extern "C-unwind" fn reported(bytes: i64, allocated: u64, reserved: u64, device: u16) {
    guard((), |core, thread| {
        let Some(index) = ordinal(device) else { return };
        let result = if thread.torch.refused.load(Relaxed) { REFUSED } else { 0 };
        thread.torch.refused.store(false, Relaxed);
        thread.torch.forget_events();
        let (used, reserved) = (Reading::of(allocated), Reading::of(reserved));
        let totals = (used, reserved);
        core.out_of_memory(thread, index as u8, bytes.unsigned_abs(), totals, OomOutcome::Fatal, result);
    });
    let next = patch::next(OUT_OF_MEMORY);
    if !next.is_null() {
        // SAFETY: what the slot held: a function of this type. Its exceptions pass.
        unsafe { std::mem::transmute::<*mut c_void, Next>(next)(bytes, allocated, reserved, device) };
    }
}

impl Core {
    fn out_of_memory(
        &self,
        thread: &Thread,
        slot: u8,
        bytes: u64,
        (pool_used_bytes, pool_reserved_bytes): (Reading, Reading),
        outcome: OomOutcome,
        result: u16,
    ) {
        let Named { tag, flags, .. } = self.named(thread);
        let at = At { tag, flags, device: slot, ..At::NOWHERE };
        let body = Body::Oom { bytes, pool_used_bytes, pool_reserved_bytes, outcome, result };
        self.record(thread, at, body, nothing);
        crate::sender::wake();
    }

    /// The driver has refused memory; told as `AllocFailed` already.
    #[cold]
    pub fn driver_refused(&self, thread: &Thread, at: At, bytes: u64, memory: MemoryKind, free: Reading) {
        if !callers::is_torch(at.module) {
            return;
        }
        let again = thread.torch.refused.swap(true, Relaxed);
        if memory == MemoryKind::StreamOrdered {
            if !again {
                let totals = (Reading::ABSENT, Reading::ABSENT);
                self.out_of_memory(thread, at.device, bytes, totals, OomOutcome::Unknown, REFUSED);
            }
            return;
        }
        self.record(thread, at, Body::Pressure { bytes, device_free_bytes: free }, nothing);
    }
}
