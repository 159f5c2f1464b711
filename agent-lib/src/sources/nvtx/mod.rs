//! Turns NVTX ranges, with which programs annotate themselves, into scopes.
//!
//! Each library that contains NVTX requests the functions on its first NVTX call, under its own spin lock. Every library gets
//! the same functions, so domains and strings are numbers with one meaning in the whole process. A push opens a scope on the
//! same stack as the C API, and a pop closes the last scope of the same domain. Ranges that are started and ended belong to the
//! process and may end on another thread. They count only with `GPUMEM_NVTX_RANGES=1`: the newest one names the allocations of
//! threads without any other name.
//!
//! Pushes and pops count in the default domain, and in those that `GPUMEM_NVTX_DOMAINS` names. Libraries such as NCCL and CUB
//! annotate each of their calls in domains of their own, which would hide the program's names. A domain's handle is a number: 0
//! is the default domain (NVTX's null), and 1 any domain that does not count. From 2 on it is the position among the wanted
//! domains, which is also the owner number of its scopes. The default domain's owner number is 1.

mod calls;
mod text;

use crate::base::row::mix;
use crate::driver::core::Core;
use crate::record::status;
use crate::threads::OWNERS;
use cupti_sys::nvtx::{self, Callbacks, GetExportTable, Table, VersionInfo};
use gpumem_wire::{Layer, LayerState};
use std::ffi::c_int;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

/// Number of libraries that requested functions and got them.
static SERVED: AtomicU32 = AtomicU32::new(0);
/// Number of libraries that requested functions, but whose tables have no place for them.
static UNKNOWN_LAYOUT: AtomicU32 = AtomicU32::new(0);

/// Gives a library the agent's NVTX functions; returns 0 if the library gets none.
pub(crate) fn initialize(core: &Core, get: GetExportTable) -> c_int {
    if !core.settings.layers.nvtx {
        return 0; // every NVTX call of that library then does nothing
    }
    // SAFETY: NVTX's own function, called while it initialises. It returns null for unknown numbers.
    let filled = unsafe { fill(get) };
    if filled == 0 { &UNKNOWN_LAYOUT } else { &SERVED }.fetch_add(1, AcqRel);
    c_int::from(filled > 0)
}

/// Writes the agent's functions into the library's tables. Returns the number of functions written.
///
/// # Safety
/// `get` must be NVTX's function.
unsafe fn fill(get: GetExportTable) -> usize {
    // SAFETY: the caller guarantees `get`; tables are null or structures that live as long as the library.
    unsafe {
        let version = get(nvtx::ETID_VERSION_INFO).cast::<VersionInfo>().as_ref();
        if let Some(version) = version.filter(|version| version.struct_size >= size_of::<VersionInfo>())
            && let Some(set) = version.set_injection_version
        {
            set(nvtx::VERSION);
        }
        let callbacks = get(nvtx::ETID_CALLBACKS).cast::<Callbacks>().as_ref();
        let callbacks = callbacks.filter(|callbacks| callbacks.struct_size >= size_of::<Callbacks>());
        let Some(get_table) = callbacks.and_then(|callbacks| callbacks.get_module_function_table) else {
            return 0;
        };
        let mut filled = 0;
        for (module, functions) in [(nvtx::MODULE_CORE, calls::CORE), (nvtx::MODULE_CORE2, calls::CORE2)] {
            let (mut table, mut count): (Table, u32) = (std::ptr::null_mut(), 0);
            if get_table(module, &mut table, &mut count) != 1 || table.is_null() {
                continue;
            }
            for &(id, function) in functions.iter().filter(|(id, _)| *id < count) {
                let place = *table.add(id as usize);
                if !place.is_null() {
                    *place = function();
                    filled += 1;
                }
            }
        }
        filled
    }
}

/// Reports whether NVTX ranges are used as scopes. For the sender: it locks and allocates.
pub(crate) fn report_state(core: &Core) {
    let (served, unknown) = (SERVED.load(Acquire), UNKNOWN_LAYOUT.load(Acquire));
    let (state, reason) = match (core.settings.layers.nvtx, served, unknown) {
        (false, ..) => (LayerState::Off, "GPUMEM_NVTX=0".to_owned()),
        (_, 0, 0) => (LayerState::Absent, absence(core.settings.nvtx_injection.as_deref())),
        (_, 0, _) => {
            (LayerState::Failed, "the program's NVTX has a layout that this agent does not know".to_owned())
        }
        (_, _, 0) => (LayerState::Active, counted(core)),
        _ => (
            LayerState::Degraded,
            "a library of the program uses an NVTX version that this agent does not know: its names are missing"
                .to_owned(),
        ),
    };
    status::report_layer(Layer::Nvtx, state, &reason);
}

