#![doc = include_str!("../README.md")]
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
