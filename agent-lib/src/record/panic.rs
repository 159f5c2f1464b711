//! Handles panics of the agent: stores the location of the first one for the daemon, and prints nothing to standard error.

use crate::base::own_thread::{self, Uncancelled};
use crate::record::status;
use crate::threads;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
use std::sync::{Mutex, TryLockError};

/// Location of the first panic as text; empty if there was none.
static WHERE: Mutex<String> = Mutex::new(String::new());
static INSTALLED: AtomicBool = AtomicBool::new(false);
/// Kernel ids of the host's threads inside of `shielded`; 0 for a free entry. There may be several, for example if one thread
/// forks while another one loads the driver.
static SHIELDED: [AtomicU32; 16] = [const { AtomicU32::new(0) }; 16];

/// Installs the panic hook. The library has its own copy of Rust's standard library, so a Rust program's own panics are printed
/// as before.
pub(crate) fn install_hook() {
    if INSTALLED.swap(true, AcqRel) {
        return;
    }
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| if is_ours() { note(panic) } else { before(panic) }));
}

/// Whether the calling thread is inside of the agent. In tests, threads outside of it panic with the same hook.
fn is_ours() -> bool {
    let is_busy = || threads::current().is_some_and(|thread| thread.busy.load(Relaxed) != 0);
    own_thread::is_here() || is_shielded(own_thread::kernel_id()) || is_busy()
}

/// Removes the parent's threads from `SHIELDED` in a forked child; keeps the child's only thread.
pub(crate) fn reset_after_fork() {
    let id = own_thread::kernel_id();
    let of_parent = SHIELDED.iter().filter(|shielded| shielded.load(Relaxed) != id);
    of_parent.for_each(|shielded| shielded.store(0, Relaxed));
}

fn is_shielded(id: u32) -> bool {
    SHIELDED.iter().any(|shielded| shielded.load(Relaxed) == id)
}

fn note(panic: &PanicHookInfo<'_>) {
    let Some(place) = panic.location() else { return };
    let mut first = match WHERE.try_lock() {
        Ok(first) => first,
        Err(TryLockError::Poisoned(first)) => first.into_inner(),
        Err(TryLockError::WouldBlock) => return,
    };
    if first.is_empty() {
        let file = place.file().rsplit('/').next().unwrap_or_default();
        *first = format!(" ({file}:{})", place.line());
    }
}

/// Returns the location of the first panic in parentheses after a space; empty if it is unknown.
pub(crate) fn first_panic_location() -> String {
    WHERE.try_lock().map(|first| first.clone()).unwrap_or_default()
}

/// Runs `work`, even if the agent is not armed, as at start, fork and exit. If `work` panics, disarms the agent and returns
/// `absent`.
pub(crate) fn shielded<T>(absent: T, work: impl FnOnce() -> T) -> T {
    let _uncancelled = Uncancelled::now();
    let id = own_thread::kernel_id();
    let claim = |place: &&AtomicU32| place.compare_exchange(0, id, Relaxed, Relaxed).is_ok();
    let place = if is_shielded(id) { None } else { SHIELDED.iter().find(claim) };
    let done = catch_unwind(AssertUnwindSafe(work));
    if let Some(place) = place {
        place.store(0, Relaxed);
    }
    done.unwrap_or_else(|panic| {
        std::mem::forget(panic);
        status::disarm_after_panic();
        absent
    })
}
