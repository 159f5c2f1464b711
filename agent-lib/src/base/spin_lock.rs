//! A lock that a forked child can take back: held for a few hundred instructions by whoever says something of modules.

use std::sync::atomic::{AtomicBool, Ordering::*};

/// See the module's text.
#[derive(Debug)]
pub struct Turn(AtomicBool);

/// Gives it back when dropped.
#[derive(Debug)]
pub struct Taken<'a>(&'a AtomicBool);

impl Turn {
    /// Nobody's.
    pub const fn new() -> Self {
        Turn(AtomicBool::new(false))
    }

    /// Waits for it.
    pub fn take(&self) -> Taken<'_> {
        while self.0.swap(true, Acquire) {
            std::thread::yield_now();
        }
        Taken(&self.0)
    }

    /// In a forked child.
    pub fn reset(&self) {
        self.0.store(false, Release);
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.0.store(false, Release);
    }
}
