//! Booking rules of the segments of framework pools. A segment takes its bytes from an *extent*, a piece of booked memory: a
//! driver allocation, a VMM handle through its mappings, or a block of the parent pool. Both sides record the bytes that a
//! segment took: `Segment::parts` and `Holdings::carved`.

use crate::book::cells::CellId;
use crate::rows::pool::{Carved, Pool, Segment, SegmentKey};
use crate::rows::row::{Backing, Extent, LARGE_BYTES, MAX_BYTES, Mapping, Row};
use crate::rules::holdings::Holdings;
use gpumem_model::oom::Oom;
use gpumem_wire::{MemoryKind, PoolOwner, Stamp};
use std::collections::{BTreeMap, BTreeSet};

impl Holdings {
    /// Books a `SegmentAdd`, or an `AllocEnd` for a framework pool.
    pub fn add_segment(&mut self, address: u64, bytes: u64, pool: u64, stamp: &Stamp, book: u8) {
        if bytes > MAX_BYTES || bytes == 0 {
            self.anomalies.impossible += 1;
            return;
        }
        let index = self.pool_index(pool, PoolOwner::Framework, book);
        let generation = self.generation;
        let pool = &mut self.pools[index as usize];
        pool.generation = generation;
        if let Some(old) = pool.segments.get_mut(&address) {
            let again = old.seq == stamp.seq && stamp.seq != 0;
            if again && old.bytes == bytes {
                old.generation = generation;
                return;
            }
            // No anomaly if the segment is restated with fewer bytes (a part was removed), or the free of its allocation is in
            // flight.
            let seq = old.seq;
            self.anomalies.replaced += u64::from(!again && self.in_flight.row_mut(seq).is_none());
            self.take_segment((index, address));
        }
        self.insert_segment((index, address), bytes, stamp.seq, true);
    }

    /// Inserts a segment. `new`: it is not a remainder of a segment that the amounts at the peak already include.
    fn insert_segment(&mut self, key: SegmentKey, bytes: u64, seq: u64, new: bool) {
        if self.pools[key.0 as usize].segments.contains_key(&key.1) {
            self.take_segment(key); // the remainder of an overlapping segment, replaced
        }
        let segment = Segment { bytes, backed: 0, parts: Vec::new(), seq, generation: self.generation };
        let pool = &mut self.pools[key.0 as usize];
        pool.segments.insert(key.1, segment);
        pool.segment_bytes = pool.segment_bytes.wrapping_add(bytes);
        if pool.parent.is_none() {
            self.roles[usize::from(pool.book)].iterations.add_reserved(bytes as i64);
        }
        self.unbacked_segments += 1;
        self.back_segment(key, 0, u64::MAX, new);
    }

    /// Books a `SegmentRemove` of a range, which may contain several segments or a part of one. 0 bytes: the segment at
    /// `address`.
    pub fn remove_segment(&mut self, address: u64, bytes: u64, pool: u64) {
        let Some(index) = self.pool_of(pool) else {
            self.anomalies.unknown_handles += 1;
            return;
        };
        let segments = &self.pools[index as usize].segments;
        let whole = segments.get(&address).map_or(0, |segment| segment.bytes);
        let end = address.saturating_add(if bytes == 0 { whole } else { bytes });
        let mut cut = Vec::new();
        for (&start, segment) in segments.range(..end).rev() {
            let segment_end = start.saturating_add(segment.bytes);
            if segment_end <= address {
                break;
            }
            cut.push((start, segment_end, segment.seq));
        }
        self.anomalies.unknown_handles += u64::from(cut.is_empty());
        for (start, segment_end, seq) in cut.into_iter().rev() {
            self.take_segment((index, start));
            if start < address {
                self.insert_segment((index, start), address - start, seq, false);
            }
            if segment_end > end {
                self.insert_segment((index, end), segment_end - end, seq, false);
            }
        }
        if self.pools[index as usize].unbooked_blocks > 0 {
            self.book_blocks(index); // blocks in the remainders, which may be wholly booked
        }
    }

