//! Allocator of the agent with reserve memory, for when the program has used up all memory (RLIMIT_AS, or a system without
//! overcommit). Rust's standard library ends the process when an allocation fails, but the program may handle that failure.
//!
//! The linker redirects the standard library's calls of malloc() and so on to the functions here (build.rs). They call the C
//! library. If that fails, they allocate from an arena in static storage, which uses no memory until it is touched. If the arena
//! is full, the agent's own thread (the sender) waits for memory; other threads get null.
#![cfg(all(target_os = "linux", target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]

use crate::base::own_thread;
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering::*};

/// Size of the arena in bytes: enough for a report of a large program.
const ARENA_BYTES: usize = 2 << 20;
/// Smallest alignment of a piece of the arena. The word before a piece contains its size.
const ALIGN: usize = 16;

#[repr(align(4096))]
struct Arena(UnsafeCell<[u8; ARENA_BYTES]>);
// SAFETY: `take` hands out pieces that do not overlap.
unsafe impl Sync for Arena {}

static ARENA: Arena = Arena(UnsafeCell::new([0; ARENA_BYTES]));
/// Number of pieces in use << 32 | bytes up to the end of the last piece. The second number returns to 0 when no piece is in use.
static USED: AtomicU64 = AtomicU64::new(0);

/// Returns a piece of the arena with `bytes` bytes; null if there is no room.
fn take(bytes: usize, align: usize) -> *mut c_void {
    let align = align.max(ALIGN);
    let base = ARENA.0.get() as usize;
    let mut place = 0;
    let taken = USED.fetch_update(AcqRel, Acquire, |used| {
        let end = (used & u64::from(u32::MAX)) as usize;
        place = (base + end + size_of::<usize>()).next_multiple_of(align);
        let end = place.checked_add(bytes)?.checked_sub(base).filter(|&end| end <= ARENA_BYTES)?;
        Some(((used >> 32) + 1) << 32 | end as u64)
    });
    if taken.is_err() {
        return std::ptr::null_mut();
    }
    // SAFETY: inside the arena: the piece begins one word before the returned address.
    unsafe { ((place - size_of::<usize>()) as *mut usize).write_unaligned(bytes) };
    place as *mut c_void
}

fn is_ours(at: *mut c_void) -> bool {
    (at as usize).checked_sub(ARENA.0.get() as usize).is_some_and(|offset| offset < ARENA_BYTES)
}

/// Returns the size of a piece in bytes.
///
/// # Safety
/// `at` must be a piece of the arena.
unsafe fn bytes_of(at: *mut c_void) -> usize {
    // SAFETY: `take` wrote the size there.
    unsafe { at.cast::<usize>().sub(1).read_unaligned() }
}

/// Allocates from the arena, after the C library has returned null. If the arena is full, the sender calls `retry` every 5 ms
/// until that returns memory; other threads get null.
fn from_arena(bytes: usize, align: usize, retry: impl Fn() -> *mut c_void) -> *mut c_void {
    let mut at = take(bytes, align);
    while at.is_null() && own_thread::is_here() {
        // SAFETY: nothing is written.
        unsafe { libc::usleep(5000) };
        at = retry();
    }
    at
}

// The C library's own functions, with symbol versions that every glibc has: see glibc.rs.
crate::base::glibc::old!("gpumem_real_", first!(): "malloc" "calloc" "realloc" "posix_memalign" "free");

unsafe extern "C" {
    fn gpumem_real_malloc(bytes: usize) -> *mut c_void;
    fn gpumem_real_calloc(count: usize, bytes: usize) -> *mut c_void;
    fn gpumem_real_realloc(at: *mut c_void, bytes: usize) -> *mut c_void;
    fn gpumem_real_posix_memalign(out: *mut *mut c_void, align: usize, bytes: usize) -> c_int;
    fn gpumem_real_free(at: *mut c_void);
}

unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    // SAFETY: as malloc().
    let at = unsafe { gpumem_real_malloc(bytes) };
    // SAFETY: as above.
    if at.is_null() { from_arena(bytes, ALIGN, || unsafe { gpumem_real_malloc(bytes) }) } else { at }
}

unsafe extern "C" fn calloc(count: usize, bytes: usize) -> *mut c_void {
    // SAFETY: as calloc().
    let at = unsafe { gpumem_real_calloc(count, bytes) };
    let Some(bytes) = count.checked_mul(bytes).filter(|_| at.is_null()) else { return at };
    // SAFETY: as calloc().
    let at = from_arena(bytes, ALIGN, || unsafe { gpumem_real_calloc(1, bytes) });
    if is_ours(at) {
        // SAFETY: a piece of this size. It may have been used before.
        unsafe { at.cast::<u8>().write_bytes(0, bytes) };
    }
    at
}

unsafe extern "C" fn realloc(old: *mut c_void, bytes: usize) -> *mut c_void {
    // SAFETY: as realloc(): if it fails, the old memory stays valid. A piece of the arena is copied before it is freed.
    unsafe {
        let ours = is_ours(old);
        let moved = if ours { std::ptr::null_mut() } else { gpumem_real_realloc(old, bytes) };
        if !moved.is_null() {
            return moved;
        }
        let at = malloc(bytes);
        if !at.is_null() && !old.is_null() {
            let had = if ours { bytes_of(old) } else { libc::malloc_usable_size(old) };
            at.copy_from_nonoverlapping(old, had.min(bytes));
            free(old);
        }
        at
    }
}

unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, align: usize, bytes: usize) -> c_int {
    let allocate = || {
        let mut at = std::ptr::null_mut();
        // SAFETY: `at` has room for the answer.
        unsafe { gpumem_real_posix_memalign(&mut at, align, bytes) };
        at
    };
    let at = allocate();
    let at = if at.is_null() { from_arena(bytes, align, allocate) } else { at };
    if at.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: the caller provides room for the result.
    unsafe { out.write(at) };
    0
}

unsafe extern "C" fn free(at: *mut c_void) {
    if is_ours(at) {
        let freed = |used: u64| Some(if used >> 32 <= 1 { 0 } else { used - (1 << 32) });
        let _ = USED.fetch_update(AcqRel, Acquire, freed);
    } else {
        // SAFETY: as free().
        unsafe { gpumem_real_free(at) }
    }
}

crate::base::glibc::own!(
    "malloc" = malloc,
    "calloc" = calloc,
    "realloc" = realloc,
    "posix_memalign" = posix_memalign,
    "free" = free
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_do_not_overlap_and_come_back() {
        let [a, b, c] = [take(1, 1), take(100, 64), take(5000, 4096)];
        assert!(is_ours(a) && (b as usize).is_multiple_of(64) && (c as usize).is_multiple_of(4096));
        assert!(b as usize > a as usize && c as usize >= b as usize + 100);
        // SAFETY: pieces of the arena.
        unsafe {
            assert_eq!((bytes_of(a), bytes_of(b), bytes_of(c)), (1, 100, 5000));
            b.cast::<u8>().write_bytes(7, 100);
            let d = realloc(b, 50);
            assert!(!is_ours(d) && *d.cast::<[u8; 50]>() == [7; 50], "there is memory again");
            free(d);
        }
        assert!(take(ARENA_BYTES, 1).is_null(), "no room");
        free_both(a, c);
        let again = take(ARENA_BYTES - 64, 1);
        assert!(is_ours(again), "empty again");
        // SAFETY: as above.
        unsafe { free(again) };
    }

    fn free_both(a: *mut c_void, b: *mut c_void) {
        // SAFETY: pieces of the arena.
        unsafe {
            free(a);
            free(b);
        }
    }
}
