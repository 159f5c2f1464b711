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
//! `Oom` has the outcome `Fatal`: the request has failed. Later records show whether the program continues. Its stack
//! is Python's.
//!
//! The cudaMallocAsync backend does not report this, and neither does a PyTorch without caching. There, only the driver's
//! refusals are recorded, as the layer's state says. (2.4.1 gives up at the first refusal; 2.15.0 flushes and retries.)

use crate::base::fault_injection;
use crate::driver::allocations::Allocation;
use crate::driver::core::Core;
use crate::driver::guard::guard;
use crate::naming::{callers, sequence};
use crate::record::recorder::RecordContext;
use crate::sources::torch::patch::{self, OUT_OF_MEMORY};
use crate::sources::torch::report::ordinal;
use crate::threads::Thread;
use gpumem_wire::{Body, FrameFormat, MemoryKind, OomOutcome, PHASE_SAID, Phase, Reading, Record, Stamp};
use std::ffi::c_void;
use std::sync::atomic::Ordering::Relaxed;

/// CUDA_ERROR_OUT_OF_MEMORY.
const REFUSED: u16 = 2;
/// Maximum length of a stack's text, in bytes; only the innermost frames are kept.
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
        let (stack, context) = (core.python_stack(), core.phase_of_request(thread));
        let at = RecordContext { stack, context, device: index as u8, ..at };
        let body = Body::Oom {
            bytes: bytes.unsigned_abs(),
            pool_used_bytes: Reading::of(allocated),
            pool_reserved_bytes: Reading::of(reserved),
            outcome: OomOutcome::Fatal,
            result,
        };
        core.recorder.note(thread, at, body);
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
        let (clears_gradients, is_custom) = crate::naming::python::rare_frames();
        let phase = match named {
            Phase::Forward if !is_custom && sequence::has_gradients() == Some(false) => Phase::Evaluation,
            Phase::Unknown if clears_gradients => Phase::Optimizer,
            phase => phase,
        };
        PHASE_SAID | u32::from(phase.to_code())
    }

    /// Records the thread's Python stack and returns its number; 0 without a stack, or after too many.
    #[cold]
    fn python_stack(&self) -> u32 {
        let mut room = [0_u8; STACK_BYTES];
        let used = crate::naming::python::stack_text(&mut room);
        let taken =
            self.torch.stacks.fetch_update(Relaxed, Relaxed, |made| (made < STACKS).then_some(made + 1));
        let (Ok(made), Some(text)) = (taken, room.get_mut(..used).filter(|text| !text.is_empty())) else {
            return 0;
        };
        let frames = as_columns(text);
        let stamp = Stamp { stack: made + 1, ..Stamp::default() };
        let body = Body::Stack { format: FrameFormat::Text, frames };
        self.recorder.names.add(&Record { stamp, body }).map_or(0, |_| made + 1)
    }
}

/// Converts lines `function (file:line)` to `function<TAB>file<TAB>line`, in place.
fn as_columns(text: &mut [u8]) -> &[u8] {
    let (mut from, mut to) = (0, 0);
    while from < text.len() {
        let end = text[from..].iter().position(|&byte| byte == b'\n').map_or(text.len(), |at| from + at);
        let line = &text[from..end];
        let file = line.windows(2).position(|pair| pair == b" (").map(|at| from + at);
        let number = line.iter().rposition(|&byte| byte == b':').map(|at| from + at);
        let whole = line.last() == Some(&b')');
        match (file, number) {
            (Some(file), Some(number)) if whole && file + 2 <= number => {
                for (start, stop, after) in
                    [(from, file, b'\t'), (file + 2, number, b'\t'), (number + 1, end - 1, b'\n')]
                {
                    text.copy_within(start..stop, to);
                    to += stop - start;
                    text[to] = after;
                    to += 1;
                }
            }
            _ => {
                text.copy_within(from..end, to);
                to += end - from;
                if to < text.len() {
                    text[to] = b'\n';
                    to += 1;
                }
            }
        }
        from = end + 1;
    }
    &text[..to]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_columns() {
        let mut text = b"forward (/a b (c)/d:e.py:12)\n? (?:?)\n<module> (x.py:3)\njunk\n".to_vec();
        let want = b"forward\t/a b (c)/d:e.py\t12\n?\t?\t?\n<module>\tx.py\t3\njunk\n";
        assert_eq!(as_columns(&mut text), want);
        for odd in [&b"("[..], b" (", b" (:", b" (:)", b")", b"\n\n", b":) (", b""] {
            let mut text = odd.to_vec();
            assert!(as_columns(&mut text).len() <= odd.len().max(1));
        }
    }
}
