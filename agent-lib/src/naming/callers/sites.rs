//! Names untagged allocations after the file and the function that requested them, e.g. `train/load_weights`.
//!
//! A callback knows only a return address, and reading symbols takes too long there. So it stores the address here. The sender
//! finds the function in the file's symbols and sends it as a tag, if the allocation still exists and has no tag.

use super::{modules, symbols};
use crate::base::row::Key;
use crate::driver::core::Core;
use crate::record::high_water;
use crate::record::live::FoundRow;
use crate::threads::Thread;
use gpumem_wire::MAX_TAG_BYTES;
use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

/// Maximum number of allocations that wait for the sender's next round; further ones stay unnamed.
const PLACES: usize = 128;
/// Maximum number of return addresses to cache; a program requests memory in few places.
const CACHED: usize = 4096;

const FREE: u32 = 0;
/// Value of `state` while a callback is writing the entry.
const TAKEN: u32 = 1;
const FULL: u32 = 2;

/// An allocation whose name the sender looks up later.
struct Unnamed {
    state: AtomicU32,
    address: AtomicU64,
    /// Number of the record of the allocation.
    seq: AtomicU64,
    /// Return address in the function that requested the allocation.
    site: AtomicUsize,
}

static UNNAMED: [Unnamed; PLACES] = [const {
    Unnamed {
        state: AtomicU32::new(FREE),
        address: AtomicU64::new(0),
        seq: AtomicU64::new(0),
        site: AtomicUsize::new(0),
    }
}; PLACES];
/// Approximate number of full entries; lets the sender return early when there are none.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Stores the unnamed allocation of record `seq` for the sender. Skips segments of PyTorch: the blocks in them have names.
#[cold]
#[inline(never)]
pub(crate) fn note_unnamed(core: &Core, thread: &Thread, module: u16, address: u64, seq: u64) {
    // SAFETY: only the calling thread uses its own data.
    let site = unsafe { thread.own().callers.site };
    if site == 0 || !core.settings.layers.sites || modules::is_torch(module) {
        return;
    }
    let claim = |entry: &&Unnamed| entry.state.compare_exchange(FREE, TAKEN, Acquire, Relaxed).is_ok();
    let Some(entry) = UNNAMED.iter().cycle().skip(seq as usize % PLACES).take(8).find(claim) else { return };
    entry.address.store(address, Relaxed);
    entry.seq.store(seq, Relaxed);
    entry.site.store(site, Relaxed);
    entry.state.store(FULL, Release);
    COUNT.fetch_add(1, Release);
}

/// Clears the table in a forked child: the allocations in it belong to the parent.
pub(crate) fn in_child() {
    UNNAMED.iter().for_each(|entry| entry.state.store(FREE, Relaxed));
    COUNT.store(0, Relaxed);
}

/// The sender's cache of the functions at return addresses.
#[derive(Debug, Default)]
pub(crate) struct Sites {
    /// Tags by return address; 0 for an unknown function. Cleared when `modules::generation` has changed, or when the cache is
    /// full.
    tags: HashMap<usize, u32>,
    generation: u32,
}

impl Sites {
    /// Gives names to the allocations that callbacks have stored in the table.
    pub(crate) fn name(&mut self, core: &Core, thread: &Thread) {
        // Not while a peak is measured (record/high_water.rs): a name that changes as its row is removed would count twice.
        if COUNT.load(Acquire) == 0 || high_water::open() {
            return;
        }
        for entry in UNNAMED.iter().filter(|entry| entry.state.load(Acquire) == FULL) {
            let (address, seq) = (entry.address.load(Relaxed), entry.seq.load(Relaxed));
            let site = entry.site.load(Relaxed);
            entry.state.store(FREE, Release);
            COUNT.fetch_sub(1, Relaxed);
            let tag = self.tag(core, site);
            let key = Key::Allocation(address);
            let is_unnamed = |found: &FoundRow| found.seq == seq && found.word(5) as u32 == 0;
            if tag != 0
                && let Some(found) = core.recorder.live.find_row(key).filter(is_unnamed)
            {
                // The sender is not in a callback, so it marks itself as inside of the agent while it makes the record.
                thread.inside(|| core.record_retag(thread, key, Some(found), Default::default(), tag));
            }
        }
    }

