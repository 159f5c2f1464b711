//! NVML samples, each with the process's `tracked` bytes at the time of the reading.
//!
//! A reading is an interval [t0, t1]. When it begins, every process on the device gets a pending sample. The sample is **marked**
//! (the book is copied into it) when the process's records up to t0 have been booked. It is **closed** when the records up to t1
//! have been booked, which record times and watermarks show. If `tracked` changes in between, the sample is **torn** and has the
//! minimum and maximum of `tracked`. If the agent is silent, the sample is closed after a while as **stale**.

use crate::book::recent_past::PastBook;
use crate::book::{Book, Range};
use crate::rules::holdings::Holdings;
use gpumem_model::gap::UntrackableParts;
use gpumem_wire::{Absence, Body, Record};
use std::sync::Arc;

/// Maximum number of changes that a pending sample keeps. If there are more, they are merged, which may make its bounds too wide.
const MAX_CHANGES: usize = 4096;

/// An NVML reading of one process on one device, with the ledger's state at that time.
#[derive(Debug, Clone, PartialEq)]
pub struct ClosedSample {
    /// Number of the reading.
    pub number: u64,
    /// Begin of the reading (ns).
    pub t0_ns: u64,
    /// End of the reading (ns).
    pub t1_ns: u64,
    /// Bytes that NVML charges to the process, or why they are absent.
    pub used_bytes: Result<u64, Absence>,
    /// Whether NVML could not list all processes, so that a missing process may still hold memory.
    pub list_failed: bool,
    /// Tracked bytes at t0; absent for a process without an agent.
    pub tracked_bytes: Option<i64>,
    /// Minimum and maximum of the tracked bytes in [t0, t1], with and without bytes that calls in flight may have freed.
    pub tracked_range: Option<(i64, i64)>,
    /// Untracked bytes that were allocated before the agent started.
    pub predates_bytes: i64,
    /// Whether memory changed or a call was in flight while NVML was read.
    pub torn: bool,
    /// Whether the sample was closed without the agent's records up to t1.
    pub stale: bool,
    /// Whether the amounts may not be those of t0: records were lost before t0 and no resync had completed, or the begin of the
    /// reading arrived too late to restore them.
    pub partial: bool,
    /// Bytes at t0, by index of [`ProcessView::cells`](crate::ProcessView::cells).
    pub amounts: Arc<[i64]>,
    /// Parts of the untrackable bytes; absent if these are unknown.
    pub parts: Option<UntrackableParts>,
}

impl ClosedSample {
    /// Whether `used` and `tracked` belong to the same moment.
    pub fn is_certain(&self) -> bool {
        !self.torn && !self.stale && !self.partial
    }

    /// Returns the gap: used minus tracked bytes; `None` if either is unknown.
    pub fn gap_bytes(&self) -> Option<i64> {
        Some(i64::try_from(self.used_bytes.ok()?).ok()?.wrapping_sub(self.tracked_bytes?))
    }

    /// Returns the untrackable bytes: the gap minus bytes allocated before the agent started.
    pub fn untrackable_bytes(&self) -> Option<i64> {
        Some(self.gap_bytes()?.wrapping_sub(self.predates_bytes))
    }
}

/// The gap (used minus tracked bytes) at a peak of `tracked`: that of the nearest sample, because NVML was not read at the peak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeakGap {
    pub untrackable_bytes: i64,
    pub predates_bytes: i64,
    /// Time from the peak to the sample (ns); negative if the sample was before.
    pub distance_ns: i64,
    /// Whether `tracked` equalled the peak when the sample was taken, and the sample is certain.
    pub exact: bool,
    pub parts: Option<UntrackableParts>,
}

/// A reading that some processes have missed, because their bytes were the same as before.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MissedReading {
    /// Position among the completed readings of the device.
    pub position: u64,
    pub number: u64,
    pub t0_ns: u64,
    pub t1_ns: u64,
}

/// Copy of the book at the begin of a reading.
#[derive(Debug)]
struct Mark {
    tracked: i64,
    amounts: Arc<[i64]>,
    range: Range,
    rounding: i64,
    /// Tag of the last record before the reading.
    near: u32,
    torn: bool,
    partial: bool,
}

