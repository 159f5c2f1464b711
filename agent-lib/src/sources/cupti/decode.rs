//! Decodes CUPTI's callbacks about driver calls. Parameters are read at the addresses that CUPTI passes, and only of the calls
//! in table.rs.

use super::kinds::freed_by;
use super::resource::resource;
use super::table::{self, Meaning, Request};
use crate::base::fault_injection;
use crate::driver::allocations::Allocation;
use crate::driver::core::Core;
use crate::driver::guard::guard;
use crate::driver::pool_polling::EVERY_NS;
use crate::driver::pools::graph_memory;
use crate::record::recorder::{self, RecordContext};
use crate::threads::{Call, Thread};
use cupti_sys::{CallbackData, ENTER, GraphData, domain, params};
use gpumem_wire::{Body, DestroyScope, DriverEventKind, Flags, MemoryKind, NONE_DEVICE, PoolOwner};
use std::ffi::c_void;
use std::sync::atomic::Ordering::*;

/// Entry point that CUPTI calls.
///
/// # Safety
/// `data` must be what CUPTI passes for this domain and id.
pub unsafe extern "C" fn callback(_: *mut c_void, domain: u32, id: u32, data: *const c_void) {
    guard((), |core, thread| {
        if data.is_null() {
            return;
        }
        // SAFETY: CUPTI passes a struct of this type for the domain; it lives during this call.
        unsafe {
            match domain {
                domain::DRIVER_API => driver_call(core, thread, id, &*data.cast()),
                domain::RESOURCE => resource(core, thread, id, &*data.cast()),
                domain::STATE => super::subscribe::note_state(id),
                _ => {}
            }
        }
    });
}

#[inline(always)]
unsafe fn driver_call(core: &Core, thread: &Thread, id: u32, data: &CallbackData) {
    let Some(meaning) = table::meaning(id) else { return super::subscribe::count_pulse(id) };
    if data.params.is_null() {
        return;
    }
    let context = CallbackContext { core, thread, data, id };
    if data.site == ENTER {
        fault_injection::at("cupti.enter");
        // SAFETY: these are the parameters of call `id`.
        unsafe { context.enter(meaning) };
    } else {
        fault_injection::at("cupti.exit");
        // SAFETY: as above; at EXIT the result and the out-parameters are valid.
        unsafe { context.exit(meaning) };
    }
}

/// A callback of a driver call, at its begin or end.
pub(super) struct CallbackContext<'a> {
    pub core: &'a Core,
    pub thread: &'a Thread,
    pub data: &'a CallbackData,
    pub id: u32,
}

