//! The memory shared with the daemon: a memfd with the layout of wire/src/layout.rs, mapped as atomic words. Also anonymous
//! memory for tables, and prefetching.
//!
//! The memfd is sealed against growing and shrinking before another process has it. So neither process can cause a fault in the
//! other.

use crate::base::own_thread::soft_limit;
use gpumem_wire::SLOT_BYTES;
use gpumem_wire::layout::{HEADER_BYTES, Header};
use std::ffi::{CStr, CString};
use std::ops::Deref;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;
/// Atomics for ring.rs, names.rs and threads/table.rs: tests/races replaces them by those of loom.
pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence};

/// A slot of the ring, or a row of the live table.
pub(crate) type Words = [AtomicU64; SLOT_BYTES / 8];
const _: () = assert!(size_of::<Words>() == SLOT_BYTES);

/// First part of the name of the agent's memfd.
pub(crate) const PREFIX: &str = "gpumem-agent.";

/// Returns the memfd's name, with the pid and the address of the table of exported functions (entry/second_copy.rs).
pub(crate) fn name_of(pid: u32, functions: usize) -> Option<CString> {
    CString::new(format!("{PREFIX}{pid}.{functions:x}")).ok()
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Number of slots in the ring: a power of two.
    pub ring_slots: u64,
    pub live_rows: u64,
    /// Size in bytes of the memory for names: a multiple of 8.
    pub name_bytes: u64,
}

/// The mapped memfd. It is never unmapped, because callbacks may arrive at any time.
#[derive(Debug, Clone, Copy)]
pub struct Shared {
    /// Descriptor of the memfd, used only by the sender. The host may have closed it: see descriptor.rs.
    pub(crate) fd: RawFd,
    /// The header as it was when the memfd was created.
    pub(crate) header: Header,
    base: *mut u8,
}

// SAFETY: the mapping lives as long as the process and is accessed through atomics (names: see names.rs).
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// Returns zeroed memory that is never freed; `None` if the mapping fails. Untouched pages use no memory. It is mapped and not
/// allocated, because the host's allocator may call the driver.
pub(crate) fn anonymous<T>(count: usize) -> Option<&'static [T]> {
    let bytes = count.checked_mul(size_of::<T>())?.max(1);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping.
    let base =
        unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: page-aligned, zeroed and never unmapped. `T` is made of atomics, for which zero is a valid value.
    Some(unsafe { std::slice::from_raw_parts(base.cast(), count) })
}

/// An array of default values, of any length: std has `Default` only for arrays of up to 32 elements.
#[derive(Debug)]
pub(crate) struct Zeros<T, const COUNT: usize>([T; COUNT]);

impl<T: Default, const COUNT: usize> Default for Zeros<T, COUNT> {
    fn default() -> Self {
        Zeros(std::array::from_fn(|_| T::default()))
    }
}

impl<T, const COUNT: usize> Deref for Zeros<T, COUNT> {
    type Target = [T; COUNT];

    fn deref(&self) -> &[T; COUNT] {
        &self.0
    }
}

/// A table of atomics in anonymous memory, empty until `make` maps it.
#[derive(Debug)]
pub(crate) struct LazyTable<T: 'static, const COUNT: usize>(AtomicPtr<T>);

impl<T: 'static, const COUNT: usize> LazyTable<T, COUNT> {
    pub(crate) const fn new() -> Self {
        LazyTable(AtomicPtr::new(std::ptr::null_mut()))
    }

    pub(crate) fn get(&self) -> &'static [T] {
        let table = self.0.load(Acquire);
        if table.is_null() {
            return &[];
        }
        // SAFETY: `make` has stored a zeroed mapping of this size, which is never unmapped.
        unsafe { std::slice::from_raw_parts(table, COUNT) }
    }

    /// Makes the table, if there is none; returns false without memory. Must not be called in a callback: it calls mmap.
    pub(crate) fn make(&self) -> bool {
        if !self.get().is_empty() {
            return true;
        }
        let Some(fresh) = anonymous::<T>(COUNT) else { return false };
        let fresh = fresh.as_ptr().cast_mut();
        if self.0.compare_exchange(std::ptr::null_mut(), fresh, AcqRel, Acquire).is_err() {
            // SAFETY: unmaps the mapping made above, which no other thread has seen.
            unsafe { libc::munmap(fresh.cast(), COUNT * size_of::<T>()) };
        }
        true
    }
}

