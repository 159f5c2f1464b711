//! Pools of free blocks, sorted for the best fit.

use super::blocks::{Block, Number, Segment, Slab};
use crate::event::{PoolKind, StreamId};
use crate::release::TieBreak;
use std::collections::BTreeSet;
use std::ops::Bound;

/// Sort key of a free block in its pool: by stream, by size, then by age or address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) stream: StreamId,
    pub(crate) bytes: u64,
    /// Sort key of blocks with equal stream and size, see [`TieBreak`].
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

    /// Returns a key that sorts before all blocks of the stream with at least this size.
    fn least(stream: StreamId, bytes: u64) -> Self {
        Key { stream, bytes, ties: (0, 0), block: 0 }
    }
}

/// Free and unmapped blocks of one size class, small or large.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pool {
    pub(crate) free: BTreeSet<Key>,
    /// Unmapped blocks of expandable segments, as (stream, address, number of the block).
    pub(crate) unmapped: BTreeSet<(StreamId, u64, Number)>,
    /// Number of searches of this pool so far; counted only if unused segments are returned (`collection_limit`).
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

/// The small and the large pool that belong together: of the process, of a graph, or of a `MemPool`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pair {
    pub(crate) pools: [Pool; 2],
    /// Kind of a private pool; `None` for the default pools of the process.
    pub(crate) kind: Option<PoolKind>,
    /// Number of segments in both pools.
    pub(crate) segments: u64,
    /// Whether the graphs or the `MemPool` object that used the pools no longer exist.
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
