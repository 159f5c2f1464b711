//! How far up the calling thread's stack can be read without a fault.
//!
//! The page of an address that is in use can always be read to its end. Beyond that it must be the thread's own stack: the
//! main thread's lies below the program's arguments, with no other mapping nearer than its limit; another thread's ends at
//! its control block, wherever its memory came from. The pages up to there are tried once, by a system call that
//! says of an address whether it can be read, and not again: a stack does not shrink. On a stack that the
//! program switched to by itself (coroutines, signal stacks) one page is all that is looked at.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// As small as pages are anywhere; larger ones begin and end at multiples of it, too.
const PAGE: usize = 4096;
/// Of a thread's stack, from its end: what lies deeper is looked at a page at a time.
const MOST: usize = 4 << 20;
/// Tried below an address that is in use, so that deeper calls need not be tried again.
const BEYOND: usize = 16 * PAGE;
/// Times that a thread tries; each is a few system calls.
const TRIES: u32 = 64;

/// Where the main thread's stack is: from .. to. 0 before it is known.
static MAIN: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

/// What a thread knows of its stack.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stack {
    low: usize,
    top: usize,
    tries: u32,
}

impl Stack {
    /// Nothing.
    pub(crate) const UNKNOWN: Stack = Stack { low: 0, top: 0, tries: 0 };

    /// The end of what can be read from `at` on, as far as that is known.
    #[inline(always)]
    pub(crate) fn known_end(&self, at: usize) -> usize {
        if self.holds(at) { self.top } else { (at | (PAGE - 1)) + 1 }
    }

    /// Whether `at` lies in it.
    #[inline(always)]
    pub(crate) fn holds(&self, at: usize) -> bool {
        self.low <= at && at < self.top
    }

    /// As `known_end`, with another look at where the stack is. `at` must be in use.
    #[cold]
    pub(crate) fn find_end(&mut self, at: usize) -> usize {
        if !self.holds(at) && self.tries < TRIES {
            self.tries += 1;
            self.learn(at);
        }
        self.known_end(at)
    }

    fn learn(&mut self, at: usize) {
        let main = [MAIN[0].load(Relaxed), MAIN[1].load(Relaxed)];
        if main[0] <= at && at < main[1] {
            (self.low, self.top) = (main[0], main[1]);
            return;
        }
        let block = control_block();
        if at >= block || block - at > MOST {
            return;
        }
        let page = at & !(PAGE - 1);
        // Pages that were tried before are those from `low` on.
        let tried = if self.top == block && page < self.low { self.low } else { block };
        if !(page..tried).step_by(PAGE).all(readable) {
            return;
        }
        let beyond = (1..=BEYOND / PAGE).map(|pages| page.saturating_sub(pages * PAGE));
        let low = beyond.take_while(|&page| readable(page)).last();
        (self.low, self.top) = (low.unwrap_or(page), block);
    }
}

/// Finds the main thread's stack.
pub(crate) fn prepare() {
    // SAFETY: numbers in, a number out.
    let name = unsafe { libc::getauxval(libc::AT_EXECFN) } as usize;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a place for the answer.
    if name == 0 || unsafe { libc::getrlimit(libc::RLIMIT_STACK, &mut limit) } != 0 {
        return;
    }
    // The kernel keeps other mappings away by the limit as it was at exec(): a program that raised it is not believed.
    let bytes = usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX).min(8 << 20);
    MAIN[0].store(name.saturating_sub(bytes), Relaxed);
    MAIN[1].store(name & !(size_of::<usize>() - 1), Relaxed);
}

/// Whether the page at a multiple of 8 can be read. The kernel copies the set of signals before it refuses what is to be
/// done with it.
fn readable(at: usize) -> bool {
    const NOTHING: libc::c_long = -1;
    // SAFETY: nothing is changed, whatever the address; errno is the host's.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let set = at as *const libc::c_void;
        libc::syscall(libc::SYS_rt_sigprocmask, NOTHING, set, std::ptr::null_mut::<libc::c_void>(), 8_usize);
        let fault = *errno == libc::EFAULT;
        *errno = before;
        !fault
    }
}

/// The C library's block about the calling thread: at the end of the stack that it gave it.
#[cfg(target_arch = "x86_64")]
fn control_block() -> usize {
    let block: usize;
    // SAFETY: the block's first word is its own address.
    unsafe {
        std::arch::asm!("mov {}, qword ptr fs:[0]", out(reg) block, options(nostack, readonly, preserves_flags));
    }
    block
}
#[cfg(target_arch = "aarch64")]
fn control_block() -> usize {
    let block: usize;
    // SAFETY: reads a register.
    unsafe {
        std::arch::asm!("mrs {}, tpidr_el0", out(reg) block, options(nostack, nomem, preserves_flags));
    }
    block
}
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn control_block() -> usize {
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hint::black_box;

    /// Anonymous pages, of which those whose bit is set can be read.
    fn pages(readable: &[bool]) -> usize {
        let bytes = readable.len() * PAGE;
        // SAFETY: a fresh mapping, changed page by page.
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
        // The signal mask is as it was.
        let mut mask = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: a place for the mask, and a signal's number.
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
            let mut stack = Stack::UNKNOWN;
            assert_eq!(stack.known_end(at), (at | 4095) + 1, "before it was looked for");
            let end = stack.find_end(at);
            assert!(end > at && end - at < 2 << 20, "{at:x} {end:x}");
            assert_eq!(end, control_block());
            // Every word up to there can be read.
            let words = (at..end).step_by(8).map(|at| {
                // SAFETY: what this test is about.
                unsafe { (at as *const u64).read_volatile() }
            });
            black_box(words.fold(0, u64::wrapping_add));
            // Deeper, it is known already or found; memory elsewhere has one page.
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
        // As a coroutine's stack below a thread's: one page can be read, then a guard.
        let mut stack = Stack::UNKNOWN;
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
        // The environment lies on it.
        let environment = std::fs::read_to_string("/proc/self/stat").expect("stat");
        let after = environment.rsplit_once(')').expect("a name").1;
        let start: usize = after.split_whitespace().nth(25).expect("startstack").parse().expect("a number");
        assert!(low < start && start < top, "{low:x} {start:x} {top:x}");
        let mut stack = Stack::UNKNOWN;
        assert_eq!(stack.find_end(start), top);
    }
}
