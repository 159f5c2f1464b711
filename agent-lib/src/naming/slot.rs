//! A loaded library, found by its file name: functions that it defines, and slots (GOT entries) through which it calls them.

use crate::base::image::{Image, Slot};
use crate::base::loaded_file::{find_mapped, write_sealed};
use crate::naming::callers;
use std::ffi::CStr;
use std::sync::atomic::{AtomicUsize, Ordering::*};

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// The slot holds the agent's function.
    Ours,
    /// The library calls the function directly.
    NoSlot,
    /// The loader has not finished with the library, or its page could not be written.
    NotYet,
}

/// Runs `work`, which must not allocate, with the first library whose file name matches; `None` without one or during a fork.
pub(crate) fn with<T>(is_it: fn(&[u8]) -> bool, work: impl FnOnce(&Image<'_>) -> T) -> Option<T> {
    let (mut work, mut done) = (Some(work), None);
    callers::in_loader(|| {
        find_mapped(|file| {
            let is_found = is_it(file.name());
            if let Some(work) = work.take_if(|_| is_found) {
                done = Some(work(&file.image));
            }
            is_found
        });
    });
    done
}

/// Like `replace`, for the slot through which the library calls its own function `name`, defined at `defined`.
pub(crate) fn take(image: &Image<'_>, name: &CStr, defined: usize, ours: usize, next: &AtomicUsize) -> Taken {
    let [Some(slot)] = image.slots(&[&[name]]) else { return Taken::NoSlot };
    replace(image, slot, ours, next, || Some(defined))
}

/// Writes `ours` into a slot, and the original into `next` first: `definition` if the slot still leads to the library's stub.
pub(crate) fn replace(
    image: &Image<'_>,
    slot: Slot,
    ours: usize,
    next: &AtomicUsize,
    definition: impl FnOnce() -> Option<usize>,
) -> Taken {
    // SAFETY: an aligned word of a mapped, readable segment; the loader writes it as one word.
    let place = unsafe { &*(slot.at as *const AtomicUsize) };
    let held = place.load(Acquire);
    if held == ours {
        return Taken::Ours;
    }
    // Not relocated yet: a small value, or an offset.
    if held < 1 << 16 || !image.runs(held) && image.is_offset(held) {
        return Taken::NotYet;
    }
    let Some(original) = (if image.runs(held) { definition() } else { Some(held) }) else {
        return Taken::NotYet;
    };
    next.store(original, Release);
    let write = || place.store(ours, Release);
    let is_written = if slot.is_sealed {
        write_sealed(image, slot.at, write)
    } else {
        write();
        true
    };
    if is_written { Taken::Ours } else { Taken::NotYet }
}
