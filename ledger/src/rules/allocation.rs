//! Booking rules for allocations with an address, and for events that remove many allocations at once.

use crate::in_order;
use crate::rows::in_flight::InFlight;
use crate::rows::row::{Extent, LARGE_BYTES, MAX_BYTES, NO_ADDRESS, Row, is_charged};
use crate::rules::holdings::Holdings;
use gpumem_model::run::Class;
use gpumem_wire::{DestroyScope, Flags, MemoryKind, Phase, PoolOwner, Role, Stamp};

/// CUDA_ERROR_DEINITIALIZED: the process exits, and the driver has already freed all memory. The free counts as successful.
pub(crate) const DEINITIALIZED: u16 = 4;

impl Holdings {
    /// Books an `AllocEnd`, or an import with an address.
    pub fn allocate(
        &mut self,
        address: u64,
        bytes: u64,
        pool: u64,
        kind: MemoryKind,
        stamp: &Stamp,
        book: u8,
    ) {
        if bytes > MAX_BYTES || address == 0 || address == NO_ADDRESS {
            self.anomalies.impossible += 1;
            return;
        }
        if stamp.flags.has(Flags::RESTATED) && self.mark_in_flight_restated(stamp.seq) {
            self.mark_segment_restated(address, stamp.seq);
            return;
        }
        if let Some(old) = self.allocations.get_mut(address) {
            if old.seq == stamp.seq && stamp.seq != 0 {
                // A resync restates the row, or the ring buffer repeats it after a resync. Its segment is restated with it.
                old.generation = self.generation;
                if old.is(Row::SEGMENT) {
                    self.add_segment(address, bytes, pool, stamp, book);
                }
                return;
            }
            self.anomalies.replaced += 1; // its free was lost, or the report is wrong
            self.unbind(address).into_iter().for_each(|row| self.unbook_row(address, row));
        }
        let mut row = Row {
            seq: stamp.seq,
            bytes,
            first_epoch: self.book(book).next_epoch(),
            owner: stamp.context,
            kind,
            book,
            generation: self.generation,
            ..Row::default()
        };
        let nothing = (Role::Unknown, Phase::Unknown);
        if stamp.flags.has(Flags::CAPTURED) {
            row.flags |= Row::UNBOOKED;
            row.cell = self.cells.cell_in(Class::Block, stamp, nothing, 0);
        } else if !is_charged(kind) {
            row.cell = self.cells.cell_in(Class::Direct, stamp, nothing, 0);
            self.count_side_memory(&row, bytes as i64);
        } else if kind == MemoryKind::StreamOrdered {
            row.cell = self.cells.cell_in(Class::Block, stamp, nothing, 0);
            row.owner = self.pool_index(pool, PoolOwner::Driver, book);
            row.book = self.pools[row.owner as usize].book;
            row.first_epoch = self.book(row.book).next_epoch();
            self.allocate_from_pool(row.owner, row.cell, bytes);
            self.note_row(Extent::Allocation(address, row.seq), &row, 0, bytes);
        } else {
            let is_scratch = stamp.module != 0 && self.scratch_libraries.contains(&stamp.module);
            let role = if is_scratch { Role::Workspace } else { Role::Unknown };
            row.cell = self.cells.cell_in(Class::Direct, stamp, (role, Phase::Unknown), 0);
            let cell = row.cell;
            let book = self.book(book);
            book.post(cell, bytes as i64);
            book.round(bytes, true);
            self.note_row(Extent::Allocation(address, row.seq), &row, 0, bytes);
        }
        // Memory outside the book can be a segment too; then its blocks are not booked either.
        let is_segment = pool != 0 && kind != MemoryKind::StreamOrdered && bytes > 0;
        if is_segment {
            row.flags |= Row::SEGMENT;
        }
        self.allocations.insert(address, row);
        let can_hold = self.can_hold_segments(&row);
        if can_hold && bytes >= LARGE_BYTES {
            self.large.insert(address, bytes);
        }
        if is_segment {
            self.add_segment(address, bytes, pool, stamp, book);
        } else if can_hold && self.unbacked_segments > 0 {
            self.back_segments(address, bytes, None);
        }
    }

