//! What the poller is doing, where its parent can see it without its help: a poller that sits in the kernel cannot
//! say so. Eight plus eight bytes in an unnamed file that both have open: one write before each call, no wake-up.

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd, pread, pwrite};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};

/// What a poller is in the middle of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    /// Waiting, or writing what it found.
    Nothing,
    /// Opening or closing the library.
    Library,
    /// Looking at the GPU with this NVML index.
    Index(u16),
    /// Calling for the device with this slot.
    Device(u8),
}

impl Doing {
    fn code(self) -> u64 {
        match self {
            Doing::Nothing => 0,
            Doing::Library => 1 << 32,
            Doing::Index(index) => 2 << 32 | u64::from(index),
            Doing::Device(slot) => 3 << 32 | u64::from(slot),
        }
    }

    fn of_code(code: u64) -> Doing {
        match (code >> 32, code & 0xffff_ffff) {
            (1, _) => Doing::Library,
            (2, index) => Doing::Index(index as u16),
            (3, slot) => Doing::Device(slot as u8),
            _ => Doing::Nothing,
        }
    }
}

/// One end of it.
#[derive(Debug)]
pub struct Beacon {
    file: OwnedFd,
    /// Counts what has been begun.
    count: u64,
}

impl Beacon {
    /// The parent's end.
    ///
    /// # Errors
    /// The system's.
    pub fn new() -> std::io::Result<Beacon> {
        Ok(Beacon { file: memfd_create("gpumemd-beacon", MemfdFlags::CLOEXEC)?, count: 0 })
    }

    /// A descriptor that a child inherits, and its number there. To be dropped once the child is there.
    ///
    /// # Errors
    /// The system's.
    pub fn to_inherit(&self) -> std::io::Result<(OwnedFd, i32)> {
        let copy = self.file.try_clone()?;
        fcntl_setfd(&copy, FdFlags::empty())?;
        let number = copy.as_raw_fd();
        Ok((copy, number))
    }

    /// The child's end, by that number.
    ///
    /// # Errors
    /// The system's.
    pub fn inherited(number: i32) -> std::io::Result<Beacon> {
        // Opened anew rather than taken over: that a descriptor with this number is ours is only hearsay.
        let file = File::options().read(true).write(true).open(format!("/proc/self/fd/{number}"))?;
        Ok(Beacon { file: file.into(), count: 0 })
    }

    /// From now on that.
    pub fn set(&mut self, doing: Doing) {
        self.count += 1;
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.count.to_le_bytes());
        bytes[8..].copy_from_slice(&doing.code().to_le_bytes());
        let _ = pwrite(&self.file, &bytes, 0);
    }

    /// What the other end does, with a number that tells one call from the next.
    pub fn get(&self) -> (u64, Doing) {
        let mut bytes = [0; 16];
        if pread(&self.file, &mut bytes, 0).is_err() {
            return (0, Doing::Nothing);
        }
        let [count, code] =
            [0, 8].map(|at| bytes[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word)));
        (count, Doing::of_code(code))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_sees_what_the_child_does() {
        let parent = Beacon::new().expect("a beacon");
        assert_eq!(parent.get(), (0, Doing::Nothing));
        let (kept, number) = parent.to_inherit().expect("a descriptor");
        let mut child = Beacon::inherited(number).expect("the other end");
        drop(kept);
        for (count, doing) in
            [Doing::Library, Doing::Index(65_535), Doing::Device(254), Doing::Nothing].into_iter().enumerate()
        {
            child.set(doing);
            assert_eq!(parent.get(), (count as u64 + 1, doing));
        }
    }
}
