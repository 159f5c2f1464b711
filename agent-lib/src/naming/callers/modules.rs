//! Table of the mapped files, in which callbacks look up the library of an address. Also detects mapped and unmapped files.
//!
//! The sender builds the table from dl_iterate_phdr and publishes it through a pointer; the first one is built while the agent
//! starts. A replaced table is freed after a second, once every thread was seen outside of the agent. A `Library` is never
//! freed, and there is one for each path, so a library keeps its number when it is mapped again.
//!
//! The sender checks for changes in each of its rounds. Rounds are 10 to 20 ms apart while there are records to send, else at
//! most 100 ms. Until the next check, a library at the address of an earlier one is mistaken for that one. A library at a new
//! address gets a number at once, its path later.
//!
//! Before glibc 2.31, a forked child finds dl_iterate_phdr's lock taken if a thread held it at the fork. So fork() waits until
//! the agent does not hold it (`before_fork`).

use super::loader::{self, Collection, Segment};
use crate::driver::core::Core;
use crate::threads;
use gpumem_wire::{Body, Record, Stamp};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

/// Upper bound of the numbers of libraries: the ledger keeps twelve bits for the number.
const NUMBERS: u32 = 1 << 12;
/// Maximum number of libraries that callbacks can number before the sender's next table has them.
const NEW: usize = 32;
/// Minimum time in ns between the replacement of a table and its free.
const GRACE_NS: u64 = 1_000_000_000;

/// What a library does in a driver call: execute it, pass it on, or make it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// The driver, CUPTI or the agent itself: code below the entry function of the driver call.
    Driver,
    /// The CUDA runtime, the C library and similar ones: the search continues with their caller.
    Between,
    /// Any other library: it made the call.
    Caller,
}

/// Prefixes of the file names of the driver's libraries (`Part::Driver`) and of those that pass calls on (`Part::Between`).
const DRIVER: &[&str] =
    &["libgpumem", "libcuda.so", "libcupti", "libnvidia-", "libnvperf", "linux-vdso", "linux-gate"];
const BETWEEN: &[&str] = &[
    "libcudart",
    "libc.so",
    "libc-",
    "libpthread",
    "ld-linux",
    "ld-2",
    "ld.so",
    "libdl.",
    "libdl-",
    "libm.",
    "libm-",
    "librt.",
    "librt-",
    "libstdc++",
    "libgcc_s",
    "libc++",
    "libffi",
    "libnvToolsExt",
    "libnvtx3interop",
];

impl Part {
    pub(crate) fn of(path: &str) -> Part {
        let name = path.rsplit('/').next().unwrap_or(path);
        let has_prefix = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
        match (has_prefix(DRIVER), has_prefix(BETWEEN)) {
            (true, _) => Part::Driver,
            (_, true) => Part::Between,
            _ => Part::Caller,
        }
    }
}

/// A file that was mapped at some time; never freed.
pub(crate) struct Library {
    path: Box<str>,
    pub part: Part,
    base: u64,
    bytes: u64,
    /// Number of the library; 0 until a callback needs it.
    id: AtomicU16,
}

pub(crate) struct Table {
    /// Mapped segments, sorted by address.
    segments: Box<[Segment]>,
    /// Libraries of the segments; `Segment::object` is the index.
    libraries: Vec<&'static Library>,
}

/// What an address points to.
pub(crate) enum Target {
    /// Executable code of this library.
    Code(&'static Library),
    /// Part of a library that is not code.
    Data,
    /// Memory that belongs to no library in the table.
    Elsewhere,
}

impl Table {
    #[inline]
    pub(crate) fn find(&self, address: usize) -> Target {
        let after = self.segments.partition_point(|segment| segment.start <= address);
        match after.checked_sub(1).and_then(|index| self.segments.get(index)) {
            Some(segment) if segment.code.0 <= address && address < segment.code.1 => {
                Target::Code(self.libraries[segment.object])
            }
            Some(segment) if address < segment.end => Target::Data,
            _ => Target::Elsewhere,
        }
    }
}

/// Returns the path of the file in which a function lies, and the file's start address in memory. `None` for the driver and for
/// libraries that pass calls on. For the sender.
pub(crate) fn file_at(address: usize) -> Option<(&'static str, u64)> {
    match table()?.find(address) {
        Target::Code(library) if library.part == Part::Caller => Some((&library.path, library.base)),
        _ => None,
    }
}

static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());
/// Increases with each table and with `invalidate`; results found with an older value are not reused.
static GENERATION: AtomicU32 = AtomicU32::new(0);
/// The number that the next library gets.
static NEXT_NUMBER: AtomicU32 = AtomicU32::new(1);

