//! Segments of framework pools: taken out of memory that is booked already, of driver allocations, of
//! VMM handles through their mappings, or of a block of the parent pool. Whose bytes a segment took is
//! written on both sides: `Segment::parts` and `Holdings::carved`.

use crate::book::CellId;
use crate::holdings::{Extent, Holdings, InFlight, LARGE_BYTES, MAX_BYTES, Row};
use crate::vmm::Mapping;
use gpumem_wire::{MemoryKind, PoolOwner, Stamp};
use std::collections::BTreeMap;

/// Pool index and first address.
pub(crate) type SegmentKey = (u32, u64);

#[derive(Debug)]
pub(crate) struct Segment {
    pub bytes: u64,
    /// Bytes of it that are booked.
    pub backed: u64,
    parts: Vec<(Extent, u64)>,
    seq: u64,
    pub generation: u8,
}

impl Holdings {
    /// `SegmentAdd`, and `AllocEnd` for a framework pool.
    pub fn add_segment(&mut self, address: u64, bytes: u64, pool: u64, stamp: &Stamp, book: u8) {
        if bytes > MAX_BYTES || bytes == 0 {
            self.odd.impossible += 1;
            return;
        }
        let index = self.pool_index(pool, PoolOwner::Framework, book);
        let generation = self.generation;
        let pool = &mut self.pools[index as usize];
        pool.generation = generation;
        if let Some(old) = pool.segments.get_mut(&address) {
            if old.seq == stamp.seq && stamp.seq != 0 {
                old.generation = generation;
                return;
            }
            self.odd.replaced += 1;
            self.take_segment((index, address));
        }
        let segment = Segment { bytes, backed: 0, parts: Vec::new(), seq: stamp.seq, generation };
        let pool = &mut self.pools[index as usize];
        pool.segments.insert(address, segment);
        pool.segment_bytes += bytes;
        self.hungry_segments += 1;
        self.feed((index, address));
    }

    /// `SegmentRemove`.
    pub fn remove_segment(&mut self, address: u64, pool: u64) {
        match self.pool_ids.get(&pool) {
            Some(&index) if self.pools[index as usize].segments.contains_key(&address) => {
                self.take_segment((index, address));
            }
            _ => self.odd.unknown_handles += 1,
        }
    }

    /// Removes a segment; its bytes go back to whom they were taken from.
    pub fn take_segment(&mut self, key: SegmentKey) {
        let pool = &mut self.pools[key.0 as usize];
        let cell = pool.cell();
        let Some(segment) = pool.segments.remove(&key.1) else { return };
        pool.segment_bytes -= segment.bytes;
        pool.backed_bytes -= segment.backed;
        if segment.backed < segment.bytes {
            self.hungry_segments -= 1;
        }
        for (extent, bytes) in segment.parts {
            self.uncarve(extent, key, cell, bytes);
        }
    }

    /// One part of a segment goes back to the extent's own cell.
    fn uncarve(&mut self, extent: Extent, key: SegmentKey, cell: CellId, bytes: u64) {
        if let Some(parts) = self.carved.get_mut(&extent) {
            parts.retain(|(other, _)| *other != key);
            if parts.is_empty() {
                self.carved.remove(&extent);
            }
        }
        if let Some(row) = self.extent_row(extent) {
            self.book(row.book).shift(cell, row.cell, bytes as i64);
        }
    }

    fn extent_row(&self, extent: Extent) -> Option<Row> {
        match extent {
            Extent::Allocation(address, seq) => {
                let bound = self.allocations.get(&address).copied().filter(|row| row.seq == seq);
                bound.or_else(|| {
                    // A free of it is in flight: its bytes are still booked.
                    self.in_flight.values().find_map(|flight| match flight {
                        InFlight::Allocation { row, .. } if row.seq == seq => Some(*row),
                        _ => None,
                    })
                })
            }
            Extent::Backing(id) => self.backings.get(&id).map(|backing| backing.row),
            Extent::Block(pool, address) => self.pools[pool as usize].blocks.get(&address).copied(),
        }
    }

    /// The extent under a segment is going away: what cell its bytes were in.
    pub fn segment_lost(&mut self, key: SegmentKey, extent: Extent, bytes: u64) -> CellId {
        let pool = &mut self.pools[key.0 as usize];
        let cell = pool.cell();
        if let Some(segment) = pool.segments.get_mut(&key.1) {
            if segment.backed == segment.bytes {
                self.hungry_segments += 1;
            }
            segment.parts.retain(|(other, _)| *other != extent);
            segment.backed -= bytes;
            pool.backed_bytes -= bytes;
        }
        cell
    }

