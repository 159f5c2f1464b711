//! Wakes the sender through a pipe. Before each use the descriptor is checked: the host may have closed it and reused its number,
//! and the agent must not write to another file.

use crate::base::descriptor::{self, Identity};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::*};

/// Descriptors of the pipe's ends; -1 before it is made, and after the host has closed it.
static READ: AtomicI32 = AtomicI32::new(-1);
static WRITE: AtomicI32 = AtomicI32::new(-1);
/// Device and inode of the pipe, the same for both ends.
static DEVICE: AtomicU64 = AtomicU64::new(0);
static INODE: AtomicU64 = AtomicU64::new(0);
/// Whether a byte was written to the pipe and not read since. Then no second byte is needed.
static WOKEN: AtomicBool = AtomicBool::new(false);

/// Makes the pipe. A forked child makes its own and leaves the parent's open.
pub(crate) fn prepare() {
    let mut ends = [-1; 2];
    // SAFETY: `ends` has room for two descriptors.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) } != 0 {
        return;
    }
    let ends = ends.map(descriptor::up);
    let Some(pipe) = Identity::of(ends[0]) else { return };
    DEVICE.store(pipe.device, Relaxed);
    INODE.store(pipe.inode, Relaxed);
    WOKEN.store(false, Relaxed);
    READ.store(ends[0], Release);
    WRITE.store(ends[1], Release);
}

/// Returns the descriptor of an end, if it still belongs to the pipe.
fn checked(end: &AtomicI32) -> Option<RawFd> {
    let fd = end.load(Acquire);
    let pipe = Identity { fd, device: DEVICE.load(Relaxed), inode: INODE.load(Relaxed) };
    if fd >= 0 && !pipe.holds() {
        end.store(-1, Release);
        return None;
    }
    (fd >= 0).then_some(fd)
}

/// Wakes the sender with two system calls, unless it was woken before. For rare and expensive driver calls. Preserves the host's
/// errno.
#[cold]
pub(crate) fn wake() {
    if WOKEN.swap(true, AcqRel) {
        return;
    }
    // SAFETY: errno of this thread; writes a byte from this stack to the agent's pipe.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        if let Some(fd) = checked(&WRITE) {
            // Not write(), at which the C library may cancel the thread while the agent's frames are on its stack.
            libc::syscall(libc::SYS_write, fd, [1_u8].as_ptr(), 1_usize);
        }
        *errno = before;
    }
}

/// Returns the descriptor for the sender to poll; -1 for none.
pub(crate) fn descriptor() -> RawFd {
    checked(&READ).unwrap_or(-1)
}

/// Called by the sender when it is awake: empties the pipe if it is `readable`, even if `WOKEN` is false. A thread may have been
/// stopped between setting `WOKEN` and writing its byte.
pub(crate) fn taken(readable: bool) {
    if readable {
        let mut bytes = [0_u8; 16];
        let fd = descriptor();
        // SAFETY: the buffer has this length; the read does not block.
        let read = unsafe { libc::read(fd, bytes.as_mut_ptr().cast(), bytes.len()) };
        if read == 0 {
            READ.store(-1, Release); // the host has closed the other end, so this one would always be readable
        }
    }
    WOKEN.store(false, Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_readable(fd: RawFd) -> bool {
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: passes one pollfd.
        unsafe { libc::poll(&mut poll, 1, 0) > 0 }
    }

    #[test]
    fn wakes_once_and_never_writes_to_a_stranger() {
        prepare();
        let fd = descriptor();
        assert!(fd >= 0 && !is_readable(fd));
        wake();
        wake();
        assert!(is_readable(fd));
        taken(true);
        assert!(!is_readable(fd), "one byte for both");
        wake();
        assert!(is_readable(fd));
        taken(true);
        // A thread is stopped before it writes, and the sender polls meanwhile.
        WOKEN.store(true, Relaxed);
        taken(false);
        // SAFETY: writes a byte to the agent's pipe.
        unsafe { libc::write(WRITE.load(Relaxed), [1_u8].as_ptr().cast(), 1) };
        taken(is_readable(fd));
        assert!(!is_readable(fd), "it would be awake for ever");
        wake();
        assert!(is_readable(fd));
        taken(true);
        // The host closes the pipe, and another pipe gets its descriptor numbers.
        let (read, write) = (READ.load(Relaxed), WRITE.load(Relaxed));
        let mut other = [-1; 2];
        // SAFETY: descriptors of this test.
        unsafe {
            assert_eq!(libc::pipe(other.as_mut_ptr()), 0);
            assert!(libc::dup2(other[0], read) == read && libc::dup2(other[1], write) == write);
            *libc::__errno_location() = 17;
        }
        wake();
        // SAFETY: errno of this thread.
        assert_eq!(unsafe { *libc::__errno_location() }, 17);
        assert!(!is_readable(other[0]), "a stranger was written to");
        assert_eq!(descriptor(), -1);
    }
}
