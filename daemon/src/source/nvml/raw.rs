//! The calls that nvml-wrapper lacks or does badly: unsafe code, as is in the daemon otherwise only for pidfds, passed sockets and malloc.
//!
//! nvml-wrapper asks for a list's size before each list, which doubles the time that the driver stands still; it
//! knows one version of each call; and it believes that a record of the newest list has 24 bytes, which drivers
//! 535.43 to 535.86 write as 32 behind its back. Here a list is one call into a buffer that is kept, and the buffer
//! has 32 bytes for each record whatever the driver is thought to write.
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

/// The first word of a file, shared with whoever has it open; never unmapped, like the process's one beacon.
#[derive(Debug)]
pub(crate) struct SharedWord {
    word: &'static AtomicU64,
}

impl SharedWord {
    /// Maps it.
    ///
    /// # Errors
    /// The system's; a file that has no word.
    pub(crate) fn map(file: &File) -> std::io::Result<SharedWord> {
        let bytes = size_of::<AtomicU64>();
        if file.metadata()?.len() < bytes as u64 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address that the kernel chooses touches nobody else's memory.
        let at = unsafe { mmap(std::ptr::null_mut(), bytes, access, flags, file, 0) }?;
        let at = NonNull::new(at.cast::<AtomicU64>()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        // SAFETY: the mapping is page-aligned, holds the word, and is never taken away. Should the file be cut behind
        // our back, which its only other owner does not do, the access ends this process and nothing else.
        Ok(SharedWord { word: unsafe { at.as_ref() } })
    }

    /// Stores it.
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

/// The calls for events; all of them or none.
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
/// The driver itself ends a list at 950 processes.
const MOST_RECORDS: usize = 64 * 1024;
/// A list that grew between two calls is asked for again that often.
const ATTEMPTS: usize = 5;

/// A device of one generation of the library. Worthless in another one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Handle {
    device: *mut c_void,
    generation: u32,
}

/// Versions of a list call, newest first; a version that the driver turns out not to have is not tried again.
#[derive(Debug, Default)]
struct Versions {
    calls: Vec<(AnyListCall, Layout)>,
}

#[derive(Debug, Clone, Copy)]
enum AnyListCall {
    List(ListCall),
    /// With the mode that says which list.
    Detail(DetailCall, u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// 16 bytes.
    Short,
    /// 24 bytes.
    Instance,
    /// 24 bytes, or 32 by the fault of early 535: what the driver wrote decides.
    Newest,
    /// 32 bytes, of which the last eight are protected bytes.
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
                // SAFETY: the set is this library's, which is still open, and is used nowhere after this.
                unsafe { (events.free)(set) };
            }
        }
    }
}

/// An open NVML. Dropping it shuts the library down and closes it.
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
    /// Event sets that live, each of one GPU: an error of one is no loss to the others.
    sets: Vec<*mut c_void>,
    /// The symbols of this library are those of early 535.
    looks_like_535: bool,
    buffer: Vec<u64>,
    nvml: Nvml,
}