impl Shared {
    /// Creates, seals and maps the memfd. `name` is visible in /proc/PID/fd and /proc/PID/maps.
    pub(crate) fn create(name: &CStr, sizes: Sizes, pid: u32, start_ticks: u64) -> Option<Self> {
        let header = Header {
            major: gpumem_wire::MAJOR,
            minor: gpumem_wire::MINOR,
            pid,
            start_ticks,
            ring_slots: sizes.ring_slots.next_power_of_two(),
            live_rows: sizes.live_rows,
            name_bytes: sizes.name_bytes,
            ..Header::default()
        };
        let bytes = header.file_bytes()?;
        if soft_limit(libc::RLIMIT_FSIZE).is_some_and(|limit| bytes > limit) {
            return None; // the kernel would send SIGXFSZ, which ends the program
        }
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // By its number, because glibc has the function only since 2.27.
        // SAFETY: passes a C string and flags.
        let fd = unsafe { libc::syscall(libc::SYS_memfd_create, name.as_ptr(), flags) } as RawFd;
        let fd = crate::base::descriptor::up(fd);
        if fd < 0 {
            return None;
        }
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: the agent's own file descriptor, mapped completely at an address that the kernel chooses.
        let base = unsafe {
            let sized = libc::ftruncate(fd, bytes as libc::off_t) == 0
                && libc::fcntl(fd, libc::F_ADD_SEALS, seals) == 0;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            match sized {
                true => libc::mmap(std::ptr::null_mut(), bytes as usize, access, libc::MAP_SHARED, fd, 0),
                false => libc::MAP_FAILED,
            }
        };
        if base == libc::MAP_FAILED {
            // SAFETY: the agent's own descriptor, which nothing else uses.
            unsafe { libc::close(fd) };
            return None;
        }
        let shared = Shared { fd, header, base: base.cast() };
        for (index, word) in header.encode().chunks_exact(8).enumerate() {
            let word = word.first_chunk().copied().map_or(0, u64::from_le_bytes);
            shared.word(index * 8).store(word.to_le(), Release);
        }
        Some(shared)
    }

    /// Returns the word at a multiple of 8 within the header.
    fn word(&self, offset: usize) -> &'static AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset < HEADER_BYTES);
        // SAFETY: inside the mapping, aligned, and only accessed as atomic.
        unsafe { &*self.base.add(offset).cast() }
    }

    pub(crate) fn head(&self) -> &'static AtomicU64 {
        self.word(48)
    }

    pub(crate) fn lost(&self) -> &'static AtomicU64 {
        self.word(56)
    }

    pub(crate) fn names_end(&self) -> &'static AtomicU64 {
        self.word(64)
    }

    fn slots(&self, offset: u64, count: u64) -> &'static [Words] {
        // SAFETY: the part lies in the mapping (file_bytes), at a multiple of 64, and is only accessed as atomics.
        unsafe { std::slice::from_raw_parts(self.base.add(offset as usize).cast(), count as usize) }
    }

    pub(crate) fn ring(&self) -> &'static [Words] {
        self.slots(self.header.ring_offset(), self.header.ring_slots)
    }

    pub(crate) fn live(&self) -> &'static [Words] {
        self.slots(self.header.live_offset().unwrap_or(0), self.header.live_rows)
    }

    /// Returns the address of the memory for names, of which threads reserve ranges (names.rs).
    pub(crate) fn names(&self) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe { self.base.add(self.header.names_offset().unwrap_or(0) as usize) }
    }
}

#[inline(always)]
pub(crate) fn fetch_to_write<T>(line: &T) {
    // The compiler's intrinsic would prefetch for reading, unless all code is compiled for newer processors. Old processors
    // ignore this instruction.
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; it reads nothing.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a hint; it reads nothing.
    unsafe {
        std::arch::asm!("prfm pstl1keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
}

#[inline(always)]
pub(crate) fn fetch_to_read<T>(line: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; it reads nothing.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<{ _MM_HINT_T0 }>(std::ptr::from_ref(line).cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a hint; it reads nothing.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
}
