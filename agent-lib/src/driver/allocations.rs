//! Records allocations, frees, imports, ends of contexts and later changes of names, and updates the rows of the live table.
//! Callbacks call sources/cupti/effects.rs, which calls these functions, and then features that depend on driver calls.
//!
//! The row of a free is removed when the call begins, before the driver can give the address to another thread. If the call
//! fails, the row is restored. The row of an allocation is added when the call has returned. Handles are in vmm.rs.

use crate::base::row::{
    Key, RowCopy, RowExtra, context_of, device_of, key_of, kind, kind_of, memory_of, pool_owner,
};
use crate::driver::core::Core;
use crate::record::live::FoundRow;
use crate::record::recorder::RecordContext;
use crate::threads::{Call, Thread};
use cupti_sys::CUDA_ERROR_DEINITIALIZED;
use gpumem_wire::{Body, DestroyScope, ImportSource, MemoryKind, Phase, PoolOwner, Reading, Role};
use std::sync::atomic::Ordering::*;

/// Returns the duration of a call from its begin to the time of its record, in microseconds, rounded up; `u32::MAX` if the begin
/// was not observed. The clock is read only once: a thread stopped between two readings would seem to begin its call later.
#[inline(always)]
pub(crate) fn took_us(entered_ns: Option<u64>, time_ns: u64) -> u32 {
    let Some(entered_ns) = entered_ns else { return u32::MAX };
    u32::try_from(time_ns.saturating_sub(entered_ns).div_ceil(1000)).unwrap_or(u32::MAX)
}

/// Like `took_us`, for records that store the duration in two bytes; at most `u16::MAX`.
#[inline(always)]
pub(crate) fn took_us_short(entered_ns: Option<u64>, time_ns: u64) -> u16 {
    u16::try_from(took_us(entered_ns, time_ns)).unwrap_or(u16::MAX)
}

/// Ids of framework pools: "gp" in the upper bits, and a number. No handle of a driver pool has such a value.
const POOL_IDS: u64 = 0x6770 << 48;

/// An allocation by the driver: what was requested, and what the driver returned.
#[derive(Debug, Clone, Copy)]
pub struct Allocation {
    pub address: u64,
    pub bytes: u64,
    pub pool: u64,
    pub memory: MemoryKind,
    /// Time at which the call began; `None` if that was not observed.
    pub entered_ns: Option<u64>,
}

impl Core {
    /// Records an allocation that succeeded and adds its row; returns the number of its record.
    #[inline(always)]
    pub(crate) fn book_allocation(&self, thread: &Thread, at: RecordContext, what: Allocation) -> u64 {
        let Allocation { address, bytes, pool, memory, entered_ns } = what;
        let body = |time_ns: u64, _: &mut RecordContext| {
            let took_us = took_us_short(entered_ns, time_ns);
            Body::AllocEnd { address, bytes, pool, took_us, memory }
        };
        self.recorder.record_timed(thread, at, body, |recorder, row| {
            recorder.live.insert(Key::Allocation(address), row, RowExtra::default());
        })
    }

    /// Records an allocation that failed. Returns the device's free bytes, if the driver returns them.
    #[cold]
    pub(crate) fn book_failed_allocation(
        &self,
        thread: &Thread,
        at: RecordContext,
        result: u32,
        what: Allocation,
    ) -> Reading {
        let device_free_bytes =
            self.devices.memory_info().map_or(Reading::ABSENT, |(free, _)| Reading::of(free));
        let result = u16::try_from(result).unwrap_or(u16::MAX);
        let Allocation { bytes, pool, memory, .. } = what;
        let body = Body::AllocFailed { bytes, pool, device_free_bytes, result, memory };
        self.recorder.note(thread, at, body);
        device_free_bytes
    }

    /// Records the begin of a free and removes the allocation's row, which `call` keeps until the free returns.
    #[inline(always)]
    pub(crate) fn book_free_entered(
        &self,
        thread: &Thread,
        at: RecordContext,
        call: &mut Call,
        address: u64,
    ) {
        let taken = &mut call.taken;
        call.begin_seq = self.recorder.record(thread, at, Body::FreeBegin { address }, |recorder, _| {
            *taken = recorder.live.remove(Key::Allocation(address));
        });
    }

    /// Records the return of a free, unmap or release. Returns whether it failed, in which case its row is restored.
    #[inline(always)]
    pub(crate) fn book_free_returned(
        &self,
        thread: &Thread,
        at: RecordContext,
        call: &Call,
        result: u32,
    ) -> bool {
        if call.begin_seq == 0 {
            return false; // NULL, or its begin was not observed
        }
        // A driver that has shut down has freed all memory, so the free did not fail.
        let failed = result != 0 && result != CUDA_ERROR_DEINITIALIZED;
        let body =
            Body::FreeEnd { begin_seq: call.begin_seq, result: u16::try_from(result).unwrap_or(u16::MAX) };
        self.recorder.record(thread, at, body, |_, row| {
            if failed {
                self.restore(call, row[0]);
            }
        });
        failed
    }

