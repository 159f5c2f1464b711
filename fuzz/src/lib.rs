//! Shared by the targets: a limit on memory, and assertions about everything that was read.

#[cfg(feature = "runs")]
mod files;
pub mod memory;
#[cfg(feature = "runs")]
mod views;

#[cfg(feature = "runs")]
pub use files::{NAME, harmless, import, sound};
#[cfg(feature = "runs")]
pub use views::{shown, tamed};

/// Takes a little-endian number from the front of the bytes. Missing bytes count as zero.
pub fn number(bytes: &mut &[u8], len: usize) -> u64 {
    let (front, rest) = bytes.split_at(len.min(bytes.len()));
    *bytes = rest;
    front.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}
