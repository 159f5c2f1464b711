//! Runs the agent's Python code in an idle program.
//!
//! Normally the interpreter runs that code on the main thread between two statements (run.rs). A main thread that waits in a
//! call, as a server does, runs no statement. Once nothing was recorded for a while, a thread of the agent takes the
//! interpreter's lock, runs `idle` (`_core.py`) and ends. The sender never waits for that lock.
//!
//! An interpreter that ends also ends (`pthread_exit`) or blocks each thread that requests its lock. So this thread is not a
//! `std::thread`, its functions may be unwound (`C-unwind`), and nothing on its stack has a destructor.

use crate::driver::core::Core;
use crate::sources::python_host::run;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

/// Time without a record, in ns, after which a program counts as idle.
const QUIET_NS: u64 = 200_000_000;

/// Number of records at the sender's last round, and the time (ns) since which that number has not changed.
static HEAD: AtomicU64 = AtomicU64::new(0);
static SINCE_NS: AtomicU64 = AtomicU64::new(0);
/// Number of records when the Python function `idle` last completed; `u64::MAX` if it never did.
static PROCESSED: AtomicU64 = AtomicU64::new(u64::MAX);
/// Time (ns) at which the thread that runs `idle` was last started.
static STARTED_NS: AtomicU64 = AtomicU64::new(0);
static RUNNING: AtomicBool = AtomicBool::new(false);

/// Resets the state in a forked child or at a new start, where no such thread runs.
pub(crate) fn restart() {
    RUNNING.store(false, Relaxed);
    PROCESSED.store(u64::MAX, Relaxed);
}

/// Stores `head`, the number of records so far; if it has changed, also the time `now`. The sender calls it in each pass of its
/// loop.
pub(crate) fn note(head: u64, now: u64) {
    if HEAD.swap(head, Relaxed) != head {
        SINCE_NS.store(now, Relaxed);
    }
}

pub(crate) fn is_quiet(now: u64) -> bool {
    now.saturating_sub(SINCE_NS.load(Relaxed)) > QUIET_NS
}

/// Starts the thread if an idle program has new records. For the sender, while the main thread runs no statement.
pub(crate) fn start_if_idle(core: &Core, now: u64) {
    let has_new = is_quiet(now) && core.recorder.ring.head() != PROCESSED.load(Acquire);
    if !has_new || RUNNING.load(Acquire) || now.saturating_sub(STARTED_NS.load(Relaxed)) < QUIET_NS {
        return;
    }
    RUNNING.store(true, Release);
    STARTED_NS.store(now, Relaxed);
    SINCE_NS.store(now, Relaxed);
    let entry: extern "C-unwind" fn(*mut c_void) -> *mut c_void = thread;
    // SAFETY: a function of this type that may unwind, and room for the thread's id. It inherits the sender's signal mask.
    unsafe {
        let entry = std::mem::transmute::<
            extern "C-unwind" fn(*mut c_void) -> *mut c_void,
            extern "C" fn(*mut c_void) -> *mut c_void,
        >(entry);
        let mut number = std::mem::zeroed();
        if libc::pthread_create(&mut number, std::ptr::null(), entry, std::ptr::null_mut()) == 0 {
            libc::pthread_detach(number);
        } else {
            RUNNING.store(false, Release);
        }
    }
}

/// Body of the thread; see the module's docs. `pthread_exit` may unwind its stack, so nothing on it has a destructor.
extern "C-unwind" fn thread(_: *mut c_void) -> *mut c_void {
    if let Some((api, namespace)) = run::loaded() {
        // SAFETY: functions of the C API; the lock is held between the first and the last.
        unsafe {
            let lock = (api.functions.ensure)();
            match (api.call(namespace, c"idle"), Core::get()) {
                // The run is complete. The records that it made itself do not count as new.
                (Ok(0), Some(core)) => PROCESSED.store(core.recorder.ring.head(), Release),
                (Ok(_), _) => {}
                (Err(_), _) => (api.functions.clear)(),
            }
            (api.functions.release)(lock);
        }
    }
    RUNNING.store(false, Release);
    std::ptr::null_mut()
}