    /// Removes the segment that is the allocation at `address` with birth number `seq`.
    pub fn take_segment_of(&mut self, address: u64, seq: u64) {
        let born = |pool: &Pool| pool.segments.get(&address).is_some_and(|s| s.seq == seq);
        if let Some(index) = self.pools.iter().position(born) {
            self.take_segment((index as u32, address));
        }
    }

    /// Marks the segment that is this allocation as restated, because the allocation was restated while its free is in flight.
    pub fn mark_segment_restated(&mut self, address: u64, seq: u64) {
        let generation = self.generation;
        let segments = self.pools.iter_mut().filter_map(|pool| pool.segments.get_mut(&address));
        segments.filter(|segment| segment.seq == seq).for_each(|segment| segment.generation = generation);
    }

    /// Removes segments with all blocks in them, and the segments of nested pools in these blocks.
    pub fn drop_segments(&mut self, segments: Vec<SegmentKey>) {
        let mut by_pool: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
        for (pool, start) in segments {
            by_pool.entry(pool).or_default().insert(start);
        }
        while let Some((index, starts)) = by_pool.pop_first() {
            let pool = &self.pools[index as usize];
            let mut inside: Vec<(u64, u64)> = Vec::new();
            for (address, row) in pool.blocks.iter() {
                let under = pool.segments.range(..=address).next_back();
                let under = under.filter(|(start, segment)| address - **start < segment.bytes);
                if under.is_some_and(|(start, _)| starts.contains(start)) {
                    inside.push((row.seq, address));
                }
            }
            inside.sort_unstable();
            for (_, address) in inside {
                if let Some(carved) = self.carved.get(&Extent::Block(index, address)) {
                    for &((inner, start), _) in &carved.parts {
                        by_pool.entry(inner).or_default().insert(start);
                    }
                }
                self.take_block(index, address, false);
            }
            starts.into_iter().for_each(|start| self.take_segment((index, start)));
        }
    }

    /// Removes a segment, and shifts its bytes back to the cells of its extents.
    pub fn take_segment(&mut self, key: SegmentKey) {
        let pool = &mut self.pools[key.0 as usize];
        let cell = pool.cell();
        let Some(segment) = pool.segments.remove(&key.1) else { return };
        pool.segment_bytes = pool.segment_bytes.wrapping_sub(segment.bytes);
        if pool.parent.is_none() {
            self.roles[usize::from(pool.book)].iterations.add_reserved((segment.bytes as i64).wrapping_neg());
        }
        pool.backed_bytes = pool.backed_bytes.wrapping_sub(segment.backed);
        if segment.backed < segment.bytes {
            self.unbacked_segments = self.unbacked_segments.saturating_sub(1);
        }
        for (extent, bytes) in segment.parts {
            self.uncarve(extent, key, cell, bytes);
        }
    }

    /// Shifts the bytes that a segment took from an extent (allocation, VMM handle or outer block) back to the extent's own cell.
    fn uncarve(&mut self, extent: Extent, key: SegmentKey, cell: CellId, bytes: u64) {
        if let Some(row) = self.row_mut(extent).copied() {
            if let Some(carved) = self.carved.get_mut(&extent) {
                carved.save_peak(&self.books[usize::from(row.book)]);
                carved.parts.retain(|(other, _)| *other != key);
            }
            let book = self.book(row.book);
            book.shift(cell, row.cell, bytes as i64);
            book.count_returned(bytes as i64);
            let own = row.bytes.saturating_sub(self.carved_bytes(extent));
            self.note_row(extent, &row, own.saturating_sub(bytes), own);
        }
    }

    /// Removes from a segment the bytes that it took from an extent. Returns the cell of these bytes.
    pub fn remove_part(&mut self, key: SegmentKey, extent: Extent, bytes: u64) -> CellId {
        let pool = &mut self.pools[key.0 as usize];
        let cell = pool.cell();
        if let Some(segment) = pool.segments.get_mut(&key.1) {
            if segment.backed == segment.bytes {
                self.unbacked_segments += 1;
            }
            if let Some(at) = segment.parts.iter().position(|(other, _)| *other == extent) {
                segment.parts.swap_remove(at);
            }
            segment.backed -= bytes;
            pool.backed_bytes = pool.backed_bytes.wrapping_sub(bytes);
        }
        cell
    }

