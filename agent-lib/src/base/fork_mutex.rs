//! Mutexes that a forked child which starts anew finds free: whoever held its parent's is not there to give it back, and
//! what lay behind it may be half changed.

use std::sync::atomic::{AtomicPtr, Ordering::*};
use std::sync::{LockResult, Mutex, MutexGuard, TryLockResult};

/// See the module's text. Made on first use; a child leaves its parent's alone.
#[derive(Debug)]
pub struct Renewed<T: 'static> {
    at: AtomicPtr<Mutex<T>>,
    make: fn() -> T,
}

impl<T> Renewed<T> {
    /// `make`: what is behind it in the beginning.
    pub const fn new(make: fn() -> T) -> Self {
        Renewed { at: AtomicPtr::new(std::ptr::null_mut()), make }
    }

    fn mutex(&self) -> &'static Mutex<T> {
        let known = self.at.load(Acquire);
        // SAFETY: null, or leaked below.
        if let Some(mutex) = unsafe { known.as_ref() } {
            return mutex;
        }
        let fresh = Box::into_raw(Box::new(Mutex::new((self.make)())));
        let at = match self.at.compare_exchange(known, fresh, AcqRel, Acquire) {
            Ok(_) => fresh,
            Err(others) => {
                // SAFETY: ours, and nobody saw it.
                drop(unsafe { Box::from_raw(fresh) });
                others
            }
        };
        // SAFETY: leaked here, by this thread or another one.
        unsafe { &*at }
    }

    /// As that of a mutex.
    pub fn lock(&self) -> LockResult<MutexGuard<'static, T>> {
        self.mutex().lock()
    }

    /// As that of a mutex.
    pub fn try_lock(&self) -> TryLockResult<MutexGuard<'static, T>> {
        self.mutex().try_lock()
    }

    /// In a forked child, before it starts anew.
    pub fn renew(&self) {
        self.at.store(std::ptr::null_mut(), Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_does_not_wait_for_its_parents_threads() {
        static WORDS: Renewed<Vec<u32>> = Renewed::new(Vec::new);
        let mut held = WORDS.lock().expect("free");
        held.push(1);
        // SAFETY: the child does what is tested, and ends.
        let status = unsafe {
            match libc::fork() {
                0 => {
                    libc::alarm(20);
                    WORDS.renew();
                    let is_empty = WORDS.lock().is_ok_and(|words| words.is_empty());
                    libc::_exit(i32::from(!is_empty))
                }
                child => {
                    let mut status = -1;
                    assert_eq!(libc::waitpid(child, &mut status, 0), child);
                    status
                }
            }
        };
        assert_eq!(status, 0, "SIGALRM: it waited");
        drop(held);
        assert_eq!(*WORDS.lock().expect("free"), [1]);
    }
}
