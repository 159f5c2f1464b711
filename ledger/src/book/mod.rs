//! Double entry for each process and device: cells, their sum `tracked`, and the exact peak of that sum with its composition.
//!
//! **Peak without copying.** The composition at the peak is kept by copy on write. A new peak increments `epoch`, and a cell
//! keeps its old value the first time it changes after that. Reading the peak takes the kept value where `Cell::epoch` is not
//! older than the peak's, and the present value elsewhere. The fullest moment of the timeline's open slot (timeline.rs) is kept
//! in the same way, and every peak is such a moment.
//!
//! Among moments with the same `tracked`, the one with the least idle and opaque bytes is the peak. A framework pool stays at its
//! highest reservation for hours, and users want to know which blocks filled it. Opaque bytes count as unused because a pool is
//! opaque until its first block. Memory that segments gave up counts, too: a program that removes its segments before it frees
//! their memory does not fill it with blocks.

pub(crate) mod cell_groups;
pub(crate) mod cells;
pub(crate) mod recent_past;
pub(crate) mod rounding;
pub(crate) mod timeline;

use crate::book::cells::{CellId, CellKey, CellTable, IDLE, OPAQUE};
use crate::book::recent_past::BookHistory;
use crate::book::rounding::Rounding;
use crate::book::timeline::{Change, Moment, Point, Timeline};
use gpumem_wire::Role;
use std::sync::Arc;

#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    now: i64,
    /// Value at the peak, if `epoch` is not older than the peak's.
    at_peak: i64,
    /// Value at the latest fullest moment, if `epoch` is the latest.
    at_high: i64,
    epoch: u32,
    /// The cell contains idle or opaque bytes.
    unnamed: bool,
    /// Code of its role; set by [`Book::learn_roles`].
    role: u8,
}

/// Minimum and maximum of a signed amount.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Range {
    pub min: i64,
    pub max: i64,
}

impl Range {
    pub fn at(value: i64) -> Self {
        Range { min: value, max: value }
    }

    /// Returns the range of `tracked`, of which calls in flight may have freed `in_flight_bytes`.
    pub fn with_in_flight(tracked: i64, in_flight_bytes: i64) -> Self {
        let without = tracked.wrapping_sub(in_flight_bytes);
        Range { min: tracked.min(without), max: tracked.max(without) }
    }

    pub fn include(&mut self, value: i64) {
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }
}

/// Width of a [`Window`] if times are nanoseconds; shorter than NVML's update interval.
pub const WINDOW_NS: u64 = 10_000_000;

/// `tracked` during an interval in which its book changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Window {
    /// Begin, a multiple of the width ([`WINDOW_NS`], or 1 if times are only an order).
    pub start_ns: u64,
    /// Minimum, including the initial value.
    pub min: i64,
    pub max: i64,
    pub last: i64,
}

#[derive(Debug, Default)]
pub(crate) struct Book {
    cells: Vec<Cell>,
    /// Cells of idle and opaque bytes: the two of unnamed pools, and those of named pools.
    unnamed: Vec<CellId>,
    /// Sum of the bytes of `unnamed`.
    unnamed_bytes: i64,
    /// Bytes that segments took and gave up again.
    let_go: i64,
    pub tracked: i64,
    /// Sums of cells by the code of their role, without the unknown role. New cells are missing until [`Book::learn_roles`].
    by_role: [i64; 16],
    /// Number of cells that `learn_roles` has processed.
    learnt: usize,
    /// Incremented with each change of a cell that has a role.
    pub role_changes: u64,
    /// Highest `tracked` since [`Book::restart_most`].
    pub most: i64,
    pub rounding: Rounding,
    /// The highest `tracked` so far; among equal moments, the one with the fewest idle and opaque bytes.
    pub peak: Moment,
    /// Incremented with every new peak, and with every moment that may become a timeline point.
    epoch: u32,
    /// Fullest moment of the timeline's open slot; [`Moment::NONE`] while none is open.
    high: Moment,
    /// Nothing has been booked since the fullest moment.
    is_at_high: bool,
    slot_end_ns: u64,
    /// Time of the last booking.
    pub touched_ns: u64,
    pub past: Timeline,
    window: Range,
    window_start_ns: u64,
    /// End of the open window; 0 if none is open.
    pub window_end_ns: u64,
    /// The open window was already returned by [`Book::partial_window`].
    is_reported: bool,
    /// The latest copy of the cells, and whether it is still valid.
    copy: Option<Arc<[i64]>>,
    copied: bool,
    /// `tracked` when the last record was booked.
    settled: i64,
    pub history: BookHistory,
}

