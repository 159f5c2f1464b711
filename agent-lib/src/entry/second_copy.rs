//! Finds another copy of the agent in the process, and loads another tool's injection library.
//!
//! If a process has two copies of the agent (the injected file and that of a Python wheel), the second forwards calls to the
//! first.
//!
//! The second copy finds the first in /proc/self/fd: the name of the first copy's memfd contains the pid, and the address of its
//! table of functions. In a forked child the name has the parent's pid, and exec() closes the memfd. An environment variable
//! would not work: a program may clear it, and children would inherit it. The file names of the copies differ, so they cannot be
//! used either.

use crate::Functions;
use crate::base::memfd::PREFIX;
use crate::sources::cupti::find::c_path;
use cupti_sys::Library;
use std::sync::atomic::{AtomicPtr, Ordering::*};

/// First word of a table of functions, to recognize it. It contains the table's size, because that changes with its layout.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"gpumem\0\0") | (size_of::<Functions>() as u64) << 48;

static FIRST: AtomicPtr<Functions> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the address of this copy's table, for the name of its memfd.
pub(crate) fn own_table() -> usize {
    std::ptr::from_ref(&crate::FUNCTIONS) as usize
}

/// Returns the functions of the first copy, if this one forwards.
pub(crate) fn first() -> Option<&'static Functions> {
    // SAFETY: null, or the static table of a library that is never unloaded.
    unsafe { FIRST.load(Acquire).as_ref() }
}

pub(crate) fn find(pid: u32) -> Option<&'static Functions> {
    let names = std::fs::read_dir("/proc/self/fd").ok()?.flatten();
    let address = names.filter_map(|entry| {
        let link = std::fs::read_link(entry.path()).ok()?;
        let rest = link.to_str()?.strip_prefix("/memfd:")?.strip_prefix(PREFIX)?;
        let (owner, address) = rest.split_whitespace().next()?.split_once('.')?;
        let address = usize::from_str_radix(address, 16).ok()?;
        (owner.parse() == Ok(pid) && address.is_multiple_of(align_of::<Functions>())).then_some(address)
    });
    let table = address.map(|address| address as *mut Functions).find(|table| !table.is_null())?;
    // SAFETY: a copy of this library has made the memfd and put the address of its table into the name.
    let functions = unsafe { &*table };
    if functions.magic != MAGIC {
        return None;
    }
    FIRST.store(table, Release);
    Some(functions)
}

/// Loads another tool's injection library, which this one replaced, and initialises it first.
pub(crate) fn chain(path: &std::path::Path) {
    let Some(file) = c_path(path) else { return };
    let Some(library) = Library::open(&file) else { return };
    // SAFETY: an injection library exports this function with this type.
    let initialize: Option<unsafe extern "C" fn() -> i32> =
        unsafe { library.function(c"InitializeInjection") };
    if let Some(initialize) = initialize {
        // SAFETY: called once, at the time at which the driver would have called it.
        unsafe { initialize() };
    }
}
