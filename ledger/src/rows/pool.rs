//! Pools of frameworks and of the driver, and the segments of framework pools.

use crate::Map;
use crate::book::Book;
use crate::book::cells::{CellId, OPAQUE};
use crate::rows::row::{Extent, Row};
use gpumem_wire::PoolOwner;
use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// The owner's number.
    pub id: u64,
    pub owner: PoolOwner,
    pub parent: Option<u32>,
    pub book: u8,
    /// Tag that names it.
    pub name: u32,
    /// Cell of its idle bytes: a cell of its own if it was named before it had segments or blocks.
    pub idle: CellId,
    /// Tag in the cells of its blocks: its name, if `idle` is its own.
    pub cell_name: u32,
    /// Reports no blocks.
    pub opaque: bool,
    pub gone: bool,
    pub generation: u8,
    /// Driver pools: reserved bytes as last polled.
    pub polled: u64,
    /// Driver pools: reserved bytes that are booked. Framework pools: reserved bytes as its owner last reported them.
    pub reserved: u64,
    /// Driver pools: bytes of live allocations; of graphs, as last polled. Framework pools: used bytes as its owner last reported them.
    pub used: u64,
    pub segments: BTreeMap<u64, Segment>,
    pub segment_bytes: u64,
    /// Segment bytes that are booked.
    pub backed_bytes: u64,
    pub blocks: Map<u64, Row>,
    pub block_bytes: u64,
    /// Of those, freed by their owner and waiting for a stream.
    pub pending_bytes: u64,
    /// Blocks that are not booked, because their segments are not wholly booked.
    pub unbooked_blocks: u32,
    /// The owner's total and ours, when it last asked for a comparison.
    pub check: Option<(u64, u64)>,
    /// Framework pools: reserved and used bytes, as the owner last reported them.
    pub said: Option<(u64, u64)>,
    /// Other pools take segments out of its blocks, so `large_blocks` is kept.
    pub has_children: bool,
    pub large_blocks: BTreeMap<u64, u64>,
}

impl Pool {
    pub fn cell(&self) -> CellId {
        if self.opaque { OPAQUE } else { self.idle }
    }

    /// Destroyed, and nothing of it is left. A driver pool waits for its last allocation.
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
    /// Bytes of it that are booked.
    pub backed: u64,
    pub parts: Vec<(Extent, u64)>,
    pub seq: u64,
    pub generation: u8,
}

impl Segment {
    /// Its memory was mapped there, piece by piece: it can grow.
    pub fn is_mapped(&self) -> bool {
        self.parts.iter().any(|(extent, _)| matches!(extent, Extent::Backing(_)))
    }
}

/// What segments took from an extent: the other side of `Segment::parts`. Made with the first segment, dropped with the extent.
#[derive(Debug)]
pub(crate) struct Carved {
    pub parts: Vec<(SegmentKey, u64)>,
    /// Highest sum of `parts` so far.
    pub most: u64,
    /// Their sum at the peak, if `epoch` is the peak's; kept as a book keeps its cells.
    pub at_peak: u64,
    pub epoch: u32,
}

impl Carved {
    pub fn total(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes that segments had and gave back.
    pub fn let_go(&self) -> i64 {
        self.most.saturating_sub(self.total()) as i64
    }

    pub fn at_peak(&self, book: &Book) -> u64 {
        if self.epoch == book.peak.epoch { self.at_peak } else { self.total() }
    }

    /// Keeps the sum at the peak; called before `parts` change.
    pub fn keep(&mut self, book: &Book) {
        (self.at_peak, self.epoch) = (self.at_peak(book), book.peak.epoch);
    }
}

/// Bytes of segments that no block covers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Idle {
    /// All of them.
    pub bytes: u64,
    /// Gaps between blocks; each lies in one segment.
    pub pieces: u64,
    /// Bytes of the largest gap.
    pub largest_bytes: u64,
    /// A segment is mapped (VMM): it can grow, as PyTorch's expandable segments do.
    pub is_expandable: bool,
}

impl Idle {
    pub(crate) fn add(&mut self, from: u64, to: u64) {
        let bytes = to.saturating_sub(from);
        self.bytes = self.bytes.saturating_add(bytes);
        self.pieces += u64::from(bytes > 0);
        self.largest_bytes = self.largest_bytes.max(bytes);
    }
}
