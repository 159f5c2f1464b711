//! Applies driver calls to the whole agent. Each method first updates the state of the driver's memory (driver/). Then it updates
//! what depends on it: segments of PyTorch's pool, names of unnamed allocations, the request for a sample. For a free, the
//! segments come first, because a segment ends before the memory that it lies in.

use crate::base::wake::wake;
use crate::driver::allocations::Allocation;
use crate::driver::core::Core;
use crate::naming::{callers, python};
use crate::record::recorder::{self, RecordContext};
use crate::threads::{Call, Thread};
use gpumem_wire::{Body, DriverEventKind, MemoryKind, NONE_DEVICE};

/// CUDA_ERROR_OUT_OF_MEMORY.
const OUT_OF_MEMORY: u32 = 2;

impl Core {
    /// Handles a successful allocation.
    #[inline(always)]
    pub fn allocated(&self, thread: &Thread, mut at: RecordContext, what: Allocation) {
        let Allocation { address, bytes, memory, .. } = what;
        let is_named_by_line = || {
            let is_python = callers::is_python(at.module) || memory == MemoryKind::Pinned;
            is_python || self.is_single_tensor(at.module, bytes, memory)
        };
        if at.tag == 0 && is_named_by_line() {
            at.tag = python::line(self);
        }
        let seq = self.book_allocation(thread, at, what);
        if at.tag == 0 && at.module != 0 {
            callers::sites::note_unnamed(self, thread, at.module, address, seq);
        }
        self.note_driver_memory(thread, at.module, what);
    }

    #[cold]
    pub(crate) fn alloc_failed(&self, thread: &Thread, mut at: RecordContext, result: u32, what: Allocation) {
        // PyTorch reports the stack of its own requests, if they fail in the end.
        if result == OUT_OF_MEMORY && !callers::is_torch(at.module) {
            at.stack = self.python_stack(thread);
        }
        if at.tag == 0 && callers::is_python(at.module) {
            at.tag = python::line(self);
        }
        let free = self.book_failed_allocation(thread, at, result, what);
        self.alloc_refused(thread, at, what, free);
        wake();
    }

    /// Handles the begin of a free. `call` keeps the allocation's row until the free returns.
    #[inline(always)]
    pub fn free_entered(&self, thread: &Thread, at: RecordContext, call: &mut Call, address: u64) {
        self.remove_segments(thread, call, address, 0);
        self.book_free_entered(thread, at, call, address);
    }

    /// Returns the device slot of this thread's current context; asks the driver the first time. Only for callbacks of driver
    /// calls, not for resource callbacks.
    #[inline(always)]
    pub(crate) fn device_of_context(&self, thread: &Thread, context: usize, uid: u32) -> u8 {
        match thread.device_of(context) {
            Some(device) => device,
            None => self.look_up_context(thread, context, uid).unwrap_or(NONE_DEVICE),
        }
    }

    #[cold]
    fn look_up_context(&self, thread: &Thread, context: usize, uid: u32) -> Option<u8> {
        if context <= 1 {
            return None;
        }
        let device = match self.devices.known(context) {
            Some((device, known)) => {
                if known == 0 {
                    self.devices.learn_uid(context, uid);
                }
                device
            }
            None => {
                let device = self.device(u32::try_from(self.devices.current()?).ok()?);
                self.context_seen(thread, context, uid, device, None);
                device
            }
        };
        thread.remember_context(context, device);
        Some(device)
    }

    /// Records a CUDA context when it is first seen. If a call has just created it, `created` holds fields of that call's record.
    /// With `None` it is older, or a green context, which is a part of the primary one and takes no memory itself.
    pub fn context_seen(
        &self,
        thread: &Thread,
        handle: usize,
        uid: u32,
        device: u8,
        created: Option<RecordContext>,
    ) {
        if !self.devices.remember_context(handle, uid, device) {
            return;
        }
        let at = created.unwrap_or_else(|| self.here(thread));
        let at = RecordContext { context: uid, device, ..at };
        self.recorder.note(thread, at, Body::ContextCreate { handle: handle as u64 });
        if created.is_some() {
            self.other_memory_changed(thread, at, DriverEventKind::ContextCreated, 0, u64::from(uid));
        }
    }

    /// Records an event with which the driver takes or frees memory outside of allocations. Wakes the sender, so that a sample of
    /// the device's memory is soon taken, which shows how much.
    pub(crate) fn other_memory_changed(
        &self,
        thread: &Thread,
        at: RecordContext,
        event: DriverEventKind,
        bytes: u64,
        value: u64,
    ) {
        if recorder::records(recorder::API) {
            self.recorder.note(thread, at, Body::DriverEvent { bytes, value, event });
        }
        wake();
    }
}
