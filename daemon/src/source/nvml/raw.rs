//! The calls that nvml-wrapper lacks or does badly, and the only unsafe code of the daemon.
//!
//! nvml-wrapper asks for a list's size before each list, which doubles the time that the driver stands still; it
//! knows one version of each call; and it believes that a record of the newest list has 24 bytes, which drivers
//! 535.43 to 535.86 write as 32 behind its back. Here a list is one call into a buffer that is kept, and the buffer
//! has 32 bytes for each record whatever the driver is thought to write.
//!
//! ```text
//! record   16 bytes  u32 pid, 4 unused, u64 bytes                                   v1
//!          24        ... u32 gpu instance, u32 compute instance                     v2, v3
//!          32        ... u64 protected bytes                                        "v3" of early 535
//! ```

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::ffi::{OsStr, c_void};
use std::fs::File;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The first word of a file, shared with whoever has it open; never unmapped, like the process's one beacon.
#[derive(Debug)]
pub struct SharedWord {
    word: &'static AtomicU64,
}

impl SharedWord {
    /// Maps it.
    ///
    /// # Errors
    /// The system's; a file that has no word.
    pub fn map(file: &File) -> std::io::Result<SharedWord> {
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
    pub fn set(&self, value: u64) {
        self.word.store(value, Ordering::Release);
    }
}

/// A return code of NVML; 0 is success and never in one of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub u32);

#[allow(missing_docs)]
impl Code {
    pub const UNINITIALIZED: Code = Code(1);
    pub const NOT_SUPPORTED: Code = Code(3);
    pub const NO_PERMISSION: Code = Code(4);
    pub const NOT_FOUND: Code = Code(6);
    pub const INSUFFICIENT_SIZE: Code = Code(7);
    pub const DRIVER_NOT_LOADED: Code = Code(9);
    pub const TIMEOUT: Code = Code(10);
    pub const FUNCTION_NOT_FOUND: Code = Code(13);
    pub const GPU_IS_LOST: Code = Code(15);
    pub const RESET_REQUIRED: Code = Code(16);
    pub const LIB_RM_VERSION_MISMATCH: Code = Code(18);
    pub const ARGUMENT_VERSION_MISMATCH: Code = Code(25);
    pub const GPU_NOT_FOUND: Code = Code(28);
    pub const UNKNOWN: Code = Code(999);
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = match self.0 {
            1 => "the library is not initialised",
            2 => "invalid argument",
            3 => "not supported",
            4 => "no permission",
            6 => "not found",
            7 => "the list kept growing while it was read",
            9 => "the driver is not loaded",
            10 => "timeout",
            13 => "the library lacks the function",
            15 => "the GPU is lost",
            16 => "the GPU needs a reset",
            18 => "library and driver are of different versions; reload the driver or reboot",
            19 => "in use",
            25 => "argument version mismatch",
            27 => "not ready",
            28 => "GPU not found",
            999 => "unknown error",
            other => return write!(f, "error {other}"),
        };
        f.write_str(text)
    }
}

impl From<NvmlError> for Code {
    fn from(error: NvmlError) -> Code {
        Code(match error {
            NvmlError::Uninitialized => 1,
            NvmlError::InvalidArg => 2,
            NvmlError::NotSupported => 3,
            NvmlError::NoPermission => 4,
            NvmlError::NotFound => 6,
            NvmlError::InsufficientSize(_) => 7,
            NvmlError::DriverNotLoaded => 9,
            NvmlError::Timeout => 10,
            NvmlError::FunctionNotFound | NvmlError::FailedToLoadSymbol(_) => 13,
            NvmlError::GpuLost => 15,
            NvmlError::ResetRequired => 16,
            NvmlError::OperatingSystem => 17,
            NvmlError::LibRmVersionMismatch => 18,
            NvmlError::InUse => 19,
            NvmlError::UnexpectedVariant(code) => code,
            _ => 999,
        })
    }
}

