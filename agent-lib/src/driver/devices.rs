//! The process's devices and contexts. A device's slot in records is its CUDA ordinal. A Device record tells the daemon its UUID.

use crate::base::memfd::Zeros;
use crate::record::recorder::Recorder;
use crate::threads::Thread;
use cupti_sys::Driver;
use cupti_sys::device_attribute::{MULTIPROCESSORS, THREADS_PER_MULTIPROCESSOR};
use gpumem_wire::{Body, DeviceIdKind, NONE_DEVICE, Reading, Record, Stamp};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

const DEVICES: usize = 64;
/// Maximum number of CUDA contexts in the table at a time.
const CONTEXTS: usize = 256;

/// An entry of the table of CUDA contexts; it has a context or is free.
#[derive(Debug, Default)]
struct Context {
    /// CUcontext; 0 while the entry is free, 1 while it is being written.
    handle: AtomicUsize,
    /// CUPTI's number of the context.
    uid: AtomicU32,
    device: AtomicU32,
}

#[derive(Debug, Default)]
pub(crate) struct Devices {
    pub(crate) driver: OnceLock<Driver>,
    /// Devices that resource callbacks have used and that are not recorded yet: one bit for each device.
    awaited: AtomicU64,
    /// For each device, whether its Device record was made.
    introduced: Zeros<AtomicBool, DEVICES>,
    contexts: Zeros<Context, CONTEXTS>,
    /// Primary context of each device; 0 if unknown.
    primary: Zeros<AtomicUsize, DEVICES>,
}

impl Devices {
    pub(crate) fn driver(&self) -> Option<&Driver> {
        self.driver.get()
    }

    fn context(&self, handle: usize) -> Option<&Context> {
        self.contexts.iter().find(|context| context.handle.load(Acquire) == handle)
    }

    /// Sets CUPTI's number of a context, if it is unknown: cuptiGetContextId may fail when the context is created.
    pub(crate) fn learn_uid(&self, handle: usize, uid: u32) {
        if let Some(context) = self.context(handle) {
            let _ = context.uid.compare_exchange(0, uid, Relaxed, Relaxed);
        }
    }

    /// Returns device and CUPTI's number of a context that was added.
    pub(crate) fn known(&self, handle: usize) -> Option<(u8, u32)> {
        if handle <= 1 {
            return None;
        }
        let context = self.context(handle)?;
        Some((context.device.load(Relaxed) as u8, context.uid.load(Relaxed)))
    }

    pub(crate) fn set_primary(&self, ordinal: u32, handle: usize) {
        if let Some(primary) = self.primary.get(ordinal as usize) {
            primary.store(handle, Relaxed);
        }
    }

    /// Sets the primary context of a device, if it is unknown. Used for a context that no observed call has created.
    pub(crate) fn set_primary_if_unknown(&self, ordinal: u32, handle: usize) {
        if let Some(primary) = self.primary.get(ordinal as usize) {
            let _ = primary.compare_exchange(0, handle, Relaxed, Relaxed);
        }
    }

    /// Returns the primary context of a device, if it is known.
    pub(crate) fn primary(&self, ordinal: i32) -> Option<*mut std::ffi::c_void> {
        let primary = self.primary.get(usize::try_from(ordinal).ok()?)?.load(Relaxed);
        (primary != 0).then_some(primary as *mut std::ffi::c_void)
    }

    /// Returns the driver's result and the number of devices; `None` without a driver that has the call.
    pub(crate) fn count(&self) -> Option<(u32, i32)> {
        let get = self.driver()?.device_get_count?;
        let mut count = 0;
        // SAFETY: a function of the loaded driver, with room for its answer.
        Some((unsafe { get(&mut count) }, count))
    }

    /// Whether the primary context of a device is active; `None` if the driver does not answer.
    pub(crate) fn is_primary_active(&self, ordinal: i32) -> Option<bool> {
        let get = self.driver()?.primary_ctx_get_state?;
        let (mut flags, mut active) = (0, 0);
        // SAFETY: a function of the loaded driver, with room for its answers. The agent has no callback enabled for it.
        (unsafe { get(ordinal, &mut flags, &mut active) } == 0).then_some(active != 0)
    }

    pub(crate) fn current(&self) -> Option<i32> {
        let get = self.driver()?.ctx_get_device?;
        let mut ordinal = -1;
        // SAFETY: a function of the loaded driver, with room for its answer. The agent has no callback enabled for it.
        (unsafe { get(&mut ordinal) } == 0).then_some(ordinal)
    }

    /// Returns the free and total bytes of the current context's device.
    pub(crate) fn memory_info(&self) -> Option<(u64, u64)> {
        let get = self.driver()?.mem_get_info?;
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: a function of the loaded driver, with room for its answers.
        (unsafe { get(&mut free, &mut total) } == 0).then_some((free as u64, total as u64))
    }

    /// Whether the driver has this device; true if the driver's call fails. Not for resource callbacks, which must not call the
    /// driver.
    pub(crate) fn exists(&self, ordinal: u32) -> bool {
        match self.count() {
            Some((0, count)) => i64::from(ordinal) < i64::from(count),
            _ => true,
        }
    }

    /// Whether cuDevicePrimaryCtxRetain, which begins now, will create a context. If the driver does not answer, the result is
    /// true if no context of the device was added.
    pub(crate) fn retain_creates(&self, ordinal: u32) -> bool {
        if self.primary.get(ordinal as usize).is_some_and(|primary| primary.load(Relaxed) != 0) {
            return false;
        }
        let is_of =
            |context: &Context| context.handle.load(Acquire) > 1 && context.device.load(Relaxed) == ordinal;
        !self.is_primary_active(ordinal as i32).unwrap_or_else(|| self.contexts.iter().any(is_of))
    }

