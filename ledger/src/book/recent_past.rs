//! Recent changes of a book, from which its state at an earlier time can be restored.
//!
//! Agents and NVML report through different channels. So the begin of an NVML reading may arrive after records that are younger
//! than it. The book is then restored as of the begin of the reading, by undoing its changes since.

use crate::book::cells::CellId;
use crate::book::rounding::Rounding;

/// Time that the history covers (ns): the delay with which the begin of a reading arrives on a busy machine.
const REACH_NS: u64 = 250_000_000;
/// Maximum length of a list of changes; a longer one loses its older half. 8,192 postings cover 80 ms of 100,000 blocks a second.
const MAX_CHANGES: usize = 1 << 14;
/// In place of a cell: the bytes come from outside of the book.
const OUTSIDE: CellId = CellId::MAX;

/// Bytes that moved from a cell to another.
#[derive(Debug, Clone, Copy)]
struct Posting {
    from: CellId,
    to: CellId,
    bytes: i64,
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

/// The latest changes, each with the latest time of all records up to it (ns). The records' own times may be out of order: a thread
/// may be delayed between taking its record number and reading the clock.
#[derive(Debug)]
struct Latest<T>(Vec<(u64, T)>);

impl<T> Default for Latest<T> {
    fn default() -> Self {
        Latest(Vec::new())
    }
}

impl<T> Latest<T> {
    /// Adds a change. Returns the last one that was dropped to make room.
    #[inline]
    fn push(&mut self, reached_ns: u64, change: T) -> Option<(u64, T)> {
        let is_full = self.0.len() == self.0.capacity();
        let dropped = if is_full { self.make_room(reached_ns) } else { None };
        self.0.push((reached_ns, change));
        dropped
    }

    /// Drops the changes that are too old, if they are at least a quarter of the list; else the list grows. Dropping moves the rest
    /// of the list, so dropping a few each time would cost as much for each record as a long list takes to move.
    #[cold]
    fn make_room(&mut self, now_ns: u64) -> Option<(u64, T)> {
        let too_old = self.up_to(old_ns(now_ns));
        let too_old = if too_old >= self.0.len() / 4 { too_old } else { 0 };
        let too_many = if self.0.len() >= MAX_CHANGES { MAX_CHANGES / 2 } else { 0 };
        self.0.drain(..too_old.max(too_many)).next_back()
    }

    /// Returns the number of changes up to a time.
    fn up_to(&self, time_ns: u64) -> usize {
        self.0.partition_point(|(reached_ns, _)| *reached_ns <= time_ns)
    }
}

/// Returns the time of the last changes that the history need not have.
fn old_ns(now_ns: u64) -> u64 {
    now_ns.saturating_sub(REACH_NS + 1)
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
    postings: Latest<Posting>,
    changes: Latest<BookChange>,
    /// Change of the rounding by the record being booked, so far.
    open_rounding: Rounding,
    /// Latest time of all records so far, with the one being booked (ns).
    reached_ns: u64,
    /// Bytes that driver calls in flight may have freed before the first of `changes`.
    first_in_flight: i64,
    /// Time after which all changes are present (ns); `None` while no history is kept.
    complete_after_ns: Option<u64>,
}

impl BookHistory {
    /// Clears the history; changes from now on are kept.
    pub fn restart(&mut self, now_ns: u64, in_flight: i64) {
        self.postings.0.clear();
        self.changes.0.clear();
        self.open_rounding = Rounding::default();
        self.first_in_flight = in_flight;
        self.reached_ns = now_ns;
        self.complete_after_ns = Some(now_ns);
    }

    #[inline]
    pub fn is_on(&self) -> bool {
        self.complete_after_ns.is_some()
    }

    /// Begins or continues a record of `time_ns`, before it changes the book.
    #[inline]
    pub fn begin_record(&mut self, time_ns: u64) {
        self.reached_ns = self.reached_ns.max(time_ns);
    }

    /// Notes bytes that a cell gets from outside of the book.
    #[inline]
    pub fn post(&mut self, cell: CellId, bytes: i64) {
        self.shift(OUTSIDE, cell, bytes);
    }

    #[inline]
    pub fn shift(&mut self, from: CellId, to: CellId, bytes: i64) {
        if self.is_on() && bytes != 0 {
            let dropped = self.postings.push(self.reached_ns, Posting { from, to, bytes });
            self.complete_after_ns = self.complete_after_ns.max(dropped.map(|(reached_ns, _)| reached_ns));
        }
    }

    #[inline]
    pub fn round(&mut self, change: Rounding) {
        self.open_rounding = self.open_rounding.plus(change);
    }

    #[inline]
    pub fn end_record(&mut self, mut change: BookChange) {
        change.rounding = std::mem::take(&mut self.open_rounding);
        let is_different = self
            .changes
            .0
            .last()
            .is_none_or(|(_, last)| (last.tracked, last.in_flight) != (change.tracked, change.in_flight));
        if self.is_on()
            && (is_different || change.entered.is_some() || change.rounding != Rounding::default())
        {
            self.add_change(change);
        }
    }

    /// Adds a change. Blocks cause no changes, because they only move bytes between cells.
    #[inline(never)]
    fn add_change(&mut self, change: BookChange) {
        let dropped = self.changes.push(self.reached_ns, change);
        self.first_in_flight = dropped.map_or(self.first_in_flight, |(_, last)| last.in_flight);
        self.complete_after_ns = self.complete_after_ns.max(dropped.map(|(reached_ns, _)| reached_ns));
    }

    /// Returns the book at `time_ns`, given its present `amounts` and `rounding`; `None` if the history does not reach back so
    /// far.
    pub fn past(&self, time_ns: u64, mut amounts: Vec<i64>, rounding: Rounding) -> Option<PastBook> {
        let (old_ns, postings, changes) = (old_ns(self.reached_ns), &self.postings, &self.changes);
        let is_beyond_reach = postings.up_to(time_ns) < postings.up_to(old_ns)
            || changes.up_to(time_ns) < changes.up_to(old_ns);
        if time_ns < self.complete_after_ns? || is_beyond_reach {
            return None;
        }
        for (_, Posting { from, to, bytes }) in &self.postings.0[self.postings.up_to(time_ns)..] {
            for (cell, bytes) in [(*from, *bytes), (*to, bytes.wrapping_neg())] {
                if let Some(amount) = amounts.get_mut(cell as usize) {
                    *amount = amount.wrapping_add(bytes);
                }
            }
        }
        let (before, since) = self.changes.0.split_at(self.changes.up_to(time_ns));
        let in_flight = before.last().map_or(self.first_in_flight, |(_, last)| last.in_flight);
        let since: Vec<BookChange> = since.iter().map(|(_, change)| *change).collect();
        let rounding = since.iter().fold(rounding, |rounding, change| rounding.minus(change.rounding));
        Some(PastBook { amounts, in_flight, rounding, since })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_made_rarely_at_every_rate() {
        for in_reach in [1000, 4000, 4090, 4095, 8180, 16_380, 100_000] {
            let mut latest = Latest::default();
            let is_dropped = |n: &u64| latest.push(n * REACH_NS / in_reach, ()).is_some();
            let drops = (0..100_000).filter(is_dropped).count();
            assert!(drops <= 400, "{drops} with {in_reach} changes in reach");
            assert!(latest.0.capacity() <= MAX_CHANGES);
        }
    }
}
