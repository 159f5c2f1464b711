//! Handles forks and exit. A forked child is disarmed first of all: it must not send records as if it were its parent.

use crate::base::{fault_injection, locks};
use crate::naming::{callers, python};
use crate::record::{high_water, panic, status};
use crate::sender;
use crate::sources::python_host::run;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static INSTALLED: AtomicBool = AtomicBool::new(false);

/// Installs the handlers of fork and exit. Called by one thread at a time.
pub(crate) fn install() {
    if INSTALLED.swap(true, Relaxed) {
        return;
    }
    // SAFETY: the handlers live as long as the process (-z nodelete).
    unsafe {
        libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child));
        libc::atexit(at_exit);
    }
}

/// Waits, for a limited time, until no thread of the agent holds the loader's lock (dl_iterate_phdr). If that lock were held at
/// the fork, the child could never take it.
extern "C" fn before() {
    panic::shielded((), || {
        fault_injection::at("fork");
        callers::before_fork();
    });
}

extern "C" fn in_parent() {
    callers::after_fork();
}

/// Disarms the child, with stores and close() only. If the child had the socket open, the daemon would not notice the parent's
/// end.
extern "C" fn in_child() {
    status::disarm();
    callers::in_child();
    callers::sites::in_child();
    python::in_child();
    run::in_child();
    sender::close_in_child();
}

/// Waits, with a timeout, until the sender has sent the last records. Does nothing in forked children.
extern "C" fn at_exit() {
    panic::shielded((), || {
        fault_injection::at("exit");
        sender::finish();
    });
}

/// Frees locks in a forked child that starts its own agent, because threads of the parent may have held them. Their data
/// (reports, counters, requests, the subscription) start empty.
pub(crate) fn reset() {
    panic::reset_after_fork();
    locks::reset_after_fork();
    high_water::reset_after_fork();
}
