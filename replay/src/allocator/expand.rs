//! Expandable segments: each reserves a range of addresses and maps memory to its pages as needed.

use super::blocks::{Block, NONE, PoolRef, State};
use super::{Allocator, Number, Wanted};
use crate::settings::SMALL_SEGMENT;

impl Allocator {
    /// Returns the page size of a pool's expandable segments, in bytes.
    fn page(&self, pool: PoolRef) -> u64 {
        if pool.is_large { self.settings.large_segment_bytes } else { SMALL_SEGMENT }
    }

    /// Makes a free block of at least the wanted size by mapping pages after a free block, or at the begin of unmapped memory.
    pub(super) fn expand(&mut self, wanted: &Wanted) -> Option<Number> {
        let mut block = self.room_to_expand(wanted)?;
        if self.blocks[block].state == State::Unmapped {
            self.map(block, self.blocks[block].bytes.min(wanted.bytes))?;
        }
        while self.blocks[block].bytes < wanted.bytes {
            let missing = wanted.bytes - self.blocks[block].bytes;
            block = self.blocks[block].right;
            self.map(block, self.blocks[block].bytes.min(missing))?;
        }
        self.remove_free(block);
        Some(block)
    }

    /// Returns the first of adjacent free and unmapped blocks that together suffice. Reserves a new range if there are none; returns
    /// `None` if the release refuses a request that is larger than a range.
    fn room_to_expand(&mut self, wanted: &Wanted) -> Option<Number> {
        let is_usable = |number: Number| {
            number != NONE && matches!(self.blocks[number].state, State::Free | State::Unmapped)
        };
        let of_stream = (wanted.stream, 0, 0)..(wanted.stream + 1, 0, 0);
        for &(_, _, unmapped) in self.pool(wanted.pool).unmapped.range(of_stream) {
            let left = self.blocks[unmapped].left;
            let first = if is_usable(left) { left } else { unmapped };
            let (mut block, mut bytes) = (first, 0);
            while bytes < wanted.bytes && is_usable(block) {
                bytes += self.blocks[block].bytes;
                block = self.blocks[block].right;
            }
            if bytes >= wanted.bytes {
                return Some(first);
            }
        }
        let total = self.device.total_bytes;
        let bytes = (total + total / 8).next_multiple_of(self.page(wanted.pool));
        if wanted.bytes > bytes && self.rules.has_reserve_keys {
            return None;
        }
        let address = self.ranges.take(bytes);
        let block = self.begin_segment(wanted, address, bytes, State::Unmapped);
        self.insert_unmapped(block);
        Some(block)
    }

    /// Maps pages for `bytes` at the begin of an unmapped block. Returns `None` if the device lacks the memory.
    fn map(&mut self, number: Number, bytes: u64) -> Option<()> {
        let bytes = bytes.next_multiple_of(self.page(self.blocks[number].pool));
        if !self.has_room(bytes) {
            return None;
        }
        self.remove_unmapped(number);
        let block = &mut self.blocks[number];
        block.state = State::Free;
        let rest = block.bytes - bytes;
        if rest > 0 {
            block.bytes = bytes;
            let rest = Block {
                address: block.address + bytes,
                bytes: rest,
                left: number,
                state: State::Unmapped,
                ..*block
            };
            let rest = self.new_block(rest);
            self.insert_unmapped(rest);
        }
        self.merge(number);
        self.insert_free(number);
        self.figures.reserved.add(bytes);
        self.figures.device_allocs += 1;
        Some(())
    }

    /// Unmaps all whole pages within a free block of an expandable segment.
    pub(super) fn unmap(&mut self, number: Number) {
        let block = self.blocks[number];
        let page = self.page(block.pool);
        let base = self.segments[block.segment].address;
        let begin = base + (block.address - base).next_multiple_of(page);
        let end = base + (block.address + block.bytes - base) / page * page;
        if begin >= end {
            return;
        }
        self.remove_free(number);
        let before = Block { bytes: begin - block.address, right: number, ..block };
        let after = Block { address: end, bytes: block.address + block.bytes - end, left: number, ..block };
        for part in [before, after] {
            if part.bytes > 0 {
                let part = self.new_block(part);
                self.insert_free(part);
            }
        }
        let unmapped = &mut self.blocks[number];
        (unmapped.address, unmapped.bytes, unmapped.state) = (begin, end - begin, State::Unmapped);
        self.merge(number);
        self.figures.reserved.remove(end - begin);
        self.figures.device_frees += 1;
        let unmapped = &self.blocks[number];
        if unmapped.left == NONE && unmapped.right == NONE {
            self.end_segment(number);
        } else {
            self.insert_unmapped(number);
        }
    }
}
