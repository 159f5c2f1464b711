//! NVML calls that nvml-wrapper lacks or handles badly. They need unsafe code, which the daemon otherwise has only for pidfds,
//! passed sockets and malloc. Types and functions are those of nvml-wrapper-sys, generated from NVIDIA's header.
//!
//! nvml-wrapper asks for a list's size before reading the list, which doubles the time for which the driver is locked. It knows
//! only one version of each call. It assumes records of 24 bytes in the newest lists, but drivers 535.43 to 535.86 write 32.
//! This file reads a list with one call into a reused buffer that has 32 bytes for each record, which fits all versions.
//!
//! ```text
//! record   16 bytes  u32 pid, 4 unused, u64 bytes                                   v1
//!          24        ... u32 gpu instance, u32 compute instance                     v2, v3
//!          32        ... u64 protected bytes                                        detail list, "v3" of early 535
//! ```

use super::answer::{Charge, Code, Event, EventKind, HEALTH_EVENTS, List, Memory, MemoryLimit};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::*;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::ffi::{CString, OsStr, c_char};
use std::fs::File;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The first 64-bit word of a file, shared with other processes that have the file open. Never unmapped; a process has one.
#[derive(Debug)]
pub(crate) struct SharedWord {
    word: &'static AtomicU64,
}

impl SharedWord {
    /// Maps the first word of a file.
    /// Errors: The file is shorter than a word, or a system call fails.
    pub(crate) fn map(file: &File) -> std::io::Result<SharedWord> {
        let bytes = size_of::<AtomicU64>();
        if file.metadata()?.len() < bytes as u64 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address chosen by the kernel does not touch existing memory.
        let at = unsafe { mmap(std::ptr::null_mut(), bytes, access, flags, file, 0) }?;
        let at = NonNull::new(at.cast::<AtomicU64>()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        // SAFETY: the mapping is page-aligned, holds the word, and is never unmapped. If its other owner truncated the file,
        // which it does not do, the access would end this process and do no other harm.
        Ok(SharedWord { word: unsafe { at.as_ref() } })
    }

    pub(crate) fn set(&self, value: u64) {
        self.word.store(value, Ordering::Release);
    }
}

const XID: u64 = nvmlEventTypeXidCriticalError as u64;
const PARTITIONED: u64 = nvmlEventMigConfigChange as u64;
const HMM: u32 = nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_HMM;
const ATS: u32 = nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_ATS;
const UNBIND: u64 = nvmlSystemEventTypeGpuDriverUnbind as u64;
/// Value with which the driver represents "none" and "not available".
const NONE: u32 = u32::MAX;

const FIRST_RECORDS: usize = 64;
/// Maximum number of records in a list; the driver itself cuts a list at 950 processes.
const MAX_RECORDS: usize = 64 * 1024;
/// Maximum number of attempts to read a list that grows between two calls.
const ATTEMPTS: usize = 5;

/// A device of one opened library. Invalid after that library was closed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Handle {
    device: nvmlDevice_t,
    generation: u32,
}

type ListFn<T> = unsafe extern "C" fn(nvmlDevice_t, *mut u32, *mut T) -> nvmlReturn_t;
type DetailFn = unsafe extern "C" fn(nvmlDevice_t, *mut nvmlProcessDetailList_t) -> nvmlReturn_t;

/// Versions of NVML's list functions.
#[derive(Debug, Clone, Copy)]
enum ListCall {
    /// Records have 16 bytes.
    V1(ListFn<nvmlProcessInfo_v1_t>),
    /// Records have 24 bytes.
    V2(ListFn<nvmlProcessInfo_v2_t>),
    /// Records have 24 bytes, or 32 due to an error in early 535 drivers; detected from the written data.
    V3(ListFn<nvmlProcessInfo_t>),
    /// Records have 32 bytes, including protected bytes. The number is the mode that selects the list.
    Detail(DetailFn, u32),
}

impl ListCall {
    /// Makes one list call. `records` has room for `count` records of [`RECORD_WORDS`]; `count` becomes the number of records.
    fn call(self, device: nvmlDevice_t, count: &mut u32, records: *mut u64) -> Result<(), Code> {
        // SAFETY: the buffer has room for `count` records of the longest version, aligned to 8 bytes.
        checked(unsafe {
            match self {
                ListCall::V1(call) => call(device, count, records.cast()),
                ListCall::V2(call) => call(device, count, records.cast()),
                ListCall::V3(call) => call(device, count, records.cast()),
                ListCall::Detail(call, mode) => {
                    let mut list = nvmlProcessDetailList_t {
                        version: version::<nvmlProcessDetailList_t>(1),
                        mode,
                        numProcArrayEntries: *count,
                        procArray: records.cast(),
                    };
                    let answer = call(device, &raw mut list);
                    *count = list.numProcArrayEntries;
                    answer
                }
            }
        })
    }
}

