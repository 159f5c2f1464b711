//! Replaces slots: entries of the GOT, in which a loaded library stores the addresses of functions that it calls.

use crate::base::image::{Image, Slot};
use crate::base::loaded_file::{find_mapped, write_sealed};
use crate::naming::callers;
use std::sync::atomic::{AtomicUsize, Ordering::*};

/// Result of replacing a function pointer (slot) by the agent's function.
#[derive(PartialEq, Eq)]
pub(crate) enum SlotResult {
    /// The slot holds the agent's function.
    Replaced,
    /// The library calls the function directly.
    NoSlot,
    /// The loader has not finished with the library, the original function is not found yet, or the slot's page could not be made
    /// writable.
    NotYet,
}

/// Runs `work`, which must not allocate, with the first loaded library whose file name matches. Returns `None` if no library
/// matches, or if another thread forks or holds the lock of `callers::in_loader` for too long.
pub(crate) fn with<T>(matches: fn(&[u8]) -> bool, work: impl FnOnce(&Image<'_>) -> T) -> Option<T> {
    let (mut work, mut done) = (Some(work), None);
    callers::in_loader(|| {
        find_mapped(|file| {
            let is_found = matches(file.name());
            if let Some(work) = work.take_if(|_| is_found) {
                done = Some(work(&file.image));
            }
            is_found
        });
    });
    done
}

/// Writes the address `ours` into a slot. Before that, writes the address of the original function into `next`: the slot's
/// value, or what `definition` returns while the slot still points to the library's stub.
pub(crate) fn replace(
    image: &Image<'_>,
    slot: Slot,
    ours: usize,
    next: &AtomicUsize,
    definition: impl FnOnce() -> Option<usize>,
) -> SlotResult {
    // SAFETY: an aligned word of a mapped, readable segment; the loader writes it as one word.
    let word = unsafe { &*(slot.at as *const AtomicUsize) };
    let held = word.load(Acquire);
    if held == ours {
        return SlotResult::Replaced;
    }
    // A small value or an offset: the loader has not relocated the slot yet.
    if held < 1 << 16 || !image.runs(held) && image.is_offset(held) {
        return SlotResult::NotYet;
    }
    let Some(original) = (if image.runs(held) { definition() } else { Some(held) }) else {
        return SlotResult::NotYet;
    };
    next.store(original, Release);
    let write = || word.store(ours, Release);
    if !slot.is_sealed {
        write();
    } else if !write_sealed(image, slot.at, write) {
        return SlotResult::NotYet;
    }
    SlotResult::Replaced
}
