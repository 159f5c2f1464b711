//! NVML samples, joined with `tracked` at their own time.
//!
//! A reading is an interval [t0, t1]. When it begins, every process on the device gets a pending sample. The sample is **marked**
//! (the book is copied) when the process's records have been applied up to t0. It is **closed** when they have been applied up to
//! t1, which record times and watermarks show. If `tracked` changes in between, the sample is torn and contains the extremes of
//! `tracked`. A silent agent does not delay the sample: it is then closed as stale.

use crate::book::recent_past::PastBook;
use crate::book::{Book, Range};
use crate::rules::holdings::Holdings;
use gpumem_model::gap::UntrackableParts;
use gpumem_wire::{Absence, Body, Record};
use std::sync::Arc;

/// Maximum number of changes that one reading can hold; further ones are merged, which may make its bounds too wide.
const MAX_CHANGES: usize = 4096;

/// One NVML reading for one process and device, with the ledger's state at that time.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct ClosedSample {
    pub number: u64,
    pub t0_ns: u64,
    pub t1_ns: u64,
    /// Bytes that NVML charges to the process, or why they are unknown.
    pub used_bytes: Result<u64, Absence>,
    /// The process lists of the reading failed: absence from them proves nothing.
    pub list_failed: bool,
    /// `tracked` at t0; absent for a process without an agent.
    pub tracked_bytes: Option<i64>,
    /// Lowest and highest `tracked` in [t0, t1], frees in flight included.
    pub tracked_range: Option<(i64, i64)>,
    /// Bytes allocated before the agent started.
    pub predates_bytes: i64,
    /// Memory changed, or a call was in flight, while NVML was read.
    pub torn: bool,
    /// The agent's records had not reached t1 when the sample was closed.
    pub stale: bool,
    /// The book may not be that of t0. Either records were lost before t0 and no resync had completed, or the begin of the
    /// reading arrived so late that later changes cannot be undone.
    pub partial: bool,
    /// The book at t0, by index of `ProcessView::cells`.
    pub amounts: Arc<[i64]>,
    /// Parts of the untrackable bytes; absent if these are unknown.
    pub parts: Option<UntrackableParts>,
}

impl ClosedSample {
    /// Whether `used` and `tracked` belong to the same moment.
    pub fn is_certain(&self) -> bool {
        !self.torn && !self.stale && !self.partial
    }

    /// Returns used minus tracked, signed; `None` if either is unknown.
    pub fn gap_bytes(&self) -> Option<i64> {
        Some(i64::try_from(self.used_bytes.ok()?).ok()?.wrapping_sub(self.tracked_bytes?))
    }

    /// Returns the gap without the bytes allocated before the agent started.
    pub fn untrackable_bytes(&self) -> Option<i64> {
        Some(self.gap_bytes()?.wrapping_sub(self.predates_bytes))
    }
}

/// The gap at a peak of `tracked`. NVML was not read at that instant, so the gap is that of the nearest sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct PeakGap {
    pub untrackable_bytes: i64,
    pub predates_bytes: i64,
    /// Distance of the sample from the peak; negative if it was before.
    pub distance_ns: i64,
    /// `tracked` was at its peak when the sample was taken.
    pub exact: bool,
    pub parts: Option<UntrackableParts>,
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

/// A call that may have changed NVML's number since it was entered. Until it is recorded, `tracked` may be lower than NVML's
/// number by `bytes`. While a pool is trimmed, `tracked` may be higher: then `bytes` is negative.
#[derive(Debug, Clone, Copy)]
struct Entered {
    entered_ns: u64,
    bytes: i64,
    /// Number of changes recorded before it.
    changes: usize,
}

#[derive(Debug)]
pub(crate) struct Pending {
    pub book: u8,
    number: u64,
    pub t0_ns: u64,
    /// End of the reading, once it was reported.
    pub t1_ns: Option<u64>,
    pub used: Result<u64, Absence>,
    list_failed: bool,
    mark: Option<Mark>,
    /// Time, and `tracked` without and with the bytes that calls in flight may have freed, of each change after t0, in record
    /// order.
    changes: Vec<(u64, Range)>,
    /// Calls recorded after the mark whose bytes may have been charged or freed before.
    entered: Vec<Entered>,
    /// Begin of the earliest driver call that was still in flight after t0.
    busy_since_ns: u64,
    /// Records were lost while the sample waited: the book at its mark may not be that of t0.
    doubtful: bool,
}

impl Pending {
    pub fn new(book: u8, number: u64, t0_ns: u64) -> Self {
        Pending {
            book,
            number,
            t0_ns,
            t1_ns: None,
            used: Err(Absence::NotListed),
            list_failed: false,
            mark: None,
            changes: Vec::new(),
            entered: Vec::new(),
            busy_since_ns: u64::MAX,
            doubtful: false,
        }
    }