#[inline(always)]
pub(crate) fn generation() -> u32 {
    GENERATION.load(Acquire)
}

/// Invalidates the cached callers, because another position of a return address has become more likely.
pub(crate) fn invalidate() {
    GENERATION.fetch_add(1, AcqRel);
}

/// Returns the newest table. It is valid while the calling thread is marked as inside of the agent.
#[inline(always)]
pub(crate) fn table() -> Option<&'static Table> {
    // SAFETY: null, or a table that is freed only after this thread was seen outside of the agent.
    unsafe { TABLE.load(Acquire).as_ref() }
}

/// Returns the number of a library, and reports its path the first time; 0 if there are too many. Does not allocate.
pub(crate) fn number(core: &Core, library: &Library) -> u16 {
    let known = library.id.load(Relaxed);
    if known != 0 {
        return known;
    }
    let (id, is_new) = assign_number(&library.id);
    if is_new {
        report_library(core, id, library.base, library.bytes, &library.path);
    }
    id
}

/// Returns the number in `id`, and whether this call assigned it; 0 if there are too many libraries.
fn assign_number(id: &AtomicU16) -> (u16, bool) {
    let next = NEXT_NUMBER.fetch_update(Relaxed, Relaxed, |next| (next < NUMBERS).then_some(next + 1));
    let next = next.map_or(0, |number| number as u16);
    match id.compare_exchange(0, next, AcqRel, Acquire) {
        Ok(_) => (next, next != 0),
        Err(first) => (first, false), // another thread was first; the number `next` stays unused
    }
}

/// Numbers of the libraries of PyTorch's allocator, for CUDA and for HIP; 0 until the library makes a driver call.
static TORCH: [AtomicU16; 2] = [const { AtomicU16::new(0) }; 2];
/// First parts of the names of files through which Python code calls C functions.
const PYTHON_FILES: [&str; 5] = ["libpython3", "python", "_ctypes", "_cffi_backend", "libffi"];
/// Numbers of these files; 0 until the file makes a driver call.
static PYTHON: [AtomicU16; 5] = [const { AtomicU16::new(0) }; 5];

/// Whether the library with this number contains PyTorch's allocator.
#[inline(always)]
pub(crate) fn is_torch(number: u16) -> bool {
    number != 0 && TORCH.iter().any(|torch| torch.load(Relaxed) == number)
}

/// Whether the library with this number is the Python interpreter or a file through which Python code calls C functions. Then a
/// line of Python code made the call.
pub(crate) fn is_python(number: u16) -> bool {
    number != 0 && PYTHON.iter().any(|python| python.load(Relaxed) == number)
}

fn report_library(core: &Core, id: u16, base: u64, bytes: u64, path: &str) {
    let file = path.rsplit('/').next().unwrap_or_default();
    let torch = TORCH.iter().zip(["libc10_cuda", "libc10_hip"]);
    for (number, name) in torch.chain(PYTHON.iter().zip(PYTHON_FILES)) {
        if file.starts_with(name) {
            number.store(id, Relaxed);
        }
    }
    let stamp = Stamp { module: id, ..Stamp::default() };
    core.recorder.names.add(&Record { stamp, body: Body::Module { base, bytes, path } });
}

/// A library that a callback met before the table had it. Its number is in use already; the sender reports its path later.
struct NewLibrary {
    /// Address at which the file is mapped; 0 for an unused entry.
    start: AtomicUsize,
    id: AtomicU16,
}

static NEW_LIBRARIES: [NewLibrary; NEW] =
    [const { NewLibrary { start: AtomicUsize::new(0), id: AtomicU16::new(0) } }; NEW];

/// `_dl_find_object`, in glibc 2.35 and later: finds a mapped file without a lock.
type FindObject = unsafe extern "C" fn(*const c_void, *mut Found) -> c_int;
static FIND_OBJECT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// `struct dl_find_object`, with room for fields of later versions.
#[repr(C)]
struct Found {
    flags: u64,
    start: usize,
    end: usize,
    rest: [u64; 29],
}

