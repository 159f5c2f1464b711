//! Returns memory to the driver: all free memory, the largest blocks, or segments that have been unused for long.

use super::blocks::{NONE, Number, PoolRef};
use super::{Allocator, Wanted};
use crate::event::PoolId;

impl Allocator {
    /// Waits for all streams, then returns unused segments, and unused parts of expandable ones, to the driver: those of the default
    /// pools and of private pools that [have ended](super::pools::Pair::has_ended). With `pool`, only those of this private pool, and
    /// only if it has ended. While requests go to a private pool, releases up to 2.12 keep the default pools.
    pub(crate) fn empty_cache(&mut self, pool: Option<PoolId>) {
        if let Some(pool) = pool {
            match self.pair_of.get(&pool) {
                Some(&index) if index > 0 && !self.pairs[index].has_ended => {}
                Some(&index) => self.release_pair(index),
                None => {}
            }
            return;
        }
        if self.rules.user_pools_release || self.scopes.is_empty() {
            for (_, number) in std::mem::take(&mut self.pending) {
                self.give_back(number);
            }
            self.release_pair(0);
        }
        for index in 1..self.pairs.len() {
            if self.pairs[index].has_ended {
                self.release_pair(index);
            }
        }
    }

    /// Returns the free memory of a pair of pools to the driver.
    pub(super) fn release_pair(&mut self, pair: usize) {
        for is_large in [true, false] {
            let free: Vec<Number> =
                self.pool(PoolRef { pair, is_large }).free.iter().map(|key| key.block).collect();
            for block in free {
                if self.segments[self.blocks[block].segment].is_expandable {
                    self.unmap(block);
                } else {
                    self.release_segment(block);
                }
            }
        }
    }

    /// Returns a segment to the driver if this free block is the whole segment. Returns the bytes of the returned segment; 0 if it
    /// was kept.
    fn release_segment(&mut self, number: Number) -> u64 {
        let block = &self.blocks[number];
        if block.left != NONE || block.right != NONE {
            return 0;
        }
        let bytes = block.bytes;
        self.remove_free(number);
        self.figures.reserved.remove(bytes);
        self.figures.segments.remove(1);
        self.figures.device_frees += 1;
        self.end_segment(number);
        bytes
    }

    /// Removes a segment and its only block, which must not be in a pool's set.
    pub(super) fn end_segment(&mut self, number: Number) {
        let (segment, pair) = (self.blocks[number].segment, self.blocks[number].pool.pair);
        let range = &self.segments[segment];
        let space = if range.is_expandable { &mut self.ranges } else { &mut self.addresses };
        space.give_back(range.address, range.bytes);
        self.segments.remove(segment);
        self.blocks.remove(number);
        self.pairs[pair].segments -= 1;
    }

    /// Returns free blocks of at least `max_split_bytes` to the driver for a request; returns whether they are enough.
    pub(super) fn release_oversize(&mut self, wanted: &Wanted) -> bool {
        let Some(max_split) = self.settings.max_split_bytes else { return false };
        let needed = wanted.bytes.max(max_split);
        let is_plain = |allocator: &Self, block: Number| {
            !(allocator.rules.spares_expandable_segments
                && allocator.segments[allocator.blocks[block].segment].is_expandable)
        };
        let mut larger = self.pool(wanted.pool).best(wanted.stream, needed);
        while let Some(key) = larger {
            if is_plain(self, key.block) {
                return self.release_segment(key.block) > 0;
            }
            larger = self.pool(wanted.pool).after(&key);
        }
        let smaller: Vec<_> = self
            .pool(wanted.pool)
            .down_from(wanted.stream, needed)
            .take_while(|key| key.bytes >= max_split)
            .filter(|key| is_plain(self, key.block))
            .collect();
        let mut released = 0;
        for key in smaller {
            if released >= needed {
                break;
            }
            released += self.release_segment(key.block);
        }
        released >= needed
    }

    /// Returns free segments of the default large pool that have been unused for long, if reserved bytes exceed the limit.
    pub(super) fn collect(&mut self) {
        let Some(limit) = self.collection_limit else { return };
        let Some(excess) = self.figures.reserved.now.checked_sub(limit).filter(|excess| *excess > 0) else {
            return;
        };
        let pool = self.pool(PoolRef { pair: 0, is_large: true });
        let mut whole: Vec<(Number, u64)> = Vec::new();
        for key in &pool.free {
            let block = &self.blocks[key.block];
            if block.left == NONE && block.right == NONE {
                whole.push((key.block, pool.searches - block.searches));
            }
        }
        let (mut freed, mut is_going_on) = (0, true);
        while freed < excess && is_going_on && !whole.is_empty() {
            let ages: u64 = whole.iter().map(|(_, age)| age).sum();
            let mean = ages as f64 / whole.len() as f64;
            is_going_on = false;
            whole.retain(|&(block, age)| {
                let is_old = age as f64 >= mean && !self.segments[self.blocks[block].segment].is_expandable;
                if is_old {
                    freed += self.release_segment(block);
                    is_going_on = true;
                }
                !is_old
            });
        }
    }
}
