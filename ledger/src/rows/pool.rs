//! Pools of frameworks and of the driver, and the segments of framework pools.

use crate::book::Book;
use crate::book::cells::{CellId, OPAQUE};
use crate::rows::row::Extent;
use crate::rows::table::RowTable;
use gpumem_wire::PoolOwner;
use std::collections::BTreeMap;

/// A pool from which memory is allocated: of the driver, of CUDA graphs, or of a framework.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    pub id: u64,
    pub owner: PoolOwner,
    /// Index of the pool whose blocks contain this pool's segments.
    pub parent: Option<u32>,
    pub book: u8,
    /// Name of the pool, as a tag id.
    pub name: u32,
    /// Cell of the pool's idle bytes; a separate cell if the pool was named before it had segments or blocks.
    pub idle: CellId,
    /// Name of the pool in the cells of its blocks: `name` if `idle` is a separate cell, else 0.
    pub cell_name: u32,
    /// Whether the pool reports no blocks.
    pub opaque: bool,
    /// Whether the pool was destroyed.
    pub gone: bool,
    /// Number, modulo 256, of the last resync (in which the agent sends all live rows again) that contained the pool.
    pub generation: u8,
    /// Driver pools: reserved bytes as last polled.
    pub polled: u64,
    /// Driver pools: reserved bytes that are booked. Framework pools: reserved bytes as their owner last reported them.
    pub reserved: u64,
    /// Driver pools: bytes of live allocations; for graphs, as last polled. Framework pools: used bytes as their owner last
    /// reported them.
    pub used: u64,
    pub segments: BTreeMap<u64, Segment>,
    pub segment_bytes: u64,
    /// Bytes of the segments that lie on booked memory.
    pub backed_bytes: u64,
    pub blocks: RowTable,
    pub block_bytes: u64,
    /// Block bytes that the program has freed and a CUDA stream may still use.
    pub pending_bytes: u64,
    /// Number of blocks outside the book, because their segments are not wholly booked.
    pub unbooked_blocks: u32,
    /// Live block bytes according to the owner and to the ledger, at the owner's last report of its total.
    pub check: Option<(u64, u64)>,
    /// Streams whose requests are known: bit N for the stream with number N, the highest bit for all larger numbers.
    pub streams: u64,
    /// Private pools whose requests are known, in the same way; bit 0 is the default pool.
    pub private_pools: u64,
    /// Framework pools: reserved and used bytes as their owner last reported them.
    pub reported: Option<(u64, u64)>,
    /// Whether other pools have segments in this pool's blocks.
    pub has_children: bool,
    /// If `has_children`: address and bytes of the pool's blocks of at least [`LARGE_BYTES`](crate::rows::row::LARGE_BYTES).
    pub large_blocks: BTreeMap<u64, u64>,
}

impl Pool {
    /// Returns the cell of the pool's bytes that are in no block.
    pub fn cell(&self) -> CellId {
        if self.opaque { OPAQUE } else { self.idle }
    }

    /// Whether the pool was destroyed and is empty; a driver pool stays until its last allocation is freed.
    pub fn is_over(&self) -> bool {
        self.gone && (self.is_framework() || self.used == 0)
    }

    /// Whether `address` lies in a segment that is wholly booked.
    pub fn is_booked(&self, address: u64) -> bool {
        let under = self.segments.range(..=address).next_back();
        under.is_some_and(|(start, segment)| {
            address - start < segment.bytes && segment.backed == segment.bytes
        })
    }

    pub fn is_framework(&self) -> bool {
        self.owner == PoolOwner::Framework
    }
}

/// Identifies a segment: index of its pool, and its first address.
pub(crate) type SegmentKey = (u32, u64);

/// A piece of memory that a framework pool divides into blocks.
#[derive(Debug)]
pub(crate) struct Segment {
    pub bytes: u64,
    /// Bytes of the segment that lie on booked memory.
    pub backed: u64,
    /// Extents of booked memory under the segment, and the bytes taken from each.
    pub parts: Vec<(Extent, u64)>,
    pub seq: u64,
    pub generation: u8,
}

impl Segment {
    /// Whether the memory under the segment is mapped (VMM), so that the segment can grow.
    pub fn is_mapped(&self) -> bool {
        self.parts.iter().any(|(extent, _)| matches!(extent, Extent::Backing(_)))
    }
}

/// Bytes that segments took from an extent (a piece of booked memory): the reverse of `Segment::parts`. Created with the first
/// segment in the extent, dropped with the extent.
#[derive(Debug)]
pub(crate) struct Carved {
    pub parts: Vec<(SegmentKey, u64)>,
    /// Highest sum of `parts` so far (bytes).
    pub max_bytes: u64,
    /// Sum of `parts` at the peak; valid if `epoch` is the peak's. Copied on write like the cells of a book.
    pub at_peak: u64,
    pub epoch: u32,
}

impl Carved {
    pub fn total(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns the bytes that segments took and have returned.
    pub fn returned_bytes(&self) -> i64 {
        self.max_bytes.saturating_sub(self.total()) as i64
    }

    pub fn at_peak(&self, book: &Book) -> u64 {
        if self.epoch == book.peak.epoch { self.at_peak } else { self.total() }
    }

    /// Saves the sum at the peak. Must be called before `parts` changes.
    pub fn save_peak(&mut self, book: &Book) {
        (self.at_peak, self.epoch) = (self.at_peak(book), book.peak.epoch);
    }
}
