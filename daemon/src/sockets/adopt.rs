//! Descriptors that the service manager passed to this process become values that own them.
//!
//! Going by way of the kernel instead (pidfd_getfd on ourselves) needs no unsafe code, but it leaves the passed numbers
//! open for ever: a connection would never be closed, the memory of an agent that has ended never be given back. And the
//! system call would have to be allowed.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// What was passed, by name; once in a process, later nothing. Marked close-on-exec, so that the child that reads NVML
/// does not inherit them.
///
/// # Errors
/// `LISTEN_FDS` and what belongs to it make no sense, or name what is not open.
pub(crate) fn passed() -> io::Result<Vec<(String, OwnedFd)>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    let passed = sd_notify::listen_fds_with_names()?;
    let own = |(number, name)| {
        // SAFETY: it is open (it was just marked), and its owner is whoever takes it first: `LISTEN_PID` says that these
        // numbers were passed to this process, nothing of it knows them otherwise, and `TAKEN` lets them be taken once.
        (name, unsafe { OwnedFd::from_raw_fd(number) })
    };
    Ok(passed.map(own).collect())
}
