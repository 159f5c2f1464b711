//! Determines how much of the calling thread's stack, from an address upwards, can be read without a fault.
//!
//! The page of an address in use can be read to its end. Beyond that page, only the thread's own stack is read. The main thread's
//! stack ends at the program's arguments, and the kernel maps nothing else within its size limit. Another thread's stack ends at
//! the C library's control block of the thread. The pages up to there are tested once, with a system call that returns whether an
//! address can be read. A stack does not shrink, so they are not tested again. If the program has switched to another stack
//! itself (coroutines, signal stacks), only one page is read.

use crate::base::own_thread::soft_limit;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The smallest page size of any platform; larger pages begin and end at its multiples, too.
const PAGE: usize = 4096;
/// Maximum distance, in bytes, between an address and its stack's end at which the pages between are tested. Further away, only
/// one page is read.
const MAX_TESTED: usize = 4 << 20;
/// Number of bytes tested below an address in use, so that deeper calls need no further test.
const BELOW: usize = 16 * PAGE;
/// Maximum number of times that a thread's stack is tested; each time takes a few system calls.
const TRIES: u32 = 64;

/// Start and end address of the main thread's stack; 0 until `prepare` has found it.
static MAIN: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

/// The part of a thread's stack that is known to be readable; empty at first.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Stack {
    low: usize,
    top: usize,
    /// Number of times that the stack was tested for readable pages.
    tries: u32,
}

impl Stack {
    /// Returns the end address of the memory from `at` on that is known to be readable.
    #[inline(always)]
    pub(crate) fn known_end(&self, at: usize) -> usize {
        if self.holds(at) { self.top } else { (at | (PAGE - 1)) + 1 }
    }

    #[inline(always)]
    pub(crate) fn holds(&self, at: usize) -> bool {
        self.low <= at && at < self.top
    }

    /// Like `known_end`, after testing more of the stack if needed. `at` must be an address in use.
    #[cold]
    pub(crate) fn find_end(&mut self, at: usize) -> usize {
        if !self.holds(at) && self.tries < TRIES {
            self.tries += 1;
            self.test(at);
        }
        self.known_end(at)
    }

    fn test(&mut self, at: usize) {
        let main = [MAIN[0].load(Relaxed), MAIN[1].load(Relaxed)];
        if main[0] <= at && at < main[1] {
            (self.low, self.top) = (main[0], main[1]);
            return;
        }
        let block = control_block();
        if at >= block || block - at > MAX_TESTED {
            return;
        }
        let page = at & !(PAGE - 1);
        // Pages from `low` on were tested before.
        let tested = if self.top == block && page < self.low { self.low } else { block };
        if !(page..tested).step_by(PAGE).all(readable) {
            return;
        }
        let below = (1..=BELOW / PAGE).map(|pages| page.saturating_sub(pages * PAGE));
        let low = below.take_while(|&page| readable(page)).last();
        (self.low, self.top) = (low.unwrap_or(page), block);
    }
}

pub(crate) fn prepare() {
    // SAFETY: takes and returns a number.
    let name = unsafe { libc::getauxval(libc::AT_EXECFN) } as usize;
    let Some(limit) = soft_limit(libc::RLIMIT_STACK).filter(|_| name != 0) else { return };
    // Nothing is mapped within the size limit as of exec(), which may have been lower than now. So at most 8 MiB are assumed.
    let bytes = usize::try_from(limit).unwrap_or(usize::MAX).min(8 << 20);
    MAIN[0].store(name.saturating_sub(bytes), Relaxed);
    MAIN[1].store(name & !(size_of::<usize>() - 1), Relaxed);
}

/// Whether the 8 bytes at `at`, a multiple of 8, can be read. The system call has an invalid operation, but the kernel first
/// reads its argument at `at`.
fn readable(at: usize) -> bool {
    const INVALID: libc::c_long = -1;
    // SAFETY: changes nothing, whatever the address is; the host's errno is restored.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let set = at as *const libc::c_void;
        libc::syscall(libc::SYS_rt_sigprocmask, INVALID, set, std::ptr::null_mut::<libc::c_void>(), 8_usize);
        let fault = *errno == libc::EFAULT;
        *errno = before;
        !fault
    }
}

