//! Timeline of a book: a bounded number of points, each exact, for runs of any length.
//!
//! **Choice of moments.** Time is divided into slots. For each slot in which the book changed, the fullest moment is kept: the
//! highest `tracked`, and among equal ones the one with the least idle and opaque bytes. (A framework pool stays at its highest
//! reservation for hours.) If a silence longer than a slot follows, the last state is kept too, because it was held meanwhile.
//! When all points are in use, slots become twice as wide, and the fuller of two moments is kept. No peak is ever lost, and the
//! point at the peak of the whole run always exists.
//!
//! **Cost.** The composition at a slot's fullest moment is kept by copy on write like the peak's, with the same epochs (mod.rs).
//! So an event costs no more than without a timeline. Cells are visited once for each slot: n slots' worth of time cost some
//! hundred times log n visits.
//!
//! **Late names** correct points like the peak, as long as the row exists: a row created in epoch e was live at every point
//! since.

use crate::book::cells::{CellId, CellTable, MAX_POINT_CELLS};
use gpumem_model::timeline as told;

pub use gpumem_model::timeline::MAX_POINTS;

#[derive(Debug, Clone)]
pub(crate) struct Point {
    pub shown: told::Point,
    pub moment: Moment,
    /// The point is the state at the begin of a silence of more than a slot.
    is_held: bool,
    /// Bytes of cells that are missing from the amounts may be in groups.
    is_folded: bool,
    /// Bytes of cells without a group are in the rest.
    has_rest: bool,
}

impl Point {
    pub fn of(moment: Moment, amounts: Vec<(CellId, i64)>, cells: &CellTable) -> Self {
        let shown = told::Point { time_ns: moment.time_ns, amounts: amounts.into(), rest_bytes: 0 };
        let is_held = !moment.is_high;
        let mut point = Point { shown, moment, is_held, is_folded: false, has_rest: false };
        point.fold(cells);
        point
    }

    /// Reduces the amounts to the maximum number of cells.
    fn fold(&mut self, cells: &CellTable) {
        let shown = &mut self.shown;
        if shown.amounts.len() > MAX_POINT_CELLS {
            let mut rest = self.has_rest.then_some(shown.rest_bytes);
            shown.amounts = cells.fewer(std::mem::take(&mut *shown.amounts), &mut rest).into();
            (self.is_folded, self.has_rest, shown.rest_bytes) = (true, rest.is_some(), rest.unwrap_or(0));
        }
    }

    fn is_fuller(&self, than: &Point) -> bool {
        (self.moment.bytes, than.moment.unnamed) > (than.moment.bytes, self.moment.unnamed)
    }

    /// Adds bytes to a cell, or to the group that contains it.
    fn add(&mut self, id: CellId, bytes: i64, cells: &CellTable) {
        let amounts = &mut self.shown.amounts;
        let find = |id| amounts.binary_search_by_key(&id, |&(id, _)| id);
        let sums = cells.sums_of(id).filter(|_| self.is_folded);
        let found = [id].into_iter().chain(sums).find_map(|id| find(id).ok());
        match found {
            Some(at) => {
                if let Some((_, amount)) = amounts.get_mut(at) {
                    *amount = amount.wrapping_add(bytes);
                    if *amount == 0 {
                        amounts.remove(at);
                    }
                }
            }
            None if self.has_rest => self.shown.rest_bytes = self.shown.rest_bytes.wrapping_add(bytes),
            None => {
                let at = find(id).unwrap_or_else(|at| at);
                amounts.insert(at, (id, bytes));
                self.fold(cells);
            }
        }
    }
}

/// A moment that is a peak or will become a point.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Moment {
    pub time_ns: u64,
    pub bytes: i64,
    /// Idle and opaque bytes.
    pub unnamed: i64,
    /// Epoch of the book: existing rows of this and earlier epochs were live then.
    pub epoch: u32,
    /// The fullest moment of its slot; otherwise the state at the begin of a silence.
    pub is_high: bool,
}

impl Moment {
    /// No moment: any moment exceeds this one.
    pub const NONE: Moment = Moment { time_ns: 0, bytes: i64::MIN, unnamed: 0, epoch: 0, is_high: true };

    pub fn is_some(&self) -> bool {
        self.bytes != i64::MIN
    }
}

#[derive(Debug, Default)]
pub(crate) struct Timeline {
    /// Width of a slot; 0 until the first slot.
    pub width_ns: u64,
    pub points: Vec<Point>,
}

impl Timeline {
    /// Returns the end of the slot of `time_ns`; slots are at least `least_ns` wide.
    pub fn slot_end_ns(&mut self, time_ns: u64, least_ns: u64) -> u64 {
        self.width_ns = self.width_ns.max(least_ns).max(1);
        (time_ns - time_ns % self.width_ns).saturating_add(self.width_ns)
    }

    pub fn is_long(&self, silence_ns: u64) -> bool {
        silence_ns >= self.width_ns
    }

    /// Adds a moment, not earlier than the last one, with its cells by id.
    pub fn push(&mut self, moment: Moment, amounts: Vec<(CellId, i64)>, cells: &CellTable) {
        let point = Point::of(moment, amounts, cells);
        let slot = |point: &Point| point.shown.time_ns / self.width_ns.max(1);
        match self.points.last_mut() {
            Some(last) if point.is_held && last.moment.epoch == point.moment.epoch => last.is_held = true, // the same moment
            Some(last)
                if point.moment.is_high
                    && last.moment.is_high
                    && !last.is_held
                    && slot(last) == slot(&point) =>
            {
                if point.is_fuller(last) {
                    *last = point;
                }
            }
            _ => self.points.push(point),
        }
        while self.points.len() > MAX_POINTS - 2 {
            self.widen(); // a view adds the open slot's moment and the present
        }
    }

    fn widen(&mut self) {
        self.width_ns = self.width_ns.saturating_mul(2);
        let mut points = std::mem::take(&mut self.points);
        // Only a silence longer than a slot has a point.
        let mut until_ns = u64::MAX;
        for point in points.iter_mut().rev() {
            point.is_held &= until_ns - point.shown.time_ns >= self.width_ns;
            until_ns = point.shown.time_ns;
        }
        let slot = |point: &Point| point.shown.time_ns / self.width_ns.max(1);
        let mut high: Option<usize> = None;
        for at in 0..points.len() {
            if !points[at].moment.is_high {
                continue;
            }
            if let Some(other) = high.filter(|&other| slot(&points[other]) == slot(&points[at])) {
                let is_fuller = points[at].is_fuller(&points[other]);
                points[if is_fuller { other } else { at }].moment.is_high = false;
                if !is_fuller {
                    continue;
                }
            }
            high = Some(at);
        }
        points.retain(|point| point.moment.is_high || point.is_held);
        self.points = points;
    }

    /// Renames bytes of a live row that was created at `first_epoch`.
    pub fn rename(
        &mut self,
        first_epoch: u32,
        (from, to): (CellId, CellId),
        change: Change,
        cells: &CellTable,
    ) {
        for point in self.points.iter_mut().rev() {
            if point.moment.epoch < first_epoch {
                break;
            }
            point.add(from, change.bytes.wrapping_neg(), cells);
            point.add(to, change.bytes, cells);
            point.moment.unnamed = point.moment.unnamed.wrapping_add(change.unnamed);
        }
    }
}

/// Bytes that get another name, and the resulting change of idle or opaque bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Change {
    pub bytes: i64,
    pub unnamed: i64,
}