/// Device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Size.
    pub total_bytes: u64,
    /// Neither used nor the driver's.
    pub free_bytes: u64,
    /// Used; without the driver's share where that is told apart.
    pub used_bytes: u64,
    /// The driver's share.
    pub reserved_bytes: Option<u64>,
}

/// One process in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Charge {
    /// Pid as NVML says it.
    pub pid: u32,
    /// Absent where NVML answers "not available".
    pub bytes: Option<u64>,
    /// GPU instance and compute instance on a partitioned GPU.
    pub instance: Option<(u32, u32)>,
}

/// Which processes are listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum List {
    Compute = 0,
    Graphics = 1,
    Mps = 2,
}

impl List {
    /// All of them.
    pub const ALL: [List; 3] = [List::Compute, List::Graphics, List::Mps];
    /// Its bit in `ProcessSample.lists`.
    pub const fn bit(self) -> u8 {
        1 << self as u8
    }
}

type Return = u32;
type MemoryCall<T> = unsafe extern "C" fn(*mut c_void, *mut T) -> Return;
type ListCall = unsafe extern "C" fn(*mut c_void, *mut u32, *mut c_void) -> Return;
type NumberCall = unsafe extern "C" fn(*mut c_void, *mut u32) -> Return;

#[repr(C)]
#[derive(Default)]
struct MemoryV1 {
    total: u64,
    free: u64,
    used: u64,
}

#[repr(C)]
#[derive(Default)]
struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

const _: () = assert!(size_of::<MemoryV1>() == 24 && size_of::<MemoryV2>() == 40);
const _: () = assert!(std::mem::offset_of!(MemoryV2, total) == 8);
const MEMORY_V2: u32 = 40 | 2 << 24;

/// The longest record that any driver writes; the buffer has room for this one.
const RECORD_BYTES: usize = 32;
const FIRST_RECORDS: usize = 64;
/// The driver itself ends a list at 950 processes.
const MOST_RECORDS: usize = 64 * 1024;
/// A list that grew between two calls is asked for again that often.
const ATTEMPTS: usize = 5;
/// What the buffer holds before a call, so that one sees how far the driver wrote.
const UNTOUCHED: u8 = 0xa5;

/// A device of one generation of the library. Worthless in another one.
#[derive(Debug, Clone, Copy)]
pub struct Handle {
    device: *mut c_void,
    generation: u32,
}

/// Versions of a list call, newest first; a version that the driver turns out not to have is not tried again.
#[derive(Debug, Default)]
struct Versions {
    calls: Vec<(ListCall, Layout)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// 16 bytes.
    Short,
    /// 24 bytes.
    Instance,
    /// 24 bytes, or 32 by the fault of early 535: what the driver wrote decides.
    Newest,
}

/// An open NVML. Dropping it shuts the library down and closes it.
pub struct Raw {
    generation: u32,
    memory_v1: Option<MemoryCall<MemoryV1>>,
    memory_v2: Option<MemoryCall<MemoryV2>>,
    lists: [Versions; 3],
    gpu_instance: Option<NumberCall>,
    compute_instance: Option<NumberCall>,
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
            call.map(|call| (call, layout))
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
    pub fn open(library: &OsStr) -> Result<Raw, Option<Code>> {
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
        Ok(Raw {
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
            looks_like_535,
            buffer: Vec::new(),
            nvml,
        })
    }

    /// What the wrapper does well: identity, MIG tree, versions.
    pub fn nvml(&self) -> &Nvml {
        &self.nvml
    }

