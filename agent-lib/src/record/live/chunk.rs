//! A chunk of the live table: seven keys in one cache line.

use std::sync::atomic::{AtomicU64, Ordering::*};

pub(crate) const KEYS: usize = 7;
pub(crate) const FREE: u64 = 0;

#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Chunk {
    /// For each row: the hash of its key, `FREE`, or `WRITING` (base/row.rs).
    pub keys: [AtomicU64; KEYS],
    /// Low half: number of rows that found this chunk full and lie in a later one. High half: a bit for each row with extra data.
    pub passed: AtomicU64,
}

impl Chunk {
    /// Whether rows that found this chunk full lie in a later one.
    #[inline(always)]
    pub(crate) fn is_passed(&self) -> bool {
        self.passed.load(Acquire) as u32 != 0
    }

    #[inline(always)]
    pub(crate) fn has_extra(&self, place: usize) -> bool {
        self.passed.load(Acquire) & extra_bit(place) != 0
    }

    /// Returns the place whose key is `hash`, else `KEYS`. Other threads may write, so a compare-and-swap has to confirm it.
    #[inline(always)]
    pub(crate) fn place_of(&self, hash: u64) -> usize {
        first(self.equal(hash))
    }

    /// Returns a free place, preferably `favourite`; `KEYS` if the chunk is full.
    #[inline(always)]
    pub(crate) fn free_place(&self, favourite: usize) -> usize {
        match self.keys.get(favourite) {
            Some(key) if key.load(Relaxed) == FREE => favourite,
            _ => first(self.equal(FREE)),
        }
    }

    /// Returns a bit for each key that equals `word`: bit 2 n for key n. A loop over the keys takes three times as much code. The
    /// size matters: most of the agent's cost for a training is that its code displaces the program's from the cache.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) fn equal(&self, word: u64) -> u32 {
        let halves: u32;
        // SAFETY: reads the 64 bytes of this chunk, which is aligned to 64; each word is read as a whole.
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

/// Returns the first place among the bits that `equal` has returned; `KEYS` for none.
#[inline(always)]
fn first(equal: u32) -> usize {
    ((equal | 1 << (2 * KEYS)).trailing_zeros() / 2) as usize
}

/// Returns the bit in `passed` which says that the row at `place` has extra data.
#[inline(always)]
pub(super) fn extra_bit(place: usize) -> u64 {
    1 << (32 + place)
}

/// Returns the preferred place in a chunk for a row. It follows from the hash, so its address is known without reading the chunk.
#[inline(always)]
pub(super) fn favourite(hash: u64) -> usize {
    ((hash >> 48) as usize * KEYS) >> 16
}
