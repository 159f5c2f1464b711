//! The double-entry book of one process on one device: amounts by cell, their sum `tracked`, the peak of that sum with the
//! amounts by cell at the peak, and a timeline.
//!
//! **Amounts at the peak.** They are copied on write, one cell at a time. A new peak increments `epoch`. When a cell changes for
//! the first time in an epoch, it saves its old amount. The amount at the peak is the saved one if the cell's epoch is not older
//! than the peak's, and the present one otherwise. The fullest moment of the timeline's open slot (timeline.rs) is saved in the
//! same way. Every new peak is the fullest moment of its slot.
//!
//! **Unused bytes** are idle bytes of pools (in no block) and bytes of opaque pools (which report no blocks). Among moments with
//! the same `tracked`, the one with the fewest unused bytes is the peak. A framework pool stays at its highest reservation for
//! hours, and users want to know which blocks filled it. Opaque bytes count as unused because a pool is opaque until its first
//! block. Memory that segments returned counts too: a program that removes its segments before it frees their memory does not
//! fill that memory with blocks.

pub(crate) mod cell_groups;
pub(crate) mod cells;
pub(crate) mod recent_past;
pub(crate) mod rounding;
pub(crate) mod timeline;

use crate::base::quota::sorted;
use crate::book::cells::{CellId, CellKey, CellTable, IDLE, OPAQUE};
use crate::book::recent_past::BookHistory;
use crate::book::rounding::Rounding;
use crate::book::timeline::{Change, Moment, Point, Timeline};
use gpumem_wire::Role;
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    now: i64,
    /// Bytes of the cell at the peak; valid if `epoch` is not older than the peak's.
    at_peak: i64,
    /// Bytes of the cell at the fullest moment (most tracked bytes) of the open timeline slot; valid if `epoch` is the book's.
    at_high: i64,
    /// Value of the book's `epoch` when the cell last changed.
    epoch: u32,
    /// Whether the cell contains unused (idle or opaque) bytes.
    unused: bool,
    /// Code of the cell's role; 0 until [`Book::learn_roles`] has run.
    role: u8,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Range {
    pub min: i64,
    pub max: i64,
}

impl Range {
    pub fn at(value: i64) -> Self {
        Range { min: value, max: value }
    }

    /// Returns the possible values of `tracked` if calls in flight may already have freed `in_flight_bytes`.
    pub fn with_in_flight(tracked: i64, in_flight_bytes: i64) -> Self {
        let without = tracked.wrapping_sub(in_flight_bytes);
        Range { min: tracked.min(without), max: tracked.max(without) }
    }

    pub fn include(&mut self, value: i64) {
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }
}

/// Width of a [`Window`] in ns; shorter than NVML's update interval.
pub const WINDOW_NS: u64 = 10_000_000;

/// Minimum, maximum and last `tracked` bytes of an interval in which the book changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Start time, a multiple of the width: [`WINDOW_NS`], or 1 if times are line numbers of a log.
    pub start_ns: u64,
    /// Minimum of `tracked`, including its value at the start.
    pub min: i64,
    pub max: i64,
    pub last: i64,
}