    /// The handle of one of [`Raw::nvml`]'s devices.
    pub fn handle(&self, device: &nvml_wrapper::Device<'_>) -> Handle {
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
    pub fn memory(&mut self, handle: Handle) -> Result<Memory, Code> {
        let device = self.device(handle)?;
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
                    });
                }
                Err(Code::FUNCTION_NOT_FOUND | Code::ARGUMENT_VERSION_MISMATCH) => self.memory_v2 = None,
                Err(code) => return Err(code),
            }
        }
        let call = self.memory_v1.ok_or(Code::FUNCTION_NOT_FOUND)?;
        let mut memory = MemoryV1::default();
        // SAFETY: the struct is the one of this version, its size is asserted above.
        checked(unsafe { call(device, &raw mut memory) })?;
        Ok(Memory {
            total_bytes: memory.total,
            free_bytes: memory.free,
            used_bytes: memory.used,
            reserved_bytes: None,
        })
    }

    /// GPU instance and compute instance of a MIG handle.
    pub fn instance(&self, handle: Handle) -> Option<(u32, u32)> {
        let device = self.device(handle).ok()?;
        let number = |call: NumberCall| {
            let mut number = u32::MAX;
            // SAFETY: the function writes one u32.
            let answer = checked(unsafe { call(device, &raw mut number) });
            answer.ok().map(|()| number).filter(|&number| number != u32::MAX)
        };
        Some((number(self.gpu_instance?)?, number(self.compute_instance?)?))
    }

    /// Appends the processes of one list: one call, more only if it grew.
    ///
    /// # Errors
    /// What NVML says; nothing was appended then.
    pub fn list(&mut self, handle: Handle, list: List, charges: &mut Vec<Charge>) -> Result<(), Code> {
        let device = self.device(handle)?;
        let mut attempts = 0;
        while let Some(&(call, layout)) = self.lists[list as usize].calls.first() {
            let records = (self.buffer.len() * size_of::<u64>() / RECORD_BYTES).max(FIRST_RECORDS);
            self.buffer.resize(records * RECORD_BYTES / size_of::<u64>(), 0);
            self.buffer.fill(u64::from_ne_bytes([UNTOUCHED; 8]));
            let mut count = u32::try_from(records).unwrap_or(u32::MAX);
            // SAFETY: the buffer has `count` times the longest record of any version, aligned to 8.
            let answer = checked(unsafe { call(device, &raw mut count, self.buffer.as_mut_ptr().cast()) });
            let count = count as usize;
            match answer {
                Ok(()) => {
                    let stride = match layout {
                        Layout::Short => 16,
                        Layout::Instance => 24,
                        Layout::Newest => stride(&self.buffer, count, self.looks_like_535),
                    };
                    parse(&self.buffer, count, stride, charges);
                    return Ok(());
                }
                Err(Code::INSUFFICIENT_SIZE) => {
                    attempts += 1;
                    // Not more than doubled by what a driver claims; a claim that is too small grows it too.
                    let wanted = count.max(records + 1).saturating_add(8).next_power_of_two();
                    if attempts == ATTEMPTS || records == MOST_RECORDS {
                        return Err(Code::INSUFFICIENT_SIZE);
                    }
                    self.buffer.resize(wanted.min(MOST_RECORDS) * RECORD_BYTES / size_of::<u64>(), 0);
                }
                Err(Code::FUNCTION_NOT_FOUND | Code::ARGUMENT_VERSION_MISMATCH) => {
                    self.lists[list as usize].calls.remove(0);
                }
                Err(code) => return Err(code),
            }
        }
        Err(Code::FUNCTION_NOT_FOUND)
    }
}

fn checked(answer: Return) -> Result<(), Code> {
    if answer == 0 { Ok(()) } else { Err(Code(answer)) }
}

fn word(buffer: &[u64], byte: usize) -> u64 {
    buffer.get(byte / 8).copied().unwrap_or(0)
}

/// Distance of the records of a newest list: 24, but 32 if the driver has written exactly to the end of `count`
/// records of 32. A driver that wipes the whole array first leaves no trace; then the symbols decide.
fn stride(buffer: &[u64], count: usize, looks_like_535: bool) -> usize {
    let untouched = u64::from_ne_bytes([UNTOUCHED; 8]);
    let records = buffer.len() * 8 / RECORD_BYTES;
    if count == 0 || count > records || word(buffer, count * 24) == untouched {
        return 24; // nothing was written behind the records of 24
    }
    let ends_at_32 = count == records || word(buffer, count * 32) == untouched;
    let wrote_last = word(buffer, count * 32 - 8) != untouched;
    let wiped = !ends_at_32;
    if (wiped && looks_like_535) || (!wiped && wrote_last) { 32 } else { 24 }
}