    pub fn can_hold_segments(&self, row: &Row) -> bool {
        matches!(row.kind, MemoryKind::Device | MemoryKind::Pitched | MemoryKind::Array | MemoryKind::Unknown)
            && !row.is(Row::UNBOOKED)
    }

    /// Marks the allocation with birth number `seq` as restated if its free is in flight; returns whether it is. A restated
    /// allocation is live, so if the end of its free is lost, the free has failed.
    fn mark_in_flight_restated(&mut self, seq: u64) -> bool {
        let generation = self.generation;
        self.in_flight.row_mut(seq).map(|row| row.generation = generation).is_some()
    }

    /// Whether the allocation with birth number `seq` (number of its record) is live, or its free has begun and not ended.
    pub fn is_born(&mut self, address: u64, seq: u64) -> bool {
        let is_bound = self.allocations.get(address).is_some_and(|row| row.seq == seq);
        is_bound || self.in_flight.row_mut(seq).is_some()
    }

    fn unbind(&mut self, address: u64) -> Option<Row> {
        let row = self.allocations.remove(address)?;
        if row.bytes >= LARGE_BYTES {
            self.large.remove(&address);
        }
        Some(row)
    }

    /// Returns book and bytes of the live allocation at an address.
    pub fn found_at(&self, address: u64) -> Option<(u8, u64)> {
        self.allocations.get(address).map(|row| (row.book, row.bytes))
    }

    /// Books a `FreeBegin`: the driver may give the address to another thread from now on.
    pub fn free_begin(&mut self, address: u64, seq: u64) {
        let flight = match self.unbind(address) {
            Some(row) => {
                self.count_in_flight(&row, true);
                InFlight::Allocation { address, row }
            }
            None => {
                self.anomalies.unknown_frees += u64::from(address != 0); // freeing NULL succeeds and does nothing
                InFlight::Nothing
            }
        };
        self.in_flight.begin(seq, flight);
    }

    /// Counts the bytes of a row as possibly freed when the call is `entered`, and no longer when it returns. Only booked bytes
    /// count; memory freed into a driver pool stays in that pool.
    #[inline]
    pub fn count_in_flight(&mut self, row: &Row, entered: bool) {
        if row.is(Row::UNBOOKED) || row.kind == MemoryKind::StreamOrdered || !is_charged(row.kind) {
            return;
        }
        let delta = if entered { row.bytes as i64 } else { -(row.bytes as i64) };
        let bytes = &mut self.in_flight_bytes[usize::from(row.book)];
        *bytes = bytes.wrapping_add(delta);
        self.book(row.book); // marks the book as touched, because a pending sample may be torn
    }

    /// Books the end of the call whose begin has the record number `begin_seq`.
    pub fn free_end(&mut self, begin_seq: u64, result: u16) {
        let failed = result != 0 && result != DEINITIALIZED;
        match self.in_flight.end(begin_seq) {
            Some(InFlight::Allocation { address, mut row }) => {
                self.count_in_flight(&row, false);
                row.generation = self.generation; // after a failed free, a resync in progress must not remove it
                if failed && self.allocations.get(address).is_none() {
                    self.allocations.insert(address, row);
                    if row.bytes >= LARGE_BYTES && self.can_hold_segments(&row) {
                        self.large.insert(address, row.bytes);
                    }
                    if self.unbacked_segments > 0 && self.can_hold_segments(&row) {
                        self.back_segments(address, row.bytes, None);
                    }
                } else {
                    self.anomalies.replaced += u64::from(failed);
                    self.unbook_row(address, row);
                }
            }
            Some(InFlight::Release { handle, backing }) => self.release_end(handle, backing, failed),
            Some(InFlight::Unmap { mappings }) => self.unmap_end(mappings, failed),
            Some(InFlight::Nothing) => {}
            None => self.anomalies.unknown_ends += u64::from(begin_seq > self.forgiven_until),
        }
    }

