//! The last moments of a book, so that it can be told as it was at a time that has passed.
//!
//! Agents and NVML speak through different channels: that a reading began may be heard after records that are younger
//! than it. Copying the book then would mix two moments; undoing what came after the reading's beginning does not.

use crate::book::CellId;
use crate::rounding::Rounding;
use std::collections::VecDeque;

/// How far back it must reach: what a reading's first word can need to arrive on a busy machine.
const REACH_NS: u64 = 250_000_000;
/// Entries kept at most (24 and 64 bytes each); at 100,000 blocks a second 16,384 are 80 ms.
const MAX_ENTRIES: usize = 1 << 14;
/// Times of several threads are not quite in the order of their records: by no more than this.
const DISORDER_NS: u64 = 20_000_000;

#[derive(Debug, Clone, Copy)]
struct Posting {
    time_ns: u64,
    cell: CellId,
    delta: i64,
}

/// A record that moved `tracked`, or may have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    pub time_ns: u64,
    pub tracked: i64,
    pub in_flight: i64,
    /// Of an allocation: when its call was entered, and its bytes.
    pub entered: Option<(u64, i64)>,
    /// What it did to the book's rounding; filled in by [`Trail::stamp`].
    pub rounding: Rounding,
}

/// A book as it was, and what has happened to it since.
#[derive(Debug)]
pub(crate) struct Past {
    pub amounts: Vec<i64>,
    pub in_flight: i64,
    pub rounding: Rounding,
    pub since: Vec<Moment>,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Trail {
    postings: VecDeque<Posting>,
    /// Postings of the record that is being booked: their time is told when it ends.
    open: usize,
    /// What that record has done to the rounding so far.
    open_rounding: Rounding,
    moments: VecDeque<Moment>,
    /// In flight before the first moment.
    first_in_flight: i64,
    /// Everything after this is here; `None` while nothing is kept.
    complete_after_ns: Option<u64>,
}

impl Trail {
    /// Forgets what it knows, and keeps what comes from now on.
    pub fn restart(&mut self, now_ns: u64, in_flight: i64) {
        self.postings.clear();
        self.moments.clear();
        self.open = 0;
        self.open_rounding = Rounding::default();
        self.first_in_flight = in_flight;
        self.complete_after_ns = Some(now_ns);
    }

    /// Whether it keeps anything.
    #[inline]
    pub fn is_kept(&self) -> bool {
        self.complete_after_ns.is_some()
    }

    #[inline]
    pub fn post(&mut self, cell: CellId, delta: i64) {
        if self.complete_after_ns.is_some() && delta != 0 {
            self.postings.push_back(Posting { time_ns: 0, cell, delta });
            self.open += 1;
        }
    }

    #[inline]
    pub fn round(&mut self, change: Rounding) {
        self.open_rounding = self.open_rounding.plus(change);
    }

    /// The record is booked.
    #[inline]
    pub fn stamp(&mut self, mut moment: Moment) {
        moment.rounding = std::mem::take(&mut self.open_rounding);
        let Some(complete_after_ns) = &mut self.complete_after_ns else { return };
        let count = self.postings.len();
        for posting in self.postings.range_mut(count - self.open..) {
            posting.time_ns = moment.time_ns;
        }
        self.open = 0;
        let is_news = self
            .moments
            .back()
            .is_none_or(|last| (last.tracked, last.in_flight) != (moment.tracked, moment.in_flight));
        if is_news || moment.entered.is_some() || moment.rounding != Rounding::default() {
            self.moments.push_back(moment);
        }
        let old_ns = moment.time_ns.saturating_sub(REACH_NS);
        let mut drop = |time_ns: u64, count: usize| {
            let goes = time_ns < old_ns || count > MAX_ENTRIES;
            if goes {
                *complete_after_ns = (*complete_after_ns).max(time_ns + DISORDER_NS);
            }
            goes
        };
        while self.postings.front().is_some_and(|first| drop(first.time_ns, self.postings.len())) {
            self.postings.pop_front();
        }
        while let Some(first) = self.moments.front().copied()
            && drop(first.time_ns, self.moments.len())
        {
            self.first_in_flight = first.in_flight;
            self.moments.pop_front();
        }
    }

    /// The book that holds `amounts` with `rounding` now, as it was at `time_ns`; `None` if that is too long ago.
    pub fn past(&self, time_ns: u64, mut amounts: Vec<i64>, rounding: Rounding) -> Option<Past> {
        if time_ns < self.complete_after_ns? {
            return None;
        }
        let oldest = time_ns.saturating_sub(DISORDER_NS);
        let recent = self.postings.iter().rev().take_while(|posting| posting.time_ns >= oldest);
        for posting in recent.filter(|posting| posting.time_ns > time_ns) {
            if let Some(amount) = amounts.get_mut(posting.cell as usize) {
                *amount = amount.wrapping_sub(posting.delta);
            }
        }
        let recent = self.moments.iter().rev().take_while(|moment| moment.time_ns >= oldest);
        let mut since: Vec<Moment> = recent.filter(|moment| moment.time_ns > time_ns).copied().collect();
        since.reverse();
        let before = self.moments.iter().rev().find(|moment| moment.time_ns <= time_ns);
        let in_flight = before.map_or(self.first_in_flight, |moment| moment.in_flight);
        let rounding = since.iter().fold(rounding, |rounding, moment| rounding.minus(moment.rounding));
        Some(Past { amounts, in_flight, rounding, since })
    }
}
