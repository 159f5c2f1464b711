//! The table of mapped files: segments sorted by address for callbacks, and detection of files that are mapped or unmapped.
//!
//! The sender builds the table from dl_iterate_phdr and publishes it through a pointer; the first one is built while the agent
//! starts. An old table is freed when a second has passed and every thread was seen outside of the library since. Libraries are
//! never freed, one for each path, so a library keeps its number when it is mapped again.
//!
//! Changes are found with the sender's next check: every 5 ms while there is something to send, else every 100 ms. Until then a
//! library at the address of an earlier one is mistaken for it. At a new address it gets a number at once, its path later.
//!
//! Before glibc 2.31, a forked child would find dl_iterate_phdr's lock taken. So fork() waits for the agent (`before_fork`).

use super::loader::{self, Collection, Object};
use crate::driver::core::Core;
use crate::threads;
use gpumem_wire::{Body, Record, Stamp};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

/// Numbers of libraries in a process: the ledger keeps twelve bits for them.
const NUMBERS: u32 = 1 << 12;
/// Libraries at a time that callbacks met before the table had them.
const NEW: usize = 32;
/// Minimum age at which an old table may be freed.
const GRACE_NS: u64 = 1_000_000_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// The driver, CUPTI, or this library: where a call arrives.
    Driver,
    /// The CUDA runtime, the C library and similar ones: the search continues with their caller.
    Between,
    /// Any other library: the caller.
    Caller,
}

/// File name prefixes: the driver's libraries, and (`BETWEEN`) libraries that pass calls on.
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
        let is = |beginnings: &[&str]| beginnings.iter().any(|beginning| name.starts_with(beginning));
        if is(DRIVER) {
            Part::Driver
        } else if is(BETWEEN) {
            Part::Between
        } else {
            Part::Caller
        }
    }
}

/// A file that was mapped at some time; never freed.
#[derive(Debug)]
pub(crate) struct Library {
    path: Box<str>,
    pub part: Part,
    base: u64,
    bytes: u64,
    /// 0 until a callback needs a number.
    id: AtomicU16,
}

/// A mapped segment and its range of functions.
#[derive(Debug, Clone, Copy)]
struct Segment {
    start: usize,
    end: usize,
    code: (usize, usize),
    library: &'static Library,
}

/// Mapped segments, sorted by address.
#[derive(Debug)]
pub(crate) struct Table {
    segments: Box<[Segment]>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Place {
    /// A function of this library.
    Code(&'static Library),
    /// Other contents of a library.
    Data,
    /// In no library of the table.
    Elsewhere,
}

impl Table {
    #[inline]
    pub(crate) fn find(&self, address: usize) -> Place {
        let after = self.segments.partition_point(|segment| segment.start <= address);
        let Some(segment) = after.checked_sub(1).and_then(|index| self.segments.get(index)) else {
            return Place::Elsewhere;
        };
        if address >= segment.end {
            Place::Elsewhere
        } else if segment.code.0 <= address && address < segment.code.1 {
            Place::Code(segment.library)
        } else {
            Place::Data
        }
    }
}

/// Returns the path of the file in which a function lies, and its start address in memory. For the sender.
pub(crate) fn file_at(address: usize) -> Option<(&'static str, u64)> {
    match table()?.find(address) {
        Place::Code(library) if library.part == Part::Caller => Some((&library.path, library.base)),
        _ => None,
    }
}

static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());
/// Increases with each table and with `look_again`; results found with an older value are not reused.
static GENERATION: AtomicU32 = AtomicU32::new(0);
static NUMBERED: AtomicU32 = AtomicU32::new(1);

#[inline(always)]
pub(crate) fn generation() -> u32 {
    GENERATION.load(Acquire)
}

/// Invalidates results found so far: they may be wrong.
pub(crate) fn look_again() {
    GENERATION.fetch_add(1, AcqRel);
}

/// Returns the newest table. It is valid while the calling thread is marked as inside of the library.
#[inline(always)]
pub(crate) fn table() -> Option<&'static Table> {
    // SAFETY: null, or a table that is freed only after this thread was seen outside.
    unsafe { TABLE.load(Acquire).as_ref() }
}

fn next_number() -> u16 {
    let taken = NUMBERED.fetch_update(Relaxed, Relaxed, |next| (next < NUMBERS).then_some(next + 1));
    taken.map_or(0, |number| number as u16)
}

/// Returns the number of a library, and reports its path the first time; 0 when there are too many. Does not allocate.
pub(crate) fn number(core: &Core, library: &Library) -> u16 {
    match library.id.load(Relaxed) {
        0 => introduce(core, library),
        id => id,
    }
}

#[cold]
fn introduce(core: &Core, library: &Library) -> u16 {
    let (id, is_new) = give_number(&library.id);
    if is_new {
        say(core, id, library);
    }
    id
}

