//! Booking rules of pools.
//!
//! A **driver pool** reserves for itself. What it reserved is polled, so between polls it is at least
//! what is live in it: `reserved = max(last polled, highest live since)`.
//!
//! A **framework pool** takes segments out of memory that is booked already: of driver allocations, of
//! VMM handles through their mappings, or of a block of its parent pool. The bytes it took are `idle`
//! until a block covers them. Whose bytes a segment took is written on both sides: `Segment::parts` and
//! `Holdings::carved`.

use crate::Map;
use crate::book::{CellId, Class, IDLE, OPAQUE};
use crate::holdings::{Extent, Holdings, InFlight, LARGE_BYTES, MAX_BYTES, Row};
use crate::vmm::Mapping;
use gpumem_wire::{FreeState, MemoryKind, Phase, PoolOwner, Role, Stamp};
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
    generation: u8,
}

#[derive(Debug)]
pub(crate) struct Pool {
    /// The owner's number for it.
    pub id: u64,
    pub owner: PoolOwner,
    pub parent: Option<u32>,
    pub book: u8,
    /// Tag that names it.
    pub name: u32,
    /// Reports no blocks.
    pub opaque: bool,
    pub gone: bool,
    generation: u8,
    /// Driver pools: what is posted for it. Framework pools: what its owner last said.
    pub reserved: u64,
    /// Driver pools: bytes of live allocations. Framework pools: what its owner last said to be in use.
    pub used: u64,
    pub segments: BTreeMap<u64, Segment>,
    pub segment_bytes: u64,
    /// Segment bytes that are booked.
    pub backed_bytes: u64,
    pub blocks: Map<u64, Row>,
    pub block_bytes: u64,
    /// The owner's own total and ours, when it last asked for a comparison.
    pub check: Option<(u64, u64)>,
    /// Other pools take segments out of its blocks; `large_blocks` is kept.
    has_children: bool,
    large_blocks: BTreeMap<u64, u64>,
}

impl Pool {
    fn cell(&self) -> CellId {
        if self.opaque { OPAQUE } else { IDLE }
    }
    fn is_framework(&self) -> bool {
        self.owner == PoolOwner::Framework
    }
}

impl Holdings {
    /// The pool with this id; made on the spot if nobody created it (default pools, late attach).
    pub fn pool_index(&mut self, id: u64, owner: PoolOwner, book: u8) -> u32 {
        if let Some(&index) = self.pool_ids.get(&id) {
            return index;
        }
        let index = self.pools.len() as u32;
        self.pools.push(Pool {
            id,
            owner,
            parent: None,
            book,
            name: 0,
            opaque: owner == PoolOwner::Framework,
            gone: false,
            generation: self.generation,
            reserved: 0,
            used: 0,
            segments: BTreeMap::new(),
            segment_bytes: 0,
            backed_bytes: 0,
            blocks: Map::default(),
            block_bytes: 0,
            check: None,
            has_children: false,
            large_blocks: BTreeMap::new(),
        });
        self.pool_ids.insert(id, index);
        index
    }

    /// `PoolCreate`.
    pub fn pool_create(
        &mut self,
        id: u64,
        parent: u64,
        blocks: bool,
        owner: PoolOwner,
        stamp: &Stamp,
        book: u8,
    ) {
        let index = self.pool_index(id, owner, book);
        let parent =
            (parent != 0 && parent != id).then(|| self.pool_index(parent, PoolOwner::Framework, book));
        let generation = self.generation;
        let pool = &mut self.pools[index as usize];
        pool.owner = owner;
        pool.name = stamp.tag;
        pool.generation = generation;
        if pool.segments.is_empty() && pool.blocks.is_empty() {
            pool.opaque = owner == PoolOwner::Framework && !blocks;
            pool.parent = parent;
        }
        if let Some(parent) = parent {
            let parent = &mut self.pools[parent as usize];
            if !parent.has_children {
                parent.has_children = true;
                let large = parent.blocks.iter().filter(|(_, row)| row.bytes >= LARGE_BYTES);
                parent.large_blocks = large.map(|(&address, row)| (address, row.bytes)).collect();
            }
        }
    }

