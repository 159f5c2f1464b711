//! Booking rules of virtual memory management (VMM). Physical memory behind a handle is freed when it has neither references nor
//! mappings, in any order (reference: cuMemRelease, cuMemUnmap).
//!
//! The driver may reuse a handle's value as soon as its last release was entered, so the memory (backing) has an id of its own.

use crate::in_order;
use crate::rows::in_flight::InFlight;
use crate::rows::row::{Backing, BackingId, Extent, MAX_BYTES, Mapping, Row};
use crate::rules::holdings::Holdings;
use gpumem_model::run::Class;
use gpumem_wire::{Flags, MemoryKind, Stamp};

impl Holdings {
    /// Books a `VmmCreate`, or an import of a shareable handle.
    pub fn vmm_create(
        &mut self,
        handle: u64,
        bytes: u64,
        references: u16,
        kind: MemoryKind,
        stamp: &Stamp,
        book: u8,
    ) {
        if bytes > MAX_BYTES {
            self.anomalies.impossible += 1;
            return;
        }
        let generation = self.generation;
        if let Some(old) = self.backings.get_mut(&stamp.seq) {
            old.row.generation = generation;
            old.references = references.into();
            old.handle = handle;
            self.handles.insert(handle, stamp.seq);
            self.update_leaving(stamp.seq);
            return;
        }
        if !stamp.flags.has(Flags::RESTATED) && self.handles.contains_key(&handle) {
            self.anomalies.replaced += 1;
            self.drop_backings(|backing| backing.handle == handle && backing.references > 0);
        }
        let cell = self.cells.cell_in(Class::Direct, stamp, Default::default(), 0);
        let row = Row {
            seq: stamp.seq,
            bytes,
            cell,
            first_epoch: self.book(book).next_epoch(),
            kind,
            book,
            generation,
            ..Row::default()
        };
        if !self.count_side_memory(&row, bytes as i64) {
            self.book(book).post(cell, bytes as i64);
            self.note_row(Extent::Backing(stamp.seq), &row, 0, bytes);
        }
        let references = references.into();
        self.backings.insert(stamp.seq, Backing { row, handle, references, ..Backing::default() });
        self.handles.insert(handle, stamp.seq);
    }

    /// Whether the backing created by the record with this number still exists.
    pub fn has_backing(&self, seq: u64) -> bool {
        self.backings.contains_key(&seq)
    }

    /// Books a `VmmMap`. An unknown handle is a multicast object, or its record was lost; nothing is booked then.
    pub fn vmm_map(&mut self, address: u64, bytes: u64, handle: u64, stamp: &Stamp) {
        let Some(&id) = self.handles.get(&handle) else {
            self.anomalies.unknown_handles += 1;
            return;
        };
        if stamp.flags.has(Flags::RESTATED) && self.mark_unmap_restated(address, stamp.seq) {
            return;
        }
        if let Some(old) = self.mappings.get_mut(&address) {
            if old.backing == id && old.bytes == bytes {
                (old.generation, old.seq) = (self.generation, stamp.seq);
                return;
            }
            self.anomalies.replaced += 1;
            self.take_mapping(address);
        }
        let (seq, generation) = (stamp.seq, self.generation);
        self.mappings.insert(address, Mapping { seq, bytes, backing: id, generation });
        if let Some(backing) = self.backings.get_mut(&id) {
            backing.mappings += 1;
            self.update_leaving(id);
        }
        self.size_import(id, bytes);
        if self.unbacked_segments > 0 {
            self.back_segments(address, bytes, None);
        }
    }

    /// Sets the size of an imported handle to that of its largest mapping, because the import call has no size.
    fn size_import(&mut self, id: BackingId, bytes: u64) {
        let Some(backing) = self.backings.get_mut(&id) else { return };
        if backing.row.kind != MemoryKind::Imported || bytes <= backing.row.bytes || bytes > MAX_BYTES {
            return;
        }
        let more = bytes - backing.row.bytes;
        backing.row.bytes = bytes;
        let row = backing.row;
        self.count_side_memory(&row, more as i64);
    }