/// Reads `count` records, as far as the buffer goes.
fn parse(buffer: &[u64], count: usize, stride: usize, charges: &mut Vec<Charge>) {
    let none = u32::MAX;
    for record in buffer.chunks_exact(stride / 8).take(count) {
        let instance = record.get(2).map_or((none, none), |&pair| halves(pair));
        charges.push(Charge {
            pid: halves(record[0]).0,
            bytes: Some(record[1]).filter(|&bytes| bytes != u64::MAX),
            instance: Some(instance).filter(|&(gpu, compute)| gpu != none && compute != none),
        });
    }
}

/// The two u32 in memory order.
fn halves(word: u64) -> (u32, u32) {
    let bytes = word.to_ne_bytes();
    let [a, b, c, d, e, f, g, h] = bytes;
    (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNTOUCHED_WORD: u64 = u64::from_ne_bytes([UNTOUCHED; 8]);

    fn pair(low: u32, high: u32) -> u64 {
        let ([a, b, c, d], [e, f, g, h]) = (low.to_ne_bytes(), high.to_ne_bytes());
        u64::from_ne_bytes([a, b, c, d, e, f, g, h])
    }

    /// A buffer of `room` records into which a driver wrote `count` of `stride` bytes.
    fn written(room: usize, count: usize, stride: usize) -> Vec<u64> {
        let mut buffer = vec![UNTOUCHED_WORD; room * RECORD_BYTES / 8];
        for index in 0..count {
            let record = &mut buffer[index * stride / 8..(index + 1) * stride / 8];
            record.fill(0);
            record[0] = pair(100 + index as u32, 0);
            record[1] = 1 << 20;
            if stride > 16 {
                record[2] = pair(3, 1);
            }
        }
        buffer
    }

    #[test]
    fn the_length_of_a_record_is_seen_from_what_was_written() {
        for count in [1, 2, 3, 4, 16, 47, 48, 63, 64] {
            for length in [24, 32] {
                let buffer = written(64, count, length);
                for symbols in [false, true] {
                    assert_eq!(stride(&buffer, count, symbols), length, "{count} of {length}, {symbols}");
                }
                let mut charges = Vec::new();
                parse(&buffer, count, length, &mut charges);
                let pids: Vec<u32> = charges.iter().map(|charge| charge.pid).collect();
                assert_eq!(pids, (100..100 + count as u32).collect::<Vec<_>>());
                assert!(charges.iter().all(|charge| charge.bytes == Some(1 << 20)));
                assert!(charges.iter().all(|charge| charge.instance == Some((3, 1))));
            }
        }
        assert_eq!(stride(&written(64, 0, 24), 0, true), 24);
    }

    #[test]
    fn a_wiped_array_is_read_by_the_symbols() {
        let mut buffer = written(64, 2, 24);
        buffer.iter_mut().filter(|word| **word == UNTOUCHED_WORD).for_each(|word| *word = 0);
        assert_eq!(stride(&buffer, 2, false), 24);
        assert_eq!(stride(&buffer, 2, true), 32);
    }

    #[test]
    fn a_count_beyond_the_buffer_reads_nothing_beyond() {
        for length in [16, 24, 32] {
            let mut charges = Vec::new();
            parse(&written(64, 64, length), usize::MAX, length, &mut charges);
            assert_eq!(charges.len(), 64 * RECORD_BYTES / length);
        }
        assert_eq!(stride(&written(64, 64, 32), 1 << 40, true), 24);
    }

    #[test]
    fn not_available_is_absent() {
        let mut buffer = written(64, 1, 24);
        buffer[1] = u64::MAX;
        buffer[2] = u64::MAX;
        let mut charges = Vec::new();
        parse(&buffer, 1, 24, &mut charges);
        assert_eq!(charges, [Charge { pid: 100, bytes: None, instance: None }]);
    }
}