#[derive(Debug, Default)]
pub(crate) struct Book {
    cells: Vec<Cell>,
    /// Cells of unused bytes: [`IDLE`], [`OPAQUE`], and the idle cells of named pools.
    pub unused_cells: Vec<CellId>,
    unused_bytes: i64,
    /// Bytes of live allocations that segments took and have returned.
    returned_bytes: i64,
    pub tracked: i64,
    /// Bytes of live page-locked (pinned) host memory, which `tracked` does not include.
    pub pinned: i64,
    /// Cells with pinned memory, each with its bytes, which add up to `pinned`.
    pub pinned_cells: BTreeMap<CellId, i64>,
    /// Bytes of each role, by its code, without the unknown role and without cells that [`Book::learn_roles`] has not seen.
    by_role: [i64; 16],
    /// Number of cells whose role [`Book::learn_roles`] has stored.
    learnt: usize,
    /// Incremented with each change of a cell that has a role.
    pub role_changes: u64,
    /// Highest `tracked` since [`Book::restart_max`].
    pub max_tracked: i64,
    pub rounding: Rounding,
    /// The moment with the highest `tracked`; among equal moments, the one with the fewest unused bytes.
    pub peak: Moment,
    /// Number of new peaks, and new fullest moments of timeline slots, so far.
    epoch: u32,
    /// Fullest moment (most tracked bytes) of the timeline's open slot; [`Moment::NONE`] without an open slot.
    high: Moment,
    /// Whether nothing has been booked since the moment `high`.
    is_at_high: bool,
    slot_end_ns: u64,
    /// Time of the last booking.
    pub touched_ns: u64,
    pub past: Timeline,
    window: Range,
    window_start_ns: u64,
    /// End of the open [`Window`] (ns); 0 without one.
    pub window_end_ns: u64,
    /// Whether [`Book::partial_window`] has already returned the open window.
    is_reported: bool,
    /// Latest copy of the bytes of all cells, for samples; valid while `copied` is true.
    copy: Option<Arc<[i64]>>,
    copied: bool,
    /// Value of `tracked` after the last complete record.
    settled: i64,
    pub history: BookHistory,
}

impl Book {
    pub fn new() -> Self {
        Book { unused_cells: vec![IDLE, OPAQUE], high: Moment::NONE, ..Book::default() }
    }

    #[cold]
    fn add_cells(&mut self, count: usize) {
        self.cells.resize(count, Cell::default());
        self.cells.iter_mut().take(2).for_each(|cell| cell.unused = true); // IDLE and OPAQUE
    }

    /// Adds bytes to a cell. If this is the cell's first change in the present `epoch`, saves its old amount.
    #[inline]
    fn change(&mut self, id: CellId, delta: i64) {
        let index = id as usize;
        if index >= self.cells.len() {
            self.add_cells(index + 1);
        }
        let cell = &mut self.cells[index];
        if cell.epoch != self.epoch {
            if cell.epoch < self.peak.epoch {
                cell.at_peak = cell.now;
            }
            cell.at_high = cell.now;
            cell.epoch = self.epoch;
        }
        cell.now = cell.now.wrapping_add(delta);
        if cell.unused {
            self.unused_bytes = self.unused_bytes.wrapping_add(delta);
        }
        if cell.role != 0 {
            let of_role = &mut self.by_role[usize::from(cell.role & 15)];
            *of_role = of_role.wrapping_add(delta);
            self.role_changes += 1;
        }
        self.copied = false;
    }

    /// Adds bytes to a cell and to `tracked`; negative bytes are subtracted.
    #[inline]
    pub fn post(&mut self, cell: CellId, delta: i64) {
        self.change(cell, delta);
        self.history.post(cell, delta);
        self.tracked = self.tracked.wrapping_add(delta);
    }

    /// Adds a direct allocation of `bytes` to the sums for the driver's rounding, or removes it. [`Book::post`] books its bytes.
    #[inline]
    pub fn round(&mut self, bytes: u64, is_added: bool) {
        let of_one = Rounding::of(bytes);
        let change = if is_added { of_one } else { Rounding::default().minus(of_one) };
        self.rounding = self.rounding.plus(change);
        self.history.round(change);
    }

    /// Moves bytes to another cell; `tracked` and past amounts do not change.
    #[inline]
    pub fn shift(&mut self, from: CellId, to: CellId, bytes: i64) {
        self.change(from, bytes.wrapping_neg());
        self.change(to, bytes);
        self.history.shift(from, to, bytes);
    }

