//! Tests whether a filter of system calls (seccomp) allows those of the agent. Some filters end a process that makes a forbidden
//! call. So if there is a filter, as in most containers, a child process tries the calls that the agent makes and CUDA does not.
//! The child has the same filter. If the filter ends the child, the program is not affected.

use crate::base::own_thread::without_signals;
use std::ffi::{c_int, c_long};

/// Result of PR_GET_SECCOMP if the program or a parent process has installed a filter.
const FILTER: c_int = 2;

/// Whether the agent can make its system calls: they may fail, but do not end the process.
pub(crate) fn syscalls_allowed() -> bool {
    // SAFETY: no memory is involved.
    let mode = unsafe { libc::prctl(libc::PR_GET_SECCOMP, 0, 0, 0, 0) };
    mode != FILTER || survives()
}

fn survives() -> bool {
    // SAFETY: errno of this thread, and a child that shares no memory and only makes system calls. The child's end sends no
    // signal, and only a wait with __WALL returns it, so the program does not see it.
    without_signals(|| unsafe {
        // Not fork(): it would run the program's fork handlers.
        let child = libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0);
        if child == 0 {
            try_all();
        }
        let mut status: c_int = 0;
        let mut got = -1;
        while child > 0 && got < 0 {
            got = libc::syscall(libc::SYS_wait4, child, &raw mut status, libc::__WALL, 0_usize) as c_int;
            if got < 0 && *libc::__errno_location() != libc::EINTR {
                break;
            }
        }
        // If no child could be created, the filter made clone() fail. Then it probably makes forbidden calls fail, and does not
        // end the process.
        child < 0 || (got >= 0 && status == 0)
    })
}

/// Makes the agent's system calls, in the child. Writes only to this stack, and never waits.
///
/// # Safety
/// Must run in a separate process.
unsafe fn try_all() -> ! {
    let path = c"/proc/self/fd".as_ptr() as usize;
    let mut room = [0_u64; 64];
    let buffer = room.as_mut_ptr() as usize;
    let zero = [0_u64; 2]; // a timespec
    let at_once = zero.as_ptr() as usize;
    let cloexec = libc::MFD_CLOEXEC as usize;
    let no_fd = usize::MAX; // -1: the call passes the filter and then fails
    let calls: &[(c_long, [usize; 6])] = &[
        // If the filter ends the child, the child writes no core file, which would contain the program's memory.
        (libc::SYS_prctl, [libc::PR_SET_DUMPABLE as usize, 0, 0, 0, 0, 0]),
        (libc::SYS_memfd_create, [path, cloexec, 0, 0, 0, 0]),
        (libc::SYS_ftruncate, [no_fd, 0, 0, 0, 0, 0]),
        (libc::SYS_fcntl, [no_fd, libc::F_ADD_SEALS as usize, 0, 0, 0, 0]),
        (libc::SYS_fcntl, [no_fd, libc::F_DUPFD_CLOEXEC as usize, 3, 0, 0, 0]),
        (libc::SYS_fstat, [no_fd, buffer, 0, 0, 0, 0]),
        (libc::SYS_newfstatat, [no_fd, path, buffer, 0, 0, 0]),
        (libc::SYS_readlinkat, [no_fd, path, buffer, 8, 0, 0]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_readlink, [path, buffer, 8, 0, 0, 0]),
        (libc::SYS_getdents64, [no_fd, buffer, 8, 0, 0, 0]),
        (libc::SYS_socket, [libc::AF_UNIX as usize, libc::SOCK_SEQPACKET as usize, 0, 0, 0, 0]),
        (libc::SYS_connect, [no_fd, buffer, 2, 0, 0, 0]),
        (libc::SYS_setsockopt, [no_fd, libc::SOL_SOCKET as usize, libc::SO_SNDTIMEO as usize, buffer, 16, 0]),
        (libc::SYS_fcntl, [no_fd, libc::F_SETFL as usize, 0, 0, 0, 0]),
        (libc::SYS_sendmsg, [no_fd, buffer, 0, 0, 0, 0]),
        (libc::SYS_sendto, [no_fd, buffer, 1, 0, 0, 0]),
        (libc::SYS_recvfrom, [no_fd, buffer, 1, 0, 0, 0]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_poll, [buffer, 0, 0, 0, 0, 0]),
        (libc::SYS_ppoll, [buffer, 0, at_once, 0, 0, 0]),
        (libc::SYS_pipe2, [buffer, libc::O_CLOEXEC as usize, 0, 0, 0, 0]),
        (libc::SYS_gettid, [0; 6]),
        (libc::SYS_tgkill, [no_fd, 1, 0, 0, 0, 0]),
        (libc::SYS_getrlimit, [libc::RLIMIT_NOFILE as usize, buffer, 0, 0, 0, 0]),
        (libc::SYS_prlimit64, [0, libc::RLIMIT_NOFILE as usize, 0, buffer, 0, 0]),
        (libc::SYS_nanosleep, [at_once, 0, 0, 0, 0, 0]),
        (libc::SYS_clock_nanosleep, [libc::CLOCK_MONOTONIC as usize, 0, at_once, 0, 0, 0]),
        (libc::SYS_sched_yield, [0; 6]),
        (libc::SYS_madvise, [0; 6]),
        (libc::SYS_geteuid, [0; 6]),
        (libc::SYS_uname, [buffer, 0, 0, 0, 0, 0]),
    ];
    for (call, [a, b, c, d, e, f]) in calls {
        // SAFETY: invalid descriptors, and buffers of this stack that are large enough.
        unsafe { libc::syscall(*call, *a, *b, *c, *d, *e, *f) };
    }
    // SAFETY: ends this process without running the program's exit handlers.
    unsafe {
        libc::syscall(libc::SYS_exit_group, 0);
        libc::abort()
    }
}
