//! Ranges that are started on one thread and may be ended on another: they belong to the process. Where that was asked for, the newest
//! one that is open is the tag of threads that have no other name.

use crate::driver::core::Core;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// Ranges at a time that count.
const PLACES: usize = 64;

/// Ids are never 0, which NVTX takes for none.
static LAST: AtomicU64 = AtomicU64::new(0);
/// Id << 32 | tag of each open range; 0 while free.
static OPEN: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];
/// The process's tag when no range was open.
static OUTSIDE: AtomicU32 = AtomicU32::new(0);

/// A range's id. `tag` makes its tag of the one in force.
pub fn start(core: &Core, tag: impl FnOnce(u32) -> u32) -> u64 {
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
    let is_kept = |place: &AtomicU64| place.compare_exchange(0, word, AcqRel, Relaxed).is_ok();
    if OPEN.iter().any(is_kept) {
        core.process_tag.store(tag, Relaxed);
    }
    id
}

/// It ends.
pub fn end(core: &Core, id: u64) {
    if !core.settings.nvtx_ranges {
        return;
    }
    let is_it = |place: &&AtomicU64| place.load(Relaxed) >> 32 == id & 0xffff_ffff;
    let Some(place) = OPEN.iter().find(is_it) else { return };
    let ended = place.swap(0, AcqRel) as u32;
    let newest = OPEN.iter().map(|place| place.load(Relaxed)).max().filter(|&word| word != 0);
    let tag = newest.map_or(OUTSIDE.load(Relaxed), |word| word as u32);
    // Unless the program has set another one meanwhile.
    let _ = core.process_tag.compare_exchange(ended, tag, Relaxed, Relaxed);
}
