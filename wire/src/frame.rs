//! Packets and recordings. A **packet** (SOCK_SEQPACKET) is a sequence of frames, a **recording** is a header and then frames.
//!
//! ```text
//! frame      u32 length of slot and payload (64 + payload), little-endian, at most MAX_FRAME_BYTES
//!            64 bytes slot
//!            payload
//! recording  8 bytes "GPUMEMR\n", u16 MAJOR, u16 MINOR, u32 zero, then frames
//! ```
//!
//! A recording whose last frame is truncated (the writer was killed) is read up to that frame.

use crate::codec::{Error as CodecError, SLOT_BYTES, Slot};
use crate::event::Record;
use crate::{MAJOR, MINOR};

/// Maximum size of a frame without its length field, in bytes; larger than any record. Readers need a buffer of this size.
pub const MAX_FRAME_BYTES: usize = 64 * 1024;
/// Size of the length field before a frame, in bytes.
pub const PREFIX_BYTES: usize = 4;
/// First bytes of a recording.
pub const MAGIC: [u8; 8] = *b"GPUMEMR\n";
/// Size of a recording's header, in bytes.
pub const HEADER_BYTES: usize = 16;

/// Returns the header of a recording of this version.
pub fn header() -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[8..10].copy_from_slice(&MAJOR.to_le_bytes());
    header[10..12].copy_from_slice(&MINOR.to_le_bytes());
    header
}

/// Returns the major and minor version of a recording, or `None` if the bytes are not a recording's header.
pub fn read_header(bytes: &[u8]) -> Option<(u16, u16)> {
    let header = bytes.first_chunk::<HEADER_BYTES>()?;
    (header[..8] == MAGIC)
        .then(|| (u16::from_le_bytes([header[8], header[9]]), u16::from_le_bytes([header[10], header[11]])))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// The bytes end inside a frame.
    Cut {
        /// Number of bytes present, including the length field.
        have: usize,
        /// Size of the frame according to its length field, which is included.
        need: usize,
    },
    /// The length of a frame is invalid; the bytes after it cannot be decoded.
    Length(u32),
}

impl core::fmt::Display for Error {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Error::Cut { have, need } => {
                write!(f, "the last frame is cut: {have} of its {need} bytes are there")
            }
            Error::Length(len) => {
                write!(
                    f,
                    "a frame of {len} bytes is impossible ({SLOT_BYTES} to {MAX_FRAME_BYTES} are valid)"
                )
            }
        }
    }
}

impl core::error::Error for Error {}

/// Splits the first frame off `bytes`. Returns its slot, its payload and the remaining bytes; `None` at the end.
///
/// # Errors
/// [`Error::Cut`] if the frame is incomplete, [`Error::Length`] if its length is invalid.
#[inline]
#[allow(clippy::type_complexity)]
pub fn split_frame(bytes: &[u8]) -> Result<Option<(&Slot, &[u8], &[u8])>, Error> {
    let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX_BYTES>() else {
        return if bytes.is_empty() {
            Ok(None)
        } else {
            Err(Error::Cut { have: bytes.len(), need: PREFIX_BYTES + SLOT_BYTES })
        };
    };
    let length = u32::from_le_bytes(*prefix);
    let len = length as usize;
    if !(SLOT_BYTES..=MAX_FRAME_BYTES).contains(&len) {
        return Err(Error::Length(length));
    }
    if rest.len() < len {
        return Err(Error::Cut { have: bytes.len(), need: PREFIX_BYTES + len });
    }
    let (frame, rest) = rest.split_at(len);
    let (slot, payload) = frame.split_first_chunk::<SLOT_BYTES>().expect("a frame holds a slot");
    Ok(Some((slot, payload, rest)))
}

/// Iterates over the records of a packet; ends after the first [`Error`], which makes the following bytes unreadable.
pub fn records(packet: &[u8]) -> impl Iterator<Item = Result<Result<Record<'_>, CodecError>, Error>> {
    let mut rest = Some(packet);
    core::iter::from_fn(move || {
        let frame = split_frame(rest.take()?).transpose()?;
        Some(frame.map(|(slot, payload, after)| {
            rest = Some(after);
            Record::decode(slot, payload)
        }))
    })
}

impl Record<'_> {
    /// Returns the size of this record's frame with its length, in bytes.
    pub fn frame_bytes(&self) -> usize {
        PREFIX_BYTES + SLOT_BYTES + self.encode().1.len()
    }

    /// Appends the frame to `out`. A payload that is too long for a frame is cut at the end of a character, or of an address.
    /// Names are far below that limit.
    #[cfg(any(feature = "std", test))]
    pub fn append_frame(&self, out: &mut std::vec::Vec<u8>) {
        let (slot, mut payload) = self.encode();
        let room = MAX_FRAME_BYTES - SLOT_BYTES; // a multiple of 8, so no address is cut
        if payload.len() > room {
            payload = &payload[..room];
            let addresses =
                matches!(self.body, crate::Body::Stack { format: crate::FrameFormat::Address, .. });
            if let Err(error) = core::str::from_utf8(payload)
                && error.error_len().is_none()
                && !addresses
            {
                payload = &payload[..error.valid_up_to()];
            }
        }
        out.extend_from_slice(&((SLOT_BYTES + payload.len()) as u32).to_le_bytes());
        out.extend_from_slice(&slot);
        out.extend_from_slice(payload);
    }
}
