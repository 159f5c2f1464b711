//! The table of threads' places. Each thread claims a place, the sender frees the places of threads that have ended, and other
//! threads reuse them. tests/races has this file under loom.

use crate::base::memfd::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};
use crate::base::ring::Ring;
use std::sync::atomic::Ordering::*;

/// The record that a thread is making.
#[derive(Debug, Default)]
pub struct RecordInProgress {
    /// While a record is being made: a lower bound of its number. Else 0.
    at: AtomicU64,
    /// The number of its last record plus one: such a bound, without a read of words that other threads write.
    bound: AtomicU64,
}

impl RecordInProgress {
    /// The number of a record that the calling thread makes from now on.
    #[inline(always)]
    pub fn begin(&self, ring: &Ring) -> u64 {
        // Seen with the number that follows; and who sees this instead of the last record's 0 sees that record, too.
        self.at.store(self.bound.load(Relaxed), Release);
        let seq = ring.take();
        self.bound.store(seq + 1, Relaxed);
        seq
    }

    /// It is in the ring, or will never be.
    #[inline(always)]
    pub fn end(&self) {
        self.at.store(0, Release);
    }

    /// As that of a thread that has made none.
    pub(crate) fn reset(&self) {
        self.end();
        self.bound.store(1, Relaxed);
    }

    /// Nothing with a number up to `seq` is being made.
    fn is_past(&self, seq: u64) -> bool {
        !(1..=seq).contains(&self.at.load(Acquire))
    }
}

/// A place of the table. All zeros is a place without a thread.
pub trait TableSlot: Sync + 'static {
    /// Its thread's kernel id, 0 while the place is free.
    fn id(&self) -> &AtomicU32;
    /// See there.
    fn making(&self) -> &RecordInProgress;
    /// The calling thread's from now on: nothing is left of the last one's.
    fn begin(&self);
    /// Its thread has ended, in the middle of whatever.
    fn end(&self);
}

/// See the module's text.
#[derive(Debug)]
pub struct SlotTable<T: 'static, const MOST: usize> {
    /// As many places; null until there are any.
    pub table: AtomicPtr<T>,
    /// Places used so far; the rest was never touched.
    pub used: AtomicUsize,
    /// Where a free place is likely: behind the last one that was taken, or the first after a sweep.
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
        // SAFETY: who stored it has made it with MOST places, and never gives it back.
        unsafe { std::slice::from_raw_parts(table, MOST) }
    }

    /// All places that were ever used.
    pub fn all(&self) -> &'static [T] {
        let table = self.table();
        &table[..self.used.load(Acquire).min(table.len())]
    }

    /// One for the calling thread, whose kernel id that is; none before there are any, and when all are taken.
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

    /// Frees places of threads that have ended. One thread does. Threads that come in the middle of it take what is free already: the
    /// table would become longer else.
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

    /// Waits until every record up to `seq` is made or was dropped; false if `wait` does not want to any more, which is told how
    /// often it has waited for the same thread.
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