    pub fn is(&self, book: u8, number: u64) -> bool {
        self.book == book && self.number == number
    }

    /// Returns the next time at which this sample must be checked.
    pub fn boundary_ns(&self) -> u64 {
        if self.mark.is_none() { self.t0_ns } else { self.t1_ns.unwrap_or(u64::MAX) }
    }

    pub fn is_marked(&self) -> bool {
        self.mark.is_some()
    }

    /// Copies the book. `late`: `tracked` had changed after t0, and the changes cannot be undone.
    pub fn mark(&mut self, book: &mut Book, in_flight_bytes: i64, near: u32, partial: bool, late: bool) {
        let range = Range::with_in_flight(book.tracked, in_flight_bytes);
        let torn = late || in_flight_bytes != 0;
        let partial = partial || self.doubtful || late;
        let (tracked, rounding) = (book.tracked, book.rounding.bytes());
        let amounts = book.shared_amounts();
        self.mark = Some(Mark { tracked, amounts, range, rounding, near, torn, partial });
    }

    /// Takes the book at the begin of the reading, and the changes since.
    pub fn mark_past(&mut self, past: PastBook, near: u32, partial: bool) {
        let tracked = past.amounts.iter().fold(0_i64, |sum, &bytes| sum.wrapping_add(bytes));
        let range = Range::with_in_flight(tracked, past.in_flight);
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
        let range = Range::with_in_flight(tracked, in_flight_bytes);
        let Some(mark) = &self.mark else { return };
        if self.changes.is_empty() && range == Range::at(mark.tracked) || self.is_over(time_ns) {
            return;
        }
        self.make_room();
        self.changes.push((time_ns, range));
    }

    /// Notes `bytes` that are about to be booked and may have been charged (negative: freed) since `entered_ns`.
    pub fn entered(&mut self, entered_ns: u64, bytes: i64) {
        if self.mark.is_some() && !self.is_over(entered_ns) {
            self.make_room();
            self.entered.push(Entered { entered_ns, bytes, changes: self.changes.len() });
        }
    }

    fn is_over(&self, time_ns: u64) -> bool {
        self.t1_ns.is_some_and(|t1| time_ns > t1)
    }

    /// Merges changes when there are too many: bounds may become too wide, but stay correct.
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

    /// Returns the extremes of the bytes that NVML may have charged in the reading, and whether they differ.
    ///
    /// Between two changes, `tracked` is constant. A call that was entered before the second change and recorded after the first
    /// may already have taken effect.
    fn bounds(&self) -> (Option<Range>, bool) {
        let Some(mark) = &self.mark else { return (None, false) };
        // The latest time by which each change had happened; times of several threads are not exactly in record order.
        let times = self.changes.iter().map(|&(time_ns, _)| time_ns);
        let ends: Vec<u64> = times
            .scan(0, |latest: &mut u64, time_ns| {
                *latest = time_ns.max(*latest);
                Some(*latest)
            })
            .collect();
        // Bytes in question after each change: first those that may be added, then those that may be removed.
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

    /// Notes that the process lists of the reading failed: absence from them proves nothing.
    pub fn fail(&mut self) {
        if self.used == Err(Absence::NotListed) {
            (self.used, self.list_failed) = (Err(Absence::Unknown), true);
        }
    }

    /// Notes that lost records may belong to this sample.
    pub fn doubt(&mut self) {
        self.doubtful = true;
        if let Some(mark) = &mut self.mark {
            mark.partial = true;
        }
    }

    /// Notes a driver call that was entered at `since_ns` and is in flight at `now_ns`. Whether it overlaps the reading is
    /// decided when the sample closes.
    pub fn in_flight(&mut self, since_ns: u64, now_ns: u64) {
        if now_ns >= self.t0_ns {
            self.busy_since_ns = self.busy_since_ns.min(since_ns);
        }
    }

    /// Returns the tag of the last record before the reading; 0 for none.
    pub fn near(&self) -> u32 {
        self.mark.as_ref().map_or(0, |mark| mark.near)
    }

    /// Closes the sample in its present state, with rounding as its only part. `covered`: the process has an agent.
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
            parts: mark.as_ref().map(|mark| UntrackableParts {
                rounding_bytes: mark.rounding,
                ..UntrackableParts::default()
            }),
            amounts: mark.map_or_else(Default::default, |mark| mark.amounts),
        }
    }
}

/// Maximum time that samples wait for a call in flight: only its record shows whether its memory is in the reading.
const MAX_CALL_WAIT_NS: u64 = 250_000_000;

/// Returns the time up to which all records have arrived, according to a watermark.
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

