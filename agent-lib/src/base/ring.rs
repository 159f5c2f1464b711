//! The ring of records: a bounded queue with slots of fixed size, written by all threads and read by the sender. Each record
//! has a number, which determines its order and its slot.
//!
//! A writer takes its number first. So a dropped record leaves a gap in the numbers, and the reader notices the loss. When the
//! ring is full, the newest record is dropped: a slot with an unsent record is not overwritten.
//!
//! A slot has one writer at a time without any lock. Record n may be written only after record n - slots was sent. The sender
//! goes on to the next number only after the writer of this one has finished (threads/table.rs).

use crate::base::memfd::{AtomicU64, Shared, Words, fetch_to_read, fetch_to_write};
use std::sync::atomic::Ordering::*;

/// A record without payload, as the words of its slot; word 0 is `seq`, its number.
pub type Row = [u64; 8];

/// The ring; see the module's docs.
#[derive(Debug)]
#[repr(C)]
pub struct Ring {
    slots: &'static [Words],
    head: &'static AtomicU64,
    lost: &'static AtomicU64,
    mask: u64,
    sent: Sent,
}

/// State of the record that has a given sequence number.
#[derive(Debug)]
pub enum Made {
    /// The record is complete.
    Record(Row),
    /// The record found no room in the ring, or its writer ended.
    Lost,
    /// A thread may still be writing it.
    Unfinished,
}

/// Number of the last record sent. In a cache line of its own: the sender writes it, and each writer reads it.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Sent(AtomicU64);

impl Ring {
    pub fn new(shared: &Shared) -> Self {
        let slots = shared.ring();
        Ring {
            slots,
            head: shared.head(),
            lost: shared.lost(),
            mask: slots.len() as u64 - 1,
            sent: Sent::default(),
        }
    }

    #[inline(always)]
    fn slot(&self, seq: u64) -> &'static Words {
        // SAFETY: the number of slots is a power of two (`Shared::create`), and the mask is one less.
        unsafe { self.slots.get_unchecked((seq.wrapping_sub(1) & self.mask) as usize) }
    }

    pub(crate) fn slots(&self) -> u64 {
        self.slots.len() as u64
    }

    /// Returns the number that a writer took last.
    #[inline(always)]
    pub fn head(&self) -> u64 {
        self.head.load(Acquire)
    }

    /// Takes the next number. A thread that reads this number as head also sees the caller's earlier stores.
    #[inline(always)]
    pub(crate) fn take(&self) -> u64 {
        self.head.fetch_add(1, AcqRel) + 1
    }

    /// Stores the record with the number `row[0]`, or counts it as lost.
    #[inline(always)]
    pub fn put(&self, row: &Row) {
        let seq = row[0];
        if seq > self.sent.0.load(Acquire) + self.slots.len() as u64 {
            return self.lose();
        }
        let slot = self.slot(seq);
        for word in 1..row.len() {
            slot[word].store(row[word].to_le(), Relaxed);
        }
        slot[0].store(seq.to_le(), Release);
    }

    #[cold]
    #[inline(never)]
    fn lose(&self) {
        self.lost.fetch_add(1, Relaxed);
    }

    /// Prefetches the slot of a future record. The sender's core has its cache line, and the write would have to wait for it.
    #[inline(always)]
    pub(crate) fn expect(&self, seq: u64) {
        fetch_to_write(self.slot(seq));
    }

    #[inline(always)]
    pub(crate) fn expect_to_read(&self, seq: u64) {
        fetch_to_read(self.slot(seq));
    }

    /// Returns record `seq`, if it is complete in its slot.
    pub fn get(&self, seq: u64) -> Option<Row> {
        let slot = self.slot(seq);
        (u64::from_le(slot[0].load(Acquire)) == seq)
            .then(|| std::array::from_fn(|index| u64::from_le(slot[index].load(Relaxed))))
    }

    /// Returns the state of record `seq`. A record that is not in its slot is still being written, or lost. To decide which,
    /// `quiesce` waits until no thread is writing a number up to `until`. `quiet`: number up to which it has waited already.
    #[inline(always)]
    pub fn made(&self, seq: u64, until: u64, quiet: &mut u64, quiesce: impl FnOnce(u64) -> bool) -> Made {
        let mut row = self.get(seq);
        if row.is_none() && *quiet < seq {
            if !quiesce(until) {
                return Made::Unfinished;
            }
            *quiet = until;
            row = self.get(seq);
        }
        row.map_or(Made::Lost, Made::Record)
    }

    /// Returns the number up to which all records were sent or are lost.
    pub fn sent(&self) -> u64 {
        self.sent.0.load(Relaxed)
    }

    /// Allows writers to reuse the slots of records up to `seq`.
    pub fn set_sent(&self, seq: u64) {
        self.sent.0.store(seq, Release);
    }

    /// Returns the number of records that found the ring full.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }
}
