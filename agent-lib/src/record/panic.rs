//! What a panic of ours leaves behind: where it was, for the daemon, and nothing on the program's standard error.

use crate::base::own_thread::{self, Uncancelled};
use crate::record::status;
use crate::threads;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
use std::sync::{Mutex, TryLockError};

/// Where the first one was.
static WHERE: Mutex<String> = Mutex::new(String::new());
static INSTALLED: AtomicBool = AtomicBool::new(false);
/// A thread of the program's that starts or ends the agent; 0 for none.
static SHIELDED: AtomicU32 = AtomicU32::new(0);

/// Our standard library is our own: what the program's says of its panics stays as it is.
pub fn install_hook() {
    if INSTALLED.swap(true, AcqRel) {
        return;
    }
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| if is_ours() { note(panic) } else { before(panic) }));
}

/// On a thread that is inside of the agent. In tests the library is a part of the program.
fn is_ours() -> bool {
    let is_busy = || threads::current().is_some_and(|thread| thread.busy.load(Relaxed) != 0);
    own_thread::is_here() || SHIELDED.load(Relaxed) == own_thread::kernel_id() || is_busy()
}

fn note(panic: &PanicHookInfo<'_>) {
    let Some(place) = panic.location() else { return };
    let mut known = match WHERE.try_lock() {
        Ok(known) => known,
        Err(TryLockError::Poisoned(known)) => known.into_inner(),
        Err(TryLockError::WouldBlock) => return,
    };
    if known.is_empty() {
        let file = place.file().rsplit('/').next().unwrap_or_default();
        *known = format!(" ({file}:{})", place.line());
    }
}

/// Where the first one was, in parentheses after a space; empty if that is not known.
pub fn first_panic_location() -> String {
    WHERE.try_lock().map(|known| known.clone()).unwrap_or_default()
}

/// Runs `work` whether or not the agent is armed; a panic disarms it. For starting and stopping.
pub fn shielded<T>(absent: T, work: impl FnOnce() -> T) -> T {
    let _uncancelled = Uncancelled::now();
    let before = SHIELDED.swap(own_thread::kernel_id(), Relaxed);
    let done = catch_unwind(AssertUnwindSafe(work));
    SHIELDED.store(before, Relaxed);
    done.unwrap_or_else(|panic| {
        std::mem::forget(panic);
        status::disarm_after_panic();
        absent
    })
}