    /// Marks a mapping as restated if its unmap is in flight; returns whether it is. A restated mapping exists, so if the end of
    /// its unmap is lost, the unmap has failed.
    fn mark_unmap_restated(&mut self, address: u64, seq: u64) -> bool {
        let generation = self.generation;
        self.in_flight.mapping_mut(address, seq).map(|mapping| mapping.generation = generation).is_some()
    }

    /// Books a `VmmRetain`: one more reference to the memory mapped at `address`.
    pub fn vmm_retain(&mut self, handle: u64, address: u64) {
        let found = self.mappings.range(..=address).next_back();
        match found.filter(|(start, mapping)| address - **start < mapping.bytes).map(|(_, m)| m.backing) {
            Some(id) => {
                if let Some(backing) = self.backings.get_mut(&id) {
                    backing.references += 1;
                    backing.handle = handle;
                }
                self.handles.insert(handle, id);
                self.update_leaving(id);
            }
            None => self.anomalies.unknown_handles += 1,
        }
    }

    pub fn release_begin(&mut self, handle: u64, seq: u64) {
        let Some(&id) = self.handles.get(&handle) else {
            self.anomalies.unknown_frees += 1;
            self.in_flight.begin(seq, InFlight::Nothing);
            return;
        };
        if let Some(backing) = self.backings.get_mut(&id) {
            backing.references = backing.references.saturating_sub(1);
            backing.in_flight += 1;
            if backing.references == 0 {
                self.handles.remove(&handle);
            }
            self.update_leaving(id);
        }
        self.in_flight.begin(seq, InFlight::Release { handle, backing: id });
    }

    pub fn release_end(&mut self, handle: u64, id: BackingId, failed: bool) {
        let Some(backing) = self.backings.get_mut(&id) else { return };
        backing.in_flight = backing.in_flight.saturating_sub(1);
        if failed {
            backing.references += 1;
            backing.row.generation = self.generation; // a resync in progress must not remove it
            self.handles.entry(handle).or_insert(id);
        }
        self.update_leaving(id);
        self.remove_if_unused(id);
    }

    /// Returns book and bytes of the mapping at an address.
    pub fn mapped_at(&self, address: u64) -> Option<(u8, u64)> {
        let mapping = self.mappings.get(&address)?;
        self.backings.get(&mapping.backing).map(|backing| (backing.row.book, mapping.bytes))
    }

    /// Books the entry of a `VmmUnmap`: one call may remove several adjacent mappings.
    pub fn unmap_begin(&mut self, address: u64, bytes: u64, seq: u64) {
        let end = address.saturating_add(bytes);
        let starts: Vec<u64> = self.mappings.range(address..end).map(|(&start, _)| start).collect();
        if starts.is_empty() {
            self.anomalies.unknown_frees += 1;
            self.in_flight.begin(seq, InFlight::Nothing);
            return;
        }
        let mut mappings = Vec::with_capacity(starts.len());
        for start in starts {
            let Some(mapping) = self.mappings.remove(&start) else { continue };
            if let Some(backing) = self.backings.get_mut(&mapping.backing) {
                backing.mappings = backing.mappings.saturating_sub(1);
                backing.in_flight += 1;
            }
            self.update_leaving(mapping.backing);
            mappings.push((start, mapping));
        }
        self.in_flight.begin(seq, InFlight::Unmap { mappings });
    }

    pub fn unmap_end(&mut self, mappings: Vec<(u64, Mapping)>, failed: bool) {
        for (address, mut mapping) in mappings {
            let Some(backing) = self.backings.get_mut(&mapping.backing) else { continue };
            backing.in_flight = backing.in_flight.saturating_sub(1);
            if failed && !self.mappings.contains_key(&address) {
                backing.mappings += 1;
                (mapping.generation, backing.row.generation) = (self.generation, self.generation);
                self.mappings.insert(address, mapping);
                if self.unbacked_segments > 0 {
                    self.back_segments(address, mapping.bytes, None);
                }
            } else {
                self.segments_unmapped(address, mapping);
            }
            self.update_leaving(mapping.backing);
            self.remove_if_unused(mapping.backing);
        }
    }

