//! Records handles of physical memory (cuMemCreate) and their mappings (cuMemMap). The memory is freed when a handle has neither
//! references nor mappings.
//!
//! The driver may reuse a handle's number when its last release has begun. From then on, if the handle still has mappings, its
//! row has the key `Backing`, which is the seq of its record. The rows of its mappings have that seq, too.

use crate::base::descriptor::Identity;
use crate::base::row::{Key, RowCopy, RowExtra, kind, kind_of};
use crate::driver::allocations::took_us;
use crate::driver::core::Core;
use crate::record::recorder::RecordContext;
use crate::threads::{Call, Thread};
use gpumem_wire::{Body, ImportSource, MemoryKind};
use std::sync::atomic::Ordering::AcqRel;

/// Mappings start at multiples of this number of bytes.
const GRANULE: u64 = 2 << 20;
/// Maximum number of addresses at which one call looks for a mapping.
const MOST_MAPPINGS: u64 = 1 << 16;

impl Core {
    /// Stores the number of the record that is about to change reference counts. A resync that reads the counts meanwhile then
    /// reads them again.
    pub(crate) fn references_change(&self, seq: u64) {
        self.references_changed.fetch_max(seq, AcqRel);
    }

    pub(crate) fn handle_created(
        &self,
        thread: &Thread,
        at: RecordContext,
        handle: u64,
        bytes: u64,
        memory: MemoryKind,
        entered_ns: Option<u64>,
    ) {
        self.multicast.objects.remove(handle); // the number belongs to memory now
        let body = |time_ns: u64, at: &mut RecordContext| {
            at.context = took_us(entered_ns, time_ns);
            Body::VmmCreate { handle, bytes, references: 1, memory }
        };
        self.recorder.record_timed(thread, at, body, |recorder, row| {
            self.references_change(row[0]);
            recorder.live.insert(Key::Handle(handle), row, RowExtra::REFERENCED);
        });
    }

    /// Records a handle imported from another process. Its size is unknown until it is mapped.
    pub(crate) fn handle_imported(&self, thread: &Thread, at: RecordContext, handle: u64) {
        let body = Body::Import { address: handle, bytes: 0, source: ImportSource::ShareableHandle };
        self.recorder.record(thread, at, body, |recorder, row| {
            self.references_change(row[0]);
            recorder.live.insert(Key::Handle(handle), row, RowExtra::REFERENCED);
        });
    }

    /// Records that cuMemRetainAllocationHandle returned `handle` for the mapping at `address`.
    pub(crate) fn handle_retained(&self, thread: &Thread, at: RecordContext, handle: u64, address: u64) {
        self.recorder.record(thread, at, Body::VmmRetain { handle, address }, |recorder, row| {
            self.references_change(row[0]);
            let Some(mapping) = self.mapping_at(address) else { return };
            match self.backing_of(&mapping) {
                Some(Key::Backing(seq)) => {
                    if let Some(mut backing) = recorder.live.remove(Key::Backing(seq)) {
                        backing.beside.references = 1;
                        backing.row[2] = handle;
                        recorder.live.insert(Key::Handle(handle), &backing.row, backing.beside);
                        // The handle may have another number now. A page found by sources/torch/adopt.rs had none before.
                        recorder.live.update(Key::Mapping(mapping.row[2]), 4, |_, _| handle);
                    }
                }
                Some(key) => drop(recorder.live.count(key, 1, 0)),
                None => {}
            }
        });
    }

    /// Returns the mapping that contains `address`, usually its first byte.
    fn mapping_at(&self, address: u64) -> Option<RowCopy> {
        let first = address & !(GRANULE - 1);
        let before = (0..MOST_MAPPINGS).map_while(|back| first.checked_sub(back * GRANULE));
        let mut starts = std::iter::once(address).chain(before);
        let nearest = starts.find_map(|start| self.recorder.live.get(Key::Mapping(start)))?;
        (address - nearest.row[2] < nearest.row[3]).then_some(nearest)
    }

    /// Returns the current key of the handle behind a mapping.
    fn backing_of(&self, mapping: &RowCopy) -> Option<Key> {
        let seq = mapping.beside.backing;
        if seq == 0 {
            return None;
        }
        let by_number = Key::Handle(mapping.row[4]);
        let is_it = self.recorder.live.get(by_number).is_some_and(|row| row.seq() == seq);
        Some(if is_it { by_number } else { Key::Backing(seq) })
    }

