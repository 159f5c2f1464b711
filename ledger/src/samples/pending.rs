//! Samples of NVML, joined to `tracked` at their own time.
//!
//! A reading is an interval [t0, t1]. When it begins, every process on the device gets a pending sample. The sample is **marked** (the
//! book is copied) when the process's records have been applied up to t0. It is **closed** when they have been applied up to t1; record
//! times and watermarks say how far that is. Changes of `tracked` in between make it torn, with its extremes. A process whose agent is
//! silent does not delay it: the sample is closed as stale.

use crate::book::recent_past::PastBook;
use crate::book::{Book, Range};
use gpumem_model::gap::Parts;
use gpumem_wire::{Absence, Body, Record};
use std::sync::Arc;

/// Changes that one reading can hold; more are summed up, and its bounds may then be too wide.
const MAX_CHANGES: usize = 4096;

/// One reading of NVML for one process and device, with what the ledger had at that time.
#[derive(Debug, Clone, PartialEq)]
pub struct ClosedSample {
    /// Number of the reading.
    pub number: u64,
    /// When it began.
    pub t0_ns: u64,
    /// When it ended.
    pub t1_ns: u64,
    /// What NVML charges to the process, or why that is unknown.
    pub used_bytes: Result<u64, Absence>,
    /// The process lists of the reading failed: absence from them proves nothing.
    pub list_failed: bool,
    /// `tracked` at t0; absent for a process without an agent.
    pub tracked_bytes: Option<i64>,
    /// Lowest and highest `tracked` in [t0, t1], frees in flight included.
    pub tracked_range: Option<(i64, i64)>,
    /// Bytes older than the agent.
    pub predates_bytes: i64,
    /// Memory moved, or a call was in flight, while NVML was read.
    pub torn: bool,
    /// The agent's records had not reached t1 when the sample was closed.
    pub stale: bool,
    /// The book may not be that of t0: records were lost before it and no resync had ended, or the begin of the reading arrived so late
    /// that later changes cannot be undone.
    pub partial: bool,
    /// The book at t0, by index of `ProcessView::cells`.
    pub amounts: Arc<[i64]>,
    /// Parts of its untrackable; absent where that is.
    pub parts: Option<Parts>,
}

impl ClosedSample {
    /// `used` and `tracked` are of one moment.
    pub fn is_certain(&self) -> bool {
        !self.torn && !self.stale && !self.partial
    }

    /// used - tracked, signed; absent if either is absent.
    pub fn gap_bytes(&self) -> Option<i64> {
        Some(i64::try_from(self.used_bytes.ok()?).ok()?.wrapping_sub(self.tracked_bytes?))
    }

    /// The gap without the bytes that are older than the agent.
    pub fn untrackable_bytes(&self) -> Option<i64> {
        Some(self.gap_bytes()?.wrapping_sub(self.predates_bytes))
    }
}

/// The gap at a peak of `tracked`. NVML was not read at that instant, so the gap is that of the nearest sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeakGap {
    /// Untrackable at that sample.
    pub untrackable_bytes: i64,
    /// What predated the agent at that sample.
    pub predates_bytes: i64,
    /// Distance of the sample from the peak; negative if it was before.
    pub distance_ns: i64,
    /// `tracked` was at its peak when the sample was taken.
    pub exact: bool,
    /// Parts of that untrackable.
    pub parts: Option<Parts>,
}

#[derive(Debug)]
struct Mark {
    tracked: i64,
    amounts: Arc<[i64]>,
    range: Range,
    rounding: i64,
    /// Tag of the last record before.
    near: u32,
    torn: bool,
    partial: bool,
}

/// An allocation may be charged as soon as its call is entered. Until it is recorded, `tracked` may be lower than NVML's number by its
/// bytes. When a pool is trimmed, `tracked` may be higher: then `bytes` is negative.
#[derive(Debug, Clone, Copy)]
struct Entered {
    entered_ns: u64,
    bytes: i64,
    /// Changes that were recorded before it.
    changes: usize,
}

#[derive(Debug)]
pub(crate) struct Pending {
    pub book: u8,
    number: u64,
    t0_ns: u64,
    t1_ns: Option<u64>,
    pub used: Result<u64, Absence>,
    list_failed: bool,
    mark: Option<Mark>,
    /// (time, `tracked` without and with what calls in flight may have given back) after t0, in the order of the records.
    changes: Vec<(u64, Range)>,
    /// Bytes that may have been charged or freed before they were recorded, which was after the mark.
    entered: Vec<Entered>,
    /// Begin of the earliest driver call that was still in flight after t0.
    busy_since_ns: u64,
    /// Records were lost while it waited: the book at its mark may not be that of t0.
    doubtful: bool,
}