/// An open NVML library. Dropping it shuts NVML down and unloads the library.
pub(crate) struct Raw {
    generation: u32,
    has_memory_v2: bool,
    /// Versions of each list function, newest first. A version that the driver refuses is removed.
    lists: [Vec<ListCall>; 3],
    /// Open event sets. Each GPU has its own, so that an error of one GPU does not affect the others.
    sets: Vec<nvmlEventSet_t>,
    /// Open event set that reports GPUs being unbound from the driver.
    unbind_set: Option<nvmlSystemEventSet_t>,
    /// Whether the library has the symbols of early 535 drivers, which write records of 32 bytes in the list version with records
    /// of 24 bytes.
    pub looks_like_535: bool,
    /// Buffer for one list, reused.
    buffer: Vec<[u64; RECORD_WORDS]>,
    pub nvml: Nvml,
}

impl Drop for Raw {
    fn drop(&mut self) {
        let lib = self.nvml.lib();
        // SAFETY: the event sets belong to this library, which is still open, and are not used afterwards.
        unsafe {
            if let (Ok(free), Some(set)) = (&lib.nvmlSystemEventSetFree, self.unbind_set.take()) {
                free(&mut nvmlSystemEventSetFreeRequest_t {
                    version: version::<nvmlSystemEventSetFreeRequest_t>(1),
                    set,
                });
            }
            if let Ok(free) = &lib.nvmlEventSetFree {
                self.sets.drain(..).for_each(|set| {
                    free(set);
                });
            }
        }
    }
}

/// Returns the `version` field of an argument struct: the struct's size combined with a version number.
const fn version<T>(number: u32) -> u32 {
    size_of::<T>() as u32 | number << 24
}

/// Returns a function of the library, or FUNCTION_NOT_FOUND if the library lacks it.
fn found<F: Copy, E>(symbol: &Result<F, E>) -> Result<F, Code> {
    symbol.as_ref().map(|function| *function).map_err(|_| Code::FUNCTION_NOT_FOUND)
}

fn checked(answer: nvmlReturn_t) -> Result<(), Code> {
    if answer == 0 { Ok(()) } else { Err(Code(answer)) }
}

/// Makes a call that fills a struct.
fn filled<T>(mut value: T, call: impl FnOnce(&mut T) -> nvmlReturn_t) -> Result<T, Code> {
    checked(call(&mut value)).map(|()| value)
}

/// Argument of nvmlDeviceGetMemoryLimits_v1, which nvml-wrapper-sys lacks. It has no `version` field.
#[repr(C)]
struct MemoryLimits {
    group: *const c_char,
    soft: u64,
    hard: u64,
    used: u64,
}

const _: () = assert!(size_of::<MemoryLimits>() == 32);

type LimitsFn = unsafe extern "C" fn(nvmlDevice_t, *mut MemoryLimits) -> nvmlReturn_t;

static GENERATIONS: AtomicU32 = AtomicU32::new(1);

