//! What a filter of system calls (seccomp) would do to the agent: one that ends whoever makes a call that is not on its list would
//! end the program. So where there is a filter at all, as in most containers, a child tries the calls that the agent makes and CUDA
//! does not; it has the same filter, and its end harms nobody.

use std::ffi::{c_int, c_long};

/// PR_GET_SECCOMP's answer: a filter of the program's, or of whoever started it.
const FILTER: c_int = 2;

/// Whether the agent may do what it does, or is refused at worst.
pub(crate) fn syscalls_allowed() -> bool {
    // SAFETY: no memory is involved.
    let mode = unsafe { libc::prctl(libc::PR_GET_SECCOMP, 0, 0, 0, 0) };
    mode != FILTER || survives()
}

/// Whether a child comes through all of them.
fn survives() -> bool {
    // SAFETY: sets of signals on this stack, errno of this thread, and a child that shares nothing with us and makes system calls
    // only. Its end is told to nobody but this thread: a program that waits for its children does not get it.
    unsafe {
        let mut all = std::mem::MaybeUninit::uninit();
        let mut old = std::mem::MaybeUninit::uninit();
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
        // Not fork(): handlers of the program's would run, for a child that is none of its.
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
        libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut());
        // No child may be had: a filter that refuses, as those do which refuse the rest.
        child < 0 || (got >= 0 && status == 0)
    }
}

/// In the child. No memory is written but this stack, and nothing waits.
///
/// # Safety
/// In a process of its own.
unsafe fn try_all() -> ! {
    let path = c"/proc/self/fd".as_ptr() as usize;
    let mut room = [0_u64; 64];
    let buffer = room.as_mut_ptr() as usize;
    let zero = [0_u64; 2]; // a timespec
    let at_once = zero.as_ptr() as usize;
    let cloexec = libc::MFD_CLOEXEC as usize;
    let no_fd = usize::MAX; // -1: refused by the kernel itself, after the filter
    let calls: &[(c_long, [usize; 6])] = &[
        // Its end leaves no core file, which would be the program's memory.
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
        // SAFETY: descriptors that are none, and buffers of this stack that are large enough.
        unsafe { libc::syscall(*call, *a, *b, *c, *d, *e, *f) };
    }
    // SAFETY: ends this process, past everything that the program wants done at its exit.
    unsafe {
        libc::syscall(libc::SYS_exit_group, 0);
        libc::abort()
    }
}
