//! Converts NVTX messages to tags, without allocating.
//!
//! Programs put numbers into messages (`iteration 17`). The first [`BUDGET`] names are used unchanged. In later new names each
//! number is replaced by `#`, so that a long run does not fill the table of names.

use crate::driver::core::Core;
use cupti_sys::nvtx::{EventAttributes, MESSAGE_ASCII, MESSAGE_REGISTERED, MESSAGE_UNICODE};
use gpumem_wire::MAX_TAG_BYTES;
use std::ffi::c_char;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering::*};

/// Number of new names that keep the digits in them; later names have them folded.
const BUDGET: u32 = 4096;
/// Number of new names used so far; it stops at `BUDGET`.
static MADE: AtomicU32 = AtomicU32::new(0);

#[derive(Debug, Clone, Copy)]
pub(crate) enum Message<'a> {
    /// A text that should be UTF-8.
    Bytes(&'a [u8]),
    /// A text of wchar_t, ending with 0; not null.
    Wide(*const u32),
    /// A tag returned by `register`.
    Registered(u32),
}

impl Message<'_> {
    pub(crate) const NONE: Message<'static> = Message::Bytes(&[]);

    /// Wraps a text; null means no message.
    ///
    /// # Safety
    /// `text` must be null or end with 0, and must outlive the result.
    #[inline(always)]
    pub(crate) unsafe fn narrow(text: *const c_char) -> Self {
        // SAFETY: the caller guarantees the text.
        Message::Bytes(unsafe { crate::base::c_text::bytes(text) })
    }

    /// Wraps a wide text; null means no message.
    ///
    /// # Safety
    /// As `narrow`.
    pub(crate) unsafe fn wide(text: *const u32) -> Self {
        if text.is_null() { Message::NONE } else { Message::Wide(text) }
    }

    /// Returns the message of an event. Reads nothing beyond the size that the event states.
    ///
    /// # Safety
    /// `attributes` must be null, or have the size that they state.
    #[inline(always)]
    pub(crate) unsafe fn of(attributes: *const EventAttributes) -> Self {
        if attributes.is_null() {
            return Message::NONE;
        }
        // SAFETY: the first eight bytes exist in every version; the message is read only if the size includes it.
        unsafe {
            let size = usize::from((&raw const (*attributes).size).read_unaligned());
            if size < offset_of!(EventAttributes, message) + size_of::<usize>() {
                return Message::NONE;
            }
            let message = (&raw const (*attributes).message).read_unaligned();
            match (&raw const (*attributes).message_type).read_unaligned() {
                MESSAGE_ASCII => Message::narrow(message as *const c_char),
                MESSAGE_UNICODE => Message::wide(message as *const u32),
                MESSAGE_REGISTERED => Message::Registered(message as u32),
                _ => Message::NONE,
            }
        }
    }

    /// Returns the tag `parent/message`. Returns `parent` without a message, and 0 without room for the name.
    #[inline(always)]
    pub(crate) fn tag(self, core: &Core, parent: u32) -> u32 {
        match self {
            Message::Bytes([]) | Message::Registered(0) => parent,
            Message::Bytes(name) => named(core, parent, name),
            Message::Registered(tag) if parent == 0 => tag,
            Message::Registered(tag) => core.recorder.names.join(parent, tag),
            Message::Wide(text) => wide(core, parent, text),
        }
    }
}

#[inline(always)]
fn named(core: &Core, parent: u32, name: &[u8]) -> u32 {
    match core.recorder.names.known(parent, name) {
        Some(tag) => tag,
        None => new(core, parent, name),
    }
}

#[inline(never)]
fn wide(core: &Core, parent: u32, text: *const u32) -> u32 {
    // SAFETY: not null, and ends with 0: see `Message::wide`.
    let (buffer, len) = unsafe { plain(text) };
    let name = buffer.get(..len).unwrap_or_default();
    if name.is_empty() { parent } else { named(core, parent, name) }
}

#[cold]
#[inline(never)]
fn new(core: &Core, parent: u32, name: &[u8]) -> u32 {
    if MADE.load(Relaxed) < BUDGET {
        MADE.fetch_add(1, Relaxed);
        return core.recorder.names.intern(parent, name);
    }
    let mut buffer = [0; MAX_TAG_BYTES];
    let len = without_numbers(name, &mut buffer);
    core.recorder.names.intern(parent, buffer.get(..len).unwrap_or_default())
}

/// Copies `name` with each run of digits replaced by one `#`; returns the new length.
fn without_numbers(name: &[u8], buffer: &mut [u8; MAX_TAG_BYTES]) -> usize {
    let mut len = 0;
    let mut before = 0;
    for &byte in name {
        let byte = if byte.is_ascii_digit() { b'#' } else { byte };
        if byte == b'#' && before == b'#' {
            continue;
        }
        before = byte;
        let Some(place) = buffer.get_mut(len) else { break };
        *place = byte;
        len += 1;
    }
    len
}

/// Converts a wide text to UTF-8, with `?` for invalid characters. Returns the part that fits into the buffer, and its length.
///
/// # Safety
/// The text must end with 0.
pub(crate) unsafe fn plain(text: *const u32) -> ([u8; MAX_TAG_BYTES], usize) {
    let (mut buffer, mut len) = ([0; MAX_TAG_BYTES], 0);
    for at in 0..MAX_TAG_BYTES {
        // SAFETY: reads no further than the terminating 0.
        let code = unsafe { text.add(at).read_unaligned() };
        if code == 0 {
            break;
        }
        let character = char::from_u32(code).unwrap_or('?');
        let Some(place) = buffer.get_mut(len..len + character.len_utf8()) else { break };
        character.encode_utf8(place);
        len += character.len_utf8();
    }
    (buffer, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_become_one_sign() {
        let mut buffer = [0; MAX_TAG_BYTES];
        let mut told = |name: &str| {
            let len = without_numbers(name.as_bytes(), &mut buffer);
            String::from_utf8_lossy(&buffer[..len]).into_owned()
        };
        assert_eq!(told("iteration 17"), "iteration #");
        assert_eq!(told("aten::mm, seq = 123, op_id = 4"), "aten::mm, seq = #, op_id = #");
        assert_eq!(told(&"9a".repeat(300)).len(), MAX_TAG_BYTES);
    }

    #[test]
    fn wide_texts_are_cut_at_characters() {
        let wide: Vec<u32> =
            "a\u{e9}\u{1f600}".chars().map(u32::from).chain([0xd800, 0x11_0000, 0]).collect();
        // SAFETY: the text ends with 0.
        let (buffer, len) = unsafe { plain(wide.as_ptr()) };
        assert_eq!(std::str::from_utf8(&buffer[..len]), Ok("a\u{e9}\u{1f600}??"));
        let long: Vec<u32> = std::iter::repeat_n(0x1f600, 100).chain([0]).collect();
        // SAFETY: as above.
        let (_, len) = unsafe { plain(long.as_ptr()) };
        assert_eq!(len, 252);
    }
}
