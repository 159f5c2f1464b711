//! The binary format between agents and the daemon, and of recordings.
//!
//! One record, three containers:
//!
//! ```text
//! event.rs    Record = Stamp (position, time, tag, thread, device) + Body (content by kind)
//! code.rs     small integers inside records: memory kinds, roles, phases, reasons
//! codec.rs    Record <-> Slot, the 64 bytes that all three containers share; one table for both directions
//! layout.rs   container 1: the sealed memfd of an agent: ring of slots, live table, name tables
//! frame.rs    containers 2 and 3: packets and recordings, length-prefixed slots with their payload
//! ```
//!
//! The crate is `no_std`, allocates nothing and contains no unsafe code; the feature `std` adds
//! only conveniences over `Vec` and `io`. Bytes are little-endian everywhere.
//!
//! **Compatibility.** A reader refuses only another [`MAJOR`] version. Within a major version a
//! record keeps its number and its slot, a new record takes a new number, and a reader that does not
//! know a number skips the frame and counts it ([`codec::Error::UnknownKind`]). A code that a reader
//! does not know reads as that code's `Unknown`. tests/golden/wire holds the bytes of every version.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(any(feature = "std", test))]
extern crate std;

pub mod code;
pub mod codec;
pub mod event;
pub mod frame;
pub mod layout;

pub use code::*;
pub use codec::{Error as CodecError, SLOT_BYTES, Slot, Words};
pub use event::{Body, Flags, NONE_DEVICE, PHASE_SAID, Record, Stamp, WITHHELD};

/// Version of the format; readers refuse any other.
pub const MAJOR: u16 = 1;
/// Version within [`MAJOR`]: increases when records are added; readers accept any.
pub const MINOR: u16 = 0;

/// Longest tag path in bytes of UTF-8.
pub const MAX_TAG_BYTES: usize = 255;