impl Raw {
    /// Opens and initializes the library.
    /// Errors: `None`: it cannot be loaded. `Some(code)`: it cannot be initialized.
    pub(crate) fn open(library: &OsStr) -> Result<Raw, Option<Code>> {
        let nvml = Nvml::builder().lib_path(library).init().map_err(|error| match error {
            NvmlError::LibloadingError(_) => None,
            error => Some(Code::from(error)),
        })?;
        let lib = nvml.lib();
        if lib.nvmlShutdown.is_err() {
            std::mem::forget(nvml); // its drop would call the missing function
            return Err(Some(Code::FUNCTION_NOT_FOUND));
        }
        let lists = ["Compute", "Graphics", "MPSCompute"].map(|kind| {
            let name = |version| format!("nvmlDeviceGet{kind}RunningProcesses{version}").into_bytes();
            // SAFETY: the function types of `ListCall` are those of NVIDIA's header.
            let versions = unsafe {
                [
                    lib.__library.get(&name("_v3")).ok().map(|call| ListCall::V3(*call)),
                    lib.__library.get(&name("_v2")).ok().map(|call| ListCall::V2(*call)),
                    lib.__library.get(&name("")).ok().map(|call| ListCall::V1(*call)),
                ]
            };
            versions.into_iter().flatten().collect()
        });
        let detail = found(&lib.nvmlDeviceGetRunningProcessDetailList);
        let mut raw = Raw {
            generation: GENERATIONS.fetch_add(1, Ordering::Relaxed),
            has_memory_v2: true,
            lists,
            sets: Vec::new(),
            unbind_set: None,
            looks_like_535: lib.nvmlDeviceGetConfComputeMemSizeInfo.is_ok() && detail.is_err(),
            buffer: Vec::new(),
            nvml,
        };
        if let Ok(call) = detail
            && raw.is_confidential()
        {
            for (mode, list) in (0..).zip(&mut raw.lists) {
                list.insert(0, ListCall::Detail(call, mode));
            }
        }
        Ok(raw)
    }

    pub(crate) fn handle(&self, device: &Device<'_>) -> Handle {
        // SAFETY: the pointer is only passed to functions of the library that it came from, see `device`.
        Handle { device: unsafe { device.handle() }, generation: self.generation }
    }

    /// Returns the device's pointer if it belongs to this opened library. NVML has crashed on pointers of others.
    fn device(&self, handle: Handle) -> Result<nvmlDevice_t, Code> {
        if handle.generation == self.generation { Ok(handle.device) } else { Err(Code::UNINITIALIZED) }
    }

