//! NVML calls that nvml-wrapper lacks or handles badly. Unsafe code, which the daemon otherwise has only for pidfds, passed
//! sockets and malloc.
//!
//! nvml-wrapper requests a list's size before each list, which doubles the time for which the driver is locked. It knows only one
//! version of each call. It assumes 24 bytes for records of the newest list, but drivers 535.43 to 535.86 write 32. Here a list
//! is one call into a reused buffer with 32 bytes for each record, whatever the driver is expected to write.
//!
//! ```text
//! record   16 bytes  u32 pid, 4 unused, u64 bytes                                   v1
//!          24        ... u32 gpu instance, u32 compute instance                     v2, v3
//!          32        ... u64 protected bytes                                        detail list, "v3" of early 535
//! ```

use self::layouts::{
    Account, AddressingMode, Confidence, DETAIL_LIST_V1, DetailList, EventData, MEMORY_V2, MemoryLimits,
    MemoryV1, MemoryV2, RECORD_BYTES, UNTOUCHED, parse, stride,
};
use self::system_events::Unbindings;
use super::answer::{Charge, Code, Event, HEALTH_EVENTS, Happened, List, Memory, MemoryLimit};
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::ffi::{CString, OsStr, c_void};
use std::fs::File;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// First word of a file, shared with the processes that have it open. Never unmapped; a process has one.
#[derive(Debug)]
pub(crate) struct SharedWord {
    word: &'static AtomicU64,
}

impl SharedWord {
    /// Maps the first word.
    ///
    /// # Errors
    /// The file has no complete word, or a system call fails.
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

    /// Stores the word.
    pub(crate) fn set(&self, value: u64) {
        self.word.store(value, Ordering::Release);
    }
}

type Return = u32;
type MemoryCall<T> = unsafe extern "C" fn(*mut c_void, *mut T) -> Return;
type ListCall = unsafe extern "C" fn(*mut c_void, *mut u32, *mut c_void) -> Return;
type DetailCall = unsafe extern "C" fn(*mut c_void, *mut DetailList) -> Return;
type NumberCall = unsafe extern "C" fn(*mut c_void, *mut u32) -> Return;
type ModelCall = unsafe extern "C" fn(*mut c_void, *mut u32, *mut u32) -> Return;
type AccountCall = unsafe extern "C" fn(*mut c_void, u32, *mut Account) -> Return;
type AddressingCall = unsafe extern "C" fn(*mut c_void, *mut AddressingMode) -> Return;
type LimitsCall = unsafe extern "C" fn(*mut c_void, *mut MemoryLimits) -> Return;
type StateCall = unsafe extern "C" fn(*mut Confidence) -> Return;

/// Functions for events; all or none.
#[derive(Clone, Copy)]
struct EventCalls {
    create: unsafe extern "C" fn(*mut *mut c_void) -> Return,
    types: unsafe extern "C" fn(*mut c_void, *mut u64) -> Return,
    register: unsafe extern "C" fn(*mut c_void, u64, *mut c_void) -> Return,
    wait: unsafe extern "C" fn(*mut c_void, *mut EventData, u32) -> Return,
    free: unsafe extern "C" fn(*mut c_void) -> Return,
}

const XID: u64 = 8;
const PARTITIONED: u64 = 0x100;

const FIRST_RECORDS: usize = 64;
/// The driver itself cuts a list at 950 processes.
const MOST_RECORDS: usize = 64 * 1024;
/// Most attempts at a list that grows between two calls.
const ATTEMPTS: usize = 5;

/// A device of one opened library; invalid for later ones.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Handle {
    device: *mut c_void,
    generation: u32,
}

/// Versions of a list function, newest first. Versions that the driver lacks are removed.
#[derive(Debug, Default)]
struct Versions {
    calls: Vec<(AnyListCall, Layout)>,
}

