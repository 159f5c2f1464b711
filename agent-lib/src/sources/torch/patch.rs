//! Puts our functions into the slots through which PyTorch's allocator calls: found among the mapped files, kept as `next`,
//! replaced by one store each.
//!
//! **When.** At injection, if PyTorch is loaded already; in the callback of a driver allocation, when the loader has mapped
//! files since the last look; and by the sender, for processes whose driver calls nobody hears. The segment comes before
//! the first tensor in it, and on the same thread, so the look in the callback has to be made there and then.
//!
//! **Why that cannot deadlock.** A look takes one lock of the loader's, the one of dl_iterate_phdr. The loader holds it for
//! moments, to change its lists, never while it runs constructors or somebody's code (that is another lock, which
//! dlopen and dlsym take: we call neither, but look symbols up by ourselves). Others hold it in callbacks of their own
//! dl_iterate_phdr: unwinders and profilers, which call neither the driver nor PyTorch there; should one do so, it
//! is on its own thread, and the lock is recursive. Whoever waits for it therefore waits for nobody who may wait for us,
//! whatever locks the program holds around its driver call (PyTorch holds its allocator's). fork() must not happen
//! meanwhile, because before glibc 2.31 the child would find the lock taken: `callers::in_loader` sees to it, and gives up
//! after a moment when somebody else is inside; then the next allocation looks.
//!
//! **What is kept.** A slot that was not bound so far holds the address of the library's own stub, whose first call would
//! write the slot again: then `next` is the function itself, looked up in the file that defines it. A slot that holds
//! something small was not relocated so far (the file is in the loader's list before that): it is left alone until
//! it is. In a file linked with `-z now` the slot lies in memory that the loader makes read-only when it has relocated the
//! whole file. Only if that has happened is it made writable for the moment (and nobody else is writing it then).

use crate::base::image::{Image, Slot};
use crate::base::loaded_file::{image, write_sealed};
use crate::naming::callers;
use crate::sources::torch::oom;
use crate::sources::torch::pending;
use crate::sources::torch::report;
use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering::*};

/// Functions that PyTorch's library calls through slots.
pub(crate) const HOOKS: usize = 5;
/// Its report that a block was allocated or freed.
pub(crate) const REPORT: usize = 0;
/// Its report that it is out of memory.
pub(crate) const OUT_OF_MEMORY: usize = 1;
/// Of the CUDA runtime: an event is recorded, asked, waited for.
pub const EVENT_RECORD: usize = 2;
/// See `EVENT_RECORD`.
pub(crate) const EVENT_QUERY: usize = 3;
/// See `EVENT_RECORD`.
pub const EVENT_SYNCHRONIZE: usize = 4;

/// Their names. The first two changed from signed to unsigned numbers after 1.13: in registers that is the same.
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

/// Beginnings of the names of the libraries whose slots are meant.
const LIBRARIES: [&[u8]; 2] = [b"libc10_cuda", b"libc10_hip"];

/// What the slots held before.
static NEXT: [AtomicPtr<c_void>; HOOKS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; HOOKS];
/// Bits of hooks that were put in.
static PATCHED: AtomicU8 = AtomicU8::new(0);
/// See `Met`.
static MET: AtomicU8 = AtomicU8::new(0);
/// Files that had been mapped at the last look.
static LOOKED_AT: AtomicU64 = AtomicU64::new(u64::MAX);
/// Looks, for tests.
pub static LOOKS: AtomicUsize = AtomicUsize::new(0);

/// Result of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Met {
    /// No such library is loaded.
    Nothing = 0,
    /// One whose slots cannot be found: stripped of its dynamic table, or of another make.
    NoSlot = 1,
    /// It has slots that the loader has not bound so far, or whose page could not be made writable: looked at again.
    NotYet = 2,
    /// Our functions are in place.
    Patched = 3,
}

/// What the last look met.
pub fn met() -> Met {
    match MET.load(Acquire) {
        1 => Met::NoSlot,
        2 => Met::NotYet,
        3 => Met::Patched,
        _ => Met::Nothing,
    }
}

/// Whether a hook is in place.
pub fn is_patched(hook: usize) -> bool {
    PATCHED.load(Acquire) & 1 << hook != 0
}

/// What the slot of a hook held before; null if it has none.
#[inline(always)]
pub(crate) fn next(hook: usize) -> *mut c_void {
    NEXT[hook].load(Acquire)
}

fn function(hook: usize) -> usize {
    match hook {
        REPORT => report::reported as *const () as usize,
        OUT_OF_MEMORY => oom::reported as *const () as usize,
        EVENT_RECORD => pending::recorded as *const () as usize,
        EVENT_QUERY => pending::queried as *const () as usize,
        _ => pending::synchronized as *const () as usize,
    }
}