    /// Moves bytes to another cell in the amounts at the peak, because they were live at the peak and now have another name.
    pub fn rename_at_peak(&mut self, from: CellId, to: CellId, bytes: i64) {
        for (id, delta) in [(from, bytes.wrapping_neg()), (to, bytes)] {
            self.change(id, 0); // saves the amount at the peak, if it is not saved yet
            let cell = &mut self.cells[id as usize];
            cell.at_peak = cell.at_peak.wrapping_add(delta);
            if self.unused_cells.contains(&id) {
                self.peak.unused = self.peak.unused.wrapping_add(delta);
            }
        }
    }

    /// Moves the bytes of a live allocation or block, created at `first_epoch`, to another cell in all timeline points since
    /// then.
    pub fn rename_past(
        &mut self,
        first_epoch: u32,
        (from, to): (CellId, CellId),
        bytes: i64,
        cells: &CellTable,
    ) {
        if self.high.is_some() && first_epoch <= self.epoch {
            for (id, delta) in [(from, bytes.wrapping_neg()), (to, bytes)] {
                self.change(id, 0); // saves the amount at the fullest moment, if it is not saved yet
                let cell = &mut self.cells[id as usize];
                cell.at_high = cell.at_high.wrapping_add(delta);
            }
        }
        let unused = |id| if self.unused_cells.contains(&id) { bytes } else { 0 };
        let unused = unused(to).wrapping_sub(unused(from));
        if first_epoch <= self.epoch {
            self.high.unused = self.high.unused.wrapping_add(unused);
        }
        self.past.rename(first_epoch, (from, to), Change { bytes, unused }, cells);
    }

    /// Completes a record that changed the book; peaks are recorded only here. Returns whether there is a new peak.
    #[inline]
    pub fn settle(&mut self, time_ns: u64) -> bool {
        if self.tracked != self.settled {
            self.settled = self.tracked;
            self.window.include(self.tracked);
            self.max_tracked = self.max_tracked.max(self.tracked);
        }
        (self.touched_ns, self.is_at_high) = (time_ns, false);
        let bytes = self.tracked;
        if bytes < self.high.bytes {
            return false; // no peak either: the slot's fullest moment is not higher than the peak
        }
        let unused = self.unused();
        let exceeds = |high: i64, of: i64| bytes > high || bytes == high && unused < of;
        let is_peak = bytes > 0 && exceeds(self.peak.bytes, self.peak.unused);
        if !is_peak && !exceeds(self.high.bytes, self.high.unused) {
            return false;
        }
        self.epoch = self.epoch.wrapping_add(1);
        self.high = Moment { time_ns, bytes, unused, epoch: self.epoch, is_high: true };
        self.is_at_high = true;
        if is_peak {
            self.peak = self.high;
        }
        is_peak
    }

    pub fn high_moment(&self) -> Option<Moment> {
        self.high.is_some().then_some(Moment { epoch: self.epoch, ..self.high })
    }

    /// Returns the present moment, if it differs from the fullest moment of the open slot.
    pub fn present(&self) -> Option<Moment> {
        let (bytes, unused) = (self.tracked, self.unused());
        let moment = Moment { time_ns: self.touched_ns, bytes, unused, epoch: self.epoch, is_high: false };
        (self.high.is_some() && !self.is_at_high).then_some(moment)
    }

    /// Closes the timeline's slot; the next booking opens a new one.
    pub fn close_high(&mut self) {
        (self.high, self.slot_end_ns) = (Moment::NONE, 0);
    }

    pub fn at_high(&self, id: CellId) -> i64 {
        let cell = self.cells.get(id as usize);
        cell.map_or(0, |cell| if cell.epoch == self.epoch { cell.at_high } else { cell.now })
    }

    pub fn sparse(&self, amount: impl Fn(CellId) -> i64) -> Vec<(CellId, i64)> {
        (0..self.cells.len() as CellId).map(|id| (id, amount(id))).filter(|(_, bytes)| *bytes != 0).collect()
    }

    pub fn add_unused_cell(&mut self, id: CellId) {
        if self.unused_cells.contains(&id) {
            return;
        }
        self.unused_cells.push(id);
        self.change(id, 0);
        self.cells[id as usize].unused = true;
        self.unused_bytes = self.unused_bytes.wrapping_add(self.now(id));
    }