#[derive(Debug, Clone, Copy)]
enum AnyListCall {
    List(ListCall),
    /// With the mode that selects the list.
    Detail(DetailCall, u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// 16 bytes.
    Short,
    /// 24 bytes.
    Instance,
    /// 24 bytes, or 32 because of an error in early 535 drivers; detected from the written data.
    Newest,
    /// 32 bytes; the last eight are protected bytes.
    Detail,
}

impl EventCalls {
    fn of(nvml: &Nvml) -> Option<EventCalls> {
        // SAFETY: the types are those of the header.
        unsafe {
            Some(EventCalls {
                create: symbol(nvml, "nvmlEventSetCreate")?,
                types: symbol(nvml, "nvmlDeviceGetSupportedEventTypes")?,
                register: symbol(nvml, "nvmlDeviceRegisterEvents")?,
                wait: symbol(nvml, "nvmlEventSetWait_v2")?,
                free: symbol(nvml, "nvmlEventSetFree")?,
            })
        }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.unbindings = None;
        if let Some(events) = self.events {
            for set in self.sets.drain(..) {
                // SAFETY: the set belongs to this library, which is still open, and is not used afterwards.
                unsafe { (events.free)(set) };
            }
        }
    }
}

/// An open NVML. Dropping it shuts the library down and unloads it.
pub(crate) struct Raw {
    generation: u32,
    memory_v1: Option<MemoryCall<MemoryV1>>,
    memory_v2: Option<MemoryCall<MemoryV2>>,
    lists: [Versions; 3],
    gpu_instance: Option<NumberCall>,
    compute_instance: Option<NumberCall>,
    accounting_mode: Option<NumberCall>,
    account: Option<AccountCall>,
    display_active: Option<NumberCall>,
    driver_model: Option<ModelCall>,
    confidence: Option<StateCall>,
    events: Option<EventCalls>,
    system_events: Option<system_events::Calls>,
    unbindings: Option<Unbindings>,
    /// Open event sets, one for each GPU, so that an error of one does not affect the others.
    sets: Vec<*mut c_void>,
    /// Whether this library has the symbols of early 535 drivers.
    looks_like_535: bool,
    buffer: Vec<u64>,
    nvml: Nvml,
}

/// # Safety
/// `F` must be the type of the function that NVML's header declares under this name (pointers to structs may be declared as `*mut
/// c_void`). The function must not be called after `nvml` is dropped.
unsafe fn symbol<F: Copy>(nvml: &Nvml, name: &str) -> Option<F> {
    // SAFETY: the caller guarantees the type and the lifetime.
    unsafe { nvml.lib().__library.get::<F>(name.as_bytes()).ok().map(|symbol| *symbol) }
}

impl Versions {
    fn of(nvml: &Nvml, name: &str) -> Versions {
        let named = [("_v3", Layout::Newest), ("_v2", Layout::Instance), ("", Layout::Short)];
        let call = |(version, layout)| {
            // SAFETY: every version of the three list functions takes a device, a count and an array of records.
            let call = unsafe { symbol::<ListCall>(nvml, &format!("{name}{version}")) };
            call.map(|call| (AnyListCall::List(call), layout))
        };
        Versions { calls: named.into_iter().filter_map(call).collect() }
    }
}

static GENERATIONS: AtomicU32 = AtomicU32::new(1);

impl Raw {
    /// Opens the library and initialises it.
    ///
    /// # Errors
    /// `Err(None)`: it cannot be loaded. `Err(Some(code))`: it cannot be initialised.
    pub(crate) fn open(library: &OsStr) -> Result<Raw, Option<Code>> {
        let nvml = Nvml::builder().lib_path(library).init().map_err(|error| match error {
            NvmlError::LibloadingError(_) => None,
            error => Some(Code::from(error)),
        })?;
        if nvml.lib().nvmlShutdown.is_err() {
            std::mem::forget(nvml); // its drop would call the missing function
            return Err(Some(Code::FUNCTION_NOT_FOUND));
        }
        let has = |name| {
            // SAFETY: the function is only looked up, never called.
            unsafe { symbol::<NumberCall>(&nvml, name) }.is_some()
        };
        let looks_like_535 =
            has("nvmlDeviceGetConfComputeMemSizeInfo") && !has("nvmlDeviceGetRunningProcessDetailList");
        // SAFETY: the types are those of the header; `Raw` drops `nvml` last and calls nothing after that.
        let (memory_v1, memory_v2, gpu_instance, compute_instance) = unsafe {
            (
                symbol(&nvml, "nvmlDeviceGetMemoryInfo"),
                symbol(&nvml, "nvmlDeviceGetMemoryInfo_v2"),
                symbol(&nvml, "nvmlDeviceGetGpuInstanceId"),
                symbol(&nvml, "nvmlDeviceGetComputeInstanceId"),
            )
        };
        // SAFETY: the same.
        let (accounting_mode, account, display_active, driver_model, confidence) = unsafe {
            (
                symbol(&nvml, "nvmlDeviceGetAccountingMode"),
                symbol(&nvml, "nvmlDeviceGetAccountingStats"),
                symbol(&nvml, "nvmlDeviceGetDisplayActive"),
                symbol(&nvml, "nvmlDeviceGetDriverModel"),
                symbol(&nvml, "nvmlSystemGetConfComputeState"),
            )
        };
        let mut raw = Raw {
            generation: GENERATIONS.fetch_add(1, Ordering::Relaxed),
            memory_v1,
            memory_v2,
            lists: [
                Versions::of(&nvml, "nvmlDeviceGetComputeRunningProcesses"),
                Versions::of(&nvml, "nvmlDeviceGetGraphicsRunningProcesses"),
                Versions::of(&nvml, "nvmlDeviceGetMPSComputeRunningProcesses"),
            ],
            gpu_instance,
            compute_instance,
            accounting_mode,
            account,
            display_active,
            driver_model,
            confidence,
            events: EventCalls::of(&nvml),
            system_events: system_events::Calls::of(&nvml),
            unbindings: None,
            sets: Vec::new(),
            looks_like_535,
            buffer: Vec::new(),
            nvml,
        };
        // SAFETY: the type is that of the header.
        let detail = unsafe { symbol::<DetailCall>(&raw.nvml, "nvmlDeviceGetRunningProcessDetailList") };
        if let Some(call) = detail.filter(|_| raw.is_confidential()) {
            for (mode, list) in (0..).zip(&mut raw.lists) {
                list.calls.insert(0, (AnyListCall::Detail(call, mode), Layout::Detail));
            }
        }
        Ok(raw)
    }