/// Returns the start of the mapped file that contains `address`; `None` if no file does, or without `_dl_find_object`.
pub(crate) fn mapped_at(address: usize) -> Option<usize> {
    let find = FIND_OBJECT.load(Relaxed);
    if find.is_null() {
        return None;
    }
    // SAFETY: the C library's function of this name and type; it takes no lock and allocates nothing.
    let find: FindObject = unsafe { std::mem::transmute(find) };
    let mut found = Found { flags: 0, start: 0, end: 0, rest: [0; 29] };
    // SAFETY: any address may be looked up, and `found` has room for the answer.
    let is_found = unsafe { find(address as *const c_void, &mut found) } == 0;
    (is_found && found.start <= address && address < found.end).then_some(found.start)
}

/// Returns a number for the file that begins at `start` and is not in the table yet; 0 if there are too many.
pub(crate) fn number_of_new(start: usize) -> u16 {
    let has_start = |new: &&NewLibrary| {
        let known = new.start.load(Acquire);
        known == start || known == 0 && new.start.compare_exchange(0, start, AcqRel, Acquire).is_ok()
    };
    let Some(new) = NEW_LIBRARIES.iter().find(has_start) else { return 0 };
    match new.id.load(Acquire) {
        0 => assign_number(&new.id).0,
        id => id,
    }
}

// The functions below are not for callbacks.

/// Lock: set while a thread is inside of dl_iterate_phdr or forks.
static GATE: AtomicBool = AtomicBool::new(false);
/// Number of times that fork() tries to take `GATE` before it continues without: its own thread may hold it (signal handler).
const FORK_RETRIES: u32 = 1 << 14;
/// Whether the forking thread holds the lock `GATE`.
static HELD: AtomicBool = AtomicBool::new(false);

/// Takes `GATE` before a fork: waits until no thread is inside of dl_iterate_phdr, and keeps other threads out.
pub(crate) fn before_fork() {
    for _ in 0..FORK_RETRIES {
        if !GATE.swap(true, Acquire) {
            HELD.store(true, Relaxed);
            return;
        }
        // SAFETY: takes no arguments.
        unsafe { libc::sched_yield() };
    }
}

/// Releases the lock `GATE` in the parent after a fork.
pub(crate) fn after_fork() {
    if HELD.swap(false, Relaxed) {
        GATE.store(false, Release);
    }
}

/// Releases the lock `GATE` in a forked child, which has one thread.
pub(crate) fn in_child() {
    HELD.store(false, Relaxed);
    GATE.store(false, Release);
}

static REGISTRY: Mutex<Registry> =
    Mutex::new(Registry { libraries: BTreeMap::new(), seen: None, retired: Vec::new() });
/// Number of tables built so far, for tests.
pub static TABLES: AtomicU64 = AtomicU64::new(0);

struct Registry {
    libraries: BTreeMap<Box<str>, &'static Library>,
    /// Value of `Collection::changes` when the newest table was built.
    seen: Option<(u64, u64)>,
    /// Replaced tables, each with the time of its replacement in ns.
    retired: Vec<(u64, *mut Table)>,
}

// SAFETY: only the registry frees the tables.
unsafe impl Send for Registry {}

/// Builds a new table if files were mapped or unmapped. For the sender and the start. Returns false if the lock is taken.
pub fn update_table(core: &Core) -> bool {
    if GATE.swap(true, Acquire) {
        return false;
    }
    let is_updated = REGISTRY.try_lock().map(|mut registry| registry.update(core)).is_ok();
    GATE.store(false, Release);
    is_updated
}

/// Number of times that a thread of the program tries to take `GATE` in `in_loader`.
const LOADER_RETRIES: u32 = 320;

/// Runs `work`, which uses dl_iterate_phdr, while no thread forks. Returns `None` if the lock was not free in time.
pub(crate) fn in_loader<T>(work: impl FnOnce() -> T) -> Option<T> {
    for turn in 0..LOADER_RETRIES {
        if !GATE.swap(true, Acquire) {
            let result = work();
            GATE.store(false, Release);
            return Some(result);
        }
        threads::wait_a_turn(turn);
    }
    None
}

/// Frees replaced tables that no thread reads any more. The sender calls it regularly.
pub(crate) fn reclaim(now_ns: u64) {
    let Ok(mut registry) = REGISTRY.try_lock() else { return };
    let due = |retired: &(u64, *mut Table)| now_ns.saturating_sub(retired.0) >= GRACE_NS;
    // By now each thread reads the newer table, unless it has been inside of the agent since before the change.
    if registry.retired.iter().any(due) && threads::all().iter().all(|thread| thread.busy.load(Acquire) == 0)
    {
        for (_, table) in registry.retired.extract_if(.., |retired| due(retired)) {
            // SAFETY: `publish` made it, and no thread uses it any more.
            drop(unsafe { Box::from_raw(table) });
        }
    }
}