    /// `PoolState`.
    pub fn pool_state(&mut self, id: u64, reserved: u64, used: u64, book: u8) {
        if reserved > MAX_BYTES || used > MAX_BYTES {
            self.odd.impossible += 1;
            return;
        }
        let index = self.pool_index(id, PoolOwner::Driver, book);
        let generation = self.generation;
        let pool = &mut self.pools[index as usize];
        pool.generation = generation;
        if pool.is_framework() {
            (pool.reserved, pool.used) = (reserved, used);
        } else {
            self.set_reserved(index, reserved);
        }
    }

    /// `PoolCheck`: both totals are kept, to be shown.
    pub fn pool_check(&mut self, id: u64, theirs: u64) {
        match self.pool_ids.get(&id) {
            Some(&index) => {
                let pool = &mut self.pools[index as usize];
                pool.check = Some((theirs, if pool.is_framework() { pool.block_bytes } else { pool.used }));
            }
            None => self.odd.unknown_handles += 1,
        }
    }

    /// `PoolDestroy`.
    pub fn pool_destroy(&mut self, id: u64) {
        let Some(index) = self.pool_ids.remove(&id) else {
            self.odd.unknown_handles += 1;
            return;
        };
        self.end_pool(index);
    }

    fn end_pool(&mut self, index: u32) {
        self.pools[index as usize].gone = true;
        if self.pools[index as usize].is_framework() {
            self.drop_blocks(index, |_| true);
            let starts: Vec<u64> = self.pools[index as usize].segments.keys().copied().collect();
            starts.into_iter().for_each(|start| self.take_segment((index, start)));
        } else {
            self.set_reserved(index, 0); // deferred by the driver until the last allocation is gone
        }
    }

    /// Everything of pools on a device that was reset.
    pub fn drop_pools(&mut self, book: u8) {
        let on_device: Vec<u32> = (0..self.pools.len() as u32)
            .filter(|&index| self.pools[index as usize].book == book && !self.pools[index as usize].gone)
            .collect();
        for index in on_device {
            self.pool_ids.remove(&self.pools[index as usize].id);
            self.end_pool(index);
        }
    }

    fn set_reserved(&mut self, index: u32, polled: u64) {
        let pool = &mut self.pools[index as usize];
        let reserved = polled.max(pool.used);
        let delta = reserved as i64 - pool.reserved as i64;
        pool.reserved = reserved;
        let book = pool.book;
        self.book(book).post(IDLE, delta);
    }

    /// A stream-ordered allocation comes out of a driver pool.
    #[inline]
    pub fn pool_takes(&mut self, index: u32, cell: CellId, bytes: u64) {
        let pool = &mut self.pools[index as usize];
        pool.used += bytes;
        let (book, reserved, used) = (pool.book, pool.reserved, pool.used);
        if used > reserved {
            self.set_reserved(index, used);
        }
        self.book(book).shift(IDLE, cell, bytes as i64);
    }