    /// Returns the wrapper, for identity, MIG instances and versions.
    pub(crate) fn nvml(&self) -> &Nvml {
        &self.nvml
    }

    /// Returns the handle of a device of [`Raw::nvml`].
    pub(crate) fn handle(&self, device: &nvml_wrapper::Device<'_>) -> Handle {
        // SAFETY: the pointer is only passed to functions of the library that it came from, see `device`.
        Handle { device: unsafe { device.handle() }.cast(), generation: self.generation }
    }

    /// Returns the pointer if it belongs to this opened library: NVML has crashed on others.
    fn device(&self, handle: Handle) -> Result<*mut c_void, Code> {
        if handle.generation == self.generation { Ok(handle.device) } else { Err(Code::UNINITIALIZED) }
    }

    /// Reads device memory, with the driver's share if the driver reports it.
    ///
    /// # Errors
    /// NVML's error.
    pub(crate) fn memory(&mut self, handle: Handle) -> Result<Memory, Code> {
        let device = self.device(handle)?;
        let mut newer = None;
        if let Some(call) = self.memory_v2 {
            let mut memory = MemoryV2 { version: MEMORY_V2, ..MemoryV2::default() };
            // SAFETY: the struct has the size of this `version`, asserted in layouts.
            match checked(unsafe { call(device, &raw mut memory) }) {
                Ok(()) => {
                    return Ok(Memory {
                        total_bytes: memory.total,
                        free_bytes: memory.free,
                        used_bytes: memory.used,
                        reserved_bytes: Some(memory.reserved),
                        is_unified: false,
                    });
                }
                Err(code @ (Code::FUNCTION_NOT_FOUND | Code::ARGUMENT_VERSION_MISMATCH)) => {
                    newer = Some(code)
                }
                Err(code) => return Err(code),
            }
        }
        let call = self.memory_v1.ok_or(newer.unwrap_or(Code::FUNCTION_NOT_FOUND))?;
        let mut memory = MemoryV1::default();
        // SAFETY: the struct is that of this version; its size is asserted in layouts.
        checked(unsafe { call(device, &raw mut memory) }).map_err(|code| newer.unwrap_or(code))?;
        self.memory_v2 = None; // only the older version works, so use it directly from now on
        Ok(Memory {
            total_bytes: memory.total,
            free_bytes: memory.free,
            used_bytes: memory.used,
            reserved_bytes: None,
            is_unified: false,
        })
    }

