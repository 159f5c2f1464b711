//! History: a bounded ring of fixed records whose slot index is the total order.
//!
//! A writer takes its number first, so a record that is dropped leaves a hole in the numbers, and the reader sees the
//! loss. Drop-newest: a slot that holds an unsent record is left alone. A slot has one writer at a time without any
//! claim: number n may write only when n - slots was sent, and the sender passes a number only when its writer is done
//! (threads.rs tells).

use crate::base::memfd::{AtomicU64, Shared, Words, fetch_to_read, fetch_to_write};
use std::sync::atomic::Ordering::*;

/// A slot as words; word 0 is `seq`.
pub type Row = [u64; 8];

/// See the module's text.
#[derive(Debug)]
#[repr(C)]
pub struct Ring {
    slots: &'static [Words],
    head: &'static AtomicU64,
    lost: &'static AtomicU64,
    mask: u64,
    sent: Sent,
}

/// What has become of a number.
#[derive(Debug)]
pub enum Made {
    /// This.
    Record(Row),
    /// It found no room, or its writer died.
    Lost,
    /// Not known yet.
    Unfinished,
}

/// On a cache line of its own: written by the sender, read by every record.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Sent(AtomicU64);

impl Ring {
    /// The ring in `shared`.
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
        // SAFETY: their number is a power of two (`Shared::create`), and the mask one less.
        unsafe { self.slots.get_unchecked((seq.wrapping_sub(1) & self.mask) as usize) }
    }

    /// Records that have room.
    pub(crate) fn slots(&self) -> u64 {
        self.slots.len() as u64
    }

    /// Last number that was taken.
    #[inline(always)]
    pub fn head(&self) -> u64 {
        self.head.load(Acquire)
    }

    /// The next number. What the caller stored before is seen by whoever reads this number as head.
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

    /// Fetches the slot of a record that will come soon: the sender has it, and a program's next locked instruction would
    /// wait until it is here.
    #[inline(always)]
    pub(crate) fn expect(&self, seq: u64) {
        fetch_to_write(self.slot(seq));
    }

    /// As `expect`, for the reader.
    #[inline(always)]
    pub(crate) fn expect_to_read(&self, seq: u64) {
        fetch_to_read(self.slot(seq));
    }

    /// Record `seq`, if it is there.
    pub fn get(&self, seq: u64) -> Option<Row> {
        let slot = self.slot(seq);
        (u64::from_le(slot[0].load(Acquire)) == seq)
            .then(|| std::array::from_fn(|index| u64::from_le(slot[index].load(Relaxed))))
    }

    /// What has become of `seq`. Without a record it is still being made, or lost: once no thread is at a number up to `until`, which
    /// `quiesce` waits for, that is known. Up to `quiet` it is so already.
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

    /// All numbers up to this one were sent, or will never come.
    pub fn sent(&self) -> u64 {
        self.sent.0.load(Relaxed)
    }

    /// Gives the slots up to `seq` back to writers.
    pub fn set_sent(&self, seq: u64) {
        self.sent.0.store(seq, Release);
    }

    /// Records that found the ring full.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }
}
