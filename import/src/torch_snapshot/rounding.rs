//! Computes the size of a block from the requested bytes, as PyTorch's allocator does. Entries of the history state only
//! requested bytes. This size is used for blocks that the snapshot no longer contains.

/// Sizes of blocks are multiples of this, in bytes.
const BLOCK_BYTES: u64 = 512;
/// Maximum size in bytes of a request that is served from segments of small blocks.
const SMALL_BYTES: u64 = 1 << 20;
/// Size of segments for small blocks, in bytes.
const SMALL_SEGMENT: u64 = 2 << 20;
/// Requests of this many bytes or more use segments whose size is a multiple of [`SMALL_SEGMENT`].
const LARGE_FROM: u64 = 10 << 20;
/// Size in bytes of segments for requests between [`SMALL_BYTES`] and [`LARGE_FROM`].
const LARGE_SEGMENT: u64 = 20 << 20;

/// Settings of PyTorch's allocator that affect the sizes of blocks.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Settings {
    /// Number of block sizes between two powers of two, 0 and 1 for none. Entry `n` is for requests from 2^n MiB
    /// on, entry 0 also for smaller ones.
    pub divisions: [u32; 16],
    /// Size of requests in bytes from which no free block is split for them (`max_split_size`).
    pub max_split_bytes: Option<u64>,
}

impl Settings {
    /// Returns the minimum size of a block for a request, in bytes.
    pub fn rounded(&self, requested: u64) -> u64 {
        if requested <= BLOCK_BYTES {
            return BLOCK_BYTES;
        }
        let log = requested.ilog2();
        let divisions = self.divisions.get(log.saturating_sub(20).min(15) as usize).copied().unwrap_or(0);
        if divisions > 1 && requested > BLOCK_BYTES * u64::from(divisions) {
            let floor = 1_u64 << log;
            let part = floor >> divisions.ilog2();
            return if requested == floor || part == 0 { floor } else { requested.next_multiple_of(part) };
        }
        requested.next_multiple_of(BLOCK_BYTES)
    }

    /// Returns the size of the block for a request that is served from `room` free bytes. It is less than `room` only if the rest
    /// is large enough to be split off.
    pub fn block(&self, requested: u64, room: u64, is_expandable: bool) -> u64 {
        let rounded = self.rounded(requested);
        let Some(rest) = room.checked_sub(rounded) else { return rounded };
        let is_split = if is_expandable || rounded <= SMALL_BYTES {
            rest >= BLOCK_BYTES
        } else {
            rest > SMALL_BYTES && self.max_split_bytes.is_none_or(|max| rounded < max)
        };
        if is_split { rounded } else { room }
    }

    /// Returns the bytes that the allocator requests from the driver to serve a request.
    pub fn segment(&self, requested: u64) -> u64 {
        match self.rounded(requested) {
            small if small <= SMALL_BYTES => SMALL_SEGMENT,
            large if large < LARGE_FROM => LARGE_SEGMENT,
            rounded => rounded.next_multiple_of(SMALL_SEGMENT),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn requests_are_rounded_as_the_allocator_does() {
        let plain = Settings::default();
        for (requested, bytes) in
            [(0, 512), (1, 512), (513, 1024), (20_480_000, 20_480_000), (MIB + 1, MIB + 512)]
        {
            assert_eq!(plain.rounded(requested), bytes, "{requested}");
        }
        let divided = Settings { divisions: [4; 16], ..plain };
        assert_eq!(divided.rounded(1200), 1536, "below 512 * 4");
        assert_eq!(divided.rounded(1025 * 1024), 1280 * 1024);
        assert_eq!(divided.rounded(4 * MIB), 4 * MIB);
    }

    #[test]
    fn a_small_rest_stays_with_the_block() {
        let settings = Settings::default();
        assert_eq!(settings.block(20_480_000, 20 * MIB, false), 20 * MIB, "a rest below 1 MiB");
        assert_eq!(settings.block(20_480_000, 20 * MIB, true), 20_480_000);
        assert_eq!(settings.block(4 * MIB, 20 * MIB, false), 4 * MIB);
        assert_eq!(settings.block(1024, 1536, false), 1024);
        assert_eq!(settings.block(2 * MIB, MIB, false), 2 * MIB, "not where there is too little room");
        let unsplit = Settings { max_split_bytes: Some(8 * MIB), ..settings };
        assert_eq!(unsplit.block(10 * MIB, 20 * MIB, false), 20 * MIB);
        assert_eq!(
            [1, 2 * MIB, 11 * MIB].map(|bytes| settings.segment(bytes)),
            [2 * MIB, 20 * MIB, 12 * MIB]
        );
    }
}