    pub(crate) fn release_entered(&self, thread: &Thread, at: RecordContext, call: &mut Call, handle: u64) {
        self.drop_closed_exports(thread);
        let taken = &mut call.taken;
        call.begin_seq = self.recorder.record(thread, at, Body::VmmRelease { handle }, |recorder, row| {
            self.references_change(row[0]);
            *taken = recorder.live.count(Key::Handle(handle), -1, 0);
            if taken.is_some_and(|taken| taken.beside.references == 0)
                && let Some(backing) = recorder.live.remove(Key::Handle(handle))
                && backing.beside.mappings > 0
            {
                recorder.live.insert(Key::Backing(backing.seq()), &backing.row, backing.beside);
            }
        });
    }

    pub(crate) fn reference_restored(&self, taken: &RowCopy, seq: u64) {
        self.references_change(seq);
        let handle = taken.row[2];
        let by_number = Key::Handle(handle);
        if self.recorder.live.get(by_number).is_some_and(|row| row.seq() == taken.seq()) {
            self.recorder.live.count(by_number, 1, 0);
            return;
        }
        let mut back = self.recorder.live.remove(Key::Backing(taken.seq())).unwrap_or(*taken);
        back.beside.references = 1;
        self.recorder.live.insert(by_number, &back.row, back.beside);
    }

    /// Records a mapping of a handle. Returns true if this process created the handle, false if it was imported or is unknown.
    pub(crate) fn map_handle(
        &self,
        thread: &Thread,
        at: RecordContext,
        address: u64,
        bytes: u64,
        handle: u64,
    ) -> bool {
        let mut is_own = false;
        self.recorder.record(thread, at, Body::VmmMap { address, bytes, handle }, |recorder, row| {
            self.references_change(row[0]);
            if let Some(backing) = recorder.live.count(Key::Handle(handle), 0, 1) {
                is_own = kind_of(&backing.row) == kind::VMM_CREATE;
                let beside = RowExtra { backing: backing.seq(), ..RowExtra::default() };
                recorder.live.insert(Key::Mapping(address), row, beside);
            }
        });
        is_own
    }

    /// Records the begin of cuMemUnmap, which may remove several neighbouring mappings.
    pub(crate) fn book_unmap_entered(
        &self,
        thread: &Thread,
        at: RecordContext,
        call: &mut Call,
        address: u64,
        bytes: u64,
    ) {
        let (taken, more) = (&mut call.taken, &mut call.more_taken);
        call.begin_seq =
            self.recorder.record(thread, at, Body::VmmUnmap { address, bytes }, |recorder, row| {
                self.references_change(row[0]);
                let end = address.saturating_add(bytes);
                let (mut place, mut tries) = (address, 0);
                while place < end && tries < MOST_MAPPINGS {
                    tries += 1;
                    let Some(mapping) = recorder.live.remove(Key::Mapping(place)) else {
                        place = (place + GRANULE) & !(GRANULE - 1);
                        continue;
                    };
                    self.unmapped(&mapping);
                    place += mapping.row[3].max(1);
                    match taken {
                        None => *taken = Some(mapping),
                        Some(_) => *more += 1,
                    }
                }
            });
    }

    pub(crate) fn unmapped(&self, mapping: &RowCopy) {
        let Some(key) = self.backing_of(mapping) else { return };
        let left = self.recorder.live.count(key, 0, -1);
        if left.is_some_and(|left| left.beside.references == 0 && left.beside.mappings == 0) {
            self.recorder.live.remove(key);
        }
    }

    pub(crate) fn mapping_restored(&self, taken: &RowCopy, address: u64) {
        let counted = self.backing_of(taken).and_then(|key| self.recorder.live.count(key, 0, 1));
        if counted.is_none() {
            self.unrestored_rows.fetch_add(1, AcqRel); // it was the last mapping, so the handle's row was removed
        }
        self.recorder.live.insert(Key::Mapping(address), &taken.row, taken.beside);
    }

    /// Records that cuMemExportToShareableHandle returned `descriptor` for `handle`.
    pub(crate) fn handle_exported(&self, thread: &Thread, at: RecordContext, handle: u64, descriptor: i32) {
        let is_own = |row: RowCopy| kind_of(&row.row) == kind::VMM_CREATE;
        let Some(file) = Identity::of(descriptor) else { return };
        if !self.recorder.live.get(Key::Handle(handle)).is_some_and(is_own) {
            return; // an imported handle: the memory belongs to another process
        }
        self.exports.follow(file, |address, bytes| {
            self.map_handle(thread, at, address, bytes, handle);
        });
    }

    pub(crate) fn drop_closed_exports(&self, thread: &Thread) {
        self.exports.drop_closed(|address, bytes| {
            // A reset of the device may have removed the mapping.
            if self.recorder.live.get(Key::Mapping(address)).is_some() {
                let mut call = Call::new(0, self.recorder.clock.now());
                self.book_unmap_entered(thread, RecordContext::NOWHERE, &mut call, address, bytes);
                self.book_free_returned(thread, RecordContext::NOWHERE, &call, 0);
            }
        });
    }
}
