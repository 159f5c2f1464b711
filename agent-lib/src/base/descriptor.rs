//! The agent's file descriptors: they get high numbers, and the agent checks before use that they are still its own.
//!
//! With high numbers the program's own descriptors keep the numbers that they have without the agent. In a program started
//! without standard output, a file of the agent could otherwise get number 1 and receive the program's output. A program that
//! closes all descriptors and opens its own expects low numbers.

use crate::base::own_thread::soft_limit;
use std::fs::File;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, RawFd};

/// Lowest number for a descriptor, if RLIMIT_NOFILE allows it: above the numbers of usual programs, and below usual limits and
/// the limit of `select()`.
const FLOOR: RawFd = 512;
/// Lowest descriptor number if `FLOOR` is not possible: above those of standard input, output and error.
const LOWEST: RawFd = 3;

/// Moves a new descriptor to a free number from `FLOOR` on, or else from `LOWEST` on, with close-on-exec. If none is free, it
/// keeps its number; below `LOWEST` it is closed, and the result is -1.
pub(crate) fn up(fd: RawFd) -> RawFd {
    if fd < 0 {
        return fd;
    }
    let half = RawFd::try_from(soft_limit(libc::RLIMIT_NOFILE).unwrap_or(0) / 2).unwrap_or(FLOOR);
    for floor in [FLOOR.min(half).max(LOWEST), LOWEST] {
        // SAFETY: no memory is involved; only the agent uses the old number.
        unsafe {
            let high = libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, floor);
            if high >= 0 {
                libc::close(fd);
                return high;
            }
        }
    }
    if fd < LOWEST {
        // SAFETY: the agent's own descriptor.
        unsafe { libc::close(fd) };
        return -1;
    }
    fd
}

/// Moves a file's descriptor to a high number, as `up` does. The low number is in use only during this call.
///
/// # Errors
/// Fails with EMFILE if no usable number is free.
pub fn file_up(file: File) -> std::io::Result<File> {
    let fd = up(file.into_raw_fd());
    if fd < 0 {
        return Err(std::io::Error::from_raw_os_error(libc::EMFILE));
    }
    // SAFETY: the descriptor was the file's, and nothing else uses it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// A descriptor and the file to which it refers. Host programs may close descriptors that they do not know, and reuse the
/// numbers. So the file is compared before each use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    pub fd: RawFd,
    pub device: u64,
    pub inode: u64,
}

impl Identity {
    /// Returns the current identity of a descriptor; `None` if it is not open.
    pub(crate) fn of(fd: RawFd) -> Option<Self> {
        let mut stat = std::mem::MaybeUninit::<libc::stat>::zeroed();
        // SAFETY: `stat` has room for the answer.
        if fd < 0 || unsafe { libc::fstat(fd, stat.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: fstat has filled it.
        let stat = unsafe { stat.assume_init() };
        Some(Identity { fd, device: stat.st_dev, inode: stat.st_ino })
    }

    /// Whether the descriptor still refers to that file.
    pub(crate) fn holds(self) -> bool {
        Identity::of(self.fd) == Some(self)
    }
}

/// A descriptor of the agent, closed when the value is dropped; -1 for none.
#[derive(Debug)]
pub(crate) struct Owned(pub RawFd);

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the agent's own descriptor, which nothing else uses.
        unsafe { libc::close(self.0) };
    }
}

/// A file that stays open for a long time. If the host has reused the descriptor's number for another file, that file is neither
/// written nor closed.
#[derive(Debug)]
pub(crate) struct CheckedFile {
    file: ManuallyDrop<File>,
    identity: Identity,
}

impl CheckedFile {
    pub(crate) fn new(file: File) -> std::io::Result<Self> {
        let file = file_up(file)?;
        let identity = Identity::of(file.as_raw_fd()).ok_or_else(closed)?;
        Ok(CheckedFile { file: ManuallyDrop::new(file), identity })
    }
}

fn closed() -> std::io::Error {
    std::io::Error::from_raw_os_error(libc::EBADF)
}

impl Write for CheckedFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.identity.holds() { self.file.write(bytes) } else { Err(closed()) }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for CheckedFile {
    fn drop(&mut self) {
        if self.identity.holds() {
            // SAFETY: dropped once, and not used again.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn another_file_under_its_number_is_left_alone() {
        let path = |name| std::env::temp_dir().join(format!("gpumem-kept-{name}-{}", std::process::id()));
        let mut kept = CheckedFile::new(File::create(path("ours")).expect("a file")).expect("kept");
        kept.write_all(b"ours").expect("written");
        let other = File::create(path("other")).expect("a file");
        // SAFETY: acts as a program that closes unknown descriptors and reuses the number.
        assert!(unsafe { libc::dup2(other.as_raw_fd(), kept.identity.fd) } >= 0);
        assert!(kept.write_all(b"ours").is_err());
        let number = kept.identity.fd;
        drop(kept);
        assert!(Identity::of(number).is_some(), "it was closed");
        let mut text = String::new();
        File::open(path("other")).and_then(|mut file| file.read_to_string(&mut text)).expect("read");
        assert_eq!(text, "");
        for name in ["ours", "other"] {
            std::fs::remove_file(path(name)).expect("removed");
        }
        // SAFETY: the test's own descriptor.
        unsafe { libc::close(number) };
    }
}
