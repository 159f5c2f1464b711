//! Recent past of a book, for restoring it as of an earlier time.
//!
//! Agents and NVML report through different channels, so the begin of a reading may arrive after younger records. A copy of the
//! book would then mix two moments. Undoing the changes after the begin of the reading avoids that.

use crate::book::cells::CellId;
use crate::book::rounding::Rounding;
use std::collections::VecDeque;

/// Time span that the history must cover: the delay of a reading's begin on a busy machine.
const REACH_NS: u64 = 250_000_000;
/// Maximum number of entries (24 and 64 bytes each). At 100,000 blocks a second, of two postings each, 16,384 entries cover 80
/// ms.
const MAX_ENTRIES: usize = 1 << 14;

#[derive(Debug, Clone, Copy)]
struct Posting {
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
    /// For an allocation: time when its call was entered, and its bytes.
    pub entered: Option<(u64, i64)>,
    /// Effect on the book's rounding; set by [`BookHistory::stamp`].
    pub rounding: Rounding,
}

#[derive(Debug, Clone, Copy)]
struct Kept {
    moment: BookChange,
    /// Latest time of all records up to this one. Times of several threads are not exactly in record order, because a thread may
    /// be delayed between taking its number and reading the clock. These times are in order, so a time separates older from
    /// younger records.
    reached_ns: u64,
}

/// An earlier state of a book, and its changes since.
#[derive(Debug)]
pub(crate) struct PastBook {
    pub amounts: Vec<i64>,
    pub in_flight: i64,
    pub rounding: Rounding,
    pub since: Vec<BookChange>,
}

#[derive(Debug, Default)]
pub(crate) struct BookHistory {
    postings: VecDeque<Posting>,
    /// Number of postings of the record being booked; they get their time when it is finished.
    open: usize,
    /// Effect of that record on the rounding so far.
    open_rounding: Rounding,
    moments: VecDeque<Kept>,
    reached_ns: u64,
    /// Bytes in flight before the first moment.
    first_in_flight: i64,
    /// All changes after this time are present; `None` while the history is off.
    complete_after_ns: Option<u64>,
}

impl BookHistory {
    /// Clears the history and starts to keep changes.
    pub fn restart(&mut self, now_ns: u64, in_flight: i64) {
        self.postings.clear();
        self.moments.clear();
        self.open = 0;
        self.open_rounding = Rounding::default();
        self.first_in_flight = in_flight;
        self.reached_ns = now_ns;
        self.complete_after_ns = Some(now_ns);
    }

    /// Whether the history is on.
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

    /// Restores the book at `time_ns` from its present `amounts` and `rounding`; `None` if that is too long ago.
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