/// Returns the reason why no library has requested functions.
fn absence(injection: Option<&Path>) -> String {
    let file = injection.and_then(Path::file_name).map(|file| file.to_string_lossy().into_owned());
    match file {
        None => "NVTX_INJECTION64_PATH is not set".to_owned(),
        Some(file) if file.starts_with("libgpumem") => "the program has made no NVTX call".to_owned(),
        Some(file) => format!("NVTX_INJECTION64_PATH names another library: {file}"),
    }
}

/// Describes the domains whose ranges count.
fn counted(core: &Core) -> String {
    let named = core.settings.nvtx_domains.join(", ");
    let named = if named.is_empty() { String::new() } else { format!(" and {named}") };
    let left =
        if HAS_LEFT_OUT.load(Relaxed) { "; other domains are left out (GPUMEM_NVTX_DOMAINS)" } else { "" };
    format!("ranges of the default domain{named}{left}")
}

/// Handle that all domains share whose ranges do not count.
const LEFT_OUT: usize = 1;
/// Hashes of the names of domains whose ranges count, by handle; 0 for a free handle. Entries 0 and 1 are not used.
static WANTED: [AtomicU64; OWNERS] = [const { AtomicU64::new(0) }; OWNERS];
/// Whether the program has created a domain whose ranges do not count.
static HAS_LEFT_OUT: AtomicBool = AtomicBool::new(false);

/// Returns the owner number of a domain's scopes; `None` for a domain whose ranges do not count.
#[inline(always)]
fn owner(handle: usize) -> Option<u8> {
    match handle {
        0 => Some(1),
        LEFT_OUT => None,
        wanted => (wanted < OWNERS).then_some(wanted as u8),
    }
}

/// Returns the handle of the domain `name`: the same for all callers.
fn create_domain(core: &Core, name: &[u8]) -> usize {
    let wanted = core.settings.nvtx_domains.iter().any(|wanted| wanted == "*" || wanted.as_bytes() == name);
    if wanted {
        let hash = name.chunks(8).fold(mix(name.len() as u64, 0x9e37), |hash, part| {
            mix(hash, part.iter().fold(0, |word, &byte| word << 8 | u64::from(byte)))
        });
        let hash = hash.max(1);
        for (handle, place) in WANTED.iter().enumerate().skip(2) {
            match place.compare_exchange(0, hash, AcqRel, Acquire) {
                Ok(_) => return handle,
                Err(known) if known == hash => return handle,
                Err(_) => {}
            }
        }
    }
    HAS_LEFT_OUT.store(true, Relaxed);
    LEFT_OUT
}

/// Maximum number of open ranges of the process at a time. Further ranges name no memory.
const PLACES: usize = 64;

/// Id of the last range. Ids are never 0, which NVTX treats as no range.
static LAST: AtomicU64 = AtomicU64::new(0);
/// For each open range of the process, id << 32 | tag; 0 for a free entry.
static OPEN: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];
/// Tag that the process had before the first of the open ranges began.
static OUTSIDE: AtomicU32 = AtomicU32::new(0);

/// Starts a range of the process and returns its id. `tag` returns the range's tag for the current tag of the process.
fn start_range(core: &Core, tag: impl FnOnce(u32) -> u32) -> u64 {
    let id = LAST.fetch_add(1, Relaxed) + 1;
    if !core.settings.nvtx_ranges {
        return id;
    }
    let outer = core.process_tag.load(Relaxed);
    let tag = tag(outer);
    if tag == 0 {
        return id;
    }
    if OPEN.iter().all(|place| place.load(Relaxed) == 0) {
        OUTSIDE.store(outer, Relaxed);
    }
    let word = (id & 0xffff_ffff) << 32 | u64::from(tag);
    if OPEN.iter().any(|place| place.compare_exchange(0, word, AcqRel, Relaxed).is_ok()) {
        core.process_tag.store(tag, Relaxed);
    }
    id
}

fn end_range(core: &Core, id: u64) {
    if !core.settings.nvtx_ranges {
        return;
    }
    let is_it = |place: &&AtomicU64| place.load(Relaxed) >> 32 == id & 0xffff_ffff;
    let Some(place) = OPEN.iter().find(is_it) else { return };
    let ended = place.swap(0, AcqRel) as u32;
    let newest = OPEN.iter().map(|place| place.load(Relaxed)).max().filter(|&word| word != 0);
    let tag = newest.map_or(OUTSIDE.load(Relaxed), |word| word as u32);
    // Keeps a tag that the program has set meanwhile.
    let _ = core.process_tag.compare_exchange(ended, tag, Relaxed, Relaxed);
}