    fn tag(&mut self, core: &Core, site: usize) -> u32 {
        let generation = modules::generation();
        if self.generation != generation || self.tags.len() >= CACHED {
            self.tags.clear();
            self.generation = generation;
        }
        *self
            .tags
            .entry(site)
            .or_insert_with(|| path_of(site).map_or(0, |path| core.recorder.names.intern(0, path.as_bytes())))
    }
}

/// Returns `file/function` of a return address; `None` if the file has no symbol for it.
fn path_of(site: usize) -> Option<String> {
    // A call may be the last instruction of a function, so the search uses the byte before the return address.
    let address = site.checked_sub(1)?;
    let (path, start) = modules::file_at(address)?;
    let symbol = symbols::at(path.as_ref(), start, address as u64)?;
    let function = readable(&symbol)?;
    let file = path.rsplit('/').next().unwrap_or(path);
    let file = file.split_once(".so").map_or(file, |(name, _)| name);
    let path = format!("{file}/{function}");
    let is_valid =
        !file.is_empty() && !function.is_empty() && !function.contains('/') && path.len() <= MAX_TAG_BYTES;
    is_valid.then_some(path)
}

/// Demangles a symbol to namespaces, classes and function. The C++ library's demangler is not used: it may not be loaded.
fn readable(symbol: &CStr) -> Option<String> {
    let symbol = symbol.to_str().ok()?;
    let symbol = symbol.split_once('.').map_or(symbol, |(name, _)| name); // f.cold, f.isra.0: parts and copies of f
    let Some(mangled) = symbol.strip_prefix("_Z") else { return Some(symbol.to_owned()) };
    let (mut rest, nested) = match mangled.strip_prefix('N') {
        Some(rest) => (rest.trim_start_matches(['r', 'V', 'K']), true),
        None => (mangled, false),
    };
    let mut parts = Vec::new();
    loop {
        if let Some(after) = rest.strip_prefix("St") {
            parts.push("std");
            rest = after;
            continue;
        }
        rest = rest.strip_prefix('L').unwrap_or(rest);
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let Some(length) = rest.get(..digits).and_then(|digits| digits.parse::<usize>().ok()) else { break };
        let Some(part) = rest.get(digits..).and_then(|rest| rest.get(..length)) else { break };
        // Rust's older mangled names end with a hash.
        let is_hash = part.len() == 17
            && part.starts_with('h')
            && part[1..].bytes().all(|byte| byte.is_ascii_hexdigit());
        match part {
            _ if is_hash => {}
            _ if part.starts_with("_GLOBAL__N") => parts.push("(anonymous namespace)"),
            _ => parts.push(part),
        }
        rest = rest.get(digits + length..)?;
        if !nested {
            break;
        }
    }
    Some(if parts.is_empty() { symbol.to_owned() } else { parts.join("::") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_people_write_them() {
        for (symbol, expected) in [
            (c"load_weights", "load_weights"),
            (c"grow.isra.0", "grow"),
            (c"_ZN5model4loadEPKcPm", "model::load"),
            (c"_ZNK5model5Cache4growEPm.isra.0", "model::Cache::grow"),
            (c"_ZL6helperi", "helper"),
            (c"_Z3addIiET_S0_S0_", "add"),
            (c"_ZN12_GLOBAL__N_14loadEPKc", "(anonymous namespace)::load"),
            (c"_ZNSt6vectorIiSaIiEE9push_backEOi", "std::vector"),
            (c"_ZN5train4data4load17h0123456789abcdefE", "train::data::load"),
            (c"_RNvCs1234_7mycrate3foo", "_RNvCs1234_7mycrate3foo"),
            (c"_Z", "_Z"),
            (c"_ZN99model", "_ZN99model"),
            (c"_ZN99999999999999999999999model", "_ZN99999999999999999999999model"),
        ] {
            assert_eq!(readable(symbol).as_deref(), Some(expected));
        }
    }
}