/// A call that may have changed NVML's figure at any time since it was entered. Until the call is recorded, that figure may
/// exceed `tracked` by `bytes`. `bytes` is negative for a call that makes a pool smaller.
#[derive(Debug, Clone, Copy)]
struct Entered {
    entered_ns: u64,
    bytes: i64,
    /// Length of `Pending::changes` when the call was recorded.
    changes: usize,
}

/// A sample that waits for records. Fields that [`ClosedSample`] has too are described there.
#[derive(Debug)]
pub(crate) struct Pending {
    pub book: u8,
    number: u64,
    pub t0_ns: u64,
    /// End of the reading (ns); `None` until it was reported.
    pub t1_ns: Option<u64>,
    pub used: Result<u64, Absence>,
    list_failed: bool,
    mark: Option<Mark>,
    /// Changes of `tracked` after t0, in record order: time, and `tracked` with and without bytes that calls in flight may have
    /// freed.
    changes: Vec<(u64, Range)>,
    /// Driver calls recorded after the sample's mark, whose memory NVML may have charged before their record.
    entered: Vec<Entered>,
    /// Time at which the earliest driver call was entered that was still in flight after t0 (ns).
    busy_since_ns: u64,
    /// Whether records were lost while the sample waited, so that its amounts may not be those of t0.
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

    /// Returns the record time at which the sample must be marked or closed.
    pub fn boundary_ns(&self) -> u64 {
        if self.mark.is_none() { self.t0_ns } else { self.t1_ns.unwrap_or(u64::MAX) }
    }

    pub fn is_marked(&self) -> bool {
        self.mark.is_some()
    }

    /// Copies the book into the sample. `late`: the book has changed since t0, and its former state cannot be restored.
    pub fn mark(&mut self, book: &mut Book, in_flight_bytes: i64, near: u32, partial: bool, late: bool) {
        let range = Range::with_in_flight(book.tracked, in_flight_bytes);
        let torn = late || in_flight_bytes != 0;
        let partial = partial || self.doubtful || late;
        let (tracked, rounding) = (book.tracked, book.rounding.bytes());
        let amounts = book.shared_amounts();
        self.mark = Some(Mark { tracked, amounts, range, rounding, near, torn, partial });
    }

    /// Copies an account's amounts at the earlier time of the sample, and how far they changed since then, into the sample.
    pub fn mark_past(&mut self, past: PastBook, near: u32, partial: bool) {
        let tracked = past.amounts.iter().fold(0_i64, |sum, &bytes| sum.wrapping_add(bytes));
        let range = Range::with_in_flight(tracked, past.in_flight);
        let torn = past.in_flight != 0;
        let (amounts, rounding) = (past.amounts.into(), past.rounding.bytes());
        self.mark = Some(Mark { tracked, amounts, range, rounding, near, torn, partial });
        for change in past.since {
            if let Some((entered_ns, bytes)) = change.entered {
                self.note_entered(entered_ns, bytes);
            }
            self.note_change(change.time_ns, change.tracked, change.in_flight);
        }
    }

    /// Records that `tracked` or the bytes in flight changed at `time_ns`, after the mark (copy of the book).
    pub fn note_change(&mut self, time_ns: u64, tracked: i64, in_flight_bytes: i64) {
        let range = Range::with_in_flight(tracked, in_flight_bytes);
        let Some(mark) = &self.mark else { return };
        if self.changes.is_empty() && range == Range::at(mark.tracked) || self.is_over(time_ns) {
            return;
        }
        self.make_room();
        self.changes.push((time_ns, range));
    }

    /// Notes a call whose `bytes` are about to be booked; NVML may have charged them (negative: freed them) since `entered_ns`.
    pub fn note_entered(&mut self, entered_ns: u64, bytes: i64) {
        if self.mark.is_some() && !self.is_over(entered_ns) {
            self.make_room();
            self.entered.push(Entered { entered_ns, bytes, changes: self.changes.len() });
        }
    }

