//! The agent's own thread: whether it runs, whether it is the calling one, its connection; protection against pthread_cancel.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering::*};

pub(crate) static FINISHED: AtomicBool = AtomicBool::new(false);

/// The kernel id of the agent's thread.
pub(crate) static THREAD: AtomicU32 = AtomicU32::new(0);

/// The process that the agent's thread belongs to: forked children have none.
pub(crate) static OWNER: AtomicU32 = AtomicU32::new(0);

/// The connection to the daemon; -1 for none. The fork handler closes it in the child.
pub(crate) static SOCKET: AtomicI32 = AtomicI32::new(-1);

/// A connection to a daemon was attempted since this process began.
pub(crate) static TRIED: AtomicBool = AtomicBool::new(false);

/// Returns the kernel id of the calling thread. By number: glibc has gettid only since 2.30.
pub(crate) fn kernel_id() -> u32 {
    // SAFETY: takes no arguments.
    unsafe { libc::syscall(libc::SYS_gettid) as u32 }
}

/// Whether the calling thread is the sender.
pub(crate) fn is_here() -> bool {
    THREAD.load(Relaxed) == kernel_id()
}

/// Sleeps 5 ms without using memory. For the sender.
pub(crate) fn nap() {
    let while_ns = libc::timespec { tv_sec: 0, tv_nsec: 5_000_000 };
    // SAFETY: nothing is written.
    unsafe { libc::nanosleep(&while_ns, std::ptr::null_mut()) };
}

/// Whether the agent's thread runs in this process. Requests are answered only then.
pub(crate) fn is_running() -> bool {
    OWNER.load(Acquire) == std::process::id() && !FINISHED.load(Acquire)
}

/// Whether a connection was attempted and there is none.
pub(crate) fn is_unheard() -> bool {
    TRIED.load(Acquire) && !connected()
}

pub(crate) fn connected() -> bool {
    SOCKET.load(Acquire) >= 0
}

/// Defers cancellation of this thread (pthread_cancel) while the value lives: the C library would unwind the agent's frames,
/// which ends the process. For code that waits, reads or writes. Callbacks have no cancellation point.
#[derive(Debug)]
pub(crate) struct Uncancelled(c_int);

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}
/// PTHREAD_CANCEL_DISABLE.
const DISABLE: c_int = 1;

impl Uncancelled {
    #[must_use]
    pub(crate) fn now() -> Self {
        let mut old = 0;
        // SAFETY: `old` has room for the old state.
        unsafe { pthread_setcancelstate(DISABLE, &mut old) };
        Uncancelled(old)
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: restores the previous state.
        unsafe { pthread_setcancelstate(self.0, std::ptr::null_mut()) };
    }
}
