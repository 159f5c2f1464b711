//! Texts and numbers that cross the C API.

use gpumem_wire::{Phase, Role};
use std::ffi::c_char;
use std::os::unix::ffi::OsStrExt;

/// Returns the bytes of a C string; empty for null.
///
/// # Safety
/// `text` is null or a C string that outlives the result.
#[inline(always)]
pub unsafe fn bytes<'a>(text: *const c_char) -> &'a [u8] {
    if text.is_null() {
        return &[];
    }
    // SAFETY: the caller guarantees a C string.
    unsafe { std::slice::from_raw_parts(text.cast(), libc::strlen(text)) }
}

/// Returns the caller's array; empty for null.
///
/// # Safety
/// `array` is null or has `count` elements, which outlive the result.
pub(crate) unsafe fn slice<'a, T>(array: *const T, count: u64) -> &'a [T] {
    // SAFETY: the caller guarantees the array.
    if array.is_null() { &[] } else { unsafe { std::slice::from_raw_parts(array, count as usize) } }
}

/// Stores a number in the caller's variable, if there is one.
///
/// # Safety
/// `place` is null or valid.
pub(crate) unsafe fn store(place: *mut u64, value: u64) {
    // SAFETY: the caller guarantees the variable.
    if let Some(place) = unsafe { place.as_mut() } {
        *place = value;
    }
}

/// Returns a text from the program; replaces bytes that are not UTF-8.
pub(crate) fn text(bytes: &[u8]) -> String {
    std::ffi::OsStr::from_bytes(bytes).to_string_lossy().into_owned()
}

/// Lets `write` fill a C string in the caller's buffer; returns its length.
///
/// # Safety
/// `out` is null or has room for `bytes` bytes.
pub(crate) unsafe fn fill(out: *mut c_char, bytes: u64, write: impl FnOnce(&mut [u8]) -> usize) -> u64 {
    let Some(most) = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_sub(1)) else { return 0 };
    if out.is_null() {
        return 0;
    }
    // SAFETY: the caller guarantees the buffer.
    let room = unsafe { std::slice::from_raw_parts_mut(out.cast::<u8>(), most + 1) };
    let used = write(&mut room[..most]).min(most);
    room[used] = 0;
    used as u64
}

/// Writes `text` to `buffer` if it fits; returns its length.
///
/// # Safety
/// `buffer` has room for `capacity` bytes, or is null.
pub(crate) unsafe fn copy(text: &str, buffer: *mut c_char, capacity: u64) -> u64 {
    let len = text.len() as u64;
    if !buffer.is_null() && len <= capacity {
        // SAFETY: the text fits, and the caller guarantees the capacity.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), text.len()) };
    }
    len
}

/// Returns a copy of a text that the program frees; null without memory.
pub(crate) fn handed(text: &str) -> *mut c_char {
    // Allocated by the C library, so that the program can free it, and not by base/arena_allocator.rs. The agent's texts
    // contain no 0.
    // SAFETY: copies at most as many bytes as the text has.
    unsafe { libc::strndup(text.as_ptr().cast(), text.len()) }
}

/// Converts role and phase from their numbers on the wire; unknown for invalid numbers.
pub(crate) fn use_as(role: i32, phase: i32) -> (Role, Phase) {
    let code = |number: i32| u8::try_from(number).unwrap_or(0);
    (Role::from_code(code(role)), Phase::from_code(code(phase)))
}