    fn is_over(&self, time_ns: u64) -> bool {
        self.t1_ns.is_some_and(|t1| time_ns > t1)
    }

    /// Merges all changes if there are too many: bounds may become too wide, but stay correct.
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

    /// Returns minimum and maximum of the tracked bytes that NVML may have charged in the reading, and whether memory may have
    /// changed in it.
    ///
    /// Between two changes `tracked` is constant. A call may already have taken effect there if it was entered before the second
    /// change and recorded after the first.
    fn bounds(&self) -> (Option<Range>, bool) {
        let Some(mark) = &self.mark else { return (None, false) };
        // Time by which each change had happened. Times of several threads may be out of record order, so the latest so far
        // counts.
        let times = self.changes.iter().map(|&(time_ns, _)| time_ns);
        let ends: Vec<u64> = times
            .scan(0, |latest: &mut u64, time_ns| {
                *latest = time_ns.max(*latest);
                Some(*latest)
            })
            .collect();
        // For each change, the difference to the change before of two sums: bytes that NVML may already charge, and (negative)
        // bytes that it may no longer charge.
        let mut steps = vec![[0_i64; 2]; self.changes.len() + 2];
        let mut torn = mark.torn;
        for entered in self.entered.iter().filter(|entered| !self.is_over(entered.entered_ns)) {
            let first = ends.partition_point(|&end| end < entered.entered_ns).min(entered.changes);
            let kind = usize::from(entered.bytes < 0);
            for (at, bytes) in [(first, entered.bytes), (entered.changes + 1, -entered.bytes)] {
                if let Some(step) = steps.get_mut(at) {
                    step[kind] = step[kind].wrapping_add(bytes);
                }
            }
            torn = true;
        }
        let mut range = mark.range;
        let [mut above, mut below] = steps.first().copied().unwrap_or_default();
        range.include(mark.range.max.wrapping_add(above));
        range.include(mark.range.min.wrapping_add(below));
        for (&(time_ns, change), [more, less]) in self.changes.iter().zip(steps.iter().skip(1)) {
            (above, below) = (above.wrapping_add(*more), below.wrapping_add(*less));
            if !self.is_over(time_ns) {
                range.include(change.min.wrapping_add(below));
                range.include(change.max.wrapping_add(above));
                torn = true;
            }
        }
        (Some(range), torn)
    }

    pub fn mark_doubtful(&mut self) {
        self.doubtful = true;
        if let Some(mark) = &mut self.mark {
            mark.partial = true;
        }
    }

    pub fn near(&self) -> u32 {
        self.mark.as_ref().map_or(0, |mark| mark.near)
    }

    /// Closes the sample. The caller adds the parts of the untrackable bytes other than rounding. `covered`: the process has an
    /// agent.
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

/// Maximum time (ns) that samples wait for the record of a call in flight, which shows whether NVML may have charged its memory.
const MAX_CALL_WAIT_NS: u64 = 250_000_000;

/// Returns the time up to which all records have arrived, according to a `Watermark` record. This time is before the oldest call in
/// flight, unless that began at least [`MAX_CALL_WAIT_NS`] ago.
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

/// Maximum number of pending samples of one device. At 100 readings a second, as many wait only if they are closed as stale
/// anyway.
const MAX_PENDING: usize = 64;

#[derive(Debug)]
pub(crate) struct Samples {
    pub pending: Vec<Pending>,
    /// Earliest record time at which a pending sample must be marked or closed (ns).
    pub boundary_ns: u64,
    /// Closed samples that the ledger has not taken, with their books.
    pub closed: Vec<(u8, Arc<ClosedSample>)>,
    /// Whether the process is in the ledger's queue for closing stale samples.
    pub is_queued: bool,
    /// Whether books keep their recent changes, because the begin of a reading may arrive late (book/recent_past.rs).
    pub keeps_history: bool,
}

impl Default for Samples {
    fn default() -> Self {
        Samples {
            pending: Vec::new(),
            boundary_ns: u64::MAX,
            closed: Vec::new(),
            is_queued: false,
            keeps_history: false,
        }
    }
}

impl Samples {
    /// Marks all pending samples as doubtful, because lost records may belong to them.
    pub fn mark_doubtful(&mut self) {
        self.pending.iter_mut().for_each(Pending::mark_doubtful);
    }