    /// Returns the slot of a device, and records the device with its UUID the first time.
    pub(crate) fn slot(&self, recorder: &Recorder, ordinal: u32) -> u8 {
        let Some(introduced) = self.introduced.get(ordinal as usize) else { return NONE_DEVICE };
        if !introduced.load(Relaxed) && !introduced.swap(true, AcqRel) {
            self.introduce(recorder, ordinal);
        }
        ordinal as u8
    }

    /// Returns the slot of a device, in a callback that must not call the driver. The sender records the device before it sends
    /// records that refer to it.
    pub(crate) fn slot_in_resource(&self, ordinal: u32) -> u8 {
        let Some(introduced) = self.introduced.get(ordinal as usize) else { return NONE_DEVICE };
        if !introduced.load(Relaxed) {
            self.awaited.fetch_or(1 << ordinal, Release);
        }
        ordinal as u8
    }

    /// Records the devices in `awaited`, which resource callbacks have used. Called by the sender.
    pub(crate) fn introduce_awaited(&self, recorder: &Recorder, thread: Option<&Thread>) {
        if self.awaited.load(Relaxed) == 0 {
            return;
        }
        let awaited = self.awaited.swap(0, Acquire);
        let introduce = || {
            for ordinal in (0..DEVICES as u32).filter(|ordinal| awaited >> ordinal & 1 == 1) {
                self.slot(recorder, ordinal);
            }
        };
        match thread {
            Some(thread) => thread.inside(introduce),
            None => introduce(),
        }
    }

    #[cold]
    fn introduce(&self, recorder: &Recorder, ordinal: u32) {
        let mut uuid = [0_u8; 16];
        let mut name = [0_u8; 128];
        let mut total = 0_usize;
        let mut id = DeviceIdKind::Ordinal;
        let mut total_bytes = Reading::ABSENT;
        let (mut multiprocessors, mut threads) = (0, 0);
        if let Some(driver) = self.driver() {
            let device = ordinal as i32;
            // SAFETY: functions of the loaded driver, with room for their answers. The name's buffer keeps a last byte of 0.
            unsafe {
                if driver.device_get_uuid.is_some_and(|get| get(&mut uuid, device) == 0) {
                    id = DeviceIdKind::Gpu;
                }
                if driver.device_total_mem.is_some_and(|get| get(&mut total, device) == 0) {
                    total_bytes = Reading::of(total as u64);
                }
                if let Some(get) = driver.device_get_attribute
                    && (get(&mut multiprocessors, MULTIPROCESSORS, device) != 0
                        || get(&mut threads, THREADS_PER_MULTIPROCESSOR, device) != 0)
                {
                    (multiprocessors, threads) = (0, 0);
                }
                if let Some(get) = driver.device_get_name {
                    get(name.as_mut_ptr().cast(), name.len() as i32 - 1, device);
                }
            }
        }
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(0);
        let name = std::str::from_utf8(&name[..end]).unwrap_or("");
        if id == DeviceIdKind::Gpu && name.contains(" MIG ") {
            id = DeviceIdKind::Mig; // the UUID is that of the MIG instance
        }
        let (high, low) = uuid.split_at(8);
        let half = |half: &[u8]| half.first_chunk().copied().map_or(0, u64::from_be_bytes);
        let body = Body::Device {
            uuid_high: half(high),
            uuid_low: half(low),
            total_bytes,
            ordinal: ordinal as u16,
            id,
            name,
        };
        // The field `context` has the number of multiprocessors and that of threads in each, which determine the memory for
        // stacks of GPU threads.
        let (many, each) = (u16::try_from(multiprocessors), u16::try_from(threads));
        let context = u32::from(many.unwrap_or(0)) << 16 | u32::from(each.unwrap_or(0));
        let stamp = Stamp { device: ordinal as u8, context, ..Stamp::default() };
        recorder.names.add(&Record { stamp, body });
    }

    /// Adds a context; returns false if it was added before. If the table is full, the context is not added, but true is
    /// returned.
    pub(crate) fn remember_context(&self, handle: usize, uid: u32, device: u8) -> bool {
        if handle <= 1 || self.context(handle).is_some() {
            return false;
        }
        let claim = |context: &&Context| {
            context.handle.load(Relaxed) == 0
                && context.handle.compare_exchange(0, 1, AcqRel, Relaxed).is_ok()
        };
        if let Some(place) = self.contexts.iter().find(claim) {
            place.uid.store(uid, Relaxed);
            place.device.store(u32::from(device), Relaxed);
            place.handle.store(handle, Release);
        }
        true
    }

    /// Removes a context that is about to be destroyed. Returns its device and CUPTI's number, if it was added.
    pub(crate) fn forget_context(&self, handle: usize) -> Option<(u8, u32)> {
        let known = self.known(handle)?;
        if let Some(context) = self.context(handle) {
            context.handle.store(0, Release);
        }
        for primary in self.primary.iter() {
            let _ = primary.compare_exchange(handle, 0, Relaxed, Relaxed);
        }
        for thread in crate::threads::all() {
            thread.forget_context(handle);
        }
        Some(known)
    }

    pub(crate) fn seen(&self) -> impl Iterator<Item = u8> + '_ {
        (0..DEVICES as u8).filter(|&device| self.introduced[usize::from(device)].load(Relaxed))
    }
}
