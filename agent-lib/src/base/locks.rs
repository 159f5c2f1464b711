//! Locks that are free in a forked child, where the thread that held a lock does not exist.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering::*};
use std::sync::{LockResult, Mutex, MutexGuard, TryLockResult};

/// Number of forks between the first process with an agent and this one. Increases in a forked child that starts its own agent.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Makes every [`ForkMutex`] free in a forked child, before the child starts its own agent.
pub(crate) fn reset_after_fork() {
    GENERATION.fetch_add(1, AcqRel);
}

/// A mutex that is free in a forked child that starts its own agent. The parent's value may be half changed there. So the child
/// makes a new mutex with a new value on first use, and leaks the parent's.
#[derive(Debug)]
pub(crate) struct ForkMutex<T: 'static> {
    at: AtomicPtr<(u32, Mutex<T>)>,
    make: fn() -> T,
}

impl<T> ForkMutex<T> {
    pub(crate) const fn new(make: fn() -> T) -> Self {
        ForkMutex { at: AtomicPtr::new(std::ptr::null_mut()), make }
    }

    fn mutex(&self) -> &'static Mutex<T> {
        let (current, now) = (self.at.load(Acquire), GENERATION.load(Acquire));
        // SAFETY: null, or leaked below.
        if let Some((generation, mutex)) = unsafe { current.as_ref() }
            && *generation == now
        {
            return mutex;
        }
        let fresh = Box::into_raw(Box::new((now, Mutex::new((self.make)()))));
        let at = match self.at.compare_exchange(current, fresh, AcqRel, Acquire) {
            Ok(_) => fresh,
            Err(others) => {
                // SAFETY: made above, and no other thread has the address.
                drop(unsafe { Box::from_raw(fresh) });
                others
            }
        };
        // SAFETY: leaked by this thread or another one.
        unsafe { &(*at).1 }
    }

    pub(crate) fn lock(&self) -> LockResult<MutexGuard<'static, T>> {
        self.mutex().lock()
    }

    pub(crate) fn try_lock(&self) -> TryLockResult<MutexGuard<'static, T>> {
        self.mutex().try_lock()
    }
}

/// A spin lock, for holding times of a few hundred instructions. A forked child can reset it.
#[derive(Debug, Default)]
pub(crate) struct SpinLock(AtomicBool);

#[derive(Debug)]
pub(crate) struct SpinLockGuard<'a>(&'a AtomicBool);

impl SpinLock {
    pub(crate) const fn new() -> Self {
        SpinLock(AtomicBool::new(false))
    }

    pub(crate) fn take(&self) -> SpinLockGuard<'_> {
        while self.0.swap(true, Acquire) {
            std::thread::yield_now();
        }
        SpinLockGuard(&self.0)
    }

    /// Releases the lock in a forked child, where its holder does not exist.
    pub(crate) fn reset(&self) {
        self.0.store(false, Release);
    }
}

impl Drop for SpinLockGuard<'_> {
    fn drop(&mut self) {
        self.0.store(false, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_does_not_wait_for_its_parents_threads() {
        static WORDS: ForkMutex<Vec<u32>> = ForkMutex::new(Vec::new);
        let mut held = WORDS.lock().expect("free");
        held.push(1);
        // SAFETY: the child runs the tested code and ends.
        let status = unsafe {
            match libc::fork() {
                0 => {
                    libc::alarm(20);
                    reset_after_fork();
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