    /// Subtracts the bytes of a removed allocation from the cell, pool or counter in which they are booked.
    pub fn unbook_row(&mut self, address: u64, row: Row) {
        let bytes = row.bytes as i64;
        if row.is(Row::SEGMENT) {
            self.take_segment_of(address, row.seq);
        }
        if row.is(Row::UNBOOKED) {
            return;
        }
        if self.count_side_memory(&row, -bytes) {
            return;
        }
        self.uncarve_all(Extent::Allocation(address, row.seq), &row);
        self.note_row(Extent::Allocation(address, row.seq), &row, row.bytes, 0);
        if row.kind == MemoryKind::StreamOrdered {
            self.free_to_pool(row.owner, row.cell, row.bytes);
        } else {
            let book = self.book(row.book);
            book.post(row.cell, -bytes);
            book.round(row.bytes, false);
        }
    }

    /// Books a `ContextDestroy`: removes all memory of the context or device, of which no frees are reported.
    pub fn destroy_context(&mut self, context: u32, scope: DestroyScope, book: u8) {
        let whole_device = scope == DestroyScope::Device;
        let is_selected = |row: &Row| {
            row.book == book
                && (whole_device || (row.owner == context && row.kind != MemoryKind::StreamOrdered))
        };
        self.drop_in_flight(is_selected);
        let rows = self.allocations.iter().filter(|(_, row)| is_selected(row) && !self.is_in_doubt(row));
        let carved = rows.filter_map(|(address, row)| self.carved.get(&Extent::Allocation(address, row.seq)));
        let segments = in_order(carved.flat_map(|carved| carved.parts.iter().map(|(key, _)| *key)));
        self.drop_segments(segments);
        self.drop_allocations(is_selected);
        if whole_device {
            self.drop_backings(|backing| backing.row.book == book);
            self.drop_pools(book);
        }
    }

    /// Ends the frees in flight of the selected rows: even if such a call fails, the memory is gone.
    fn drop_in_flight(&mut self, is_selected: impl Fn(&Row) -> bool) {
        let gone = self
            .in_flight
            .begun(|flight| matches!(flight, InFlight::Allocation { row, .. } if is_selected(row)));
        for seq in gone {
            self.free_end(seq, 0);
            self.in_flight.begin(seq, InFlight::Nothing);
        }
    }

    pub fn drop_allocations(&mut self, is_selected: impl Fn(&Row) -> bool) {
        let gone = self.allocations.iter().filter(|(_, row)| is_selected(row));
        for (_, address) in in_order(gone.map(|(address, row)| (row.seq, address))) {
            if let Some(row) = self.unbind(address) {
                self.unbook_row(address, row);
            }
        }
    }

    /// Ends frees that began before a loss of records and may have ended in it. If the row was restated, the free has failed.
    pub fn end_doubtful_frees(&mut self) {
        let generation = self.generation;
        let is_restated = |flight: &InFlight| match flight {
            InFlight::Allocation { row, .. } => row.generation == generation,
            InFlight::Unmap { mappings } => {
                mappings.iter().any(|(_, mapping)| mapping.generation == generation)
            }
            // A resync restates reference counts as they are now, so a release in flight has nothing to undo.
            InFlight::Release { .. } | InFlight::Nothing => false,
        };
        let failed = self.in_flight.begun(is_restated);
        for seq in self.in_flight.begun(|_| true) {
            if self.doubtful_before.is_some_and(|doubt| seq <= doubt) {
                self.free_end(seq, u16::from(failed.binary_search(&seq).is_ok()));
            }
        }
        self.in_flight.forget_births();
        self.doubtful_before = None;
    }
}