impl Registry {
    fn update(&mut self, core: &Core) {
        let now = loader::changes_now();
        let is_new = |new: &NewLibrary| new.id.load(Relaxed) != 0;
        if self.seen == Some(now) && !NEW_LIBRARIES.iter().any(is_new) {
            return;
        }
        if self.seen.is_none() {
            // SAFETY: the name is a C string.
            let find = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_dl_find_object".as_ptr()) };
            FIND_OBJECT.store(find, Relaxed);
        }
        let collection = Collection::take();
        self.seen = Some(collection.changes);
        self.publish(core, collection);
    }

    fn publish(&mut self, core: &Core, collection: Collection) {
        let indexes = 0..collection.objects.len();
        let libraries: Vec<_> = indexes.map(|index| self.library(index, &collection)).collect();
        let starts = collection.objects.iter().map(|object| object.start);
        let starts: Vec<_> = starts.zip(libraries.iter().copied()).collect();
        let mut segments = collection.segments;
        segments.sort_unstable_by_key(|segment| segment.start);
        let table = Box::into_raw(Box::new(Table { segments: segments.into(), libraries }));
        let old = TABLE.swap(table, AcqRel);
        GENERATION.fetch_add(1, AcqRel);
        TABLES.fetch_add(1, Relaxed);
        if !old.is_null() {
            self.retired.push((core.recorder.clock.now(), old));
        }
        report_new_libraries(core, &starts);
    }

    fn library(&mut self, index: usize, collection: &Collection) -> &'static Library {
        let (path, object) = (collection.path(index), &collection.objects[index]);
        self.libraries.entry(path.as_str().into()).or_insert_with(|| {
            // The agent's library is never the caller, regardless of its file name. If the agent is linked into the program
            // (index 0), the program still counts as a caller.
            let here = update_table as *const () as usize;
            let is_agent = index != 0 && object.start <= here && here < object.end;
            Box::leak(Box::new(Library {
                part: if is_agent { Part::Driver } else { Part::of(&path) },
                path: path.into(),
                base: object.start as u64,
                bytes: (object.end - object.start) as u64,
                id: AtomicU16::new(0),
            }))
        })
    }
}

/// Reports the paths of libraries that callbacks numbered before the table had them. `starts`: mapped files by start address.
fn report_new_libraries(core: &Core, starts: &[(usize, &'static Library)]) {
    for new in &NEW_LIBRARIES {
        let (start, id) = (new.start.load(Acquire), new.id.load(Acquire));
        if start == 0 || id == 0 {
            continue;
        }
        match starts.iter().find(|(known, _)| *known == start) {
            Some((_, library)) => {
                let _ = library.id.compare_exchange(0, id, Relaxed, Relaxed);
                report_library(core, id, library.base, library.bytes, &library.path);
            }
            None => report_library(core, id, start as u64, 0, "(a library that is gone)"),
        }
        new.id.store(0, Release);
        new.start.store(0, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_go_by_the_name_of_the_file() {
        let cases = [
            ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", Part::Driver),
            ("/a/nvidia/cuda_cupti/lib/libcupti.so.12", Part::Driver),
            ("/opt/libgpumem.so", Part::Driver),
            ("linux-vdso.so.1", Part::Driver),
            ("/a/libcudart-d0da41ae.so.11.0", Part::Between),
            ("/a/libcudart.so.12", Part::Between),
            ("/lib/x86_64-linux-gnu/libc.so.6", Part::Between),
            ("/lib/libc-2.31.so", Part::Between),
            ("/a/libstdc++.so.6", Part::Between),
            ("/a/torch/lib/libc10.so", Part::Caller),
            ("/a/torch/lib/libc10_cuda.so", Part::Caller),
            ("/a/torch/lib/libtorch_cuda.so", Part::Caller),
            ("/a/libcublas.so.12", Part::Caller),
            ("/a/libmkl_core.so", Part::Caller),
            ("/a/libnccl.so.2", Part::Caller),
            ("/usr/bin/python3.11", Part::Caller),
        ];
        for (path, part) in cases {
            assert_eq!(Part::of(path), part, "{path}");
        }
    }
}