impl Pending {
    pub fn new(book: u8, number: u64, t0_ns: u64) -> Self {
        let used = Err(Absence::NotListed);
        let busy_since_ns = u64::MAX;
        Pending {
            book,
            number,
            t0_ns,
            t1_ns: None,
            used,
            list_failed: false,
            mark: None,
            changes: Vec::new(),
            entered: Vec::new(),
            busy_since_ns,
            doubtful: false,
        }
    }

    pub fn is(&self, book: u8, number: u64) -> bool {
        self.book == book && self.number == number
    }

    /// The next time at which this sample has to be looked at.
    pub fn boundary_ns(&self) -> u64 {
        if self.mark.is_none() { self.t0_ns } else { self.t1_ns.unwrap_or(u64::MAX) }
    }

    pub fn is_marked(&self) -> bool {
        self.mark.is_some()
    }

    pub fn starts_by(&self, done_ns: u64) -> bool {
        done_ns >= self.t0_ns
    }

    pub fn begins_after(&self, time_ns: u64) -> bool {
        self.t0_ns > time_ns
    }

    pub fn ends_by(&self, done_ns: u64) -> bool {
        self.t1_ns.is_some_and(|t1| done_ns >= t1)
    }

    /// Copies the book. `late`: `tracked` had changed after t0, and the changes cannot be undone.
    pub fn mark(&mut self, book: &mut Book, in_flight_bytes: i64, near: u32, partial: bool, late: bool) {
        let mut range = Range::at(book.tracked);
        range.include(book.tracked.wrapping_sub(in_flight_bytes));
        let torn = late || in_flight_bytes != 0;
        let partial = partial || self.doubtful || late;
        let (tracked, rounding) = (book.tracked, book.rounding.bytes());
        let amounts = book.shared_amounts();
        self.mark = Some(Mark { tracked, amounts, range, rounding, near, torn, partial });
    }

    /// Takes the book as it was when the reading began, and the changes since.
    pub fn mark_past(&mut self, past: PastBook, near: u32, partial: bool) {
        let tracked = past.amounts.iter().fold(0_i64, |sum, &bytes| sum.wrapping_add(bytes));
        let mut range = Range::at(tracked);
        range.include(tracked.wrapping_sub(past.in_flight));
        let torn = past.in_flight != 0;
        let (amounts, rounding) = (past.amounts.into(), past.rounding.bytes());
        self.mark = Some(Mark { tracked, amounts, range, rounding, near, torn, partial });
        for moment in past.since {
            if let Some((entered_ns, bytes)) = moment.entered {
                self.entered(entered_ns, bytes);
            }
            self.change(moment.time_ns, moment.tracked, moment.in_flight);
        }
    }

    /// Notes that `tracked` changed at `time_ns`, after the mark, or that a call was entered that may change it.
    pub fn change(&mut self, time_ns: u64, tracked: i64, in_flight_bytes: i64) {
        let mut range = Range::at(tracked);
        range.include(tracked.wrapping_sub(in_flight_bytes));
        self.change_range(time_ns, range);
    }

    fn change_range(&mut self, time_ns: u64, range: Range) {
        let Some(mark) = &self.mark else { return };
        if self.changes.is_empty() && range == Range::at(mark.tracked) || self.is_over(time_ns) {
            return;
        }
        self.make_room();
        self.changes.push((time_ns, range));
    }

    /// Notes `bytes` that are about to be booked and may have come (negative: gone) since `entered_ns`.
    pub fn entered(&mut self, entered_ns: u64, bytes: i64) {
        if self.mark.is_some() && !self.is_over(entered_ns) {
            self.make_room();
            self.entered.push(Entered { entered_ns, bytes, changes: self.changes.len() });
        }
    }

    fn is_over(&self, time_ns: u64) -> bool {
        self.t1_ns.is_some_and(|t1| time_ns > t1)
    }

    /// Sums up changes when there are too many: bounds may become too wide, and still hold.
    fn make_room(&mut self) {
        if self.changes.len() < MAX_CHANGES && self.entered.len() < MAX_CHANGES {
            return;
        }
        let (range, torn) = self.bounds();
        if let (Some(mark), Some(range)) = (&mut self.mark, range) {
            (mark.range, mark.torn) = (range, torn);
        }
        self.changes.clear();
        self.entered.clear();
    }

