//! Recent changes of a book, from which its state at an earlier time can be restored.
//!
//! Agents and NVML report through different channels. So the begin of an NVML reading may arrive after records that are younger
//! than it. The book is then restored as of the begin of the reading, by undoing its changes since.

use crate::book::cells::CellId;
use crate::book::rounding::Rounding;
use std::collections::VecDeque;

/// Time that the history covers (ns): the delay with which the begin of a reading arrives on a busy machine.
const REACH_NS: u64 = 250_000_000;
/// Maximum length of `postings` and of `entries`. 100,000 blocks a second have two postings each, so 16,384 postings cover 80 ms.
const MAX_ENTRIES: usize = 1 << 14;

#[derive(Debug, Clone, Copy)]
struct Posting {
    /// As in [`HistoryEntry`].
    reached_ns: u64,
    cell: CellId,
    delta: i64,
}

/// A record that changed `tracked`, or may have changed it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BookChange {
    pub time_ns: u64,
    pub tracked: i64,
    pub in_flight: i64,
    /// For an allocation: time at which its call was entered (ns), and its bytes.
    pub entered: Option<(u64, i64)>,
    /// Change of the book's rounding; set by [`BookHistory::end_record`].
    pub rounding: Rounding,
}

#[derive(Debug, Clone, Copy)]
struct HistoryEntry {
    change: BookChange,
    /// Latest time of all records up to this one (ns). The records' own times may be out of order: a thread may be delayed
    /// between taking its record number and reading the clock.
    reached_ns: u64,
}

/// Amounts of a book at an earlier time, and their changes since.
#[derive(Debug)]
pub(crate) struct PastBook {
    pub amounts: Vec<i64>,
    /// Bytes that calls in flight (frees that have not returned) may already have freed.
    pub in_flight: i64,
    pub rounding: Rounding,
    pub since: Vec<BookChange>,
}

#[derive(Debug, Default)]
pub(crate) struct BookHistory {
    postings: VecDeque<Posting>,
    /// Number of postings (changes of one cell) of the record being booked; they get their time when the record ends.
    open: usize,
    /// Change of the rounding by that record so far.
    open_rounding: Rounding,
    entries: VecDeque<HistoryEntry>,
    reached_ns: u64,
    /// Bytes that driver calls in flight may have freed before the first entry.
    first_in_flight: i64,
    /// Time after which all changes are present (ns); `None` while no history is kept.
    complete_after_ns: Option<u64>,
}

impl BookHistory {
    /// Clears the history; changes from now on are kept.
    pub fn restart(&mut self, now_ns: u64, in_flight: i64) {
        self.postings.clear();
        self.entries.clear();
        self.open = 0;
        self.open_rounding = Rounding::default();
        self.first_in_flight = in_flight;
        self.reached_ns = now_ns;
        self.complete_after_ns = Some(now_ns);
    }

    #[inline]
    pub fn is_on(&self) -> bool {
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

    /// Ends the record that was booked: its postings get its time. Drops entries that are too old or too many.
    #[inline]
    pub fn end_record(&mut self, mut change: BookChange) {
        change.rounding = std::mem::take(&mut self.open_rounding);
        let Some(complete_after_ns) = &mut self.complete_after_ns else { return };
        self.reached_ns = self.reached_ns.max(change.time_ns);
        let reached_ns = self.reached_ns;
        let count = self.postings.len();
        for posting in self.postings.range_mut(count - self.open..) {
            posting.reached_ns = reached_ns;
        }
        self.open = 0;
        let is_different = self.entries.back().is_none_or(|last| {
            (last.change.tracked, last.change.in_flight) != (change.tracked, change.in_flight)
        });
        if is_different || change.entered.is_some() || change.rounding != Rounding::default() {
            self.entries.push_back(HistoryEntry { change, reached_ns });
        }
        let old_ns = reached_ns.saturating_sub(REACH_NS);
        let mut drop = |reached_ns: u64, count: usize| {
            let is_dropped = reached_ns < old_ns || count > MAX_ENTRIES;
            if is_dropped {
                *complete_after_ns = (*complete_after_ns).max(reached_ns);
            }
            is_dropped
        };
        while self.postings.front().is_some_and(|first| drop(first.reached_ns, self.postings.len())) {
            self.postings.pop_front();
        }
        while let Some(first) = self.entries.front().copied()
            && drop(first.reached_ns, self.entries.len())
        {
            self.first_in_flight = first.change.in_flight;
            self.entries.pop_front();
        }
    }

    /// Returns the book at `time_ns`, given its present `amounts` and `rounding`; `None` if the history does not reach back so
    /// far.
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
        let cut = self.entries.partition_point(|entry| entry.reached_ns <= time_ns);
        let since: Vec<BookChange> = self.entries.range(cut..).map(|entry| entry.change).collect();
        let before = cut.checked_sub(1).and_then(|last| self.entries.get(last));
        let in_flight = before.map_or(self.first_in_flight, |entry| entry.change.in_flight);
        let rounding = since.iter().fold(rounding, |rounding, change| rounding.minus(change.rounding));
        Some(PastBook { amounts, in_flight, rounding, since })
    }
}