    /// Returns the device in the form of nvml-wrapper, for calls that the wrapper handles well.
    pub(crate) fn wrapped(&self, handle: Handle) -> Result<Device<'_>, Code> {
        // SAFETY: `device` has checked that the pointer is of this library.
        Ok(unsafe { Device::new(self.device(handle)?, &self.nvml) })
    }

    /// Reads device memory, with the driver's own share if the driver reports that.
    pub(crate) fn memory(&mut self, handle: Handle) -> Result<Memory, Code> {
        let device = self.device(handle)?;
        let lib = self.nvml.lib();
        let mut newer = None;
        if let (true, Ok(call)) = (self.has_memory_v2, &lib.nvmlDeviceGetMemoryInfo_v2) {
            let version = version::<nvmlMemory_v2_t>(2);
            let empty = nvmlMemory_v2_t { version, total: 0, reserved: 0, free: 0, used: 0 };
            // SAFETY: the struct has the layout of the version in its `version` field.
            match filled(empty, |memory| unsafe { call(device, memory) }) {
                Ok(nvmlMemory_v2_t { total, free, used, reserved, .. }) => {
                    return Ok(Memory::new(total, free, used, Some(reserved)));
                }
                Err(code @ (Code::FUNCTION_NOT_FOUND | Code::ARGUMENT_VERSION_MISMATCH)) => {
                    newer = Some(code)
                }
                Err(code) => return Err(code),
            }
        }
        let empty = nvmlMemory_t { total: 0, free: 0, used: 0 };
        let memory = found(&lib.nvmlDeviceGetMemoryInfo).and_then(|call| {
            // SAFETY: the struct has the layout of this version of the function.
            filled(empty, |memory| unsafe { call(device, memory) })
        });
        let memory = memory.map_err(|code| newer.unwrap_or(code))?;
        self.has_memory_v2 = false; // only the older version works, so use it directly from now on
        Ok(Memory::new(memory.total, memory.free, memory.used, None))
    }

    /// Returns the numbers of the GPU instance and the compute instance; `None` for a whole GPU.
    pub(crate) fn instance(&self, handle: Handle) -> Option<(u32, u32)> {
        let (lib, device) = (self.nvml.lib(), self.device(handle).ok()?);
        let (gpu_call, compute_call) =
            (found(&lib.nvmlDeviceGetGpuInstanceId).ok()?, found(&lib.nvmlDeviceGetComputeInstanceId).ok()?);
        let (mut gpu, mut compute) = (NONE, NONE);
        // SAFETY: each function writes one u32.
        let (of_gpu, of_compute) =
            unsafe { (gpu_call(device, &raw mut gpu), compute_call(device, &raw mut compute)) };
        checked(of_gpu).and(checked(of_compute)).ok()?;
        (gpu != NONE && compute != NONE).then_some((gpu, compute))
    }

    /// Returns whether Windows manages the GPU's memory (WDDM); then the memory of processes is unknown here.
    pub(crate) fn is_windows(&self, handle: Handle) -> bool {
        // The wrapper has this call only on Windows.
        let (Ok(device), Ok(call)) = (self.device(handle), &self.nvml.lib().nvmlDeviceGetDriverModel) else {
            return false;
        };
        let (mut now, mut pending) = (NONE, NONE);
        // SAFETY: the function writes two u32.
        checked(unsafe { call(device, &raw mut now, &raw mut pending) }).is_ok()
            && now == nvmlDriverModel_enum_NVML_DRIVER_WDDM
    }

    /// Returns how the GPU accesses ordinary host memory (malloc): `hmm` or `ats`. `None`: not at all, or unknown.
    pub(crate) fn addressing(&self, handle: Handle) -> Option<&'static str> {
        let device = self.device(handle).ok()?;
        let call = found(&self.nvml.lib().nvmlDeviceGetAddressingMode).ok()?;
        let version = version::<nvmlDeviceAddressingMode_t>(1);
        let empty = nvmlDeviceAddressingMode_t { version, value: 0 };
        // SAFETY: the struct has the layout of the version in its `version` field.
        match filled(empty, |mode| unsafe { call(device, mode) }).ok()?.value {
            HMM => Some("hmm"),
            ATS => Some("ats"),
            _ => None,
        }
    }

    /// Reads the memory limit of a control group. Fails with FUNCTION_NOT_FOUND if the driver is older than R615.
    pub(crate) fn memory_limit(&self, handle: Handle, group: &str) -> Result<MemoryLimit, Code> {
        let device = self.device(handle)?;
        // SAFETY: the function type is that of NVIDIA's header.
        let call = found(
            &unsafe { self.nvml.lib().__library.get::<LimitsFn>(b"nvmlDeviceGetMemoryLimits_v1") }
                .map(|symbol| *symbol),
        )?;
        let name = CString::new(group).map_err(|_| Code::INVALID_ARGUMENT)?;
        let empty = MemoryLimits { group: name.as_ptr(), soft: 0, hard: 0, used: 0 };
        // SAFETY: the struct has the layout of NVIDIA's header; the name ends with 0 and outlives the call.
        let limits = filled(empty, |limits| unsafe { call(device, limits) })?;
        Ok(MemoryLimit { soft_bytes: limits.soft, hard_bytes: limits.hard, used_bytes: limits.used })
    }

    pub(crate) fn is_confidential(&self) -> bool {
        let Ok(call) = &self.nvml.lib().nvmlSystemGetConfComputeState else { return false };
        let empty = nvmlConfComputeSystemState_t { environment: 0, ccFeature: 0, devToolsMode: 0 };
        // SAFETY: only one version of the struct exists.
        filled(empty, |state| unsafe { call(state) }).is_ok_and(|state| state.ccFeature != 0)
    }

    /// Returns whether lists report the part of a process's memory that confidential computing protects.
    pub(crate) fn tells_protected_bytes(&self) -> bool {
        self.lists.iter().flatten().any(|call| matches!(call, ListCall::Detail(..)))
    }

    /// Starts watching the events of a GPU: faults, health, and changes of its partition. Returns the number for [`Raw::event`].
    /// Fails with NOT_SUPPORTED if the GPU has no events.
    pub(crate) fn watch(&mut self, handle: Handle) -> Result<usize, Code> {
        let (lib, device) = (self.nvml.lib(), self.device(handle)?);
        let (create, register) = (found(&lib.nvmlEventSetCreate)?, found(&lib.nvmlDeviceRegisterEvents)?);
        let (supported, free) =
            (found(&lib.nvmlDeviceGetSupportedEventTypes)?, found(&lib.nvmlEventSetFree)?);
        let (mut types, mut set) = (0, null_mut());
        // SAFETY: the function writes one u64.
        checked(unsafe { supported(device, &raw mut types) })?;
        let wanted = types & HEALTH_EVENTS.iter().fold(XID | PARTITIONED, |all, event| all | event.bit);
        if wanted == 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        // SAFETY: the function writes one pointer, which is passed to no other library.
        checked(unsafe { create(&raw mut set) })?;
        // SAFETY: device and set belong to this library.
        checked(unsafe { register(device, wanted, set) }).inspect_err(|_| {
            // SAFETY: the set was stored nowhere.
            unsafe { free(set) };
        })?;
        self.sets.push(set); // freed with the library
        Ok(self.sets.len() - 1)
    }

    /// Returns the next event of a watched GPU without waiting; `None` if there is none.
    pub(crate) fn event(&self, number: usize) -> Result<Option<Event>, Code> {
        let wait = found(&self.nvml.lib().nvmlEventSetWait_v2)?;
        let &set = self.sets.get(number).ok_or(Code::NOT_FOUND)?;
        let empty = nvmlEventData_t {
            device: null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: NONE,
            computeInstanceId: NONE,
        };
        // SAFETY: the struct has the layout of this version of the function.
        let data = match filled(empty, |data| unsafe { wait(set, data, 0) }) {
            Err(Code::TIMEOUT) => return Ok(None),
            data => data?,
        };
        let kind = match data.eventType {
            XID => EventKind::Xid(data.eventData),
            PARTITIONED => EventKind::Partitioned,
            bit => {
                let health = HEALTH_EVENTS.iter().position(|event| event.bit == bit);
                health.map_or(EventKind::Other, EventKind::Health)
            }
        };
        let instance = (data.gpuInstanceId, data.computeInstanceId);
        Ok(Some(Event { kind, instance: Some(instance).filter(|of| of.0 != NONE && of.1 != NONE) }))
    }

    /// Returns the driver's number of a GPU that is being unbound from the driver; `None` if there is none. The first call only
    /// starts watching. Fails with FUNCTION_NOT_FOUND if the driver is older than R575.
    pub(crate) fn unbinding(&mut self) -> Result<Option<u32>, Code> {
        let lib = self.nvml.lib();
        let (create, register) =
            (found(&lib.nvmlSystemEventSetCreate)?, found(&lib.nvmlSystemRegisterEvents)?);
        let (wait, free) = (found(&lib.nvmlSystemEventSetWait)?, found(&lib.nvmlSystemEventSetFree)?);
        let Some(set) = self.unbind_set else {
            let version_1 = version::<nvmlSystemEventSetCreateRequest_t>(1);
            let empty = nvmlSystemEventSetCreateRequest_t { version: version_1, set: null_mut() };
            // SAFETY: the struct has the layout of its `version` field; the function writes the pointer.
            let set = filled(empty, |request| unsafe { create(request) })?.set;
            let mut events = nvmlSystemRegisterEventRequest_t {
                version: version::<nvmlSystemRegisterEventRequest_t>(1),
                eventTypes: UNBIND,
                set,
            };
            // SAFETY: the struct has the layout of its `version` field; the set belongs to this library.
            checked(unsafe { register(&raw mut events) }).inspect_err(|_| {
                let version = version::<nvmlSystemEventSetFreeRequest_t>(1);
                // SAFETY: the set was stored nowhere.
                unsafe { free(&mut nvmlSystemEventSetFreeRequest_t { version, set }) };
            })?;
            self.unbind_set = Some(set); // freed with the library
            return Ok(None);
        };
        let mut data = nvmlSystemEventData_v1_t { eventType: 0, gpuId: 0 };
        let mut request = nvmlSystemEventSetWaitRequest_t {
            version: version::<nvmlSystemEventSetWaitRequest_t>(1),
            timeoutms: 0,
            set,
            data: &raw mut data,
            dataSize: 1,
            numEvent: 0,
        };
        // SAFETY: the struct has the layout of its `version` field. `data` has room for one event and outlives the call.
        match checked(unsafe { wait(&raw mut request) }) {
            Ok(()) => Ok((request.numEvent != 0 && data.eventType & UNBIND != 0).then_some(data.gpuId)),
            Err(Code::TIMEOUT) => Ok(None),
            Err(code) => Err(code),
        }
    }

    /// Appends the processes of one list, or nothing after an error. Makes one call, or more if the list has grown.
    pub(crate) fn list(&mut self, handle: Handle, list: List, charges: &mut Vec<Charge>) -> Result<(), Code> {
        let device = self.device(handle)?;
        let mut newer = None;
        for place in 0..self.lists[list as usize].len() {
            let call = self.lists[list as usize][place];
            match self.list_by(device, call, charges) {
                Ok(()) => {
                    // The driver lacks the newer versions, so do not try them again.
                    self.lists[list as usize].drain(..place);
                    return Ok(());
                }
                Err(code @ (Code::FUNCTION_NOT_FOUND | Code::ARGUMENT_VERSION_MISMATCH)) => {
                    newer = newer.or(Some(code));
                }
                Err(Code::NOT_SUPPORTED) if matches!(call, ListCall::Detail(..)) => {}
                Err(code) => return Err(newer.unwrap_or(code)),
            }
        }
        Err(newer.unwrap_or(Code::FUNCTION_NOT_FOUND))
    }

    /// Appends the processes of one list by calling one version of its function. Retries while the list grows.
    fn list_by(
        &mut self,
        device: nvmlDevice_t,
        call: ListCall,
        charges: &mut Vec<Charge>,
    ) -> Result<(), Code> {
        let mut records = self.buffer.len();
        for _ in 0..ATTEMPTS {
            records = records.clamp(FIRST_RECORDS, MAX_RECORDS);
            self.buffer.clear();
            self.buffer.resize(records, [UNTOUCHED; RECORD_WORDS]);
            let mut count = u32::try_from(records).unwrap_or(u32::MAX);
            let answer = call.call(device, &mut count, self.buffer.as_mut_ptr().cast());
            let (count, words) = (count as usize, self.buffer.as_flattened());
            match answer {
                Ok(()) => {
                    let stride = match call {
                        ListCall::V1(_) => 16,
                        ListCall::V2(_) => 24,
                        ListCall::V3(_) => stride(words, count, self.looks_like_535),
                        ListCall::Detail(..) => RECORD_WORDS * 8,
                    };
                    parse(words, count, stride, matches!(call, ListCall::Detail(..)), charges);
                    // Shrink a buffer that many processes needed: filling it takes longer than reading a short list.
                    if count < records / 8 {
                        self.buffer.truncate(records / 4);
                    }
                    return Ok(());
                }
                Err(Code::INSUFFICIENT_SIZE) if records < MAX_RECORDS => {
                    // Grow by at least a few records, even if the driver reports too small a size.
                    records = count.max(records + 1).saturating_add(8).next_power_of_two();
                }
                Err(code) => {
                    self.buffer.clear();
                    return Err(code);
                }
            }
        }
        self.buffer.clear();
        Err(Code::INSUFFICIENT_SIZE)
    }
}

