//! Returns memory that the daemon has freed to the system. The C library keeps free memory below the last used block. So a daemon
//! that once served sixty processes would seem to grow with each later process.

use std::time::{Duration, Instant};

/// Interval at which freed memory is returned. Each return takes some milliseconds.
const EVERY: Duration = Duration::from_secs(60);

/// Time at which freed memory was last returned to the system.
#[derive(Debug)]
pub(crate) struct SpareMemory(Instant);

impl Default for SpareMemory {
    fn default() -> Self {
        SpareMemory(Instant::now())
    }
}

impl SpareMemory {
    /// Returns freed memory to the system if the interval has passed since the last return.
    pub(crate) fn trim_if_due(&mut self) {
        if self.0.elapsed() >= EVERY {
            trim();
            self.0 = Instant::now();
        }
    }
}

/// Returns freed memory to the system now.
#[cfg(target_env = "gnu")]
pub fn trim() {
    // SAFETY: the call takes no pointers, and it takes malloc's locks.
    #[allow(unsafe_code)]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Returns the number of bytes that malloc has in use, for a daemon below 4 GiB. Does not use mallinfo2, which glibc has only
/// since 2.33.
#[cfg(target_env = "gnu")]
pub fn in_use() -> Option<u64> {
    // SAFETY: the call takes no pointers, and it takes malloc's locks.
    #[allow(unsafe_code)]
    let info = unsafe { libc::mallinfo() };
    Some(u64::from(info.uordblks.cast_unsigned()) + u64::from(info.hblkhd.cast_unsigned()))
}

/// Does nothing, because only glibc has a function for this.
#[cfg(not(target_env = "gnu"))]
pub fn trim() {}

/// Returns `None`, because only glibc has a function for this.
#[cfg(not(target_env = "gnu"))]
pub fn in_use() -> Option<u64> {
    None
}