    /// Reads one of NVML's numbers of a device.
    fn number(&self, handle: Handle, call: Option<NumberCall>) -> Option<u32> {
        let (device, call) = (self.device(handle).ok()?, call?);
        let mut number = u32::MAX;
        // SAFETY: the function writes one u32.
        let answer = checked(unsafe { call(device, &raw mut number) });
        answer.ok().map(|()| number).filter(|&number| number != u32::MAX)
    }

    /// Returns GPU instance and compute instance of a MIG handle.
    pub(crate) fn instance(&self, handle: Handle) -> Option<(u32, u32)> {
        Some((self.number(handle, self.gpu_instance)?, self.number(handle, self.compute_instance)?))
    }

    /// Returns whether accounting mode is on.
    pub(crate) fn is_accounting(&self, handle: Handle) -> bool {
        self.number(handle, self.accounting_mode) == Some(1)
    }

    /// Returns the highest memory use of a process in accounting mode; the process may have ended.
    ///
    /// # Errors
    /// NVML's error.
    pub(crate) fn accounted_peak(&self, handle: Handle, pid: u32) -> Result<u64, Code> {
        let device = self.device(handle)?;
        let call = self.account.ok_or(Code::FUNCTION_NOT_FOUND)?;
        let mut account = Account::default();
        // SAFETY: the struct has the same size in every version, asserted in layouts.
        checked(unsafe { call(device, pid, &raw mut account) })?;
        if account.most_bytes == u64::MAX { Err(Code::NOT_SUPPORTED) } else { Ok(account.most_bytes) }
    }

    /// Returns whether the device drives a display.
    pub(crate) fn is_display_active(&self, handle: Handle) -> bool {
        self.number(handle, self.display_active) == Some(1)
    }

    /// Returns whether Windows manages its memory (WDDM); then the memory of processes is unknown here.
    pub(crate) fn is_windows(&self, handle: Handle) -> bool {
        let (Ok(device), Some(call)) = (self.device(handle), self.driver_model) else { return false };
        let (mut now, mut pending) = (u32::MAX, u32::MAX);
        // SAFETY: the function writes two u32.
        checked(unsafe { call(device, &raw mut now, &raw mut pending) }).is_ok() && now == 0
    }

    /// Returns how the GPU accesses ordinary host memory (malloc): `hmm` or `ats`; `None`: not at all, or unknown.
    pub(crate) fn addressing(&self, handle: Handle) -> Option<&'static str> {
        let device = self.device(handle).ok()?;
        // SAFETY: the type is that of the header.
        let call = unsafe { symbol::<AddressingCall>(&self.nvml, "nvmlDeviceGetAddressingMode") }?;
        let mut mode = AddressingMode::default();
        // SAFETY: the struct has the size of its version.
        checked(unsafe { call(device, &raw mut mode) }).ok()?;
        mode.name()
    }

    /// Returns the host's NUMA node that the GPU's memory forms (Grace).
    pub(crate) fn numa_node(&self, handle: Handle) -> Option<u32> {
        // SAFETY: the function writes one u32.
        self.number(handle, unsafe { symbol(&self.nvml, "nvmlDeviceGetNumaNodeId") })
    }

