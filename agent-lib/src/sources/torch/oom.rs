//! Records that PyTorch's allocator is out of memory.
//!
//! There are three cases:
//!
//! | case | records, of one thread and in this order |
//! |---|---|
//! | a limit of the pool itself (`set_per_process_memory_fraction`): no driver call | `Oom` with result 0 |
//! | the driver refuses; PyTorch flushes its cache and then gets memory | `AllocFailed`, `Pressure`; no `Oom` |
//! | the driver refuses each time | `AllocFailed`, `Pressure`, perhaps again; `Oom` with the driver's result |
//!
//! PyTorch then calls its observers, among them the agent's Python code (`_observer.py`), which finds the names that keep tensors:
//! `Keepers`, with the number of the `Oom` before it.
//!
//! `Oom` has the outcome `Fatal`: the request has failed. Later records show whether the program continues. The stack of `Oom` is
//! Python's.
//!
//! The cudaMallocAsync backend does not report this, and neither does a PyTorch without caching. There, only the driver's
//! refusals are recorded, as the layer's state says. (2.4.1 gives up at the first refusal; 2.15.0 flushes and retries.)

use crate::base::fault_injection;
use crate::driver::allocations::Allocation;
use crate::driver::core::Core;
use crate::driver::guard::guard;
use crate::naming::{autograd, callers, python, sequence};
use crate::record::recorder::RecordContext;
use crate::sources::torch::patch::{self, OUT_OF_MEMORY};
use crate::sources::torch::report::ordinal;
use crate::threads::Thread;
use gpumem_wire::{Body, FrameFormat, MemoryKind, OomOutcome, PHASE_FLAG, Phase, Reading, Record, Stamp};
use std::ffi::c_void;
use std::sync::atomic::Ordering::Relaxed;

/// CUDA_ERROR_OUT_OF_MEMORY.
const REFUSED: u16 = 2;
/// Maximum length of a stack's text, in bytes: the innermost frames, and the program's own frames.
const STACK_BYTES: usize = 4096;
/// Maximum number of stacks of a process: a program may run out of memory in a loop, on purpose.
const STACKS: u32 = 256;

type Next = unsafe extern "C-unwind" fn(i64, u64, u64, u16);

/// Replacement for reportOutOfMemoryToProfiler: called once for each failed request, after retries, under PyTorch's mutex.
///
/// # Safety
/// Must be called with PyTorch's arguments.
pub unsafe extern "C-unwind" fn reported(bytes: i64, allocated: u64, reserved: u64, device: u16) {
    guard((), |core, thread| {
        fault_injection::at("torch.oom");
        let Some(index) = ordinal(device) else { return };
        let result = if thread.torch.refused.load(Relaxed) { REFUSED } else { 0 };
        thread.torch.refused.store(false, Relaxed);
        thread.torch.forget_events();
        core.record_gradient_of_running_node(thread);
        let at = core.here(thread);
        let (stack, context) = (core.python_stack(thread), core.phase_of_request(thread));
        let at = RecordContext { stack, context, device: index as u8, ..at };
        let body = Body::Oom {
            bytes: bytes.unsigned_abs(),
            pool_used_bytes: Reading::of(allocated),
            pool_reserved_bytes: Reading::of(reserved),
            outcome: OomOutcome::Fatal,
            result,
        };
        thread.torch.failed_seq.store(core.recorder.note(thread, at, body), Relaxed);
        crate::base::wake::wake();
    });
    let next = patch::next(OUT_OF_MEMORY);
    if !next.is_null() {
        // SAFETY: the slot held a function of this type. Its exceptions pass through.
        unsafe { std::mem::transmute::<*mut c_void, Next>(next)(bytes, allocated, reserved, device) };
    }
}

impl Core {
    /// Handles an allocation that the driver has refused; `AllocFailed` is recorded already.
    #[cold]
    pub(crate) fn alloc_refused(&self, thread: &Thread, at: RecordContext, what: Allocation, free: Reading) {
        thread.torch.refused.store(true, Relaxed);
        if callers::is_torch(at.module) && what.memory != MemoryKind::StreamOrdered {
            let at = RecordContext { context: self.phase_of_request(thread), ..at };
            self.recorder.note(thread, at, Body::Pressure { bytes: what.bytes, device_free_bytes: free });
        }
    }

    /// Returns the phase of the thread's request, as the records `Pressure` and `Oom` state it. A forward pass without gradients
    /// is an evaluation, except in a function with its own backward pass (a checkpoint). Clearing gradients belongs to the
    /// optimizer's phase.
    #[cold]
    fn phase_of_request(&self, thread: &Thread) -> u32 {
        let named = self.named(thread).phase;
        let (clears_gradients, is_custom) = python::rare_frames();
        let phase = match named {
            Phase::Forward if !is_custom && sequence::has_gradients() == Some(false) => Phase::Evaluation,
            Phase::Unknown if clears_gradients => Phase::Optimizer,
            phase => phase,
        };
        PHASE_FLAG | u32::from(phase.to_code())
    }

    /// Records the names that keep tensors, which Python code found after the thread's last failed request. Like a stack, the record
    /// lies in the memory for names, so it survives the end of the process.
    #[cold]
    pub(crate) fn report_keepers(&self, thread: &Thread, lines: &[u8]) {
        let oom_seq = thread.torch.failed_seq.swap(0, Relaxed);
        let keepers = String::from_utf8_lossy(lines);
        let body = Body::Keepers { oom_seq, keepers: &keepers };
        self.recorder.names.add(&Record { stamp: self.recorder.stamp(), body });
        crate::base::wake::wake();
    }

    /// Records the thread's Python stack and returns the stack's number; 0 without a stack, or after `STACKS` stacks. A thread of
    /// the backward pass without Python frames has the stack of the thread that waits for the pass.
    #[cold]
    pub(crate) fn python_stack(&self, thread: &Thread) -> u32 {
        let mut room = [0_u8; STACK_BYTES];
        let mut used = python::stack_text(python::text::COLUMNS, &mut room);
        if used == 0 && autograd::name_of_running(thread).is_some() {
            used = python::stack_of_backward(python::text::COLUMNS, &mut room);
        }
        let taken =
            self.torch.stacks.fetch_update(Relaxed, Relaxed, |made| (made < STACKS).then_some(made + 1));
        let (Ok(made), Some(frames)) = (taken, room.get(..used).filter(|text| !text.is_empty())) else {
            return 0;
        };
        let stamp = Stamp { stack: made + 1, ..Stamp::default() };
        let body = Body::Stack { format: FrameFormat::Text, frames };
        self.recorder.names.add(&Record { stamp, body }).map_or(0, |_| made + 1)
    }
}
