//! Replaces the slots (GOT entries) through which PyTorch's allocator calls certain functions. The slots are found in the
//! mapped files. The original value is stored first, and each slot is replaced with a single store.
//!
//! **When.** At the start, if PyTorch is loaded already. In the callback of a driver allocation, if the loader has mapped files
//! since the last search. By the sender, for processes whose driver calls are not observed. PyTorch allocates a segment right
//! before the first tensor in it and on the same thread, so the search in the callback cannot wait.
//!
//! **Why this cannot deadlock.** A search takes one lock of the loader, that of dl_iterate_phdr.
//!
//! - The loader holds it only to change its lists, never while it runs constructors or other code. (Those run under another
//!   lock, which dlopen and dlsym take. The agent calls neither here and resolves symbols itself.)
//! - Other code holds it in callbacks of dl_iterate_phdr: unwinders and profilers, which call neither the driver nor PyTorch
//!   there. Should one do so, it is on the same thread, and the lock is recursive.
//! - So the holder of that lock never waits for a lock that the program may hold around its driver call (PyTorch holds its
//!   allocator's).
//!
//! No thread may fork meanwhile, because before glibc 2.31 the child would find the lock taken. `callers::in_loader` makes sure
//! of that. If it cannot get its lock in time, the next allocation searches.
//!
//! **Which original value is stored.** A slot that is not bound yet holds the address of the library's own stub, whose first
//! call would overwrite the slot. Then the value is the address of the function, found in the file that defines it. The loader
//! lists a file before it relocates the file's slots. Such a slot has a small value and is left alone. In a file linked with `-z
//! now`, the loader makes relocated slots read-only. Such a slot is made writable for a moment, in which no other code writes
//! it.

use crate::base::image::Image;
use crate::base::loaded_file::find_mapped;
use crate::naming::callers;
use crate::naming::slot::{self, SlotResult};
use crate::sources::torch::{oom, pending, report};
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering::*};

/// Number of functions that are replaced ("hooks").
const HOOKS: usize = 5;
/// Hook of PyTorch's report that a block was allocated or freed.
pub(crate) const REPORT: usize = 0;
/// Hook of PyTorch's report that it is out of memory.
pub(crate) const OUT_OF_MEMORY: usize = 1;
/// Hook of the CUDA runtime's function that records an event.
pub const EVENT_RECORD: usize = 2;
/// Hook of the CUDA runtime's function that queries an event.
pub(crate) const EVENT_QUERY: usize = 3;
/// Hook of the CUDA runtime's function that waits for an event.
pub const EVENT_SYNCHRONIZE: usize = 4;

/// Symbol names of the hooks. The first two changed from signed to unsigned numbers after 1.13; in registers that is the same.
const NAMES: [&[&CStr]; HOOKS] = [
    &[
        c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE",
        c"_ZN3c1027reportMemoryUsageToProfilerEPvlllNS_6DeviceE",
    ],
    &[
        c"_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE",
        c"_ZN3c1027reportOutOfMemoryToProfilerElllNS_6DeviceE",
    ],
    &[c"cudaEventRecord", c"cudaEventRecord_ptsz", c"hipEventRecord"],
    &[c"cudaEventQuery", c"hipEventQuery"],
    &[c"cudaEventSynchronize", c"hipEventSynchronize"],
];

/// For each hook, a function that returns the address of the agent's function.
const FUNCTIONS: [fn() -> usize; HOOKS] = [
    || report::reported as *const () as usize,
    || oom::reported as *const () as usize,
    || pending::recorded as *const () as usize,
    || pending::queried as *const () as usize,
    || pending::synchronized as *const () as usize,
];

/// Prefixes of the file names of the libraries whose slots are replaced.
const LIBRARIES: [&[u8]; 2] = [b"libc10_cuda", b"libc10_hip"];

/// For each hook, the original value of the slots: the address of PyTorch's or CUDA's function.
static NEXT: [AtomicUsize; HOOKS] = [const { AtomicUsize::new(0) }; HOOKS];
/// Bits of the hooks that are installed.
static PATCHED: AtomicU8 = AtomicU8::new(0);
/// Result of the last search: a `SearchResult`.
static MET: AtomicU8 = AtomicU8::new(0);
/// Number of files that had been mapped at the last search.
static SEARCHED_AT: AtomicU64 = AtomicU64::new(u64::MAX);
/// Number of searches, for tests.
pub static SEARCHES: AtomicUsize = AtomicUsize::new(0);

