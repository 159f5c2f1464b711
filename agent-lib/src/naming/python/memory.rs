//! Reads the interpreter's memory, only through plausible pointers. Tests use images of damaged memory (fuzz.rs).

use crate::base::descriptor::{self, Owned};
use std::ffi::c_void;

/// Upper bound of offsets from a pointer: see `Layout::is_sane`.
pub(crate) const FAR: usize = 1 << 12;
/// Lower bound of pointers: the kernel maps nothing below the usual vm.mmap_min_addr.
const LOWEST: u64 = 1 << 16;
/// Number of bits of an address in user space, unless a program asks for more.
const BITS: u32 = if cfg!(target_arch = "x86_64") { 47 } else { 48 };
/// Upper bound of pointers: the end of user space, less room for any offset.
const HIGHEST: u64 = (1 << BITS) - (1 << 16);

/// A word that may be the address of an object or a frame: aligned, and in user space with room for any offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pointer(usize);

impl Pointer {
    /// Returns `None` if the word cannot be a pointer.
    #[inline(always)]
    pub(crate) const fn new(word: u64) -> Option<Pointer> {
        // The rotation moves the lowest bits to the top, so a single comparison checks alignment and both bounds.
        let is_pointer = word.rotate_right(3).wrapping_sub(LOWEST >> 3) < (HIGHEST - LOWEST) >> 3;
        if is_pointer { Some(Pointer(word as usize)) } else { None }
    }

    #[inline(always)]
    pub(crate) const fn address(self) -> u64 {
        self.0 as u64
    }
}

pub(crate) trait Memory {
    /// Reads the word `offset` bytes behind `at`; `None` if it cannot be read.
    fn word(&self, at: Pointer, offset: u16) -> Option<u64>;

    /// Fills `out` with the bytes from `offset` behind `at` on; returns whether they could be read. Fails if the offset and the
    /// length together exceed `FAR`.
    fn bytes(&self, at: Pointer, offset: u16, out: &mut [u8]) -> bool;

    #[inline(always)]
    fn pointer(&self, at: Pointer, offset: u16) -> Option<Pointer> {
        Pointer::new(self.word(at, offset)?)
    }

    /// Reads a C int.
    fn int(&self, at: Pointer, offset: u16) -> Option<i32> {
        let mut bytes = [0; 4];
        self.bytes(at, offset, &mut bytes).then(|| i32::from_ne_bytes(bytes))
    }

    fn byte(&self, at: Pointer, offset: u16) -> Option<u8> {
        let mut byte = [0];
        self.bytes(at, offset, &mut byte).then(|| byte[0])
    }
}

/// This process's memory, read directly.
pub(crate) struct Plain(());

impl Plain {
    /// # Safety
    /// Reads must follow a layout that was proved in this process, starting from the calling thread's own Python state or from
    /// an object that it holds. Until the thread's present call returns, its frames and their objects stay unchanged.
    #[inline(always)]
    pub(crate) const unsafe fn new() -> Self {
        Plain(())
    }
}

impl Memory for Plain {
    #[inline(always)]
    fn word(&self, at: Pointer, offset: u16) -> Option<u64> {
        // SAFETY: `new` requires valid memory; pointers and the offsets of words are multiples of 8, so the read is aligned.
        Some(unsafe { ((at.0 + usize::from(offset)) as *const u64).read() })
    }

    fn bytes(&self, at: Pointer, offset: u16, out: &mut [u8]) -> bool {
        if usize::from(offset) + out.len() > FAR {
            return false;
        }
        let from = (at.0 + usize::from(offset)) as *const u8;
        // SAFETY: `new` requires valid memory.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        true
    }
}

/// This process's memory, read by the kernel: a wrong address gives an error, not a fault. Used to check whether a layout is
/// right. The kernel reads the memory for a write to a pipe, because process_vm_readv is forbidden in many containers.
pub(crate) struct Careful {
    from: Owned,
    to: Owned,
}

impl Careful {
    /// Makes the pipe; returns `None` if no file descriptors are left.
    pub(crate) fn new() -> Option<Self> {
        let mut ends = [0; 2];
        // SAFETY: `ends` has room for two descriptors.
        let made = unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) } == 0;
        let [from, to] = if made { ends.map(|end| Owned(descriptor::up(end))) } else { return None };
        (from.0 >= 0 && to.0 >= 0).then_some(Careful { from, to })
    }
}

impl Memory for Careful {
    fn word(&self, at: Pointer, offset: u16) -> Option<u64> {
        let mut bytes = [0; 8];
        self.bytes(at, offset, &mut bytes).then(|| u64::from_ne_bytes(bytes))
    }

    fn bytes(&self, at: Pointer, offset: u16, out: &mut [u8]) -> bool {
        if usize::from(offset) + out.len() > FAR {
            return false;
        }
        let from = (at.0 + usize::from(offset)) as *const c_void;
        // SAFETY: the kernel reads, and returns EFAULT for unmapped memory. The empty pipe takes a page without blocking.
        let put = unsafe { libc::write(self.to.0, from, out.len()) };
        let Ok(put) = usize::try_from(put) else { return false };
        // SAFETY: reads the bytes that are in the pipe, and never more than `out` has room for.
        let got = unsafe { libc::read(self.from.0, out.as_mut_ptr().cast(), put) };
        usize::try_from(got) == Ok(out.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_looks_like_a_pointer() {
        for word in
            [0, 1, 8, 0xfff8, (1 << BITS) - 8, 1 << BITS, 0xffff_8000_0000_0000, u64::MAX, 0x5555_0000_0001]
        {
            assert_eq!(Pointer::new(word), None, "{word:x}");
        }
        for word in [0x1_0000, 0x5555_0000_0000, 0x7fff_fffe_0000] {
            assert_eq!(Pointer::new(word).map(Pointer::address), Some(word), "{word:x}");
        }
    }

    #[test]
    fn a_wrong_address_is_an_answer() {
        let careful = Careful::new().expect("a pipe");
        let words = [7_u64, 8, 9];
        let at = Pointer::new(words.as_ptr() as u64).expect("aligned");
        let nowhere = Pointer::new(0x10_0000).expect("aligned");
        for _ in 0..100 {
            assert_eq!(careful.word(at, 8), Some(8));
            assert_eq!(careful.word(nowhere, 0), None);
        }
        // A range that ends in unmapped memory cannot be read and leaves nothing in the pipe.
        let page = crate::base::memfd::anonymous::<u64>(1024).expect("two pages");
        // SAFETY: unmaps the second of this test's own two pages.
        unsafe { libc::munmap(page.as_ptr().add(512).cast_mut().cast(), 4096) };
        let last = Pointer::new(page.as_ptr() as u64 + 4088).expect("aligned");
        assert!(!careful.bytes(last, 0, &mut [0; 16]));
        assert_eq!(careful.word(last, 0), Some(0));
        assert_eq!(careful.word(last, 8), None);
        assert_eq!(careful.word(at, 16), Some(9));
    }
}