    /// Removes a mapping whose unmap was not reported.
    fn take_mapping(&mut self, address: u64) {
        let Some(mapping) = self.mappings.remove(&address) else { return };
        self.segments_unmapped(address, mapping);
        if let Some(backing) = self.backings.get_mut(&mapping.backing) {
            backing.mappings = backing.mappings.saturating_sub(1);
            self.update_leaving(mapping.backing);
        }
        self.remove_if_unused(mapping.backing);
    }

    /// Removes a backing if it has no references, no mappings and no calls in flight.
    fn remove_if_unused(&mut self, id: BackingId) {
        let unused = |b: &Backing| b.references == 0 && b.mappings == 0 && b.in_flight == 0;
        if self.backings.get(&id).is_some_and(unused) {
            self.take_backing(id);
        }
    }

    /// Updates `in_flight_bytes`: NVML may already not charge memory that only calls in flight hold.
    fn update_leaving(&mut self, id: BackingId) {
        let Some(backing) = self.backings.get_mut(&id) else { return };
        let leaving = backing.references == 0 && backing.mappings == 0 && backing.in_flight > 0;
        if leaving != backing.leaving {
            backing.leaving = leaving;
            let row = backing.row;
            self.count_in_flight(&row, leaving);
        }
    }

    fn take_backing(&mut self, id: BackingId) {
        let Some(backing) = self.backings.remove(&id) else { return };
        let row = backing.row;
        if self.handles.get(&backing.handle) == Some(&id) {
            self.handles.remove(&backing.handle);
        }
        if backing.leaving {
            self.count_in_flight(&row, false);
        }
        if !self.count_side_memory(&row, -(row.bytes as i64)) {
            self.uncarve_all(Extent::Backing(id), &row);
            self.book(row.book).post(row.cell, -(row.bytes as i64));
            self.note_row(Extent::Backing(id), &row, row.bytes, 0);
        }
    }

    /// Removes all selected backings with their handles and mappings.
    pub fn drop_backings(&mut self, is_selected: impl Fn(&Backing) -> bool) {
        let gone = self.backings.iter().filter(|(_, backing)| is_selected(backing));
        for id in in_order(gone.map(|(&id, _)| id)) {
            self.handles.retain(|_, handle| *handle != id);
            let starts: Vec<u64> =
                self.mappings.iter().filter(|(_, m)| m.backing == id).map(|(&start, _)| start).collect();
            for start in starts {
                if let Some(mapping) = self.mappings.remove(&start) {
                    self.segments_unmapped(start, mapping);
                }
            }
            self.take_backing(id);
        }
    }

    /// Removes mappings, then backings, that a resync did not restate. Handles without references are removed too; they were
    /// needed only to restate mappings.
    pub fn sweep_vmm(&mut self) {
        let generation = self.generation;
        let starts: Vec<u64> =
            self.mappings.iter().filter(|(_, m)| m.generation != generation).map(|(&s, _)| s).collect();
        starts.into_iter().for_each(|start| self.take_mapping(start));
        self.drop_backings(|backing| backing.row.generation != generation);
        // Several backings may have been restated with the same handle value; the value belongs to the one with references.
        let held = self.backings.iter().filter(|(_, backing)| backing.references > 0);
        self.handles = held.map(|(&id, backing)| (backing.handle, id)).collect();
        let unused = self.backings.iter().filter(|(_, b)| b.references == 0 && b.mappings == 0);
        for id in in_order(unused.map(|(&id, _)| id)) {
            self.remove_if_unused(id);
        }
    }
}