    /// A mapping is gone: segments that took the handle's bytes through it give them back.
    pub fn segments_unmapped(&mut self, address: u64, mapping: Mapping) {
        let extent = Extent::Backing(mapping.backing);
        let Some(parts) = self.carved.get(&extent) else { return };
        let end = address.saturating_add(mapping.bytes);
        let through: Vec<(SegmentKey, u64)> = parts
            .iter()
            .filter(|((pool, start), _)| {
                let segment = self.pools[*pool as usize].segments.get(start);
                segment.is_some_and(|segment| *start < end && start.saturating_add(segment.bytes) > address)
            })
            .copied()
            .collect();
        for (key, bytes) in through {
            let cell = self.segment_lost(key, extent, bytes);
            self.uncarve(extent, key, cell, bytes);
        }
    }

    /// New memory at [address, address+bytes): segments that wait for some take it.
    pub fn feed_segments(&mut self, address: u64, bytes: u64) {
        self.feed_overlapping(address, bytes, None);
    }

    pub fn feed_overlapping(&mut self, address: u64, bytes: u64, parent: Option<u32>) {
        let end = address.saturating_add(bytes);
        let mut hungry = Vec::new();
        for (index, pool) in self.pools.iter().enumerate() {
            if pool.parent != parent || pool.backed_bytes == pool.segment_bytes {
                continue;
            }
            for (&start, segment) in pool.segments.range(..end).rev() {
                if start.saturating_add(segment.bytes) <= address {
                    break;
                }
                if segment.backed < segment.bytes {
                    hungry.push((index as u32, start));
                }
            }
        }
        hungry.into_iter().for_each(|key| self.feed(key));
    }

    /// Takes what the memory under a segment can still give.
    fn feed(&mut self, key: SegmentKey) {
        let Some(segment) = self.pools[key.0 as usize].segments.get(&key.1) else { return };
        let (start, end) = (key.1, key.1.saturating_add(segment.bytes));
        for (extent, at, bytes) in self.extents_under(key.0, start, end) {
            let overlap = end.min(at.saturating_add(bytes)).saturating_sub(start.max(at));
            let Some(row) = self.extent_row(extent).filter(|row| !row.is(Row::UNBOOKED)) else { continue };
            let free = row.bytes.saturating_sub(self.carved_bytes(extent));
            let pool = &mut self.pools[key.0 as usize];
            let cell = pool.cell();
            let Some(segment) = pool.segments.get_mut(&key.1) else { return };
            let take = overlap.min(free).min(segment.bytes - segment.backed);
            if take == 0 {
                continue;
            }
            segment.backed += take;
            pool.backed_bytes += take;
            if segment.backed == segment.bytes {
                self.hungry_segments -= 1;
            }
            match segment.parts.iter_mut().find(|(other, _)| *other == extent) {
                Some((_, bytes)) => *bytes += take,
                None => segment.parts.push((extent, take)),
            }
            let carved = self.carved.entry(extent).or_default();
            match carved.iter_mut().find(|(other, _)| *other == key) {
                Some((_, bytes)) => *bytes += take,
                None => carved.push((key, take)),
            }
            let book = self.book(row.book);
            let live = book.live_at_peak(row.first_epoch);
            book.rename(row.cell, cell, take as i64, live);
        }
    }

    /// Booked memory that overlaps [start, end), as (extent, its first address there, its bytes there).
    fn extents_under(&self, pool: u32, start: u64, end: u64) -> Vec<(Extent, u64, u64)> {
        fn overlapping<V>(
            map: &BTreeMap<u64, V>,
            bytes: impl Fn(&V) -> u64,
            start: u64,
            end: u64,
        ) -> Vec<(u64, u64)> {
            let before = map.range(..start).next_back();
            let before = before.filter(|(at, value)| at.saturating_add(bytes(value)) > start);
            before.into_iter().chain(map.range(start..end)).map(|(&at, value)| (at, bytes(value))).collect()
        }
        if let Some(parent) = self.pools[pool as usize].parent {
            let outer = &self.pools[parent as usize];
            let mut found = overlapping(&outer.large_blocks, |&bytes| bytes, start, end);
            if let Some(row) = outer.blocks.get(&start).filter(|row| row.bytes < LARGE_BYTES) {
                found.push((start, row.bytes));
            }
            return found.into_iter().map(|(at, bytes)| (Extent::Block(parent, at), at, bytes)).collect();
        }
        let mut found: Vec<_> = overlapping(&self.large, |&bytes| bytes, start, end)
            .into_iter()
            .filter_map(|(at, bytes)| {
                Some((Extent::Allocation(at, self.allocations.get(&at)?.seq), at, bytes))
            })
            .collect();
        if let Some(row) = self.allocations.get(&start)
            && row.bytes < LARGE_BYTES
            && self.can_hold_segments(row)
        {
            found.push((Extent::Allocation(start, row.seq), start, row.bytes));
        }
        for (at, bytes) in overlapping(&self.mappings, |mapping| mapping.bytes, start, end) {
            let id = self.mappings[&at].backing;
            let device = |backing: &crate::vmm::Backing| {
                matches!(backing.row.kind, MemoryKind::Vmm | MemoryKind::Unknown)
            };
            if self.backings.get(&id).is_some_and(device) {
                found.push((Extent::Backing(id), at, bytes));
            }
        }
        found
    }
}