    /// Handles the removal of a mapping: segments return the bytes of the handle that they took through it.
    pub fn segments_unmapped(&mut self, address: u64, mapping: Mapping) {
        let extent = Extent::Backing(mapping.backing);
        let Some(carved) = self.carved.get(&extent) else { return };
        let end = address.saturating_add(mapping.bytes);
        let through: Vec<(SegmentKey, u64)> = carved
            .parts
            .iter()
            .filter(|((pool, start), _)| {
                let segment = self.pools[*pool as usize].segments.get(start);
                segment.is_some_and(|segment| *start < end && start.saturating_add(segment.bytes) > address)
            })
            .copied()
            .collect();
        for &(key, bytes) in &through {
            let cell = self.remove_part(key, extent, bytes);
            self.uncarve(extent, key, cell, bytes);
        }
        // A sleeping pool unmaps the memory under its segments and blocks, but keeps both.
        for ((pool, _), _) in through {
            let pool_of = &self.pools[pool as usize];
            if pool_of.block_bytes > pool_of.backed_bytes {
                self.unbook_blocks(pool);
            }
        }
    }

    /// Assigns new memory at [address, address + bytes) to segments that are not wholly booked. `parent`: pool of the block that
    /// is the memory.
    pub fn back_segments(&mut self, address: u64, bytes: u64, parent: Option<u32>) {
        let end = address.saturating_add(bytes);
        let mut unbacked = Vec::new();
        for (index, pool) in self.pools.iter().enumerate() {
            if pool.parent != parent || pool.backed_bytes == pool.segment_bytes {
                continue;
            }
            for (&start, segment) in pool.segments.range(..end).rev() {
                if start.saturating_add(segment.bytes) <= address {
                    break;
                }
                if segment.backed < segment.bytes {
                    unbacked.push((index as u32, start));
                }
            }
        }
        for key in unbacked {
            self.back_segment(key, address, end, true);
            let pool = &self.pools[key.0 as usize];
            if pool.unbooked_blocks > 0 && pool.segments.get(&key.1).is_some_and(|s| s.backed == s.bytes) {
                self.book_blocks(key.0);
            }
        }
    }

    /// Lets a segment take the bytes of the memory under it within [from, to) that no segment has taken. `new`: as in
    /// `insert_segment`.
    pub fn back_segment(&mut self, key: SegmentKey, from: u64, to: u64, new: bool) {
        let Some(segment) = self.pools[key.0 as usize].segments.get(&key.1) else { return };
        let (start, end) = (key.1.max(from), key.1.saturating_add(segment.bytes).min(to));
        for (extent, at, bytes) in self.extents_under(key.0, start, end) {
            let overlap = end.min(at.saturating_add(bytes)).saturating_sub(start.max(at));
            let row = self.row_mut(extent).copied().filter(|row| !row.is(Row::UNBOOKED));
            let Some(row) = row.filter(|row| !self.is_in_doubt(row)) else { continue };
            let free = row.bytes.saturating_sub(self.carved_bytes(extent));
            let carved =
                self.carved.get(&extent).and_then(|c| c.parts.iter().find(|(other, _)| *other == key));
            let overlap = overlap.saturating_sub(carved.map_or(0, |(_, bytes)| *bytes)); // without bytes that it has taken before
            let peak_cell = self.cell_at_peak(&row);
            let pool = &mut self.pools[key.0 as usize];
            let cell = pool.cell();
            let Some(segment) = pool.segments.get_mut(&key.1) else { return };
            let take = overlap.min(free).min(segment.bytes - segment.backed);
            if take == 0 {
                continue;
            }
            segment.backed += take;
            pool.backed_bytes = pool.backed_bytes.wrapping_add(take);
            if segment.backed == segment.bytes {
                self.unbacked_segments = self.unbacked_segments.saturating_sub(1);
            }
            let book = &self.books[usize::from(row.book)];
            let untouched = Carved { parts: Vec::new(), max_bytes: 0, at_peak: 0, epoch: book.peak.epoch };
            let carved = self.carved.entry(extent).or_insert(untouched);
            carved.save_peak(book);
            let had = carved.returned_bytes();
            match carved.parts.iter_mut().find(|(other, _)| *other == key) {
                Some((_, bytes)) => {
                    *bytes += take;
                    let mut parts = segment.parts.iter_mut();
                    parts.find(|(other, _)| *other == extent).into_iter().for_each(|(_, sum)| *sum += take);
                }
                None => {
                    carved.parts.push((key, take));
                    segment.parts.push((extent, take));
                }
            }
            carved.max_bytes = carved.max_bytes.max(carved.total());
            let returned = carved.returned_bytes() - had;
            // At the peak, the segment takes only bytes that no segment had taken then.
            let live = new && book.live_at_peak(row.first_epoch);
            let at_peak = if live { take.min(row.bytes.saturating_sub(carved.at_peak)) } else { 0 };
            carved.at_peak += at_peak;
            let book = self.book(row.book);
            book.shift(row.cell, cell, take as i64);
            book.count_returned(returned);
            book.rename_at_peak(peak_cell, cell, at_peak as i64);
            self.note_row(extent, &row, free, free - take);
            if new {
                let book = &mut self.books[usize::from(row.book)];
                book.rename_past(row.first_epoch, (row.cell, cell), take as i64, &self.cells);
            }
        }
    }