    /// Reads the memory limit of a control group.
    ///
    /// # Errors
    /// NVML's error; FUNCTION_NOT_FOUND before R615.
    pub(crate) fn memory_limit(&self, handle: Handle, group: &str) -> Result<MemoryLimit, Code> {
        let device = self.device(handle)?;
        // SAFETY: the type is that of the header.
        let call = unsafe { symbol::<LimitsCall>(&self.nvml, "nvmlDeviceGetMemoryLimits_v1") };
        let call = call.ok_or(Code::FUNCTION_NOT_FOUND)?;
        let name = CString::new(group).map_err(|_| Code::INVALID_ARGUMENT)?;
        let mut limits = MemoryLimits { group: name.as_ptr(), soft: 0, hard: 0, used: 0 };
        // SAFETY: the struct is the header's; the name ends with 0 and outlives the call.
        checked(unsafe { call(device, &raw mut limits) })?;
        Ok(MemoryLimit { soft_bytes: limits.soft, hard_bytes: limits.hard, used_bytes: limits.used })
    }

    /// Returns whether confidential computing is on.
    pub(crate) fn is_confidential(&self) -> bool {
        let mut state = Confidence::default();
        // SAFETY: the struct is three u32 and has no other version.
        self.confidence
            .is_some_and(|call| checked(unsafe { call(&raw mut state) }).is_ok() && state.feature != 0)
    }

    /// Returns whether lists have the part of a process's bytes that confidential computing protects.
    pub(crate) fn tells_protected_bytes(&self) -> bool {
        self.lists.iter().any(|list| list.calls.iter().any(|(_, layout)| *layout == Layout::Detail))
    }

    /// Returns whether this driver writes 32 bytes in the version of lists with 24-byte records.
    pub(crate) fn writes_long_records(&self) -> bool {
        self.looks_like_535
    }

    /// Starts watching events of a GPU: faults, health, and changes of its partition. Returns the number for [`Raw::event`].
    ///
    /// # Errors
    /// NVML's error; NOT_SUPPORTED for a GPU without events.
    pub(crate) fn watch(&mut self, handle: Handle) -> Result<usize, Code> {
        let device = self.device(handle)?;
        let events = self.events.ok_or(Code::FUNCTION_NOT_FOUND)?;
        let (mut types, mut set) = (0, std::ptr::null_mut());
        // SAFETY: the function writes one u64.
        checked(unsafe { (events.types)(device, &raw mut types) })?;
        let wanted = types & HEALTH_EVENTS.iter().fold(XID | PARTITIONED, |all, event| all | event.bit);
        if wanted == 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        // SAFETY: the function writes one pointer, which is passed to no other library.
        checked(unsafe { (events.create)(&raw mut set) })?;
        // SAFETY: device and set belong to this library.
        let registered = checked(unsafe { (events.register)(device, wanted, set) });
        if let Err(code) = registered {
            // SAFETY: the set was stored nowhere.
            unsafe { (events.free)(set) };
            return Err(code);
        }
        self.sets.push(set); // freed with the library
        Ok(self.sets.len() - 1)
    }

    /// Returns the next event of a watched GPU, if there is one. Does not wait.
    ///
    /// # Errors
    /// NVML's error.
    pub(crate) fn event(&self, number: usize) -> Result<Option<Event>, Code> {
        let (Some(events), Some(&set)) = (self.events, self.sets.get(number)) else {
            return Err(Code::NOT_FOUND);
        };
        let none = u32::MAX;
        let mut data = EventData { device: std::ptr::null_mut(), kind: 0, data: 0, instance: (none, none) };
        // SAFETY: the struct has the asserted size; earlier versions write less.
        match checked(unsafe { (events.wait)(set, &raw mut data, 0) }) {
            Ok(()) => {}
            Err(Code::TIMEOUT) => return Ok(None),
            Err(code) => return Err(code),
        }
        let kind = match data.kind {
            XID => Happened::Xid(data.data),
            PARTITIONED => Happened::Partitioned,
            bit => {
                let health = HEALTH_EVENTS.iter().position(|event| event.bit == bit);
                health.map_or(Happened::Other, Happened::Health)
            }
        };
        let instance = Some(data.instance).filter(|&(gpu, compute)| gpu != none && compute != none);
        Ok(Some(Event { kind, instance }))
    }

