//! A table with a place for each thread. Threads claim places; the sender frees those of threads that have ended, and other
//! threads reuse them. tests/races checks this file with loom.

use crate::base::memfd::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};
use crate::base::ring::Ring;
use std::sync::atomic::Ordering::*;

/// The record that a thread is making.
#[derive(Debug, Default)]
pub struct RecordInProgress {
    /// While a record is being made, a lower bound of its number; else 0.
    at: AtomicU64,
    /// Number of the thread's last record plus one: a lower bound of the next number, without reading what other threads write.
    bound: AtomicU64,
}

impl RecordInProgress {
    /// Begins a record of the calling thread; returns its number.
    #[inline(always)]
    pub fn begin(&self, ring: &Ring) -> u64 {
        // A thread that sees the number as taken also sees the bound. A thread that sees the bound also sees the last record.
        self.at.store(self.bound.load(Relaxed), Release);
        let seq = ring.take();
        self.bound.store(seq + 1, Relaxed);
        seq
    }

    /// Marks the record as finished: it is in the ring, or is lost.
    #[inline(always)]
    pub fn end(&self) {
        self.at.store(0, Release);
    }

    pub(crate) fn reset(&self) {
        self.end();
        self.bound.store(1, Relaxed);
    }

    /// Whether the thread is not making a record with a number up to `seq`.
    fn is_past(&self, seq: u64) -> bool {
        !(1..=seq).contains(&self.at.load(Acquire))
    }
}

/// A place of the table, for the data of one thread. A place whose bytes are all 0 belongs to no thread.
pub trait TableSlot: Sync + 'static {
    /// Returns the kernel id of the place's thread; 0 while the place is free.
    fn id(&self) -> &AtomicU32;
    /// Returns the state of the record that the thread is making.
    fn making(&self) -> &RecordInProgress;
    /// Prepares the place for the calling thread: removes all data of the last one.
    fn begin(&self);
    /// Cleans up after the thread has ended, perhaps inside of the agent.
    fn end(&self);
}

/// A table of threads with room for `COUNT`.
#[derive(Debug)]
pub struct SlotTable<T: 'static, const COUNT: usize> {
    /// Array of the entries; null until it is allocated.
    pub table: AtomicPtr<T>,
    /// Number of entries used so far; later entries were never touched.
    pub used: AtomicUsize,
    /// Index at which the search for a free place starts: after the last place claimed, or 0 after a sweep.
    pub next: AtomicUsize,
    /// Number of times that a thread found no free entry, because the table was full. Each call of such a thread counts.
    pub refused: AtomicU64,
}

impl<T: TableSlot, const COUNT: usize> SlotTable<T, COUNT> {
    fn table(&self) -> &'static [T] {
        let table = self.table.load(Acquire);
        if table.is_null() {
            return &[];
        }
        // SAFETY: the array has COUNT places and is never freed.
        unsafe { std::slice::from_raw_parts(table, COUNT) }
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
        let start = self.next.load(Relaxed) % COUNT;
        let Some(index) = (start..COUNT).chain(0..start).find(is_ours) else {
            self.refused.fetch_add(1, Relaxed);
            return None;
        };
        self.next.store(index + 1, Relaxed);
        table[index].making().reset();
        table[index].begin();
        self.used.fetch_max(index + 1, AcqRel);
        Some(&table[index])
    }

    /// Frees the places of ended threads; called by one thread. New threads can claim them at once.
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

    /// Waits until all records up to `seq` are made or lost. While a thread is still making one, calls `wait` with the number of
    /// calls for that thread, counted from 1. Returns false as soon as `wait` does.
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