impl Book {
    /// Returns an empty book that knows the cells of idle and opaque bytes.
    pub fn new() -> Self {
        Book { unnamed: vec![IDLE, OPAQUE], high: Moment::NONE, ..Book::default() }
    }

    #[inline]
    fn change(&mut self, id: CellId, delta: i64) {
        let index = id as usize;
        if index >= self.cells.len() {
            self.cells.resize(index + 1, Cell::default());
            self.cells.iter_mut().take(2).for_each(|cell| cell.unnamed = true); // idle and opaque
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
        if cell.unnamed {
            self.unnamed_bytes = self.unnamed_bytes.wrapping_add(delta);
        }
        if cell.role != 0 {
            let of_role = &mut self.by_role[usize::from(cell.role & 15)];
            *of_role = of_role.wrapping_add(delta);
            self.role_changes += 1;
        }
        self.copied = false;
        self.history.post(id, delta);
    }

    /// Adds or subtracts tracked bytes.
    #[inline]
    pub fn post(&mut self, cell: CellId, delta: i64) {
        self.change(cell, delta);
        self.tracked = self.tracked.wrapping_add(delta);
    }

    /// Adds a direct allocation to the rounding (`post` books its bytes), or removes it.
    #[inline]
    pub fn round(&mut self, bytes: u64, comes: bool) {
        let of_one = Rounding::of(bytes);
        let change = if comes { of_one } else { Rounding::default().minus(of_one) };
        self.rounding = self.rounding.plus(change);
        self.history.round(change);
    }

    /// Moves tracked bytes to another cell, from now on.
    #[inline]
    pub fn shift(&mut self, from: CellId, to: CellId, bytes: i64) {
        self.change(from, bytes.wrapping_neg());
        self.change(to, bytes);
    }

    /// Corrects the peak's composition for bytes that were live at the peak and have got another name.
    pub fn rename_at_peak(&mut self, from: CellId, to: CellId, bytes: i64) {
        for (id, delta) in [(from, bytes.wrapping_neg()), (to, bytes)] {
            self.change(id, 0); // keeps the value at the peak, if it is not kept yet
            let cell = &mut self.cells[id as usize];
            cell.at_peak = cell.at_peak.wrapping_add(delta);
            if self.is_unnamed(id) {
                self.peak.unnamed = self.peak.unnamed.wrapping_add(delta);
            }
        }
    }

    /// Corrects the timeline for a live row that was created at `first_epoch` and has got another name.
    pub fn rename_past(
        &mut self,
        first_epoch: u32,
        (from, to): (CellId, CellId),
        bytes: i64,
        cells: &CellTable,
    ) {
        if self.high.is_some() && first_epoch <= self.epoch {
            for (id, delta) in [(from, bytes.wrapping_neg()), (to, bytes)] {
                self.change(id, 0); // keeps the value at the fullest moment, if it is not kept yet
                let cell = &mut self.cells[id as usize];
                cell.at_high = cell.at_high.wrapping_add(delta);
            }
        }
        let unnamed = |id| if self.is_unnamed(id) { bytes } else { 0 };
        let unnamed = unnamed(to).wrapping_sub(unnamed(from));
        if first_epoch <= self.epoch {
            self.high.unnamed = self.high.unnamed.wrapping_add(unnamed);
        }
        self.past.rename(first_epoch, (from, to), Change { bytes, unnamed }, cells);
    }

    /// Finishes a record that changed the book: only whole records count for peaks and fullest moments.
    #[inline]
    pub fn settle(&mut self, time_ns: u64) -> bool {
        if self.tracked != self.settled {
            self.settled = self.tracked;
            self.window.include(self.tracked);
            self.most = self.most.max(self.tracked);
        }
        (self.touched_ns, self.is_at_high) = (time_ns, false);
        let bytes = self.tracked;
        if bytes < self.high.bytes {
            return false; // not a peak either: no peak is lower than the slot's fullest moment
        }
        let unnamed = self.unnamed();
        let exceeds = |high: i64, of: i64| bytes > high || bytes == high && unnamed < of;
        let is_peak = bytes > 0 && exceeds(self.peak.bytes, self.peak.unnamed);
        if !is_peak && !exceeds(self.high.bytes, self.high.unnamed) {
            return false;
        }
        self.epoch = self.epoch.wrapping_add(1);
        self.high = Moment { time_ns, bytes, unnamed, epoch: self.epoch, is_high: true };
        self.is_at_high = true;
        if is_peak {
            self.peak = self.high;
        }
        is_peak
    }

    /// Returns the fullest moment of the open slot.
    pub fn high_moment(&self) -> Option<Moment> {
        self.high.is_some().then_some(Moment { epoch: self.epoch, ..self.high })
    }

    /// Returns the last state, if it differs from the fullest moment of the open slot.
    pub fn present(&self) -> Option<Moment> {
        let (bytes, unnamed) = (self.tracked, self.unnamed());
        let moment = Moment { time_ns: self.touched_ns, bytes, unnamed, epoch: self.epoch, is_high: false };
        (self.high.is_some() && !self.is_at_high).then_some(moment)
    }

    /// Closes the slot: the next booking opens a new one.
    pub fn close_high(&mut self) {
        (self.high, self.slot_end_ns) = (Moment::NONE, 0);
    }

    /// Returns the value of a cell at the fullest moment of the open slot.
    pub fn at_high(&self, id: CellId) -> i64 {
        let cell = self.cells.get(id as usize);
        cell.map_or(0, |cell| if cell.epoch == self.epoch { cell.at_high } else { cell.now })
    }

    /// Returns cells with their amounts, without zeros.
    pub fn sparse(&self, amount: impl Fn(CellId) -> i64) -> Vec<(CellId, i64)> {
        (0..self.cells.len() as CellId).map(|id| (id, amount(id))).filter(|(_, bytes)| *bytes != 0).collect()
    }

    pub fn add_unnamed(&mut self, id: CellId) {
        if self.is_unnamed(id) {
            return;
        }
        self.unnamed.push(id);
        self.change(id, 0);
        self.cells[id as usize].unnamed = true;
        self.unnamed_bytes = self.unnamed_bytes.wrapping_add(self.now(id));
    }

    /// Whether a cell contains idle or opaque bytes.
    pub fn is_unnamed(&self, id: CellId) -> bool {
        self.unnamed.contains(&id)
    }

    /// Returns all cells of idle and opaque bytes.
    pub fn unnamed_cells(&self) -> &[CellId] {
        &self.unnamed
    }

    /// Returns idle and opaque bytes, and memory that segments gave up.
    #[inline]
    pub fn unnamed(&self) -> i64 {
        self.unnamed_bytes.wrapping_add(self.let_go)
    }

    /// Notes that segments gave up `bytes` of memory that stays, or have taken them again (negative).
    pub fn let_go(&mut self, bytes: i64) {
        self.let_go = self.let_go.wrapping_add(bytes);
    }

    /// Restarts peak and timeline with the amounts held at `time_ns`. `None`: these are unknown until the next record.
    pub fn restart(&mut self, time_ns: Option<u64>, slot_ns: u64) {
        self.past = Timeline::default();
        self.close_high();
        self.epoch = self.epoch.wrapping_add(1);
        self.peak = Moment { epoch: self.epoch, ..Moment::default() };
        let Some(time_ns) = time_ns else { return };
        let (bytes, unnamed) = (self.tracked, self.unnamed());
        self.slot_end_ns = self.past.slot_end_ns(time_ns, slot_ns);
        self.high = Moment { time_ns, bytes, unnamed, epoch: self.epoch, is_high: true };
        (self.is_at_high, self.touched_ns) = (true, time_ns);
        if bytes > 0 {
            self.peak = self.high;
        }
    }

    /// Returns the first epoch at whose peak a row created now is live.
    #[inline]
    pub fn next_epoch(&self) -> u32 {
        self.epoch.wrapping_add(1)
    }

    /// Whether a live row created at `first_epoch` (see [`Book::next_epoch`]) was live at the peak.
    #[inline]
    pub fn live_at_peak(&self, first_epoch: u32) -> bool {
        first_epoch <= self.peak.epoch
    }

    #[inline]
    pub fn now(&self, id: CellId) -> i64 {
        self.cells.get(id as usize).map_or(0, |cell| cell.now)
    }

    /// Updates the sums by role for new cells.
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

    pub fn restart_most(&mut self) {
        self.most = self.tracked;
    }

    pub fn at_peak(&self, id: CellId) -> i64 {
        self.cells
            .get(id as usize)
            .map_or(0, |cell| if cell.epoch >= self.peak.epoch { cell.at_peak } else { cell.now })
    }

    /// Returns the present amounts by cell id.
    pub fn amounts(&self) -> Vec<i64> {
        self.cells.iter().map(|cell| cell.now).collect()
    }

    /// Returns the present amounts by cell id, for samples: one copy serves all readings between two changes.
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

    /// Returns the estimated memory of cells, their copies, and the history.
    pub fn bytes(&self) -> usize {
        self.cells.capacity() * (std::mem::size_of::<Cell>() + 5 * std::mem::size_of::<i64>())
    }

    /// Opens the window and the timeline slot of `time_ns`; returns the window that has ended. Must precede [`Book::settle`] of
    /// the record that lies after the end of the open window.
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

    /// Returns the open window if it has changed since the last call. Later changes yield another window of the same time. The
    /// window stays open, so windows end at the same records whether or not this is called.
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
}

impl Book {
    #[cold]
    pub fn end_slot(&mut self, cells: &CellTable) {
        if let Some(moment) = self.high_moment() {
            let amounts = self.sparse(|id| self.at_high(id));
            self.past.push(moment, amounts, cells);
        }
        self.close_high();
    }

