//! Handles forks and exit. A child is disarmed before anything else runs in it: it must not send records as its parent.

use crate::base::{fault_injection, locks};
use crate::naming::{callers, python};
use crate::record::{high_water, panic, status};
use crate::sender;
use crate::sources::python_host::run;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static INSTALLED: AtomicBool = AtomicBool::new(false);

/// Installs the handlers that disarm children. Called by one thread at a time.
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

/// Waits until the sender has released the loader's lock, which must be free in the child.
extern "C" fn before() {
    panic::shielded((), || {
        fault_injection::at("fork");
        callers::before_fork();
    });
}

extern "C" fn in_parent() {
    callers::after_fork();
}

/// Disarms the child: only stores and close(). With the socket open in the child, the daemon would never see the parent's end.
extern "C" fn in_child() {
    status::disarm();
    callers::in_child();
    callers::sites::in_child();
    python::in_child();
    run::in_child();
    sender::close_in_child();
}

/// Waits, with a timeout, until the sender has sent the last records; not in forked children.
extern "C" fn at_exit() {
    panic::shielded((), || {
        fault_injection::at("exit");
        sender::finish();
    });
}

/// Releases locks in a forked child that starts its own agent: other threads of its parent may have held them. What they guard
/// (reports, counters, requests, the subscription) belongs to the parent and starts empty.
pub(crate) fn reset() {
    panic::reset_after_fork();
    locks::reset_after_fork();
    high_water::reset_after_fork();
}