    /// Returns the extremes of what NVML may have charged in the reading, and whether that is more than one value.
    ///
    /// Between two changes `tracked` is constant. What was entered before the second change and is recorded after the first may have
    /// happened already.
    fn bounds(&self) -> (Option<Range>, bool) {
        let Some(mark) = &self.mark else { return (None, false) };
        // The latest time by which each change had happened; times of several threads are not quite in the order of their records.
        let times = self.changes.iter().map(|&(time_ns, _)| time_ns);
        let ends: Vec<u64> = times
            .scan(0, |latest: &mut u64, time_ns| {
                *latest = time_ns.max(*latest);
                Some(*latest)
            })
            .collect();
        // What is open after each change: first what comes, then what goes.
        let mut steps = vec![[0_i64; 2]; self.changes.len() + 2];
        let mut torn = mark.torn;
        for entered in self.entered.iter().filter(|entered| !self.is_over(entered.entered_ns)) {
            let first = ends.partition_point(|&end| end < entered.entered_ns).min(entered.changes);
            let kind = usize::from(entered.bytes < 0);
            for (place, bytes) in [(first, entered.bytes), (entered.changes + 1, -entered.bytes)] {
                if let Some(step) = steps.get_mut(place) {
                    step[kind] = step[kind].wrapping_add(bytes);
                }
            }
            torn = true;
        }
        let mut range = mark.range;
        let [mut above, mut below] = steps.first().copied().unwrap_or_default();
        range.include(mark.range.max.wrapping_add(above));
        range.include(mark.range.min.wrapping_add(below));
        for (&(time_ns, change), [comes, goes]) in self.changes.iter().zip(steps.iter().skip(1)) {
            (above, below) = (above.wrapping_add(*comes), below.wrapping_add(*goes));
            if !self.is_over(time_ns) {
                range.include(change.min.wrapping_add(below));
                range.include(change.max.wrapping_add(above));
                torn = true;
            }
        }
        (Some(range), torn)
    }

    /// The reading ended.
    pub fn end(&mut self, t1_ns: u64) {
        self.t1_ns = Some(t1_ns);
    }

    /// End of the reading, if it was reported.
    pub fn ended_ns(&self) -> Option<u64> {
        self.t1_ns
    }

    /// The process lists of the reading failed: absence from them proves nothing.
    pub fn fail(&mut self) {
        if self.used == Err(Absence::NotListed) {
            (self.used, self.list_failed) = (Err(Absence::Unknown), true);
        }
    }

    /// Records were lost that may belong to it.
    pub fn doubt(&mut self) {
        self.doubtful = true;
        if let Some(mark) = &mut self.mark {
            mark.partial = true;
        }
    }

    /// Notes a driver call that was entered at `since_ns` and is in flight at `now_ns`. Whether it overlaps the reading is decided when
    /// the sample closes.
    pub fn in_flight(&mut self, since_ns: u64, now_ns: u64) {
        if now_ns >= self.t0_ns {
            self.busy_since_ns = self.busy_since_ns.min(since_ns);
        }
    }

    /// Tag of the last record before the reading; 0 for none.
    pub fn near(&self) -> u32 {
        self.mark.as_ref().map_or(0, |mark| mark.near)
    }

    /// Closes the sample as it is now, with rounding as its only part, for a process with (`covered`) or without an agent.
    pub fn close(self, predates_bytes: i64, stale: bool, covered: bool) -> ClosedSample {
        let (range, torn) = self.bounds();
        let mark = self.mark.filter(|_| covered);
        let busy = self.busy_since_ns <= self.t1_ns.unwrap_or(self.t0_ns);
        let range = range.filter(|_| covered).map(|range| (range.min, range.max));
        ClosedSample {
            number: self.number,
            t0_ns: self.t0_ns,
            t1_ns: self.t1_ns.unwrap_or(self.t0_ns),
            used_bytes: self.used,
            list_failed: self.list_failed,
            tracked_bytes: mark.as_ref().map(|mark| mark.tracked),
            tracked_range: range,
            predates_bytes,
            torn: mark.is_some() && (torn || busy),
            stale,
            partial: mark.as_ref().is_some_and(|mark| mark.partial),
            parts: mark.as_ref().map(|mark| Parts { rounding_bytes: mark.rounding, ..Parts::default() }),
            amounts: mark.map_or_else(Default::default, |mark| mark.amounts),
        }
    }
}

/// How long samples wait for a call in flight: whether its memory is in the reading is known only from its record.
const MAX_CALL_WAIT_NS: u64 = 250_000_000;

/// Time up to which all records have come, according to a watermark.
pub(crate) fn known_until(watermark: &Record<'_>) -> u64 {
    let time_ns = watermark.stamp.time_ns;
    match watermark.body {
        Body::Watermark { in_flight_since_ns: since_ns @ 1.., .. }
            if time_ns.saturating_sub(since_ns) < MAX_CALL_WAIT_NS =>
        {
            since_ns.min(time_ns).saturating_sub(1)
        }
        _ => time_ns,
    }
}
