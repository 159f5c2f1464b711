//! The table of threads' places. Each thread claims a place, the sender frees the places of threads that have ended, and other
//! threads reuse them. tests/races runs this file under loom.

use crate::base::memfd::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};
use crate::base::ring::Ring;
use std::sync::atomic::Ordering::*;

/// The record that a thread is making.
#[derive(Debug, Default)]
pub struct RecordInProgress {
    /// While a record is being made: a lower bound of its number. Else 0.
    at: AtomicU64,
    /// The number of its last record plus one: a lower bound that needs no read of words that other threads write.
    bound: AtomicU64,
}

impl RecordInProgress {
    /// Returns the number for a record that the calling thread now begins.
    #[inline(always)]
    pub fn begin(&self, ring: &Ring) -> u64 {
        // The bound is visible with the following number. A thread that sees the bound instead of the last record's 0 also sees
        // that record.
        self.at.store(self.bound.load(Relaxed), Release);
        let seq = ring.take();
        self.bound.store(seq + 1, Relaxed);
        seq
    }

    /// Marks the record as finished: it is in the ring, or will never be.
    #[inline(always)]
    pub fn end(&self) {
        self.at.store(0, Release);
    }

    /// Resets to the state of a thread that has made no record.
    pub(crate) fn reset(&self) {
        self.end();
        self.bound.store(1, Relaxed);
    }

    /// Whether no record with a number up to `seq` is being made.
    fn is_past(&self, seq: u64) -> bool {
        !(1..=seq).contains(&self.at.load(Acquire))
    }
}

/// A place of the table. All zeros is a place without a thread.
pub trait TableSlot: Sync + 'static {
    /// Returns its thread's kernel id, 0 while the place is free.
    fn id(&self) -> &AtomicU32;
    /// Returns the record that its thread is making.
    fn making(&self) -> &RecordInProgress;
    /// Prepares the place for the calling thread, removing all data of the last one.
    fn begin(&self);
    /// Cleans up after its thread has ended, perhaps in the middle of an operation.
    fn end(&self);
}

/// A table of places.
#[derive(Debug)]
pub struct SlotTable<T: 'static, const MOST: usize> {
    /// Array of `MOST` places; null until it is made.
    pub table: AtomicPtr<T>,
    /// Places used so far; the rest was never touched.
    pub used: AtomicUsize,
    /// Index where a free place is likely: after the last one taken, or the first after a sweep.
    pub next: AtomicUsize,
    /// Threads that found no place.
    pub refused: AtomicU64,
}

impl<T: TableSlot, const MOST: usize> SlotTable<T, MOST> {
    fn table(&self) -> &'static [T] {
        let table = self.table.load(Acquire);
        if table.is_null() {
            return &[];
        }
        // SAFETY: the array was made with MOST places and is never freed.
        unsafe { std::slice::from_raw_parts(table, MOST) }
    }

    /// Returns all places that were ever used.
    pub fn all(&self) -> &'static [T] {
        let table = self.table();
        &table[..self.used.load(Acquire).min(table.len())]
    }

    /// Claims a place for the calling thread with this kernel id; `None` without a table or a free place.
    pub fn claim(&self, id: u32) -> Option<&'static T> {
        let table = self.table();
        if table.is_empty() {
            return None;
        }
        let is_ours = |index: &usize| {
            let place = table[*index].id();
            place.load(Relaxed) == 0 && place.compare_exchange(0, id, AcqRel, Relaxed).is_ok()
        };
        let start = self.next.load(Relaxed) % MOST;
        let Some(index) = (start..MOST).chain(0..start).find(is_ours) else {
            self.refused.fetch_add(1, Relaxed);
            return None;
        };
        self.next.store(index + 1, Relaxed);
        table[index].making().reset();
        table[index].begin();
        self.used.fetch_max(index + 1, AcqRel);
        Some(&table[index])
    }

    /// Frees places of ended threads, for one caller. New threads use the places freed so far: the table does not grow.
    pub fn sweep(&self, is_gone: impl Fn(u32) -> bool) {
        for (index, place) in self.all().iter().enumerate() {
            let id = place.id().load(Relaxed);
            if id != 0 && is_gone(id) {
                place.making().end();
                place.end();
                let _ = place.id().compare_exchange(id, 0, AcqRel, Relaxed);
                self.next.fetch_min(index, Relaxed);
            }
        }
        self.next.store(0, Relaxed);
    }

    /// Waits until records up to `seq` are made or dropped, or until `wait`, which gets its calls for a thread, returns false.
    pub fn quiesce(&self, seq: u64, mut wait: impl FnMut(u32) -> bool) -> bool {
        self.all().iter().all(|place| {
            let mut turns = 0;
            while !place.making().is_past(seq) {
                turns += 1;
                if !wait(turns) {
                    return false;
                }
            }
            true
        })
    }
}