    /// Returns the extents (allocations, VMM handles, outer blocks) that overlap [start, end): extent, its first address, its
    /// bytes.
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
            if let Some(row) = outer.blocks.get(start).filter(|row| row.bytes < LARGE_BYTES) {
                found.push((start, row.bytes));
            }
            return found.into_iter().map(|(at, bytes)| (Extent::Block(parent, at), at, bytes)).collect();
        }
        let mut found: Vec<_> = overlapping(&self.large, |&bytes| bytes, start, end)
            .into_iter()
            .filter_map(|(at, bytes)| {
                Some((Extent::Allocation(at, self.allocations.get(at)?.seq), at, bytes))
            })
            .collect();
        if let Some(row) = self.allocations.get(start)
            && row.bytes < LARGE_BYTES
            && self.can_hold_segments(row)
        {
            found.push((Extent::Allocation(start, row.seq), start, row.bytes));
        }
        for (at, bytes) in overlapping(&self.mappings, |mapping| mapping.bytes, start, end) {
            let id = self.mappings[&at].backing;
            let device =
                |backing: &Backing| matches!(backing.row.kind, MemoryKind::Vmm | MemoryKind::Unknown);
            if self.backings.get(&id).is_some_and(device) {
                found.push((Extent::Backing(id), at, bytes));
            }
        }
        found
    }

    /// Adds the idle bytes of the framework pools on a device to an OOM record, with the number of pieces and the largest. A
    /// piece lies in one segment. Pools that report no blocks are left out.
    pub fn note_idle(&self, book: u8, oom: &mut Oom) {
        let reports = |pool: &&Pool| {
            pool.book == book
                && pool.owner == PoolOwner::Framework
                && !pool.opaque
                && !pool.segments.is_empty()
        };
        let (mut pieces, mut is_known) = (Vec::<u64>::new(), false);
        for pool in self.pools.iter().filter(reports) {
            is_known = true;
            let mut blocks: Vec<(u64, u64)> =
                pool.blocks.iter().map(|(address, row)| (address, row.bytes)).collect();
            blocks.sort_unstable();
            let mut blocks = blocks.into_iter().peekable();
            for (&start, segment) in &pool.segments {
                oom.is_expandable |= segment.is_mapped();
                let end = start.saturating_add(segment.bytes);
                let mut at = start;
                while let Some(&(address, bytes)) = blocks.peek()
                    && address < end
                {
                    pieces.push(address.saturating_sub(at));
                    at = at.max(address.saturating_add(bytes));
                    blocks.next();
                }
                pieces.push(end.saturating_sub(at));
            }
        }
        if is_known {
            pieces.retain(|bytes| *bytes > 0);
            oom.idle_bytes = Some(pieces.iter().fold(0, |sum, bytes| u64::saturating_add(sum, *bytes)));
            oom.idle_pieces = Some(pieces.len() as u64);
            oom.largest_idle_bytes = Some(pieces.iter().copied().max().unwrap_or(0));
        }
    }
}
