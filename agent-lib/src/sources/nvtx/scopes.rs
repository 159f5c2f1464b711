//! Opens and closes the scopes of NVTX ranges, of threads or of the process.
//!
//! **Ranges of threads** count in the default domain, and in those that `GPUMEM_NVTX_DOMAINS` names. Libraries such as NCCL and
//! CUB annotate each of their calls in domains of their own, which would hide the program's names.
//!
//! A domain's handle is a number: 0 is the default domain (NVTX's null) and 1 any domain that does not count. From 2 on it is
//! the position among the wanted domains, which is also the owner number of its scopes. The default domain's owner number is 1.
//!
//! **Ranges of the process** may end on another thread. With `GPUMEM_NVTX_RANGES` the newest names threads without a name.

use crate::base::row::mix;
use crate::driver::core::Core;
use crate::threads::OWNERS;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

/// Handle of each domain that does not count.
const LEFT_OUT: usize = 1;
/// Hashes of the wanted domains' names, by handle; 0 while free. The first two are never used.
static WANTED: [AtomicU64; OWNERS] = [const { AtomicU64::new(0) }; OWNERS];
/// Whether the program has created a domain that does not count.
static HAS_LEFT_OUT: AtomicBool = AtomicBool::new(false);

/// Whether the program has created domains that do not count.
pub(crate) fn are_left_out() -> bool {
    HAS_LEFT_OUT.load(Relaxed)
}

/// Returns the owner of the scopes of a domain; `None` for a domain that does not count.
#[inline(always)]
pub(crate) fn owner(handle: usize) -> Option<u8> {
    match handle {
        0 => Some(1),
        LEFT_OUT => None,
        wanted => (wanted < OWNERS).then_some(wanted as u8),
    }
}

/// Returns the handle of the domain `name`: the same for all callers.
pub(crate) fn create(core: &Core, name: &[u8]) -> usize {
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

/// Maximum number of open ranges of the process at a time.
const PLACES: usize = 64;

/// Id of the last range. Ids are never 0, which NVTX treats as no range.
static LAST: AtomicU64 = AtomicU64::new(0);
/// Id << 32 | tag of each open range of the process; 0 while free.
static OPEN: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];
/// Tag of the process outside of all ranges.
static OUTSIDE: AtomicU32 = AtomicU32::new(0);

/// Starts a range of the process and returns its id. `tag` returns the range's tag for the current tag of the process.
pub(crate) fn start_range(core: &Core, tag: impl FnOnce(u32) -> u32) -> u64 {
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

pub(crate) fn end_range(core: &Core, id: u64) {
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