/// Returns the number in `id`, and whether this call gave it; 0 when there are too many.
fn give_number(id: &AtomicU16) -> (u16, bool) {
    let next = next_number();
    match id.compare_exchange(0, next, AcqRel, Acquire) {
        Ok(_) => (next, next != 0),
        Err(first) => (first, false), // another thread was first; this number stays unused
    }
}

/// Numbers of the library of PyTorch's allocator; 0 where there is none.
static TORCH: [AtomicU16; 2] = [const { AtomicU16::new(0) }; 2];

/// Whether the library with this number contains PyTorch's allocator.
#[inline(always)]
pub(crate) fn is_torch(number: u16) -> bool {
    number != 0 && TORCH.iter().any(|torch| torch.load(Relaxed) == number)
}

fn say(core: &Core, id: u16, library: &Library) {
    let file = library.path.rsplit('/').next().unwrap_or_default();
    for (torch, name) in TORCH.iter().zip(["libc10_cuda", "libc10_hip"]) {
        if file.starts_with(name) {
            torch.store(id, Relaxed);
        }
    }
    let stamp = Stamp { module: id, ..Stamp::default() };
    let body = Body::Module { base: library.base, bytes: library.bytes, path: &library.path };
    core.recorder.names.add(&Record { stamp, body });
}

/// A library that a callback met before the table had it. Its number is in use; its path is reported later.
struct Fresh {
    start: AtomicUsize,
    id: AtomicU16,
}

static FRESH: [Fresh; NEW] = [const { Fresh { start: AtomicUsize::new(0), id: AtomicU16::new(0) } }; NEW];

/// `_dl_find_object`, in glibc 2.35 and later: finds a mapped file without a lock.
type FindObject = unsafe extern "C" fn(*const c_void, *mut Found) -> c_int;
static FIND_OBJECT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// `struct dl_find_object`, with room for fields of later versions.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Found {
    flags: u64,
    start: usize,
    end: usize,
    rest: [u64; 29],
}

/// Returns the start of the mapped file at `address`; `None` without one or without `_dl_find_object`.
pub(crate) fn mapped_at(address: usize) -> Option<usize> {
    let find = FIND_OBJECT.load(Relaxed);
    if find.is_null() {
        return None;
    }
    // SAFETY: the C library's function of this name and type; it takes no lock and allocates nothing.
    let find: FindObject = unsafe { std::mem::transmute(find) };
    let mut found = Found { flags: 0, start: 0, end: 0, rest: [0; 29] };
    // SAFETY: any address may be looked up, and `found` has room for the answer.
    let is = unsafe { find(address as *const c_void, &mut found) } == 0;
    (is && found.start <= address && address < found.end).then_some(found.start)
}

/// Returns a number for the file that begins at `start` and is not in the table yet; 0 if there are too many.
pub(crate) fn number_of_new(start: usize) -> u16 {
    let has = |fresh: &&Fresh| {
        let known = fresh.start.load(Acquire);
        known == start || known == 0 && fresh.start.compare_exchange(0, start, AcqRel, Acquire).is_ok()
    };
    let Some(fresh) = FRESH.iter().find(has) else { return 0 };
    match fresh.id.load(Acquire) {
        0 => give_number(&fresh.id).0,
        id => id,
    }
}

// From here on: used by the sender.

/// Lock: a thread is inside of dl_iterate_phdr, or forks.
static GATE: AtomicBool = AtomicBool::new(false);
/// Retries of fork() before it continues without the lock: a signal handler may fork on the thread that holds the lock.
const TURNS: u32 = 1 << 14;
/// The forking thread holds the lock.
static HELD: AtomicBool = AtomicBool::new(false);

/// Waits until no thread is inside of dl_iterate_phdr, and keeps others out.
pub(crate) fn before_fork() {
    for _ in 0..TURNS {
        if !GATE.swap(true, Acquire) {
            HELD.store(true, Relaxed);
            return;
        }
        // SAFETY: takes no arguments.
        unsafe { libc::sched_yield() };
    }
}

/// Releases the lock in the parent.
pub(crate) fn after_fork() {
    if HELD.swap(false, Relaxed) {
        GATE.store(false, Release);
    }
}

/// Releases the lock in the child, which has one thread.
pub(crate) fn in_child() {
    HELD.store(false, Relaxed);
    GATE.store(false, Release);
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry::NEW);
/// For tests: number of tables built.
pub static TABLES: AtomicU64 = AtomicU64::new(0);

struct Registry {
    libraries: BTreeMap<Box<str>, &'static Library>,
    seen: Option<(u64, u64)>,
    retired: Vec<(u64, *mut Table)>,
}

// SAFETY: only the registry frees the tables.
unsafe impl Send for Registry {}

/// Builds a new table if files were mapped or unmapped. For the sender and the start. Returns false while a thread forks.
pub fn look(core: &Core) -> bool {
    if GATE.swap(true, Acquire) {
        return false;
    }
    let looked = REGISTRY.try_lock().map(|mut registry| registry.look(core)).is_ok();
    GATE.store(false, Release);
    looked
}

