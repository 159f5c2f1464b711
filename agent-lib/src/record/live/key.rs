//! By what rows are found, and where that is looked for first.

use super::WRITING;
use super::chunk::KEYS;

/// By what a row is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    /// A driver allocation or import, by address.
    Allocation(u64),
    /// A VMM handle that has references, by its number.
    Handle(u64),
    /// A VMM handle without references that still has mappings, by the seq that made it: its number may be given out
    /// again.
    Backing(u64),
    /// A VMM mapping, by address.
    Mapping(u64),
    /// A pool.
    Pool(u64),
    /// Pool and address.
    Segment(u64, u64),
    /// Pool and address.
    Block(u64, u64),
}

impl Key {
    #[inline(always)]
    pub(super) fn hash(self) -> u64 {
        let (space, a, b) = match self {
            Key::Allocation(address) => (1, address, 0),
            Key::Handle(handle) => (2, handle, 0),
            Key::Backing(seq) => (3, seq, 0),
            Key::Mapping(address) => (4, address, 0),
            Key::Pool(pool) => (5, pool, 0),
            Key::Segment(pool, address) => (6, address, pool),
            Key::Block(pool, address) => (7, address, pool),
        };
        let mixed = mix(a ^ (space << 57), b ^ 0x9e37_79b9_7f4a_7c15);
        if mixed <= WRITING { mixed + 2 } else { mixed }
    }
}

/// Both halves of a 128-bit product.
#[inline(always)]
pub fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ 0x2d35_8dcc_aa6c_78a5) * u128::from(b ^ 0x8bb8_4b93_962e_acc9);
    let folded = product as u64 ^ (product >> 64) as u64;
    (folded ^ folded >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

/// The place of its chunk that a row takes if it is free: where it will be is known before the chunk is here.
#[inline(always)]
pub(super) fn favourite(hash: u64) -> usize {
    ((hash >> 48) as usize * KEYS) >> 16
}
