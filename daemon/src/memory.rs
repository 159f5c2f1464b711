//! Memory that is free goes back to the system. The C library keeps what lies below something that is used, for as long as that is: a
//! daemon that has once had to do with sixty processes at a time would seem to grow with each of their successors.

use std::time::{Duration, Instant};

/// It takes some milliseconds.
const EVERY: Duration = Duration::from_secs(60);

/// When it was given back last.
#[derive(Debug)]
pub(crate) struct Spare(Instant);

impl Default for Spare {
    fn default() -> Self {
        Self::new()
    }
}

impl Spare {
    /// From now on.
    pub(crate) fn new() -> Self {
        Spare(Instant::now())
    }

    /// Gives it back, once a minute.
    pub(crate) fn give_back(&mut self) {
        if self.0.elapsed() >= EVERY {
            trim();
            self.0 = Instant::now();
        }
    }
}

/// Gives back what is free now.
#[cfg(target_env = "gnu")]
pub fn trim() {
    // SAFETY: no pointers; it takes the locks that malloc takes.
    #[allow(unsafe_code)]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Bytes that are used of what malloc has, of a daemon below 4 GiB. Not mallinfo2, which glibc has only since 2.33.
#[cfg(target_env = "gnu")]
pub fn in_use() -> Option<u64> {
    // SAFETY: no pointers; it takes the locks that malloc takes.
    #[allow(unsafe_code)]
    let info = unsafe { libc::mallinfo() };
    Some(u64::from(info.uordblks.cast_unsigned()) + u64::from(info.hblkhd.cast_unsigned()))
}

/// Nothing here.
#[cfg(not(target_env = "gnu"))]
pub fn trim() {}

/// Not known here.
#[cfg(not(target_env = "gnu"))]
pub fn in_use() -> Option<u64> {
    None
}
