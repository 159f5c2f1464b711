//! Pools of free blocks.

use super::blocks::{Block, Number, Segment, Slab};
use crate::event::{PoolKind, StreamId};
use crate::release::TieBreak;
use std::collections::BTreeSet;
use std::ops::Bound;

/// Place of a free block in its pool: the order of the best fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) stream: StreamId,
    pub(crate) bytes: u64,
    /// Order of blocks with equal stream and size.
    ties: (u64, u64),
    pub(crate) block: Number,
}

impl Key {
    pub(crate) fn new(number: Number, block: &Block, segments: &Slab<Segment>, ties: TieBreak) -> Self {
        let ties = match ties {
            TieBreak::Address => (block.address, 0),
            TieBreak::BlockAge => (block.order, 0),
            TieBreak::SegmentAge => (segments[block.segment].order, block.address),
        };
        Key { stream: block.stream, bytes: block.bytes, ties, block: number }
    }

    /// Returns a key before all blocks of the stream that have at least this size.
    fn least(stream: StreamId, bytes: u64) -> Self {
        Key { stream, bytes, ties: (0, 0), block: 0 }
    }
}

/// Free blocks of one size class.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pool {
    pub(crate) free: BTreeSet<Key>,
    /// Stream, address and number of blocks without memory.
    pub(crate) unmapped: BTreeSet<(StreamId, u64, Number)>,
    /// Number of searches, while the collection is on.
    pub(crate) searches: u64,
}

impl Pool {
    /// Returns the smallest block of a stream that has at least this size.
    pub(crate) fn best(&self, stream: StreamId, bytes: u64) -> Option<Key> {
        self.free.range(Key::least(stream, bytes)..).next().filter(|key| key.stream == stream).copied()
    }

    /// Returns the next larger block of the same stream.
    pub(crate) fn after(&self, key: &Key) -> Option<Key> {
        let next = self.free.range((Bound::Excluded(key), Bound::Unbounded)).next();
        next.filter(|next| next.stream == key.stream).copied()
    }

    /// Returns the blocks of a stream below a size, from the largest down.
    pub(crate) fn down_from(&self, stream: StreamId, bytes: u64) -> impl Iterator<Item = Key> {
        self.free.range(Key::least(stream, 0)..Key::least(stream, bytes)).rev().copied()
    }
}

/// The small and the large pool of the process, of a graph, or of a `MemPool`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pair {
    /// The small and the large pool.
    pub(crate) pools: [Pool; 2],
    /// `None` for the pair that every process has.
    pub(crate) kind: Option<PoolKind>,
    /// Number of segments.
    pub(crate) segments: u64,
    /// The graphs or the object that the pair belongs to are gone.
    pub(crate) has_ended: bool,
}

impl Pair {
    pub(crate) fn has_own_allocator(&self) -> bool {
        matches!(self.kind, Some(PoolKind::User { has_own_allocator: true, .. }))
    }

    pub(crate) fn no_split(&self) -> bool {
        matches!(self.kind, Some(PoolKind::User { no_split: true, .. }))
    }

    pub(crate) fn serves_shortage(&self) -> bool {
        matches!(self.kind, Some(PoolKind::User { use_on_oom: true, .. }))
    }
}
