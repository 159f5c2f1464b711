//! State of the agent's own thread, the sender: whether it runs, and its connection. Also protection against pthread_cancel, and
//! the kernel's data about the process.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering::*};

pub(crate) static FINISHED: AtomicBool = AtomicBool::new(false);

pub(crate) static THREAD: AtomicU32 = AtomicU32::new(0);

/// Pid of the process that has started the agent's thread. In a forked child, which has no such thread, it is the parent's pid.
pub(crate) static OWNER: AtomicU32 = AtomicU32::new(0);

/// Descriptor of the connection to the daemon; -1 for none. The fork handler closes it in the child.
pub(crate) static SOCKET: AtomicI32 = AtomicI32::new(-1);

/// Whether the agent has tried to connect to a daemon since this process began.
pub static TRIED: AtomicBool = AtomicBool::new(false);

/// Returns the kernel id of the calling thread. A direct system call, because glibc has gettid only since 2.30.
pub(crate) fn kernel_id() -> u32 {
    // SAFETY: takes no arguments.
    unsafe { libc::syscall(libc::SYS_gettid) as u32 }
}

pub(crate) fn is_here() -> bool {
    THREAD.load(Relaxed) == kernel_id()
}

/// Returns the soft limit of a resource of this process, e.g. `RLIMIT_NOFILE`; `None` if it cannot be read.
pub(crate) fn soft_limit(resource: libc::__rlimit_resource_t) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` has room for the answer.
    (unsafe { libc::getrlimit(resource, &mut limit) } == 0).then_some(limit.rlim_cur)
}

/// Returns the fields of `/proc/self/stat` from field 3 on. Field 2, the command in parentheses, may contain any bytes.
fn fields_of(stat: &[u8]) -> impl Iterator<Item = &str> {
    let name_end = stat.iter().rposition(|&byte| byte == b')');
    let rest = name_end.and_then(|end| std::str::from_utf8(stat.get(end + 1..)?).ok());
    rest.unwrap_or_default().split_ascii_whitespace()
}

/// Returns the start time of the process, field 22, in clock ticks after the boot; 0 if it cannot be read.
pub(crate) fn start_ticks() -> u64 {
    let stat = std::fs::read("/proc/self/stat").unwrap_or_default();
    fields_of(&stat).nth(19).and_then(|ticks| ticks.parse().ok()).unwrap_or(0)
}

/// Whether the agent's thread is the last one of the process, after `main` was left by `pthread_exit`. The agent's thread would
/// run forever, because no signal is delivered to it. When it ends, the C library ends the process, as without the agent. The
/// result is false without /proc.
pub(crate) fn is_alone() -> bool {
    let stat = std::fs::read("/proc/self/stat").unwrap_or_default();
    let mut fields = fields_of(&stat);
    // Fields 3 and 20: the state of the first thread, and the number of threads including it.
    fields.next() == Some("Z") && fields.nth(16) == Some("2")
}

/// Whether the agent's thread runs in this process. If not, requests would never be answered.
pub(crate) fn is_running() -> bool {
    OWNER.load(Acquire) == std::process::id() && !FINISHED.load(Acquire)
}

pub(crate) fn connected() -> bool {
    SOCKET.load(Acquire) >= 0
}

/// Runs `work` while all signals are blocked for this thread, and for threads that `work` starts.
pub(crate) fn without_signals<T>(work: impl FnOnce() -> T) -> T {
    let (mut all, mut old) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the signal sets are on this stack.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
    }
    let done = work();
    // SAFETY: restores the previous mask.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut()) };
    done
}

/// Defers cancellation of this thread (pthread_cancel) while the value exists. A cancelled thread unwinds the agent's frames,
/// which ends the process. Needed for code that waits, reads or writes; callbacks have no cancellation point.
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

#[cfg(test)]
mod tests {
    use super::fields_of;

    #[test]
    fn a_name_may_be_anything() {
        let rest = b" S 17 4711 4711 34816 4711 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 10 11 12\n";
        for name in [
            &b"python"[..],
            b"\xe8\xae\xad\xe7\xbb\x83\xe6\xa8\xa1\xe5\x9e\x8b\xe6\x96",
            b"\xff",
            b"a) S 1 (b\n",
        ] {
            let stat = [b"4711 (", name, b")", rest].concat();
            assert_eq!(fields_of(&stat).nth(19), Some("987654"));
        }
        assert_eq!(fields_of(b"").nth(19), None);
        assert_eq!(fields_of(b"1 (a)").nth(19), None);
    }
}