/// Number of 64-bit words of the longest record that any driver writes. The buffer has room for records of this size.
const RECORD_WORDS: usize = 4;
/// Word with which the buffer is filled before a call, to find where the written data ends.
const UNTOUCHED: u64 = u64::from_ne_bytes([0xa5; 8]);

/// Returns the word at this byte of the buffer; 0 behind its end.
fn word(buffer: &[u64], byte: usize) -> u64 {
    buffer.get(byte / 8).copied().unwrap_or(0)
}

/// Returns the size of records in a list of the newest version: 24, or 32 if the data ends exactly after `count` records of 32
/// bytes. If a driver has cleared the whole array first, the library's symbols decide.
fn stride(buffer: &[u64], count: usize, looks_like_535: bool) -> usize {
    let records = buffer.len() / RECORD_WORDS;
    if count == 0 || count > records || word(buffer, count * 24) == UNTOUCHED {
        return 24; // nothing was written behind records of 24 bytes
    }
    let ends_at_32 = count == records || word(buffer, count * 32) == UNTOUCHED;
    let wrote_last = word(buffer, count * 32 - 8) != UNTOUCHED;
    let wiped = !ends_at_32;
    if (wiped && looks_like_535) || (!wiped && wrote_last) { 32 } else { 24 }
}

/// Parses `count` records, or as many as the buffer has.
fn parse(buffer: &[u64], count: usize, stride: usize, has_protected: bool, charges: &mut Vec<Charge>) {
    for record in buffer.chunks_exact(stride / 8).take(count) {
        let instance = record.get(2).map_or((NONE, NONE), |&pair| halves(pair));
        charges.push(Charge {
            pid: halves(record[0]).0,
            bytes: Some(record[1]).filter(|&bytes| bytes != u64::MAX),
            instance: Some(instance).filter(|&(gpu, compute)| gpu != NONE && compute != NONE),
            protected_bytes: record.get(3).filter(|&&bytes| has_protected && bytes != u64::MAX).copied(),
        });
    }
}

/// Splits a word into its two u32, in the order of their memory addresses.
fn halves(word: u64) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = word.to_ne_bytes();
    (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]))
}

#[cfg(test)]
mod tests;