/// # Safety
/// `F` must be the type of the function that NVML's header declares under this name (pointers to structs may be
/// told as `*mut c_void`), and must not be called once `nvml` is dropped.
unsafe fn symbol<F: Copy>(nvml: &Nvml, name: &str) -> Option<F> {
    // SAFETY: as above.
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
    /// `Err(None)`: it cannot be loaded. `Err(Some(code))`: it will not be initialised.
    pub(crate) fn open(library: &OsStr) -> Result<Raw, Option<Code>> {
        let nvml = Nvml::builder().lib_path(library).init().map_err(|error| match error {
            NvmlError::LibloadingError(_) => None,
            error => Some(Code::from(error)),
        })?;
        if nvml.lib().nvmlShutdown.is_err() {
            std::mem::forget(nvml); // its drop would call what is not there
            return Err(Some(Code::FUNCTION_NOT_FOUND));
        }
        let has = |name| {
            // SAFETY: never called, only asked for.
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

    /// What the wrapper does well: identity, MIG tree, versions.
    pub(crate) fn nvml(&self) -> &Nvml {
        &self.nvml
    }

    /// The handle of one of [`Raw::nvml`]'s devices.
    pub(crate) fn handle(&self, device: &nvml_wrapper::Device<'_>) -> Handle {
        // SAFETY: the pointer is only handed to functions of the library that it came from, see `device`.
        Handle { device: unsafe { device.handle() }.cast(), generation: self.generation }
    }

    /// The pointer, if it is this generation's: NVML has crashed on others.
    fn device(&self, handle: Handle) -> Result<*mut c_void, Code> {
        if handle.generation == self.generation { Ok(handle.device) } else { Err(Code::UNINITIALIZED) }
    }

    /// Device memory, with the driver's share where the driver tells it.
    ///
    /// # Errors
    /// What NVML says.
    pub(crate) fn memory(&mut self, handle: Handle) -> Result<Memory, Code> {
        let device = self.device(handle)?;
        let mut newer = None;
        if let Some(call) = self.memory_v2 {
            let mut memory = MemoryV2 { version: MEMORY_V2, ..MemoryV2::default() };
            // SAFETY: the struct has the size that `version` says, asserted above.
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
        // SAFETY: the struct is the one of this version, its size is asserted above.
        checked(unsafe { call(device, &raw mut memory) }).map_err(|code| newer.unwrap_or(code))?;
        self.memory_v2 = None; // where only the older one works, it is not asked twice
        Ok(Memory {
            total_bytes: memory.total,
            free_bytes: memory.free,
            used_bytes: memory.used,
            reserved_bytes: None,
            is_unified: false,
        })
    }

    /// One of the numbers that NVML has about a device.
    fn number(&self, handle: Handle, call: Option<NumberCall>) -> Option<u32> {
        let (device, call) = (self.device(handle).ok()?, call?);
        let mut number = u32::MAX;
        // SAFETY: the function writes one u32.
        let answer = checked(unsafe { call(device, &raw mut number) });
        answer.ok().map(|()| number).filter(|&number| number != u32::MAX)
    }

    /// GPU instance and compute instance of a MIG handle.
    pub(crate) fn instance(&self, handle: Handle) -> Option<(u32, u32)> {
        Some((self.number(handle, self.gpu_instance)?, self.number(handle, self.compute_instance)?))
    }

    /// Accounting mode is on.
    pub(crate) fn is_accounting(&self, handle: Handle) -> bool {
        self.number(handle, self.accounting_mode) == Some(1)
    }

    /// The most that accounting mode has seen a process hold; it needs not live any more.
    ///
    /// # Errors
    /// What NVML says.
    pub(crate) fn accounted_peak(&self, handle: Handle, pid: u32) -> Result<u64, Code> {
        let device = self.device(handle)?;
        let call = self.account.ok_or(Code::FUNCTION_NOT_FOUND)?;
        let mut account = Account::default();
        // SAFETY: the struct has the one size that it has in every version, asserted above.
        checked(unsafe { call(device, pid, &raw mut account) })?;
        if account.most_bytes == u64::MAX { Err(Code::NOT_SUPPORTED) } else { Ok(account.most_bytes) }
    }

    /// A screen is lit by it.
    pub(crate) fn is_display_active(&self, handle: Handle) -> bool {
        self.number(handle, self.display_active) == Some(1)
    }

    /// Windows manages its memory (WDDM): nobody here knows what a process has.
    pub(crate) fn is_windows(&self, handle: Handle) -> bool {
        let (Ok(device), Some(call)) = (self.device(handle), self.driver_model) else { return false };
        let (mut now, mut pending) = (u32::MAX, u32::MAX);
        // SAFETY: the function writes two u32.
        checked(unsafe { call(device, &raw mut now, &raw mut pending) }).is_ok() && now == 0
    }

    /// How the GPU addresses memory of the host's processes (malloc): `hmm`, `ats`. `None`: not at all, or not known.
    pub(crate) fn addressing(&self, handle: Handle) -> Option<&'static str> {
        let device = self.device(handle).ok()?;
        // SAFETY: the type is that of the header.
        let call = unsafe { symbol::<AddressingCall>(&self.nvml, "nvmlDeviceGetAddressingMode") }?;
        let mut mode = AddressingMode::default();
        // SAFETY: the struct has the size that its version says.
        checked(unsafe { call(device, &raw mut mode) }).ok()?;
        mode.name()
    }

    /// The NUMA node of the host that the GPU's memory is (Grace).
    pub(crate) fn numa_node(&self, handle: Handle) -> Option<u32> {
        // SAFETY: the function writes one u32.
        self.number(handle, unsafe { symbol(&self.nvml, "nvmlDeviceGetNumaNodeId") })
    }

    /// What the driver says of the memory of a control group.
    ///
    /// # Errors
    /// What NVML says; FUNCTION_NOT_FOUND before R615.
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

    /// Confidential computing is on.
    pub(crate) fn is_confidential(&self) -> bool {
        let mut state = Confidence::default();
        // SAFETY: the struct is three u32, and has no other version.
        self.confidence
            .is_some_and(|call| checked(unsafe { call(&raw mut state) }).is_ok() && state.feature != 0)
    }

    /// Its lists say which part of a process's bytes confidential computing protects.
    pub(crate) fn tells_protected_bytes(&self) -> bool {
        self.lists.iter().any(|list| list.calls.iter().any(|(_, layout)| *layout == Layout::Detail))
    }

    /// Its lists have records of 32 bytes under the name of those of 24.
    pub(crate) fn writes_long_records(&self) -> bool {
        self.looks_like_535
    }

    /// Has events of a GPU kept from now on: faults, and changes of its partition. Returns its number for
    /// [`Raw::event`].
    ///
    /// # Errors
    /// What NVML says; a GPU without events is NOT_SUPPORTED.
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
        // SAFETY: the function writes one pointer, which goes to no other library.
        checked(unsafe { (events.create)(&raw mut set) })?;
        // SAFETY: device and set are this library's.
        let registered = checked(unsafe { (events.register)(device, wanted, set) });
        if let Err(code) = registered {
            // SAFETY: nobody else knows the set.
            unsafe { (events.free)(set) };
            return Err(code);
        }
        self.sets.push(set); // freed with the library
        Ok(self.sets.len() - 1)
    }

    /// The next event of a watched GPU, if there is one: it is not waited for.
    ///
    /// # Errors
    /// What NVML says.
    pub(crate) fn event(&self, number: usize) -> Result<Option<Event>, Code> {
        let (Some(events), Some(&set)) = (self.events, self.sets.get(number)) else {
            return Err(Code::NOT_FOUND);
        };
        let none = u32::MAX;
        let mut data = EventData { device: std::ptr::null_mut(), kind: 0, data: 0, instance: (none, none) };
        // SAFETY: the struct has the size that is asserted above; earlier versions wrote less of it.
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

    /// The GPU that the driver is being taken off, if there is one, as the driver numbers it: known from the second call on.
    ///
    /// # Errors
    /// What NVML says; FUNCTION_NOT_FOUND before R575.
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

    /// Appends the processes of one list: one call, more only if it grew.
    ///
    /// # Errors
    /// What NVML says; nothing was appended then.
    pub(crate) fn list(&mut self, handle: Handle, list: List, charges: &mut Vec<Charge>) -> Result<(), Code> {
        let device = self.device(handle)?;
        let versions = self.lists[list as usize].calls.len();
        let mut newer = None;
        for version in 0..versions {
            let (call, layout) = self.lists[list as usize].calls[version];
            match self.list_by(device, call, layout, charges) {
                Ok(()) => {
                    // Newer versions that this driver does not have are not tried again.
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
                    // SAFETY: the same; the struct has the size that `version` says.
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
                    // Filling a buffer that was once needed for a crowd costs more than a list of today.
                    if count < records / 8 {
                        self.buffer.truncate(records / 4 * RECORD_BYTES / size_of::<u64>());
                    }
                    return Ok(());
                }
                Err(Code::INSUFFICIENT_SIZE) if records < MOST_RECORDS => {
                    // Not more than doubled by what a driver claims; a claim that is too small grows it too.
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
