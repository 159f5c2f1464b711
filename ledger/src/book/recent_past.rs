//! The last moments of a book, to restore it as it was at an earlier time.
//!
//! Agents and NVML report through different channels: the begin of a reading may arrive after records that are younger. A copy of the
//! book would mix two moments then. Undoing what came after the begin of the reading does not.

use crate::book::cells::CellId;
use crate::book::rounding::Rounding;
use std::collections::VecDeque;

/// How far back the history must reach: the delay of a reading's begin on a busy machine.
const REACH_NS: u64 = 250_000_000;
/// Entries kept at most (24 and 64 bytes each); at 100,000 blocks a second 16,384 are 80 ms.
const MAX_ENTRIES: usize = 1 << 14;

#[derive(Debug, Clone, Copy)]
struct Posting {
    /// See [`Kept::reached_ns`].
    reached_ns: u64,
    cell: CellId,
    delta: i64,
}

/// A record that changed `tracked`, or may have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BookChange {
    pub time_ns: u64,
    pub tracked: i64,
    pub in_flight: i64,
    /// For an allocation: when its call was entered, and its bytes.
    pub entered: Option<(u64, i64)>,
    /// Its effect on the book's rounding; filled in by [`BookHistory::stamp`].
    pub rounding: Rounding,
}

#[derive(Debug, Clone, Copy)]
struct Kept {
    moment: BookChange,
    /// The latest time of all records up to this one. Times of several threads are not quite in the order of their records (a thread
    /// may be delayed between its number and its clock), these times are: a time cuts off a tail.
    reached_ns: u64,
}

/// A book as it was, and its changes since.
#[derive(Debug)]
pub(crate) struct PastBook {
    pub amounts: Vec<i64>,
    pub in_flight: i64,
    pub rounding: Rounding,
    pub since: Vec<BookChange>,
}

/// The last moments of a book.
#[derive(Debug, Default)]
pub(crate) struct BookHistory {
    postings: VecDeque<Posting>,
    /// Postings of the record that is being booked: they get their time when it ends.
    open: usize,
    /// Effect of that record on the rounding so far.
    open_rounding: Rounding,
    moments: VecDeque<Kept>,
    /// [`Kept::reached_ns`] of the latest record.
    reached_ns: u64,
    /// Bytes in flight before the first moment.
    first_in_flight: i64,
    /// All changes after this time are here; `None` while nothing is kept.
    complete_after_ns: Option<u64>,
}

impl BookHistory {
    /// Forgets everything, and keeps what comes from now on.
    pub fn restart(&mut self, now_ns: u64, in_flight: i64) {
        self.postings.clear();
        self.moments.clear();
        self.open = 0;
        self.open_rounding = Rounding::default();
        self.first_in_flight = in_flight;
        self.reached_ns = now_ns;
        self.complete_after_ns = Some(now_ns);
    }

    /// Whether it keeps changes.
    #[inline]
    pub fn is_kept(&self) -> bool {
        self.complete_after_ns.is_some()
    }

    #[inline]
    pub fn post(&mut self, cell: CellId, delta: i64) {
        if self.complete_after_ns.is_some() && delta != 0 {
            self.postings.push_back(Posting { reached_ns: 0, cell, delta });
            self.open += 1;
        }
    }

    #[inline]
    pub fn round(&mut self, change: Rounding) {
        self.open_rounding = self.open_rounding.plus(change);
    }

    /// The record is booked.
    #[inline]
    pub fn stamp(&mut self, mut moment: BookChange) {
        moment.rounding = std::mem::take(&mut self.open_rounding);
        let Some(complete_after_ns) = &mut self.complete_after_ns else { return };
        self.reached_ns = self.reached_ns.max(moment.time_ns);
        let reached_ns = self.reached_ns;
        let count = self.postings.len();
        for posting in self.postings.range_mut(count - self.open..) {
            posting.reached_ns = reached_ns;
        }
        self.open = 0;
        let is_news = self.moments.back().is_none_or(|last| {
            (last.moment.tracked, last.moment.in_flight) != (moment.tracked, moment.in_flight)
        });
        if is_news || moment.entered.is_some() || moment.rounding != Rounding::default() {
            self.moments.push_back(Kept { moment, reached_ns });
        }
        let old_ns = reached_ns.saturating_sub(REACH_NS);
        let mut drop = |reached_ns: u64, count: usize| {
            let goes = reached_ns < old_ns || count > MAX_ENTRIES;
            if goes {
                *complete_after_ns = (*complete_after_ns).max(reached_ns);
            }
            goes
        };
        while self.postings.front().is_some_and(|first| drop(first.reached_ns, self.postings.len())) {
            self.postings.pop_front();
        }
        while let Some(first) = self.moments.front().copied()
            && drop(first.reached_ns, self.moments.len())
        {
            self.first_in_flight = first.moment.in_flight;
            self.moments.pop_front();
        }
    }

    /// Returns the book that holds `amounts` with `rounding` now, as it was at `time_ns`; `None` if that is too long ago.
    pub fn past(&self, time_ns: u64, mut amounts: Vec<i64>, rounding: Rounding) -> Option<PastBook> {
        if time_ns < self.complete_after_ns? {
            return None;
        }
        let undone = self.postings.partition_point(|posting| posting.reached_ns <= time_ns);
        for posting in self.postings.range(undone..) {
            if let Some(amount) = amounts.get_mut(posting.cell as usize) {
                *amount = amount.wrapping_sub(posting.delta);
            }
        }
        let cut = self.moments.partition_point(|kept| kept.reached_ns <= time_ns);
        let since: Vec<BookChange> = self.moments.range(cut..).map(|kept| kept.moment).collect();
        let before = cut.checked_sub(1).and_then(|last| self.moments.get(last));
        let in_flight = before.map_or(self.first_in_flight, |kept| kept.moment.in_flight);
        let rounding = since.iter().fold(rounding, |rounding, moment| rounding.minus(moment.rounding));
        Some(PastBook { amounts, in_flight, rounding, since })
    }
}
