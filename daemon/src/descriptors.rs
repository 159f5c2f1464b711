//! File descriptors for which the safe crates have no functions: pidfds, and descriptors that the service manager passes.
//!
//! A passed descriptor could be copied through the kernel (pidfd_getfd on this process) without unsafe code. But that leaves the
//! passed number open for ever: a connection would never be closed, and the memory of an ended agent never be freed.

use rustix::fd::AsRawFd;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Returns a pidfd of the process that called connect(2) on the socket, even if another process has its pid now. Needs Linux 6.5.
/// Errors: `ENOPROTOOPT` on older kernels; `EINVAL`, `ESRCH` or `ENODATA` when the process has ended and was waited for.
pub(crate) fn pidfd_of_peer(socket: &impl AsFd) -> io::Result<OwnedFd> {
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
    // SAFETY: the call has just opened this descriptor (close-on-exec), and nothing else knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns a pidfd of the process that has this pid now. Needs Linux 5.3.
/// Errors: `ENOSYS` on older kernels; `ESRCH` when no process has the pid.
pub(crate) fn pidfd_of_pid(pid: u32) -> io::Result<OwnedFd> {
    let pid =
        i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
    Ok(rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?)
}

/// Result of the ioctl `PIDFD_GET_INFO` (linux/pidfd.h, its first 64 bytes).
#[repr(C)]
#[derive(Debug, Default)]
struct PidfdInfo {
    mask: u64,
    cgroup: u64,
    ids: [u32; 11],
    exit_code: i32,
}

const GET_INFO: Opcode = opcode::read_write::<PidfdInfo>(0xff, 11);
const EXIT: u64 = 1 << 3;

/// Returns the exit status of a process, as waitpid encodes it. `None` if it is unknown, or the process has not ended.
///
/// Until the parent has waited for the process, /proc has the status for readers with permission. Afterwards, since Linux 6.15,
/// the pidfd has it for each holder.
pub(crate) fn exit_status(pidfd: &OwnedFd) -> Option<u64> {
    let mut info = PidfdInfo { mask: EXIT, ..PidfdInfo::default() };
    // SAFETY: the kernel writes at most the 64 bytes of `PidfdInfo` that the opcode names. All values are valid for these
    // integers, and a kernel without the call refuses it.
    unsafe { ioctl(pidfd, Updater::<GET_INFO, PidfdInfo>::new(&mut info)) }.ok()?;
    (info.mask & EXIT != 0).then_some(u64::from(info.exit_code as u32 & 0xffff))
}

/// Returns the descriptors that the service manager passed, by name; later calls return none. Marks them close-on-exec, so that
/// the child that reads NVML does not inherit them.
/// Errors: `LISTEN_FDS` and related variables are invalid, or name a descriptor that is not open.
pub(crate) fn passed() -> io::Result<Vec<(String, OwnedFd)>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    let passed = sd_notify::listen_fds_with_names()?;
    let own = |(number, name)| {
        // SAFETY: the descriptor is open, because it was just marked. `LISTEN_PID` confirms that these numbers were passed to
        // this process, no other code uses them, and `TAKEN` lets them be taken only once.
        (name, unsafe { OwnedFd::from_raw_fd(number) })
    };
    Ok(passed.map(own).collect())
}
