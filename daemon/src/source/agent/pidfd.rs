//! The pidfd of the process that made a connection, or that has a pid now.

use rustix::fd::AsRawFd;
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

/// Returns a pidfd of the process that called connect(2), whatever process has its pid now. Needs Linux 6.5.
///
/// # Errors
/// `ENOPROTOOPT` on older kernels; `EINVAL`, `ESRCH` or `ENODATA` when the process has ended and was waited for.
pub(crate) fn of_peer(socket: &impl AsFd) -> io::Result<OwnedFd> {
    let mut fd: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `len` bytes to `fd`, and how many to `len`; both live until the call returns.
    let result = unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            std::ptr::from_mut(&mut fd).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if fd < 0 {
        return Err(io::ErrorKind::NotFound.into());
    }
    // SAFETY: the call has just opened this descriptor (close-on-exec) for its caller, and nothing else knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns a pidfd of the process that has this pid now. Needs Linux 5.3.
///
/// # Errors
/// `ENOSYS` on older kernels; `ESRCH` when no process has the pid.
pub(crate) fn of_pid(pid: u32) -> io::Result<OwnedFd> {
    let pid =
        i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
    Ok(rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?)
}
