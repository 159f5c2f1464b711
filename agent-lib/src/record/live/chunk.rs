//! Seven keys on one line of the processor's cache.

use std::sync::atomic::{AtomicU64, Ordering::*};

/// Places of a chunk.
pub(crate) const KEYS: usize = 7;
/// The key of a place that is free.
pub(crate) const FREE: u64 = 0;

/// See the module's text.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Chunk {
    /// Hashes; `FREE`, or being written.
    pub keys: [AtomicU64; KEYS],
    /// Low half: rows that probed past. Above: a bit per key, set while something lies beside its row.
    pub passed: AtomicU64,
}

impl Chunk {
    /// Rows lie further away than here.
    #[inline(always)]
    pub(crate) fn is_passed(&self) -> bool {
        self.passed.load(Acquire) as u32 != 0
    }

    /// Something lies beside the row of that place.
    #[inline(always)]
    pub(crate) fn has_beside(&self, place: usize) -> bool {
        self.passed.load(Acquire) & beside_bit(place) != 0
    }

    /// The place whose key is `hash`, or one that is free; `KEYS` where there is none. Others may write meanwhile: it is a guess, to be claimed
    /// by compare-and-swap.
    #[inline(always)]
    pub(crate) fn place_of(&self, hash: u64) -> usize {
        first(self.equal(hash))
    }

    /// A free place: this one, if it is.
    #[inline(always)]
    pub(crate) fn free_place(&self, favourite: usize) -> usize {
        let free = self.equal(FREE);
        if free & 1 << (2 * favourite) != 0 { favourite } else { first(free) }
    }

    /// A bit for each key that is `word`: bit 2 n for key n. One key after the other takes three times as much code, and what a training
    /// pays for a block is mostly the code of its own that ours takes out of the processor's cache.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) fn equal(&self, word: u64) -> u32 {
        let halves: u32;
        // SAFETY: reads the 64 bytes of this chunk, which is aligned to them; a word is read as a whole.
        unsafe {
            std::arch::asm!(
                "movq {word}, {hash}",
                "punpcklqdq {word}, {word}",
                "movdqa {a}, {word}",
                "movdqa {b}, {word}",
                "movdqa {c}, {word}",
                "pcmpeqd {a}, [{keys}]",
                "pcmpeqd {b}, [{keys} + 16]",
                "pcmpeqd {c}, [{keys} + 32]",
                "pcmpeqd {word}, [{keys} + 48]",
                "packssdw {a}, {b}",
                "packssdw {c}, {word}",
                "packsswb {a}, {c}",
                "pmovmskb {halves:e}, {a}",
                keys = in(reg) self,
                hash = in(reg) word,
                halves = lateout(reg) halves,
                word = out(xmm_reg) _,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                options(nostack, readonly, preserves_flags, pure),
            );
        }
        halves & halves >> 1 & 0x1555
    }
    #[cfg(not(target_arch = "x86_64"))]
    #[inline(always)]
    pub(crate) fn equal(&self, word: u64) -> u32 {
        let bit = |(place, key): (usize, &AtomicU64)| u32::from(key.load(Acquire) == word) << (2 * place);
        self.keys.iter().enumerate().map(bit).sum()
    }
}

/// The first place of those bits; `KEYS` for none.
#[inline(always)]
fn first(equal: u32) -> usize {
    ((equal | 1 << (2 * KEYS)).trailing_zeros() / 2) as usize
}

/// In `passed`.
#[inline(always)]
pub(super) fn beside_bit(place: usize) -> u64 {
    1 << (32 + place)
}

/// The place of its chunk that a row takes if it is free: where it will be is known before the chunk is here.
#[inline(always)]
pub(super) fn favourite(hash: u64) -> usize {
    ((hash >> 48) as usize * KEYS) >> 16
}