    /// Returns the unused bytes, including memory that segments returned.
    #[inline]
    pub fn unused(&self) -> i64 {
        self.unused_bytes.wrapping_add(self.returned_bytes)
    }

    /// Counts `bytes` of live allocations that segments have returned; negative if segments have taken them again.
    pub fn count_returned(&mut self, bytes: i64) {
        self.returned_bytes = self.returned_bytes.wrapping_add(bytes);
    }

    /// Restarts peak and timeline with the amounts held at `time_ns`. `None`: the amounts are not known yet, so both restart empty.
    pub fn restart(&mut self, time_ns: Option<u64>, slot_ns: u64) {
        self.past = Timeline::default();
        self.close_high();
        self.epoch = self.epoch.wrapping_add(1);
        self.peak = Moment { epoch: self.epoch, ..Moment::default() };
        let Some(time_ns) = time_ns else { return };
        let (bytes, unused) = (self.tracked, self.unused());
        self.slot_end_ns = self.past.slot_end_ns(time_ns, slot_ns);
        self.high = Moment { time_ns, bytes, unused, epoch: self.epoch, is_high: true };
        (self.is_at_high, self.touched_ns) = (true, time_ns);
        if bytes > 0 {
            self.peak = self.high;
        }
    }

    /// Returns the first epoch whose amounts include an allocation or block created now.
    #[inline]
    pub fn next_epoch(&self) -> u32 {
        self.epoch.wrapping_add(1)
    }

    /// Whether a live allocation or block was live at the peak; `first_epoch` is [`Book::next_epoch`] at its creation.
    #[inline]
    pub fn live_at_peak(&self, first_epoch: u32) -> bool {
        first_epoch <= self.peak.epoch
    }

    #[inline]
    pub fn now(&self, id: CellId) -> i64 {
        self.cells.get(id as usize).map_or(0, |cell| cell.now)
    }

    /// Adds new cells to the sums by role.
    pub fn learn_roles(&mut self, keys: &[CellKey]) {
        self.role_changes += u64::from(self.learnt < self.cells.len());
        for (cell, key) in self.cells.iter_mut().zip(keys).skip(self.learnt) {
            cell.role = key.role.to_code();
            let of_role = &mut self.by_role[usize::from(cell.role & 15)];
            *of_role = of_role.wrapping_add(cell.now);
        }
        self.learnt = self.cells.len();
    }

    /// Returns the bytes of a role as of the last [`Book::learn_roles`]; 0 for the unknown role.
    pub fn by_role(&self, role: Role) -> i64 {
        self.by_role.get(usize::from(role.to_code())).copied().unwrap_or(0)
    }

    pub fn restart_max(&mut self) {
        self.max_tracked = self.tracked;
    }

    pub fn at_peak(&self, id: CellId) -> i64 {
        self.cells
            .get(id as usize)
            .map_or(0, |cell| if cell.epoch >= self.peak.epoch { cell.at_peak } else { cell.now })
    }

    pub fn amounts(&self) -> Vec<i64> {
        self.cells.iter().map(|cell| cell.now).collect()
    }

    /// Like [`Book::amounts`], for samples: all samples between two changes of the book share one copy.
    pub fn shared_amounts(&mut self) -> Arc<[i64]> {
        if !self.copied {
            self.copy = None;
        }
        self.copied = true;
        let cells = &self.cells;
        self.copy.get_or_insert_with(|| cells.iter().map(|cell| cell.now).collect()).clone()
    }

    pub fn len(&self) -> usize {
        self.cells.len()
    }

    /// Adds bytes of pinned memory to a cell.
    pub fn post_pinned(&mut self, cell: CellId, bytes: i64) {
        let amount = self.pinned_cells.entry(cell).or_default();
        *amount = amount.wrapping_add(bytes);
        if *amount == 0 {
            self.pinned_cells.remove(&cell);
        }
    }