    /// Marks the pending samples that began by `known_from_ns` as doubtful, because the book up to that time is unknown.
    pub fn mark_doubtful_until(&mut self, known_from_ns: u64) {
        let unknown = |pending: &&mut Pending| pending.t0_ns <= known_from_ns;
        self.pending.iter_mut().filter(unknown).for_each(Pending::mark_doubtful);
    }

    /// Removes the oldest sample of a book if there is no room for another one.
    pub fn take_oldest(&mut self, book: u8) -> Option<Pending> {
        let of_book = |pending: &Pending| pending.book == book;
        if self.pending.iter().filter(|pending| of_book(pending)).count() < MAX_PENDING {
            return None;
        }
        self.pending.iter().position(of_book).map(|at| self.pending.remove(at))
    }

    pub fn first_end_ns(&self) -> Option<u64> {
        self.pending.iter().filter_map(|pending| pending.t1_ns).min()
    }

    pub fn set_used(&mut self, book: u8, number: u64, used: Result<u64, Absence>) {
        // Numbers may repeat after a restart of the daemon, so the youngest reading counts.
        if let Some(pending) = self.pending.iter_mut().rfind(|pending| pending.is(book, number)) {
            pending.used = used;
        }
    }

    /// Ends a reading; `failed`: NVML could not list the processes, so a missing process may still hold memory.
    pub fn end(&mut self, book: u8, number: u64, t1_ns: u64, failed: bool) {
        let is_open = |pending: &Pending| pending.is(book, number) && pending.t1_ns.is_none();
        if let Some(pending) = self.pending.iter_mut().rfind(|pending| is_open(pending)) {
            pending.t1_ns = Some(t1_ns);
            if failed && pending.used == Err(Absence::NotListed) {
                (pending.used, pending.list_failed) = (Err(Absence::Unknown), true);
            }
        }
    }

    /// Updates `boundary_ns`. If the agent sends watermarks, only these close samples; other records only mark them (copy the
    /// book).
    pub fn set_boundary(&mut self, has_watermarks: bool) {
        let waits = self.pending.iter().filter(|pending| !has_watermarks || !pending.is_marked());
        self.boundary_ns = waits.map(Pending::boundary_ns).min().unwrap_or(u64::MAX);
    }

    /// Notes an allocation in the pending samples of its book. An allocation is recorded when its call returns, but NVML may have
    /// charged it since the call was entered.
    pub fn note_entered(&mut self, book: u8, entered: Option<(u64, i64)>) {
        if let Some((entered_ns, bytes)) = entered {
            for pending in self.pending.iter_mut().filter(|pending| pending.book == book) {
                pending.note_entered(entered_ns, bytes);
            }
        }
    }

    /// Notes the earliest call in flight that a `Watermark` record names, because it may change memory during a reading. Must be
    /// called before the record closes samples.
    pub fn note_in_flight(&mut self, record: &Record<'_>) {
        if let Body::Watermark { in_flight_since_ns, .. } = record.body
            && in_flight_since_ns != 0
        {
            let has_begun = |pending: &&mut Pending| record.stamp.time_ns >= pending.t0_ns;
            for pending in self.pending.iter_mut().filter(has_begun) {
                pending.busy_since_ns = pending.busy_since_ns.min(in_flight_since_ns);
            }
        }
    }

    /// Adds the change by a record of `time_ns` to the pending samples of the books in `touched` (one bit for each book).
    pub fn note_change(&mut self, touched: u64, time_ns: u64, holdings: &Holdings) {
        for pending in &mut self.pending {
            if touched & 1 << pending.book != 0 {
                let index = usize::from(pending.book);
                let tracked = holdings.books[index].tracked;
                pending.note_change(time_ns, tracked, holdings.in_flight_bytes[index]);
            }
        }
    }
}
