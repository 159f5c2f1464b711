//! The agent's descriptors: where they do not hurt, and known again.
//!
//! The program's own numbers stay what they would be without us. A program that runs without standard output, for one, would
//! write its lines into whatever had the number 1; and one that closes all and opens its own gets low numbers first.

use std::fs::File;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, RawFd};

/// Where there is room: above what a program that counts its descriptors meets, below what `select()` and usual limits end at.
const FLOOR: RawFd = 512;
/// Standard input, output and error are never ours.
const LOWEST: RawFd = 3;

/// Gives a descriptor that was just made a high number, which closes on exec; -1 if it has none that may be kept.
pub(crate) fn up(fd: RawFd) -> RawFd {
    if fd < 0 {
        return fd;
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a place for the answer.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    let half = RawFd::try_from(limit.rlim_cur / 2).unwrap_or(FLOOR);
    for floor in [FLOOR.min(half).max(LOWEST), LOWEST] {
        // SAFETY: no memory is involved; the old number is ours alone.
        unsafe {
            let high = libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, floor);
            if high >= 0 {
                libc::close(fd);
                return high;
            }
        }
    }
    if fd < LOWEST {
        // SAFETY: ours.
        unsafe { libc::close(fd) };
        return -1;
    }
    fd
}

/// The same for a file: its low number is in use for as long as this takes, not for as long as it is read.
pub fn file_up(file: File) -> std::io::Result<File> {
    let fd = up(file.into_raw_fd());
    if fd < 0 {
        return Err(std::io::Error::from_raw_os_error(libc::EMFILE));
    }
    // SAFETY: it was the file's, and is nobody else's.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// A descriptor that is still what we opened: hosts close descriptors that they do not know, and get the numbers for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Its number.
    pub fd: RawFd,
    /// What it was.
    pub device: u64,
    /// See `device`.
    pub inode: u64,
}

impl Identity {
    /// As it is now; `None` if it is not open.
    pub(crate) fn of(fd: RawFd) -> Option<Self> {
        let mut stat = std::mem::MaybeUninit::<libc::stat>::zeroed();
        // SAFETY: a place for the answer.
        if fd < 0 || unsafe { libc::fstat(fd, stat.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: filled.
        let stat = unsafe { stat.assume_init() };
        Some(Identity { fd, device: stat.st_dev, inode: stat.st_ino })
    }

    /// Whether it is still that.
    pub(crate) fn holds(self) -> bool {
        Identity::of(self.fd) == Some(self)
    }
}

/// A file that is written to for long: not once its number is another's, and then it is not closed either.
#[derive(Debug)]
pub(crate) struct Kept {
    file: ManuallyDrop<File>,
    identity: Identity,
}

impl Kept {
    /// Under a high number.
    pub(crate) fn new(file: File) -> std::io::Result<Self> {
        let file = file_up(file)?;
        let identity = Identity::of(file.as_raw_fd()).ok_or_else(gone)?;
        Ok(Kept { file: ManuallyDrop::new(file), identity })
    }
}

fn gone() -> std::io::Error {
    std::io::Error::from_raw_os_error(libc::EBADF)
}

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.identity.holds() { self.file.write(bytes) } else { Err(gone()) }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.identity.holds() {
            // SAFETY: once, and not used again.
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
        let mut kept = Kept::new(File::create(path("ours")).expect("a file")).expect("kept");
        kept.write_all(b"ours").expect("written");
        let other = File::create(path("other")).expect("a file");
        // SAFETY: as a program that closes what it does not know, and uses the number.
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
        // SAFETY: this test's.
        unsafe { libc::close(number) };
    }
}