    /// And goes back.
    #[inline]
    pub fn pool_gives(&mut self, index: u32, cell: CellId, bytes: u64) {
        let pool = &mut self.pools[index as usize];
        pool.used = pool.used.saturating_sub(bytes);
        let (book, gone) = (pool.book, pool.gone);
        self.book(book).shift(cell, IDLE, bytes as i64);
        if gone {
            self.set_reserved(index, 0);
        }
    }

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
    fn take_segment(&mut self, key: SegmentKey) {
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

    fn feed_overlapping(&mut self, address: u64, bytes: u64, parent: Option<u32>) {
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

    /// `BlockAlloc`.
    #[inline]
    pub fn block_alloc(
        &mut self,
        address: u64,
        bytes: u64,
        pool: u64,
        use_as: (Role, Phase),
        stamp: &Stamp,
        book: u8,
    ) {
        if bytes > MAX_BYTES {
            self.odd.impossible += 1;
            return;
        }
        let index = self.pool_index(pool, PoolOwner::Framework, book);
        let generation = self.generation;
        let pool = &mut self.pools[index as usize];
        if let Some(old) = pool.blocks.get_mut(&address) {
            if old.seq == stamp.seq && stamp.seq != 0 {
                old.generation = generation;
                return;
            }
            self.odd.replaced += 1;
            self.take_block(index, address);
        }
        let pool = &mut self.pools[index as usize];
        if pool.opaque {
            pool.opaque = false;
            let (book, bytes) = (pool.book, pool.backed_bytes as i64);
            self.book(book).rename(OPAQUE, IDLE, bytes, false);
        }
        let pool = &mut self.pools[index as usize];
        let booked = if pool.backed_bytes == pool.segment_bytes {
            pool.segment_bytes > 0
        } else {
            let under = pool.segments.range(..=address).next_back();
            under.is_some_and(|(start, segment)| {
                address - start < segment.bytes && segment.backed == segment.bytes
            })
        };
        let has_children = pool.has_children;
        if has_children && bytes >= LARGE_BYTES {
            pool.large_blocks.insert(address, bytes);
        }
        pool.block_bytes += bytes;
        let book = pool.book;
        let cell = self.cell_of(Class::Block, stamp, use_as);
        let row = Row {
            seq: stamp.seq,
            bytes,
            cell,
            first_epoch: self.books[usize::from(book)].next_epoch(),
            owner: index,
            kind: MemoryKind::Unknown,
            book,
            generation,
            flags: if booked { 0 } else { Row::UNBOOKED },
        };
        self.pools[index as usize].blocks.insert(address, row);
        if booked {
            self.book(book).shift(IDLE, cell, bytes as i64);
            if has_children && self.hungry_segments > 0 {
                self.feed_overlapping(address, bytes, Some(index));
            }
        } else {
            self.beside(book).unbooked_blocks += bytes as i64;
        }
    }

    /// `BlockFree`.
    #[inline]
    pub fn block_free(&mut self, address: u64, pool: u64, state: FreeState) {
        let Some(&index) = self.pool_ids.get(&pool) else {
            self.odd.unknown_frees += 1;
            return;
        };
        if state == FreeState::Pending {
            match self.pools[index as usize].blocks.get_mut(&address) {
                Some(row) if !row.is(Row::PENDING) => {
                    row.flags |= Row::PENDING;
                    let (book, bytes) = (row.book, row.bytes as i64);
                    self.beside(book).pending_blocks += bytes;
                }
                Some(_) => {}
                None => self.odd.unknown_frees += 1,
            }
        } else if !self.take_block(index, address) {
            self.odd.unknown_frees += 1;
        }
    }

    #[inline]
    fn take_block(&mut self, index: u32, address: u64) -> bool {
        let pool = &mut self.pools[index as usize];
        let Some(row) = pool.blocks.remove(&address) else { return false };
        pool.block_bytes -= row.bytes;
        if pool.has_children {
            pool.large_blocks.remove(&address);
        }
        if row.is(Row::PENDING) {
            self.beside(row.book).pending_blocks -= row.bytes as i64;
        }
        if row.is(Row::UNBOOKED) {
            self.beside(row.book).unbooked_blocks -= row.bytes as i64;
        } else {
            self.uncarve_all(Extent::Block(index, address), &row);
            self.book(row.book).shift(row.cell, IDLE, row.bytes as i64);
        }
        true
    }

    fn drop_blocks(&mut self, index: u32, goes: impl Fn(&Row) -> bool) {
        let blocks = &self.pools[index as usize].blocks;
        let mut gone: Vec<(u64, u64)> =
            blocks.iter().filter(|(_, row)| goes(row)).map(|(&address, row)| (row.seq, address)).collect();
        gone.sort_unstable();
        for (_, address) in gone {
            self.take_block(index, address);
        }
    }

    /// After a resync: blocks, then segments, then pools that were not said again.
    pub fn sweep_pools(&mut self) {
        let generation = self.generation;
        for index in 0..self.pools.len() as u32 {
            self.drop_blocks(index, |row| row.generation != generation);
            let segments = &self.pools[index as usize].segments;
            let gone: Vec<u64> = segments
                .iter()
                .filter(|(_, s)| s.generation != generation)
                .map(|(&start, _)| start)
                .collect();
            gone.into_iter().for_each(|start| self.take_segment((index, start)));
            let pool = &self.pools[index as usize];
            if !pool.is_framework() && pool.generation != generation && !pool.gone {
                self.set_reserved(index, 0);
            }
        }
    }
}
