//! Pools of frameworks and of the driver, and the segments of framework pools.

use crate::Map;
use crate::book::Book;
use crate::book::cells::{CellId, OPAQUE};
use crate::rows::row::{Extent, Row};
use gpumem_wire::PoolOwner;
use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub(crate) struct Pool {
    pub id: u64,
    pub owner: PoolOwner,
    pub parent: Option<u32>,
    pub book: u8,
    pub name: u32,
    /// Cell of its idle bytes: a separate one if the pool was named before it had segments or blocks.
    pub idle: CellId,
    /// Tag in the cells of its blocks: its name, if `idle` is a separate cell.
    pub cell_name: u32,
    /// The pool reports no blocks.
    pub opaque: bool,
    pub gone: bool,
    pub generation: u8,
    /// Driver pools: reserved bytes as last polled.
    pub polled: u64,
    /// Driver pools: reserved bytes that are booked. Framework pools: reserved bytes as last reported by the owner.
    pub reserved: u64,
    /// Driver pools: bytes of live allocations; for graphs, as last polled. Framework pools: used bytes as last reported by the
    /// owner.
    pub used: u64,
    pub segments: BTreeMap<u64, Segment>,
    pub segment_bytes: u64,
    /// Segment bytes that are booked.
    pub backed_bytes: u64,
    pub blocks: Map<u64, Row>,
    pub block_bytes: u64,
    /// Block bytes that the owner has freed and that wait for a stream.
    pub pending_bytes: u64,
    /// Number of blocks that are not booked, because their segments are not wholly booked.
    pub unbooked_blocks: u32,
    /// The owner's total and the ledger's total at the last comparison, in bytes.
    pub check: Option<(u64, u64)>,
    /// Framework pools: reserved and used bytes as last reported by the owner.
    pub said: Option<(u64, u64)>,
    /// Other pools take segments from its blocks, so `large_blocks` is maintained.
    pub has_children: bool,
    pub large_blocks: BTreeMap<u64, u64>,
}

impl Pool {
    pub fn cell(&self) -> CellId {
        if self.opaque { OPAQUE } else { self.idle }
    }

    /// Whether the pool was destroyed and is empty. A driver pool waits for its last allocation to be freed.
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

/// Pool index and first address.
pub(crate) type SegmentKey = (u32, u64);

#[derive(Debug)]
pub(crate) struct Segment {
    pub bytes: u64,
    /// Bytes of the segment that are booked.
    pub backed: u64,
    pub parts: Vec<(Extent, u64)>,
    pub seq: u64,
    pub generation: u8,
}

impl Segment {
    /// Whether its memory was mapped piece by piece (VMM), so that it can grow.
    pub fn is_mapped(&self) -> bool {
        self.parts.iter().any(|(extent, _)| matches!(extent, Extent::Backing(_)))
    }
}

/// Bytes that segments took from an extent: the other side of `Segment::parts`. Created with the first segment, dropped with the
/// extent.
#[derive(Debug)]
pub(crate) struct Carved {
    pub parts: Vec<(SegmentKey, u64)>,
    /// Highest sum of `parts` so far.
    pub most: u64,
    /// Sum of `parts` at the peak, if `epoch` is the peak's; copied on write like the cells of a book.
    pub at_peak: u64,
    pub epoch: u32,
}

impl Carved {
    pub fn total(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns the bytes that segments took and gave back.
    pub fn let_go(&self) -> i64 {
        self.most.saturating_sub(self.total()) as i64
    }

    pub fn at_peak(&self, book: &Book) -> u64 {
        if self.epoch == book.peak.epoch { self.at_peak } else { self.total() }
    }

    /// Keeps the sum at the peak; must be called before `parts` changes.
    pub fn keep(&mut self, book: &Book) {
        (self.at_peak, self.epoch) = (self.at_peak(book), book.peak.epoch);
    }
}