/// Maximum number of readings of one device that wait for a process's records. An agent that is not stale cannot delay that many
/// at a hundred readings a second.
const MAX_PENDING: usize = 64;

#[derive(Debug)]
pub(crate) struct Samples {
    pub pending: Vec<Pending>,
    /// Earliest time at which a pending sample must be checked.
    pub boundary_ns: u64,
    /// Closed samples that the ledger has not taken, with their books.
    pub closed: Vec<(u8, ClosedSample)>,
    /// The ledger will close pending samples once they are stale.
    pub is_watched: bool,
    /// Books keep their recent past, because the begin of a reading may arrive after records of a live agent.
    pub keeps_history: bool,
}

impl Default for Samples {
    fn default() -> Self {
        Samples {
            pending: Vec::new(),
            boundary_ns: u64::MAX,
            closed: Vec::new(),
            is_watched: false,
            keeps_history: false,
        }
    }
}

impl Samples {
    /// Notes that lost records may belong to waiting samples.
    pub fn doubt(&mut self) {
        self.pending.iter_mut().for_each(Pending::doubt);
    }

    /// Doubts samples that began by `known_from_ns`: the book at earlier times is unknown.
    pub fn doubt_until(&mut self, known_from_ns: u64) {
        let unknown = |pending: &&mut Pending| pending.t0_ns <= known_from_ns;
        self.pending.iter_mut().filter(unknown).for_each(Pending::doubt);
    }

    /// Removes the oldest sample of a book if there is no room for another one.
    pub fn take_oldest(&mut self, book: u8) -> Option<Pending> {
        let of_book = |pending: &Pending| pending.book == book;
        if self.pending.iter().filter(|pending| of_book(pending)).count() < MAX_PENDING {
            return None;
        }
        self.pending.iter().position(of_book).map(|at| self.pending.remove(at))
    }

    /// Returns the end of the earliest waiting reading.
    pub fn waits_since_ns(&self) -> Option<u64> {
        self.pending.iter().filter_map(|pending| pending.t1_ns).min()
    }

    pub fn has(&self, book: u8, number: u64) -> bool {
        self.pending.iter().any(|pending| pending.is(book, number))
    }

    /// Sets the bytes that NVML charges in a reading.
    pub fn set_used(&mut self, book: u8, number: u64, used: Result<u64, Absence>) {
        // Numbers may repeat after a restart of the daemon: the youngest reading is meant.
        if let Some(pending) = self.pending.iter_mut().rfind(|pending| pending.is(book, number)) {
            pending.used = used;
        }
    }

    /// Ends a reading; `failed`: its process lists failed.
    pub fn end(&mut self, book: u8, number: u64, t1_ns: u64, failed: bool) {
        let is_open = |pending: &Pending| pending.is(book, number) && pending.t1_ns.is_none();
        if let Some(pending) = self.pending.iter_mut().rfind(|pending| is_open(pending)) {
            pending.t1_ns = Some(t1_ns);
            if failed {
                pending.fail();
            }
        }
    }

    /// Updates the earliest time at which a sample must be checked.
    pub fn set_boundary(&mut self, has_watermarks: bool) {
        let waits = self.pending.iter().filter(|pending| !has_watermarks || !pending.is_marked());
        self.boundary_ns = waits.map(Pending::boundary_ns).min().unwrap_or(u64::MAX);
    }

    /// Notes an allocation in all samples of its book. It is recorded when its call returns, but NVML may have charged it since
    /// the call was entered. A reading that ended in between may include it.
    pub fn note_entered(&mut self, book: u8, entered: Option<(u64, i64)>) {
        if let Some((entered_ns, bytes)) = entered {
            for pending in self.pending.iter_mut().filter(|pending| pending.book == book) {
                pending.entered(entered_ns, bytes);
            }
        }
    }

    /// Notes a call in flight, which may tear samples. Must precede the closing of samples by the same record.
    pub fn note_in_flight(&mut self, record: &Record<'_>) {
        if let Body::Watermark { in_flight_since_ns, .. } = record.body
            && in_flight_since_ns != 0
        {
            let now_ns = record.stamp.time_ns;
            self.pending.iter_mut().for_each(|pending| pending.in_flight(in_flight_since_ns, now_ns));
        }
    }

    /// Notes that a record of `time_ns` changed the books in `touched`.
    pub fn note_change(&mut self, touched: u64, time_ns: u64, holdings: &Holdings) {
        for pending in &mut self.pending {
            if touched & 1 << pending.book != 0 {
                let index = usize::from(pending.book);
                let tracked = holdings.books[index].tracked;
                pending.change(time_ns, tracked, holdings.in_flight_bytes[index]);
            }
        }
    }
}