    /// Returns the driver's number of a GPU from which it is being unbound, if any. The first call only starts watching.
    ///
    /// # Errors
    /// NVML's error; FUNCTION_NOT_FOUND before R575.
    pub(crate) fn unbinding(&mut self) -> Result<Option<u32>, Code> {
        let calls = self.system_events.ok_or(Code::FUNCTION_NOT_FOUND)?;
        match &self.unbindings {
            Some(unbindings) => unbindings.next(),
            None => {
                self.unbindings = Some(Unbindings::watch(calls)?);
                Ok(None)
            }
        }
    }

    /// Appends the processes of one list. Makes one call, more only if the list grew.
    ///
    /// # Errors
    /// NVML's error; nothing was appended then.
    pub(crate) fn list(&mut self, handle: Handle, list: List, charges: &mut Vec<Charge>) -> Result<(), Code> {
        let device = self.device(handle)?;
        let versions = self.lists[list as usize].calls.len();
        let mut newer = None;
        for version in 0..versions {
            let (call, layout) = self.lists[list as usize].calls[version];
            match self.list_by(device, call, layout, charges) {
                Ok(()) => {
                    // The driver lacks the newer versions: do not try them again.
                    self.lists[list as usize].calls.drain(..version);
                    return Ok(());
                }
                Err(code @ (Code::FUNCTION_NOT_FOUND | Code::ARGUMENT_VERSION_MISMATCH)) => {
                    newer = newer.or(Some(code));
                }
                Err(Code::NOT_SUPPORTED) if layout == Layout::Detail => {}
                Err(code) => return Err(newer.unwrap_or(code)),
            }
        }
        Err(newer.unwrap_or(Code::FUNCTION_NOT_FOUND))
    }

    fn list_by(
        &mut self,
        device: *mut c_void,
        call: AnyListCall,
        layout: Layout,
        charges: &mut Vec<Charge>,
    ) -> Result<(), Code> {
        let mut records = self.buffer.len() * size_of::<u64>() / RECORD_BYTES;
        for _ in 0..ATTEMPTS {
            records = records.clamp(FIRST_RECORDS, MOST_RECORDS);
            self.buffer.resize(records * RECORD_BYTES / size_of::<u64>(), 0);
            self.buffer.fill(u64::from_ne_bytes([UNTOUCHED; 8]));
            let mut count = u32::try_from(records).unwrap_or(u32::MAX);
            let room = self.buffer.as_mut_ptr().cast();
            let answer = match call {
                // SAFETY: the buffer has `count` times the longest record of any version, aligned to 8.
                AnyListCall::List(call) => checked(unsafe { call(device, &raw mut count, room) }),
                AnyListCall::Detail(call, mode) => {
                    let mut list = DetailList { version: DETAIL_LIST_V1, mode, count, records: room };
                    // SAFETY: the same; the struct has the size of this `version`.
                    let answer = checked(unsafe { call(device, &raw mut list) });
                    count = list.count;
                    answer
                }
            };
            let count = count as usize;
            match answer {
                Ok(()) => {
                    let stride = match layout {
                        Layout::Short => 16,
                        Layout::Instance => 24,
                        Layout::Detail => RECORD_BYTES,
                        Layout::Newest => stride(&self.buffer, count, self.looks_like_535),
                    };
                    parse(&self.buffer, count, stride, layout == Layout::Detail, charges);
                    // Shrink a buffer that was needed for many processes: filling it costs more than a short list.
                    if count < records / 8 {
                        self.buffer.truncate(records / 4 * RECORD_BYTES / size_of::<u64>());
                    }
                    return Ok(());
                }
                Err(Code::INSUFFICIENT_SIZE) if records < MOST_RECORDS => {
                    // Grow at least a little even if the driver reports too small a size.
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

fn checked(answer: Return) -> Result<(), Code> {
    if answer == 0 { Ok(()) } else { Err(Code(answer)) }
}

mod layouts;
mod system_events;
#[cfg(test)]
mod tests;
