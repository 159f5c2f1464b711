//! Messages of NVTX as tags. Nothing here allocates.
//!
//! Programs put numbers into messages (`iteration 17`). The first [`BUDGET`] names are taken as they are; after that a name
//! that is new has its numbers replaced by `#`, so that a long run does not fill the table of names.

use crate::driver::core::Core;
use cupti_sys::nvtx::{EventAttributes, MESSAGE_ASCII, MESSAGE_REGISTERED, MESSAGE_UNICODE};
use gpumem_wire::MAX_TAG_BYTES;
use std::ffi::c_char;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering::*};

/// Names that are taken as they are.
const BUDGET: u32 = 4096;
static MADE: AtomicU32 = AtomicU32::new(0);

/// A message as a program gives it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Message<'a> {
    /// UTF-8, hopefully.
    Bytes(&'a [u8]),
    /// wchar_t, ending with 0; not null.
    Wide(*const u32),
    /// A tag, from `register`.
    Registered(u32),
}

impl Message<'_> {
    /// Nothing.
    pub(crate) const NONE: Message<'static> = Message::Bytes(&[]);

    /// A text; null is none.
    ///
    /// # Safety
    /// Null or a text ending with 0, which outlives the result.
    #[inline(always)]
    pub(crate) unsafe fn narrow(text: *const c_char) -> Self {
        // SAFETY: as our caller says.
        Message::Bytes(unsafe { crate::base::c_text::bytes(text) })
    }

    /// A wide text; null is none.
    ///
    /// # Safety
    /// As `narrow`.
    pub(crate) unsafe fn wide(text: *const u32) -> Self {
        if text.is_null() { Message::NONE } else { Message::Wide(text) }
    }

    /// The message of an event. What lies beyond the size that the event says is not read.
    ///
    /// # Safety
    /// Null, or attributes of the size that they say.
    #[inline(always)]
    pub(crate) unsafe fn of(attributes: *const EventAttributes) -> Self {
        if attributes.is_null() {
            return Message::NONE;
        }
        // SAFETY: the first eight bytes are there in every version; the message only if the size says so.
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

    /// The tag `parent/message`; `parent` without a message, 0 if there is no room.
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
    // SAFETY: not null, and a text ending with 0: see `Message::wide`.
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

/// Each run of digits becomes one `#`; how long it is then.
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

/// A wide text as UTF-8, and how long that is.
///
/// # Safety
/// A text ending with 0.
pub(crate) unsafe fn plain(text: *const u32) -> ([u8; MAX_TAG_BYTES], usize) {
    let mut buffer = [0; MAX_TAG_BYTES];
    // SAFETY: as our caller says.
    let len = unsafe { narrowed(text, &mut buffer) };
    (buffer, len)
}

/// UTF-8 of a wide text, as much as fits; `?` for what is no character.
///
/// # Safety
/// A text ending with 0.
unsafe fn narrowed(text: *const u32, buffer: &mut [u8; MAX_TAG_BYTES]) -> usize {
    let mut len = 0;
    for at in 0..MAX_TAG_BYTES {
        // SAFETY: up to its end.
        let code = unsafe { text.add(at).read_unaligned() };
        if code == 0 {
            break;
        }
        let character = char::from_u32(code).unwrap_or('?');
        let Some(place) = buffer.get_mut(len..len + character.len_utf8()) else { break };
        character.encode_utf8(place);
        len += character.len_utf8();
    }
    len
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
        let mut buffer = [0; MAX_TAG_BYTES];
        let wide: Vec<u32> =
            "a\u{e9}\u{1f600}".chars().map(u32::from).chain([0xd800, 0x11_0000, 0]).collect();
        // SAFETY: it ends with 0.
        let len = unsafe { narrowed(wide.as_ptr(), &mut buffer) };
        assert_eq!(std::str::from_utf8(&buffer[..len]), Ok("a\u{e9}\u{1f600}??"));
        let long: Vec<u32> = std::iter::repeat_n(0x1f600, 100).chain([0]).collect();
        // SAFETY: as above.
        let len = unsafe { narrowed(long.as_ptr(), &mut buffer) };
        assert_eq!(len, 252);
    }
}