/// Returns the address of the C library's control block of this thread, at the end of the stack that it has allocated; 0 on other
/// processors.
fn control_block() -> usize {
    let block: usize;
    // SAFETY: reads a register, or on x86-64 the control block's first word, which is its own address.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        std::arch::asm!("mov {}, qword ptr fs:[0]", out(reg) block, options(nostack, readonly, preserves_flags));
        #[cfg(target_arch = "aarch64")]
        std::arch::asm!("mrs {}, tpidr_el0", out(reg) block, options(nostack, nomem, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let block = 0;
    block
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hint::black_box;

    /// Maps anonymous pages and makes only the given ones readable.
    fn pages(readable: &[bool]) -> usize {
        let bytes = readable.len() * PAGE;
        // SAFETY: a new mapping, changed page by page.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let base = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, flags, -1, 0);
            assert_ne!(base, libc::MAP_FAILED);
            for (page, _) in readable.iter().enumerate().filter(|(_, readable)| !**readable) {
                assert_eq!(libc::mprotect(base.add(page * PAGE), PAGE, libc::PROT_NONE), 0);
            }
            base as usize
        }
    }

    #[test]
    fn readable_says_so_and_leaves_errno_alone() {
        let base = pages(&[true, false, true]);
        // SAFETY: errno of this thread.
        unsafe { *libc::__errno_location() = 17 };
        assert_eq!([0, 1, 2].map(|page| readable(base + page * PAGE)), [true, false, true]);
        assert!(!readable(8));
        // SAFETY: as above.
        assert_eq!(unsafe { *libc::__errno_location() }, 17);
        // The signal mask is unchanged.
        let mut mask = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: `mask` has room for the signal mask; a valid signal number.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, std::ptr::null(), mask.as_mut_ptr());
            assert_eq!(libc::sigismember(mask.as_ptr(), libc::SIGUSR1), 0);
        }
    }

    #[test]
    fn stack_of_a_thread_is_known_to_its_end_and_other_memory_is_not() {
        prepare();
        let end = std::thread::spawn(|| {
            let here = black_box(0_u64);
            let at = &raw const here as usize;
            let mut stack = Stack::default();
            assert_eq!(stack.known_end(at), (at | 4095) + 1, "before it was looked for");
            let end = stack.find_end(at);
            assert!(end > at && end - at < 2 << 20, "{at:x} {end:x}");
            assert_eq!(end, control_block());
            // Every word before `end` can be read.
            let words = (at..end).step_by(8).map(|at| {
                // SAFETY: reads only memory that `find_end` reported as readable.
                unsafe { (at as *const u64).read_volatile() }
            });
            black_box(words.fold(0, u64::wrapping_add));
            // A deeper call's stack was tested already, or is found. Other memory has one page.
            assert_eq!(deeper(&mut stack, 4), end);
            let elsewhere = pages(&[true, true]);
            assert_eq!(stack.find_end(elsewhere + 8), elsewhere + PAGE);
            end
        });
        assert_ne!(end.join().expect("no panic"), 0);
    }

    #[inline(never)]
    fn deeper(stack: &mut Stack, times: u32) -> usize {
        let room = black_box([0_u64; 4096]);
        match times {
            0 => stack.find_end(&raw const room as usize),
            _ => deeper(stack, black_box(times - 1)),
        }
    }

    #[test]
    fn a_hole_below_the_control_block_ends_the_search() {
        // Like a coroutine's stack below a thread's: one readable page, then a guard.
        let mut stack = Stack::default();
        let base = pages(&[true, false, true, true]);
        for _ in 0..2 * TRIES {
            assert_eq!(stack.find_end(base + 24), base + PAGE);
        }
        assert!(stack.tries <= TRIES);
    }

    #[test]
    fn main_thread_has_its_stack_below_the_arguments() {
        prepare();
        let (low, top) = (MAIN[0].load(Relaxed), MAIN[1].load(Relaxed));
        // The start of the stack according to the kernel lies inside.
        let environment = std::fs::read_to_string("/proc/self/stat").expect("stat");
        let after = environment.rsplit_once(')').expect("a name").1;
        let start: usize = after.split_whitespace().nth(25).expect("startstack").parse().expect("a number");
        assert!(low < start && start < top, "{low:x} {start:x} {top:x}");
        let mut stack = Stack::default();
        assert_eq!(stack.find_end(start), top);
    }
}
