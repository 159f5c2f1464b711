//! Layout of an agent's shared memory: a memfd, sealed against shrinking, that the agent passes with its Hello. The daemon never
//! maps it: it checks the seals and the size, and reads with pread.
//!
//! ```text
//! 0         header, 4096 bytes, see `Header`
//! ring      `ring_slots` slots of 64 bytes (a power of two). Ordered record n (from 1) lies in slot (n - 1) mod ring_slots. The
//!           writer stores everything but `seq`, then `seq` (release): a slot has record n if and only if its seq is n.
//! live      the live table: `live_rows` rows of 64 bytes. Each is the slot of the record that made the row (AllocEnd, VmmCreate,
//!           VmmMap, PoolCreate, SegmentAdd, BlockAlloc); its seq is 0 while the row is empty or being written.
//! names     `name_bytes` bytes: frames (frame.rs) of Device, Tag, Module and Stack records, valid up to `names_end`.
//! ```

use crate::SLOT_BYTES;

/// Size of the header, in bytes.
pub const HEADER_BYTES: usize = 4096;
/// First bytes of the header.
pub const MAGIC: [u8; 8] = *b"GPUMEML\n";

/// Fields of the header. `head_seq`, `lost` and `names_end` change while the agent runs; the others are written before the
/// memfd is passed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Header {
    /// Version of the format: see [`crate::MAJOR`].
    pub major: u16,
    /// Version of the format: see [`crate::MINOR`].
    pub minor: u16,
    /// The agent's pid in its own pid namespace.
    pub pid: u32,
    /// Start time of the process: field 22 of its /proc/self/stat, in clock ticks after the boot.
    pub start_ticks: u64,
    /// Number of slots in the ring: a power of two.
    pub ring_slots: u64,
    pub live_rows: u64,
    /// Size of the shared memory's part for names, in bytes.
    pub name_bytes: u64,
    /// Last record number (`seq`) that a thread has reserved; its record may not be written yet.
    pub head_seq: u64,
    /// Number of ordered records lost because the ring was full.
    pub lost: u64,
    /// End of the valid names, in bytes from the start of the part for names.
    pub names_end: u64,
}

/// Why a memfd is not an agent's shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// The memfd does not begin with the magic bytes of the header.
    Magic,
    /// The format has another major version.
    Version(u16),
    /// The parts do not fit into the file, or the ring size is not a power of two.
    Size,
}

impl core::fmt::Display for Error {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Error::Magic => f.write_str("not an agent's shared memory"),
            Error::Version(major) => write!(f, "format version {major}, this program reads {}", crate::MAJOR),
            Error::Size => f.write_str("the parts do not fit the file"),
        }
    }
}

impl core::error::Error for Error {}

impl Header {
    /// Returns the 72 bytes that the header uses; the rest of its 4096 bytes is zero.
    pub fn encode(&self) -> [u8; 72] {
        let words = [
            u64::from_le_bytes(MAGIC),
            u64::from(self.major) | u64::from(self.minor) << 16 | u64::from(self.pid) << 32,
            self.start_ticks,
            self.ring_slots,
            self.live_rows,
            self.name_bytes,
            self.head_seq,
            self.lost,
            self.names_end,
        ];
        let mut out = [0; 72];
        for (place, word) in out.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// Reads a header and checks that its parts fit into a file of `file_bytes`.
    ///
    /// # Errors
    /// [`Error`] if the bytes are not a valid header: the process that made the memfd may have written anything.
    pub fn decode(bytes: &[u8; 72], file_bytes: u64) -> Result<Self, Error> {
        if bytes[..8] != MAGIC {
            return Err(Error::Magic);
        }
        let word = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().expect("within 72 bytes"));
        let header = Header {
            major: word(8) as u16,
            minor: (word(8) >> 16) as u16,
            pid: (word(8) >> 32) as u32,
            start_ticks: word(16),
            ring_slots: word(24),
            live_rows: word(32),
            name_bytes: word(40),
            head_seq: word(48),
            lost: word(56),
            names_end: word(64),
        };
        if header.major != crate::MAJOR {
            return Err(Error::Version(header.major));
        }
        match header.file_bytes() {
            Some(need)
                if need <= file_bytes
                    && header.ring_slots.is_power_of_two()
                    && header.names_end <= header.name_bytes =>
            {
                Ok(header)
            }
            _ => Err(Error::Size),
        }
    }

    pub const fn ring_offset(&self) -> u64 {
        HEADER_BYTES as u64
    }

    /// Returns the live table's byte offset; `None` if the sizes overflow.
    pub fn live_offset(&self) -> Option<u64> {
        self.ring_slots.checked_mul(SLOT_BYTES as u64)?.checked_add(self.ring_offset())
    }

    /// Returns the byte offset of the names; `None` if the sizes overflow.
    pub fn names_offset(&self) -> Option<u64> {
        self.live_rows.checked_mul(SLOT_BYTES as u64)?.checked_add(self.live_offset()?)
    }

    /// Returns the size of the whole file in bytes; `None` if the sizes overflow.
    pub fn file_bytes(&self) -> Option<u64> {
        self.names_offset()?.checked_add(self.name_bytes)
    }

    /// Returns the byte offset of the slot of ordered record `seq` (from 1).
    pub fn slot_offset(&self, seq: u64) -> u64 {
        self.ring_offset() + (seq.wrapping_sub(1) & (self.ring_slots - 1)) * SLOT_BYTES as u64
    }
}