    /// Returns the estimated bytes of the cells, and of copies of their amounts. `history` and the timeline are not included.
    pub fn bytes(&self) -> usize {
        self.cells.capacity() * (std::mem::size_of::<Cell>() + 5 * std::mem::size_of::<i64>())
            + self.pinned_cells.len() * sorted(16)
    }

    /// Opens the window and the timeline slot of `time_ns`; returns the window that has ended. Must be called before
    /// [`Book::settle`] of the first record after the end of the open window.
    #[cold]
    pub fn roll(&mut self, time_ns: u64, width_ns: u64, cells: &CellTable) -> Option<Window> {
        if time_ns >= self.slot_end_ns {
            self.end_slot(cells);
            self.slot_end_ns = self.past.slot_end_ns(time_ns, width_ns);
        }
        let over = self.take_window();
        self.is_reported = false;
        self.window_start_ns = time_ns - time_ns % width_ns;
        self.window_end_ns = self.window_start_ns.saturating_add(width_ns);
        over
    }

    /// Returns the open window if it has changed since the last call. The window stays open, so calls do not change at which
    /// records windows end. Later changes yield another window with the same start.
    pub fn partial_window(&mut self) -> Option<Window> {
        let is_old = self.is_reported && self.window == Range::at(self.settled);
        self.is_reported = true;
        if is_old { None } else { self.take_window() }
    }

    fn take_window(&mut self) -> Option<Window> {
        let is_open = self.window_end_ns != 0;
        let Range { min, max } = std::mem::replace(&mut self.window, Range::at(self.settled));
        is_open.then_some(Window { start_ns: self.window_start_ns, min, max, last: self.settled })
    }

    /// Adds the fullest moment of the open slot to the timeline, and closes the slot.
    #[cold]
    pub fn end_slot(&mut self, cells: &CellTable) {
        if let Some(moment) = self.high_moment() {
            let amounts = self.sparse(|id| self.at_high(id));
            self.past.push(moment, amounts, cells);
        }
        self.close_high();
    }

    /// Adds the last state as a timeline point if nothing was booked for a slot's width. Must be called before a record of
    /// `now_ns` is booked.
    pub fn end_silence(&mut self, now_ns: u64, cells: &CellTable) {
        if self.high_moment().is_none() || !self.past.is_long(now_ns.saturating_sub(self.touched_ns)) {
            return;
        }
        // All rows that are live now were already live at the last booking.
        let held = match (self.present(), self.high_moment()) {
            (Some(present), _) => Some(Moment { epoch: self.next_epoch(), ..present }),
            (None, high) => high.map(|high| Moment { is_high: false, ..high }),
        };
        self.end_slot(cells);
        if let Some(moment) = held {
            self.epoch = moment.epoch;
            let amounts = self.sparse(|id| self.now(id));
            self.past.push(moment, amounts, cells);
        }
    }

    /// Returns all points, the fullest moment of the open slot and, if `is_known`, the present state (unknown while a resync
    /// mixes rows of several moments). The point at the peak has the amounts at the peak, because late names correct those for a
    /// longer time.
    pub fn timeline(&self, cells: &CellTable, is_known: bool) -> gpumem_model::timeline::Timeline {
        let high =
            self.high_moment().map(|moment| Point::new(moment, self.sparse(|id| self.at_high(id)), cells));
        let present = self.present().filter(|_| is_known);
        let present = present.map(|moment| Point::new(moment, self.sparse(|id| self.now(id)), cells));
        let points = self.past.points.iter().cloned().chain(high).chain(present);
        let points = points.map(|point| {
            let is_peak = point.moment.epoch == self.peak.epoch && point.moment.is_high;
            if is_peak {
                Point::new(point.moment, self.sparse(|id| self.at_peak(id)), cells).view
            } else {
                point.view
            }
        });
        gpumem_model::timeline::Timeline { width_ns: self.past.width_ns, points: points.collect() }
    }
}
