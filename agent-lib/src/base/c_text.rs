//! Converts texts and numbers that programs pass through the C API.

use gpumem_wire::{Phase, Role};
use std::ffi::c_char;

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

/// Returns the caller's array for writing; empty for null.
///
/// # Safety
/// As [`slice`], and nothing else uses the array meanwhile.
pub(crate) unsafe fn slice_mut<'a, T>(array: *mut T, count: u64) -> &'a mut [T] {
    // SAFETY: the caller guarantees the array.
    if array.is_null() { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(array, count as usize) } }
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

/// Returns the bytes as a text; replaces those that are not UTF-8.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Lets `write` fill the caller's buffer with a C string; returns the string's length, 0 without a buffer.
///
/// # Safety
/// `out` is null or has room for `bytes` bytes.
pub(crate) unsafe fn fill(out: *mut c_char, bytes: u64, write: impl FnOnce(&mut [u8]) -> usize) -> u64 {
    let Some(longest) = (bytes as usize).checked_sub(1).filter(|_| !out.is_null()) else { return 0 };
    // SAFETY: the caller guarantees the buffer.
    let buffer = unsafe { std::slice::from_raw_parts_mut(out.cast::<u8>(), longest + 1) };
    let used = write(&mut buffer[..longest]).min(longest);
    buffer[used] = 0;
    used as u64
}

/// Writes `text`, without a 0 at the end, to `buffer` if it fits; returns the length of `text`.
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

/// Returns a copy of a text, which the program frees; null without memory.
pub(crate) fn handed(text: &str) -> *mut c_char {
    // Allocated by the C library and not by base/arena_allocator.rs, so that the program can free it. The text has no 0 byte.
    // SAFETY: copies at most as many bytes as the text has.
    unsafe { libc::strndup(text.as_ptr().cast(), text.len()) }
}

/// Converts the numbers of role and phase on the wire; `Unknown` for invalid numbers.
pub(crate) fn use_as(role: i32, phase: i32) -> (Role, Phase) {
    let code = |number: i32| u8::try_from(number).unwrap_or(0);
    (Role::from_code(code(role)), Phase::from_code(code(phase)))
}