    /// Restores the row that the begin of a failed call has removed. `seq` is the number of the record of the failure.
    #[cold]
    fn restore(&self, call: &Call, seq: u64) {
        self.unrestored_rows.fetch_add(call.more_taken.into(), Relaxed);
        let Some(taken) = call.taken else { return };
        if call.begin_seq <= self.resync_after_seq.load(Acquire) {
            self.restored.fetch_add(1, AcqRel); // the begin of the free was sent before the resync
        }
        match key_of(&taken) {
            Some(Key::Handle(_) | Key::Backing(_)) => self.reference_restored(&taken, seq),
            Some(Key::Mapping(address)) => self.mapping_restored(&taken, address),
            Some(key) => drop(self.recorder.live.insert(key, &taken.row, taken.beside)),
            None => {}
        }
    }

    /// Records that memory of another process or API was mapped. If IPC memory is opened again at the same address, only the
    /// count of its opens increases.
    pub(crate) fn imported(
        &self,
        thread: &Thread,
        at: RecordContext,
        address: u64,
        bytes: u64,
        source: ImportSource,
    ) {
        let key = Key::Allocation(address);
        let is_open = |row: RowCopy| kind_of(&row.row) == kind::IMPORT && row.beside.references > 0;
        if source == ImportSource::Ipc && self.recorder.live.get(key).is_some_and(is_open) {
            self.recorder.live.count(key, 1, 0);
            return;
        }
        let body = Body::Import { address, bytes, source };
        self.recorder.insert(thread, at, body, key, RowExtra::REFERENCED);
    }

    /// Handles a close of imported memory: decreases the count of its opens. Returns whether the memory stays open.
    pub(crate) fn import_stays_open(&self, address: u64) -> bool {
        let key = Key::Allocation(address);
        let stays = self.recorder.live.get(key).is_some_and(|row| row.beside.references > 1);
        if stays {
            self.recorder.live.count(key, -1, 0);
        }
        stays
    }

    /// Records the end of a context or the reset of a device, and removes the rows of the memory that ends with it. The driver
    /// frees that memory without calls of cuMemFree.
    pub(crate) fn context_ended(&self, thread: &Thread, at: RecordContext, scope: DestroyScope) {
        self.recorder.record(thread, at, Body::ContextDestroy { scope }, |recorder, _| {
            recorder.live.remove_where(|taken| {
                let row = &taken.row;
                if device_of(row) != at.device {
                    return None;
                }
                let key = key_of(taken)?;
                let ends = match (scope, key) {
                    (DestroyScope::Context, Key::Allocation(_)) => {
                        context_of(row) == at.context && memory_of(row) != MemoryKind::StreamOrdered
                    }
                    (DestroyScope::Context, _) => false,
                    // A framework's pool stays until the framework removes it, but without segments.
                    (DestroyScope::Device, Key::Pool(_)) => pool_owner(row) != PoolOwner::Framework,
                    _ => true,
                };
                ends.then_some(key)
            });
        });
        if scope == DestroyScope::Device {
            self.driver_pools.forget_device(at.device.into());
        }
    }

    pub(crate) fn new_pool_id(&self) -> u64 {
        POOL_IDS | (self.pools_made.fetch_add(1, Relaxed) + 1)
    }

    /// Records that the allocation or block of `key` gets another name, role or phase, and updates its row `found`. Tag 0 keeps
    /// the present one.
    #[inline(always)]
    pub(crate) fn record_retag(
        &self,
        thread: &Thread,
        key: Key,
        found: Option<FoundRow>,
        use_as: (Role, Phase),
        tag: u32,
    ) {
        let (pool, address) = match key {
            Key::Block(pool, address) => (pool, address),
            Key::Allocation(address) => (0, address),
            _ => return,
        };
        self.record_retag_at(thread, pool, address, found, use_as, tag);
    }

    #[unsafe(link_section = ".text.hot.gpumem")]
    #[inline(never)]
    fn record_retag_at(
        &self,
        thread: &Thread,
        pool: u64,
        address: u64,
        found: Option<FoundRow>,
        use_as: (Role, Phase),
        tag: u32,
    ) {
        let block_seq = found.map_or(0, |found| found.seq);
        let body = Body::Retag { address, block_seq, pool, use_as };
        self.recorder.record(thread, RecordContext::tagged(tag), body, |recorder, _| {
            let Some(found) = found else { return };
            // Word 5 contains tag and stack; the tag is its low half.
            recorder.live.update_found(&found, 5, |word, beside| {
                if beside.flags & RowExtra::RETAGGED == 0 {
                    beside.first_tag = word as u32;
                    beside.flags |= RowExtra::RETAGGED;
                }
                let (role, phase, old) = (use_as.0.to_code(), use_as.1.to_code(), beside.use_as);
                let role = if role == 0 { old & 15 } else { role };
                let phase = if phase == 0 { old >> 4 } else { phase };
                beside.use_as = role | phase << 4;
                if tag == 0 { word } else { word & !0xffff_ffff | u64::from(tag) }
            });
        });
    }
}
