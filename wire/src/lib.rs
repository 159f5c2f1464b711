//! The binary format between agents and the daemon, and of recordings.
//!
//! ```text
//! event.rs    Record = Stamp (number, time, tag, thread, device) + Body (content by kind)
//! code.rs     small integers inside records: memory kinds, roles, phases, reasons
//! codec.rs    Record <-> Slot, its 64 bytes without the payload; one table for both directions
//! layout.rs   shared memory of an agent: ring of slots, live table, names
//! frame.rs    packets and recordings: frames of a length, a slot and its payload
//! ```
//!
//! The crate is `no_std`, allocates nothing and contains no unsafe code; the feature `std` adds only `Record::append_frame`,
//! which appends to a `Vec`. All numbers are little-endian.
//!
//! **Compatibility.** A reader refuses only another [`MAJOR`] version. Within a major version the number and slot of a kind of
//! record do not change, and a new kind takes a new number. A reader skips a frame of an unknown kind and counts it
//! ([`codec::Error::UnknownKind`]). It reads an unknown code as `Unknown`. tests/golden/wire has the bytes of every version.
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
pub use codec::{Error as CodecError, SLOT_BYTES, Slot, Words, slot_of};
pub use event::{Body, Flags, NONE_DEVICE, PHASE_FLAG, Record, Request, Stamp, WITHHELD};

/// Version of the format; readers refuse any other.
pub const MAJOR: u16 = 1;
/// Version within [`MAJOR`]: increases when records are added; readers accept any.
pub const MINOR: u16 = 0;

/// Longest tag path in bytes of UTF-8.
pub const MAX_TAG_BYTES: usize = 255;