/// In the callback of a driver allocation: looks if the loader has mapped files since the last look (about 25 ns if not), or was
/// not done with them then: whoever looks in the middle of a dlopen meets files that are not relocated.
/// Once our functions are in place, a second PyTorch is left to the sender.
#[inline]
pub fn look_if_changed() {
    match met() {
        Met::Patched => {}
        met => {
            look(met == Met::NotYet);
        }
    }
}

/// Looks; `again` also if nothing was mapped since. False if somebody else was at it.
#[cold]
#[inline(never)]
pub fn look(again: bool) -> bool {
    callers::in_loader(|| {
        let (mapped, _) = callers::changes_now();
        if !again && LOOKED_AT.load(Relaxed) == mapped {
            return;
        }
        LOOKS.fetch_add(1, Relaxed);
        let mut look = Look { met: Met::Nothing, wanted: 0, defined: [0; HOOKS] };
        look.run(at_importer);
        if look.wanted != 0 {
            look.run(at_definition);
            look.met = Met::Nothing;
            look.run(at_importer);
        }
        MET.store(look.met as u8, Release);
        LOOKED_AT.store(mapped, Relaxed);
    })
    .is_some()
}

struct Look {
    met: Met,
    /// Bits of hooks whose functions have to be looked up.
    wanted: u8,
    defined: [usize; HOOKS],
}

type Visit = unsafe extern "C" fn(*mut libc::dl_phdr_info, usize, *mut c_void) -> c_int;

impl Look {
    fn run(&mut self, visit: Visit) {
        // SAFETY: a function of this type, which gets `self`.
        unsafe { libc::dl_iterate_phdr(Some(visit), std::ptr::from_mut(self).cast()) };
    }

    fn import(&mut self, image: &Image<'_>) {
        let slots = image.slots(&NAMES);
        let mut met = if slots[REPORT].is_some() { Met::Patched } else { Met::NoSlot };
        for (hook, slot) in slots.iter().enumerate() {
            if let Some(slot) = slot
                && !self.patch(image, hook, *slot)
                && hook == REPORT
            {
                met = Met::NotYet;
            }
        }
        // A process may have more than one: what one of them does counts.
        if met as u8 > self.met as u8 {
            self.met = met;
        }
    }

    fn patch(&mut self, image: &Image<'_>, hook: usize, slot: Slot) -> bool {
        // SAFETY: an aligned word of a mapped, readable segment; the loader writes it as one word.
        let place = unsafe { &*(slot.at as *const AtomicUsize) };
        let (ours, held) = (function(hook), place.load(Acquire));
        if held == ours {
            PATCHED.fetch_or(1 << hook, AcqRel);
            return true;
        }
        if held < 1 << 16 {
            return false;
        }
        let next = if image.runs(held) {
            let defined = self.defined[hook];
            if defined == 0 {
                self.wanted |= 1 << hook;
                return false;
            }
            defined
        } else if image.is_offset(held) {
            return false; // not relocated so far
        } else {
            held
        };
        NEXT[hook].store(next as *mut c_void, Release);
        let written = if slot.is_sealed {
            write_sealed(image, slot.at, || place.store(ours, Release))
        } else {
            place.store(ours, Release);
            true
        };
        if written {
            PATCHED.fetch_or(1 << hook, AcqRel);
        }
        written
    }
}

unsafe extern "C" fn at_importer(info: *mut libc::dl_phdr_info, _: usize, look: *mut c_void) -> c_int {
    // SAFETY: what dl_iterate_phdr hands over, and `Look::run`'s.
    let (look, (name, image)) = unsafe { (&mut *look.cast::<Look>(), image(info)) };
    let file = name.rsplit(|&byte| byte == b'/').next().unwrap_or(name);
    if LIBRARIES.iter().any(|library| file.starts_with(library)) {
        look.import(&image);
    }
    0
}

/// The first file in the loader's order that has it: the one it would take, unless scopes differ.
unsafe extern "C" fn at_definition(info: *mut libc::dl_phdr_info, _: usize, look: *mut c_void) -> c_int {
    // SAFETY: as above.
    let (look, (_, image)) = unsafe { (&mut *look.cast::<Look>(), image(info)) };
    for (hook, (names, defined)) in NAMES.iter().zip(&mut look.defined).enumerate() {
        if look.wanted & 1 << hook != 0 && *defined == 0 {
            *defined = names.iter().find_map(|name| image.defines(name)).unwrap_or(0);
        }
    }
    0
}
