//! Runs the agent's Python code in an idle program. Normally the interpreter runs it on the main thread between two statements
//! (run.rs), but a main thread that waits in a call, as a server does, runs none. Once nothing was recorded for a while, a
//! thread of the agent takes the interpreter's lock, runs `idle` (`_core.py`) and ends. The sender never waits for that lock.
//!
//! If a thread requests the lock while the interpreter ends, that ends (`pthread_exit`) or blocks the thread. So this is no
//! `std::thread`, its functions may be unwound (`C-unwind`), and nothing on its stack has a destructor.

use crate::driver::core::Core;
use crate::sources::python_host::run;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

/// Time without a record after which a program is idle.
const QUIET_NS: u64 = 200_000_000;

/// `HEAD`: records at the sender's last round; since `SINCE_NS`. `LOOKED`: records after the last complete run.
static HEAD: AtomicU64 = AtomicU64::new(0);
static SINCE_NS: AtomicU64 = AtomicU64::new(0);
static LOOKED: AtomicU64 = AtomicU64::new(u64::MAX);
/// When the thread was last started.
static TRIED_NS: AtomicU64 = AtomicU64::new(0);
static RUNNING: AtomicBool = AtomicBool::new(false);

/// Resets the state in a child or at a new start: no thread is running.
pub(crate) fn restart() {
    RUNNING.store(false, Relaxed);
    LOOKED.store(u64::MAX, Relaxed);
}

/// Notes the number of records; the sender calls it each round.
pub(crate) fn note(head: u64, now: u64) {
    if HEAD.swap(head, Relaxed) != head {
        SINCE_NS.store(now, Relaxed);
    }
}

pub(crate) fn is_quiet(now: u64) -> bool {
    now.saturating_sub(SINCE_NS.load(Relaxed)) > QUIET_NS
}

/// Starts the thread if the idle program has recorded something new. For the sender, while the main thread does not respond.
pub(crate) fn look(core: &Core, now: u64) {
    let has_new = is_quiet(now) && core.recorder.ring.head() != LOOKED.load(Acquire);
    if !has_new || RUNNING.load(Acquire) || now.saturating_sub(TRIED_NS.load(Relaxed)) < QUIET_NS {
        return;
    }
    RUNNING.store(true, Release);
    TRIED_NS.store(now, Relaxed);
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

/// Body of the thread; see the module's docs. Nothing that may be unwound here has a destructor.
extern "C-unwind" fn thread(_: *mut c_void) -> *mut c_void {
    if let Some((call, namespace)) = run::loaded() {
        // SAFETY: functions of the C API; the lock is held between the first and the last.
        unsafe {
            let held = (call.ensure)();
            let function = (call.get)(namespace.0, c"idle".as_ptr());
            let answer =
                if function.is_null() { function } else { (call.call)(function, std::ptr::null_mut()) };
            if answer.is_null() {
                (call.clear)();
            } else {
                let is_complete = (call.as_long)(answer) == 0;
                (call.drop)(answer);
                done(is_complete);
            }
            (call.release)(held);
        }
    }
    RUNNING.store(false, Release);
    std::ptr::null_mut()
}

/// Notes a complete run: only new records need another. Records that the run itself made do not count as new.
fn done(is_complete: bool) {
    if let Some(core) = Core::get().filter(|_| is_complete) {
        LOOKED.store(core.recorder.ring.head(), Release);
    }
}