impl CallbackContext<'_> {
    /// Returns the call's parameters.
    ///
    /// # Safety
    /// `P` must be the layout of the call's parameters.
    #[inline(always)]
    pub(super) unsafe fn params<P: Copy>(&self) -> P {
        // SAFETY: the caller guarantees the layout.
        unsafe { self.param(0) }
    }

    /// Returns the parameter at an offset.
    ///
    /// # Safety
    /// The call must have a parameter of this type there.
    #[inline(always)]
    pub(super) unsafe fn param<P: Copy>(&self, offset: u16) -> P {
        // SAFETY: the pointer is not null, and the caller guarantees the layout.
        unsafe { self.data.params.byte_add(offset.into()).cast::<P>().read_unaligned() }
    }

    /// Whether the call is cuDevicePrimaryCtxRetain, which creates a context only if the device has none.
    pub(super) fn retains(&self) -> bool {
        self.id == cupti_sys::ids::cuDevicePrimaryCtxRetain
    }

    /// Returns the context of the call's records: the name for the thread's memory, and the thread's current CUDA context with
    /// its device.
    #[inline(always)]
    pub(super) fn at(&self) -> RecordContext {
        let at = self.core.here(self.thread);
        let context = self.data.context as usize;
        let device = match context {
            0 => NONE_DEVICE,
            _ => self.core.device_of_context(self.thread, context, self.data.context_uid),
        };
        RecordContext { context: self.data.context_uid, device, ..at }
    }

    /// Like `at`, for the device in the call's parameters.
    pub(super) fn at_device(&self, ordinal: u32) -> RecordContext {
        let at = self.core.here(self.thread);
        RecordContext { context: self.data.context_uid, device: self.core.device(ordinal), ..at }
    }

    /// Sets `module` in `at` to the number of the library that made this call.
    #[inline(always)]
    pub(super) fn called(&self, at: RecordContext) -> RecordContext {
        let (params, frame) = (self.data.params as usize, std::ptr::from_ref(self) as usize);
        RecordContext { module: self.core.caller(self.thread, self.id, params, frame), ..at }
    }

    #[inline(always)]
    unsafe fn enter(&self, meaning: &Meaning) {
        use Meaning::*;
        let now = self.core.recorder.clock.now();
        let mut call = Call::new(self.data.correlation_id, now);
        (call.id, call.params) = (self.id, self.data.params as usize);
        // SAFETY: this is the callback's own thread, and no other reference is in use.
        unsafe { self.thread.own() }.drop_unobserved_calls(self.thread);
        // SAFETY: each layout is that of the calls with this meaning.
        unsafe {
            match *meaning {
                Free(at) => self.free(&mut call, self.param(at)),
                FreeV1 => self.free(&mut call, self.params::<u32>().into()),
                FreeAsync => self.free(&mut call, self.params()),
                GraphAddNode(at) => {
                    if let Some(address) = self.graph_node(at).and_then(freed_by) {
                        self.free(&mut call, address);
                    }
                }
                IpcClose => {
                    let address = self.params();
                    if address != 0 && !self.core.import_stays_open(address) {
                        self.free(&mut call, address);
                    }
                }
                MemRelease => {
                    let handle = self.params();
                    if !self.core.multicast.objects.has(handle) {
                        self.core.release_entered(self.thread, self.at(), &mut call, handle);
                    }
                }
                MemUnmap => {
                    let range: params::Range = self.params();
                    if !self.core.multicast.mappings.remove(range.address) {
                        let (at, address, bytes) = (self.at(), range.address, range.bytes as u64);
                        self.core.remove_segments(self.thread, &mut call, address, bytes);
                        self.core.book_unmap_entered(self.thread, at, &mut call, address, bytes);
                    }
                }
                PoolDestroy => self.core.pool_gone(self.thread, self.params()),
                PrimaryReset => self.core.driver_pools.forget_device(self.params()),
                Context(at) => {
                    let ordinal = self.param(at);
                    if !self.retains() || self.core.devices.retain_creates(ordinal) {
                        self.creating(&mut call, ordinal);
                    }
                }
                _ if table::moves_memory(meaning) => {
                    let since = &self.thread.moving_since_ns;
                    if since.load(Relaxed) == 0 {
                        since.store(now, Release);
                    }
                }
                _ => {}
            }
        }
        // SAFETY: this is the callback's own thread, and no other reference is in use.
        unsafe { self.thread.own() }.entered(call);
    }

    /// Requests a sample before a context is created, which takes the driver 0.1 s. The sample shows the device's memory
    /// without the context.
    fn creating(&self, call: &mut Call, ordinal: u32) {
        if !self.core.devices.exists(ordinal) {
            return; // the call will fail
        }
        call.creating = true;
        let at = self.called(self.at_device(ordinal));
        self.core.other_memory_changed(self.thread, at, DriverEventKind::ContextCreating, 0, 0);
    }

    fn free(&self, call: &mut Call, address: u64) {
        if address != 0 {
            self.core.free_entered(self.thread, self.at(), call, address);
        }
    }

    #[inline(always)]
    unsafe fn exit(&self, meaning: &Meaning) {
        use Meaning::*;
        // SAFETY: as in `enter`.
        let call = unsafe { self.thread.own() }.returned(self.data.correlation_id);
        let call = call.as_ref();
        let result = match self.data.return_value {
            place if place.is_null() => 0,
            // SAFETY: at EXIT it points to the result.
            place => unsafe { *place },
        };
        // SAFETY: each layout is that of the calls with this meaning; out-parameters are read only after success.
        unsafe {
            match *meaning {
                // The usual call has its own arm, whose code is shorter.
                Alloc(Request::Bytes, MemoryKind::Device) => {
                    let p: params::Alloc = self.params();
                    let address = read(p.out, result, 0);
                    self.allocated(call, result, self.at(), address, p.bytes as u64, 0, MemoryKind::Device);
                }
                AllocAsync | AllocFromPool => self.alloc_async(meaning, call, result),
                Free(_) | FreeV1 | FreeAsync | IpcClose | MemRelease | MemUnmap => {
                    self.freed(meaning, call, result);
                }
                _ => self.other(meaning, call, result),
            }
        }
        if table::moves_memory(meaning) {
            // SAFETY: as in `enter`.
            let outermost = unsafe { self.thread.own() }.open == 0;
            if outermost {
                self.thread.moving_since_ns.store(0, Release);
            }
        }
    }

    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub(super) fn allocated(
        &self,
        call: Option<&Call>,
        result: u32,
        at: RecordContext,
        address: u64,
        bytes: u64,
        pool: u64,
        memory: MemoryKind,
    ) {
        let entered_ns = call.map(|call| call.entered_ns);
        let what = Allocation { address, bytes, pool, memory, entered_ns };
        if result != 0 {
            return self.core.alloc_failed(self.thread, self.called(at), result, what);
        }
        if address == 0 || call.is_some_and(|call| call.reported == address) {
            return; // nothing was allocated, or a nested call has recorded it already
        }
        self.core.allocated(self.thread, self.called(at), what);
        // SAFETY: as in `enter`.
        if let Some(outer) = unsafe { self.thread.own() }.innermost() {
            outer.reported = address;
        }
    }

    unsafe fn alloc_async(&self, meaning: &Meaning, call: Option<&Call>, result: u32) {
        let mut at = self.at();
        // SAFETY: layouts match the meaning; out-parameters are read only after success.
        let (address, bytes, pool) = unsafe {
            match *meaning {
                Meaning::AllocFromPool => {
                    let p: params::AllocFromPool = self.params();
                    (read(p.out, result, 0), p.bytes as u64, p.pool)
                }
                _ => {
                    let p: params::AllocAsync = self.params();
                    let pool = self.core.current_pool(self.thread, at.device);
                    (read(p.out, result, 0), p.bytes as u64, pool)
                }
            }
        };
        if let Some(memory) = self.core.driver_pools.memory_elsewhere(pool) {
            return self.allocated(call, result, at, address, bytes, 0, memory);
        }
        // A pool can be used from a context of another device.
        at.device = self.core.driver_pools.device_of(pool).unwrap_or(at.device);
        self.core.pool_seen(self.thread, pool, at.device, PoolOwner::Driver);
        if call.is_some_and(|call| call.captured) {
            at.flags = at.flags.with(Flags::CAPTURED);
            self.core.graph_memory_used(self.thread, at.device);
        }
        self.allocated(call, result, at, address, bytes, pool, MemoryKind::StreamOrdered);
        if result == 0 && !at.flags.has(Flags::CAPTURED) {
            self.core.poll_pool_for(self.thread, pool, bytes);
        }
    }

    fn freed(&self, meaning: &Meaning, call: Option<&Call>, result: u32) {
        let Some(call) = call else { return };
        let failed = self.core.book_free_returned(self.thread, self.at(), call, result);
        let Some(taken) = call.taken else { return };
        if failed && call.segment_of != 0 {
            self.core.restore_segment(self.thread, call.segment_of, taken.row[2], taken.row[3]);
        }
        if matches!(meaning, Meaning::FreeAsync) {
            self.core.poll_pool(self.thread, taken.row[4], EVERY_NS);
        }
    }

    /// Handles the return of a less frequent call.
    #[inline(never)]
    unsafe fn other(&self, meaning: &Meaning, call: Option<&Call>, result: u32) {
        use Meaning::*;
        // SAFETY: layouts match the meaning; out-parameters are read only after success.
        unsafe {
            match *meaning {
                Alloc(request, memory) => {
                    let mut at = self.at();
                    if memory == MemoryKind::Array {
                        at.flags = at.flags.with(Flags::ESTIMATED);
                    }
                    let (address, bytes) = self.requested(request, result);
                    self.allocated(call, result, at, address, bytes, 0, memory);
                }
                GraphAddAlloc => {
                    let p: params::GraphAddAlloc = self.params();
                    self.graph_alloc(call, result, p.parameters);
                }
                GraphAddNode(at) => match self.graph_node(at) {
                    Some(node) if (*node).kind == GraphData::MEM_ALLOC => {
                        self.graph_alloc(call, result, &raw const (*node).alloc);
                    }
                    _ => self.freed(meaning, call, result),
                },
                MemCreate => self.handle_created(call, result),
                _ if result != 0 => {}
                MemMap | MemRetain | MemImport | MemExport | MulticastCreate | PoolCreate | PoolTouched
                | DeviceSetPool | LocationSetPool | GraphMemoryTrim => self.handle_or_pool(*meaning),
                Import(_) | ExternalImport => self.import(*meaning),
                Context(at) => self.context(call, self.param(at)),
                PrimaryReset => {
                    let at = self.at_device(self.params());
                    self.core.context_ended(self.thread, at, DestroyScope::Device);
                    crate::base::wake::wake();
                }
                SetLimit => {
                    let p: params::SetLimit = self.params();
                    let event = match p.limit {
                        0 => DriverEventKind::StackLimit,
                        1 => DriverEventKind::PrintfLimit,
                        2 => DriverEventKind::HeapLimit,
                        _ => return,
                    };
                    self.core.other_memory_changed(
                        self.thread,
                        self.called(self.at()),
                        event,
                        0,
                        p.value as u64,
                    );
                }
                GreenCreate => {
                    let p: params::GreenCreate = self.params();
                    self.event(self.at_device(p.device), DriverEventKind::GreenContextCreated);
                }
                Event(event) => self.event(self.at(), event),
                GraphEvent(event) => {
                    let at = self.at();
                    self.event(at, event);
                    self.core.poll_pool(self.thread, graph_memory(at.device), EVERY_NS);
                }
                GraphUpload => self.core.poll_pool(self.thread, graph_memory(self.at().device), EVERY_NS),
                _ => {}
            }
        }
    }

    fn event(&self, at: RecordContext, event: DriverEventKind) {
        if recorder::records(recorder::API) {
            let body = Body::DriverEvent { bytes: 0, value: 0, event };
            self.core.recorder.note(self.thread, self.called(at), body);
        }
    }
}

/// Reads an out-parameter. Returns `otherwise` if the call failed or the program passed null for the parameter.
#[inline(always)]
pub(super) unsafe fn read<T: Copy>(out: *const T, result: u32, otherwise: T) -> T {
    // SAFETY: the call's out-parameter, which a successful call has filled.
    if result == 0 && !out.is_null() { unsafe { out.read_unaligned() } } else { otherwise }
}