    /// Adds the last state as a point if the book was silent for long; called before a record of `now_ns` is booked.
    pub fn end_silence(&mut self, now_ns: u64, cells: &CellTable) {
        if self.high_moment().is_none() || !self.past.is_long(now_ns.saturating_sub(self.touched_ns)) {
            return;
        }
        // Rows that are live now were live then.
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

    /// Returns all points, the fullest moment of the open slot and, if `is_known`, the last state. The point at the peak comes
    /// from the peak itself, because late names correct the peak for longer.
    pub fn timeline(&self, cells: &CellTable, is_known: bool) -> gpumem_model::timeline::Timeline {
        let high =
            self.high_moment().map(|moment| Point::of(moment, self.sparse(|id| self.at_high(id)), cells));
        let present = self.present().filter(|_| is_known);
        let present = present.map(|moment| Point::of(moment, self.sparse(|id| self.now(id)), cells));
        let points = self.past.points.iter().cloned().chain(high).chain(present);
        let shown = points.map(|point| {
            let is_peak = point.moment.epoch == self.peak.epoch && point.moment.is_high;
            if is_peak {
                Point::of(point.moment, self.sparse(|id| self.at_peak(id)), cells).shown
            } else {
                point.shown
            }
        });
        gpumem_model::timeline::Timeline { width_ns: self.past.width_ns, points: shown.collect() }
    }
}