/// Retries of a thread of the host in `in_loader`.
const PATIENCE: u32 = 320;

/// Runs `work`, which uses dl_iterate_phdr, while no thread forks; `None` if it could not get the lock in time.
pub(crate) fn in_loader<T>(work: impl FnOnce() -> T) -> Option<T> {
    for turn in 0..PATIENCE {
        if !GATE.swap(true, Acquire) {
            let result = work();
            GATE.store(false, Release);
            return Some(result);
        }
        threads::wait_a_turn(turn);
    }
    None
}

/// Frees tables that no thread reads any more. The sender calls it regularly.
pub(crate) fn reclaim(now_ns: u64) {
    let Ok(mut registry) = REGISTRY.try_lock() else { return };
    let due = |retired: &(u64, *mut Table)| now_ns.saturating_sub(retired.0) >= GRACE_NS;
    // Each thread sees the newer table by now, unless it has been inside of the agent since before the change.
    if registry.retired.iter().any(due) && threads::all().iter().all(|thread| thread.busy.load(Acquire) == 0)
    {
        registry.retired.retain(|retired| {
            if due(retired) {
                // SAFETY: `publish` made it, and no thread uses it any more.
                drop(unsafe { Box::from_raw(retired.1) });
            }
            !due(retired)
        });
    }
}

impl Registry {
    const NEW: Registry = Registry { libraries: BTreeMap::new(), seen: None, retired: Vec::new() };

    fn look(&mut self, core: &Core) {
        let now = loader::changes_now();
        let is_met = |fresh: &Fresh| fresh.id.load(Relaxed) != 0;
        if self.seen == Some(now) && !FRESH.iter().any(is_met) {
            return;
        }
        if self.seen.is_none() {
            // SAFETY: the name is a C string.
            let find = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_dl_find_object".as_ptr()) };
            FIND_OBJECT.store(find, Relaxed);
        }
        let collection = Collection::take();
        self.seen = Some(collection.changes);
        self.publish(core, &collection);
    }

    fn publish(&mut self, core: &Core, collection: &Collection) {
        let mut segments = Vec::with_capacity(collection.segments.len());
        let mut starts = Vec::with_capacity(collection.objects.len());
        for (index, object) in collection.objects.iter().enumerate() {
            let library = self.library(index, &collection.path(index), object);
            starts.push((object.start, library));
            for segment in collection.segments.get(object.segments.0..object.segments.1).unwrap_or_default() {
                let code = match (segment.runs, object.functions) {
                    (false, _) => (0, 0),
                    (true, None) => (segment.start, segment.end),
                    (true, Some((from, to))) => (from.max(segment.start), to.min(segment.end)),
                };
                segments.push(Segment { start: segment.start, end: segment.end, code, library });
            }
        }
        segments.sort_unstable_by_key(|segment| segment.start);
        let table = Box::into_raw(Box::new(Table { segments: segments.into() }));
        let old = TABLE.swap(table, AcqRel);
        GENERATION.fetch_add(1, AcqRel);
        TABLES.fetch_add(1, Relaxed);
        if !old.is_null() {
            self.retired.push((core.recorder.clock.now(), old));
        }
        name_new(core, &starts);
    }

    fn library(&mut self, index: usize, path: &str, object: &Object) -> &'static Library {
        if let Some(library) = self.libraries.get(path) {
            return library;
        }
        // The agent's library is never the caller, regardless of its file name. If the agent is linked into the program
        // (index 0), the program still counts as a caller.
        let here = look as *const () as usize;
        let is_ours = index != 0 && object.start <= here && here < object.end;
        let library: &'static Library = Box::leak(Box::new(Library {
            path: path.into(),
            part: if is_ours { Part::Driver } else { Part::of(path) },
            base: object.start as u64,
            bytes: (object.end - object.start) as u64,
            id: AtomicU16::new(0),
        }));
        self.libraries.insert(path.into(), library);
        library
    }
}

/// Reports the paths of libraries that callbacks met before the table had them.
fn name_new(core: &Core, starts: &[(usize, &'static Library)]) {
    for fresh in &FRESH {
        let (start, id) = (fresh.start.load(Acquire), fresh.id.load(Acquire));
        if start == 0 || id == 0 {
            continue;
        }
        match starts.iter().find(|(known, _)| *known == start) {
            Some((_, library)) => {
                let _ = library.id.compare_exchange(0, id, Relaxed, Relaxed);
                say(core, id, library);
            }
            None => {
                let body = Body::Module { base: start as u64, bytes: 0, path: "(a library that is gone)" };
                core.recorder.names.add(&Record { stamp: Stamp { module: id, ..Stamp::default() }, body });
            }
        }
        fresh.id.store(0, Release);
        fresh.start.store(0, Release);
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
