//! Access to a loaded library, found by its file name: the functions that it defines, and the slots (GOT entries) through which
//! it calls them.

use crate::base::image::Image;
use crate::base::loaded_file::{image, write_sealed};
use crate::naming::callers;
use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::*};

/// Result of [`take`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// The slot holds the agent's function.
    Ours,
    /// The library calls the function directly.
    NoSlot,
    /// The loader has not finished with the library, or its page could not be written.
    NotYet,
}

struct Visit<F> {
    is_it: fn(&[u8]) -> bool,
    work: Option<F>,
}

unsafe extern "C" fn visit<F: FnOnce(&Image<'_>)>(
    info: *mut libc::dl_phdr_info,
    _: usize,
    visit: *mut c_void,
) -> c_int {
    // SAFETY: dl_iterate_phdr passes valid data and the pointer from `run`.
    let (visit, (name, image)) = unsafe { (&mut *visit.cast::<Visit<F>>(), image(info)) };
    let file = name.rsplit(|&byte| byte == b'/').next().unwrap_or(name);
    if !(visit.is_it)(file) {
        return 0;
    }
    if let Some(work) = visit.work.take() {
        work(&image);
    }
    1
}

/// Runs `work` with the first loaded library whose file name matches. Returns `None` if there is none, or while a thread forks.
/// `work` must not allocate.
pub(crate) fn with<T>(is_it: fn(&[u8]) -> bool, work: impl FnOnce(&Image<'_>) -> T) -> Option<T> {
    let mut done = None;
    run(is_it, |image| done = Some(work(image)));
    done
}

fn run<F: FnOnce(&Image<'_>)>(is_it: fn(&[u8]) -> bool, work: F) {
    let mut data = Visit { is_it, work: Some(work) };
    // SAFETY: the function has this type, and `data` outlives the call.
    let look = || unsafe { libc::dl_iterate_phdr(Some(visit::<F>), (&raw mut data).cast()) };
    callers::in_loader(look);
}

/// Writes `ours` into the slot through which the library calls its own function `name`, defined at `defined`. Sets `next`
/// first, to the function that the slot led to.
pub(crate) fn take(image: &Image<'_>, name: &CStr, defined: usize, ours: usize, next: &AtomicUsize) -> Taken {
    let [Some(slot)] = image.slots(&[&[name]]) else { return Taken::NoSlot };
    // SAFETY: an aligned word of a mapped, readable segment; the loader writes it as one word.
    let place = unsafe { &*(slot.at as *const AtomicUsize) };
    let held = place.load(Acquire);
    if held == ours {
        return Taken::Ours;
    }
    if held < 1 << 16 || !image.runs(held) && image.is_offset(held) {
        return Taken::NotYet;
    }
    // A slot that is not bound yet leads to the library's own stub, so the definition is used instead.
    next.store(if image.runs(held) { defined } else { held }, Release);
    let written = if slot.is_sealed {
        write_sealed(image, slot.at, || place.store(ours, Release))
    } else {
        place.store(ours, Release);
        true
    };
    if written { Taken::Ours } else { Taken::NotYet }
}