/// Result of a search for the libraries of PyTorch's allocator and their slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum SearchResult {
    /// No library of PyTorch's allocator is loaded.
    Nothing = 0,
    /// The library has no slot of the report (`REPORT`): it calls that function directly, or its dynamic table was not found.
    NoSlot = 1,
    /// The slot of the report is not relocated yet, its original function was not found, or its page could not be made writable.
    /// The search is repeated.
    NotYet = 2,
    /// The agent's functions are installed.
    Patched = 3,
}

pub fn search_result() -> SearchResult {
    match MET.load(Acquire) {
        1 => SearchResult::NoSlot,
        2 => SearchResult::NotYet,
        3 => SearchResult::Patched,
        _ => SearchResult::Nothing,
    }
}

/// Whether a hook is installed.
pub fn is_patched(hook: usize) -> bool {
    PATCHED.load(Acquire) & 1 << hook != 0
}

/// Returns the original value of a hook's slot; null if no slot was replaced.
#[inline(always)]
pub(crate) fn next(hook: usize) -> *mut c_void {
    NEXT[hook].load(Acquire) as *mut c_void
}

/// Searches for PyTorch in the callback of a driver allocation, if the loader has mapped files since the last search, or had not
/// relocated PyTorch's library then. Costs about 25 ns without a search. Once the hooks are installed, only the sender searches
/// for a second PyTorch.
#[inline]
pub fn search_if_changed() {
    let met = search_result();
    if met != SearchResult::Patched {
        search(met == SearchResult::NotYet);
    }
}

/// Searches for PyTorch; with `again` also if no file was mapped since the last search. Returns false if it could not get the
/// lock of `callers::in_loader`.
#[cold]
#[inline(never)]
pub fn search(again: bool) -> bool {
    callers::in_loader(|| {
        let (mapped, _) = callers::changes_now();
        if !again && SEARCHED_AT.load(Relaxed) == mapped {
            return;
        }
        SEARCHES.fetch_add(1, Relaxed);
        let mut search = Search { met: SearchResult::Nothing, wanted: 0, defined: [0; HOOKS] };
        search.install();
        if search.wanted != 0 {
            search.resolve();
            search.met = SearchResult::Nothing;
            search.install();
        }
        MET.store(search.met as u8, Release);
        SEARCHED_AT.store(mapped, Relaxed);
    })
    .is_some()
}

struct Search {
    met: SearchResult,
    /// Bits of hooks whose original functions have to be resolved.
    wanted: u8,
    /// Addresses of the original functions; 0 for one that was not resolved.
    defined: [usize; HOOKS],
}

impl Search {
    /// Installs the hooks in each library of PyTorch's allocator. A process may have several; the best result counts.
    fn install(&mut self) {
        find_mapped(|file| {
            if LIBRARIES.iter().any(|library| file.name().starts_with(library)) {
                let met = self.install_in(&file.image);
                self.met = if met as u8 > self.met as u8 { met } else { self.met };
            }
            false
        });
    }

    fn install_in(&mut self, image: &Image<'_>) -> SearchResult {
        let slots = image.slots(&NAMES);
        let mut met = if slots[REPORT].is_some() { SearchResult::Patched } else { SearchResult::NoSlot };
        for (hook, slot) in slots.into_iter().enumerate() {
            let Some(slot) = slot else { continue };
            let definition = || {
                let defined = self.defined[hook];
                self.wanted |= if defined == 0 { 1 << hook } else { 0 };
                (defined != 0).then_some(defined)
            };
            match slot::replace(image, slot, FUNCTIONS[hook](), &NEXT[hook], definition) {
                SlotResult::Replaced => drop(PATCHED.fetch_or(1 << hook, AcqRel)),
                _ if hook == REPORT => met = SearchResult::NotYet,
                _ => {}
            }
        }
        met
    }

    /// Resolves each wanted function in the first file that defines it. The loader does the same within a scope of symbols.
    fn resolve(&mut self) {
        find_mapped(|file| {
            for (hook, (names, defined)) in NAMES.iter().zip(&mut self.defined).enumerate() {
                if self.wanted & 1 << hook != 0 && *defined == 0 {
                    *defined = names.iter().find_map(|name| file.image.defines(name)).unwrap_or(0);
                }
            }
            false
        });
    }
}
