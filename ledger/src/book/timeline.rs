//! What a book held over time: a bounded number of points, each exact, for runs of any length.
//!
//! **Which moments.** Time is cut into slots. For each slot in which the book was touched, the fullest moment is kept: the highest
//! `tracked`, and among equal ones that with the least idle and opaque bytes (a framework's pool stays at its highest reservation for
//! hours). When a silence follows that is longer than a slot, the last state is kept too: it was held meanwhile. When all points are
//! taken, slots become twice as wide, and of two moments the fuller one is kept. No peak is ever lost, and the point at the peak of the
//! whole run always exists.
//!
//! **What it costs.** The composition at a slot's fullest moment is kept by copy on write like the peak's, with the same epochs
//! (mod.rs), so an event costs no more than without it. Cells are visited once per slot: n slots' worth of time cost some hundred times
//! log n visits.
//!
//! **Late names** correct points as they correct the peak, as long as the row lives: a row that was made in epoch e was live at every
//! point since.

use crate::book::cells::{CellId, CellTable, MAX_POINT_CELLS};
use gpumem_model::timeline as told;

/// Points at most.
pub use gpumem_model::timeline::MAX_POINTS;

#[derive(Debug, Clone)]
pub(crate) struct Point {
    pub shown: told::Point,
    pub bytes: i64,
    /// Idle and opaque bytes in it.
    pub unnamed: i64,
    /// Epoch of the moment: rows of this and earlier epochs that still live were live then.
    pub epoch: u32,
    /// The fullest moment of its slot.
    pub is_high: bool,
    /// The state at the begin of a silence of more than a slot.
    is_held: bool,
    /// Bytes of cells that are not among its amounts may be in groups.
    is_folded: bool,
    /// Bytes of cells without a group are in the rest.
    has_rest: bool,
}

impl Point {
    pub fn of(moment: Moment, amounts: Vec<(CellId, i64)>, cells: &CellTable) -> Self {
        let Moment { time_ns, bytes, unnamed, epoch, is_high } = moment;
        let shown = told::Point { time_ns, amounts: amounts.into(), rest_bytes: 0 };
        let mut point = Point {
            shown,
            bytes,
            unnamed,
            epoch,
            is_high,
            is_held: !is_high,
            is_folded: false,
            has_rest: false,
        };
        point.fold(cells);
        point
    }

    /// Reduces the amounts to the room that there is.
    fn fold(&mut self, cells: &CellTable) {
        let shown = &mut self.shown;
        if shown.amounts.len() > MAX_POINT_CELLS {
            let mut rest = self.has_rest.then_some(shown.rest_bytes);
            shown.amounts = cells.fewer(std::mem::take(&mut *shown.amounts), &mut rest).into();
            (self.is_folded, self.has_rest, shown.rest_bytes) = (true, rest.is_some(), rest.unwrap_or(0));
        }
    }

    fn is_fuller(&self, than: &Point) -> bool {
        (self.bytes, than.unnamed) > (than.bytes, self.unnamed)
    }

    /// Adds bytes to a cell, or to the group that has it.
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

/// A moment that becomes a point.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    pub time_ns: u64,
    pub bytes: i64,
    pub unnamed: i64,
    pub epoch: u32,
    /// It is the fullest of its slot; else the state at the begin of a silence.
    pub is_high: bool,
}

/// The points of a book.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    /// 0 until the first slot.
    pub width_ns: u64,
    pub points: Vec<Point>,
}

impl Timeline {
    /// The end of the slot of `time_ns`; slots are at least `least_ns` wide.
    pub fn slot_end_ns(&mut self, time_ns: u64, least_ns: u64) -> u64 {
        self.width_ns = self.width_ns.max(least_ns).max(1);
        (time_ns - time_ns % self.width_ns).saturating_add(self.width_ns)
    }

    /// Whether a silence of this length has a point of its own.
    pub fn is_long(&self, silence_ns: u64) -> bool {
        silence_ns >= self.width_ns
    }

    /// Adds a moment that is not before the last one, with its cells by id.
    pub fn push(&mut self, moment: Moment, amounts: Vec<(CellId, i64)>, cells: &CellTable) {
        let point = Point::of(moment, amounts, cells);
        let slot = |point: &Point| point.shown.time_ns / self.width_ns.max(1);
        match self.points.last_mut() {
            Some(last) if point.is_held && last.epoch == point.epoch => last.is_held = true, // the same moment
            Some(last) if point.is_high && last.is_high && !last.is_held && slot(last) == slot(&point) => {
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
        // Only a silence that is longer than a slot has a point of its own.
        let mut until_ns = u64::MAX;
        for point in points.iter_mut().rev() {
            point.is_held &= until_ns - point.shown.time_ns >= self.width_ns;
            until_ns = point.shown.time_ns;
        }
        let slot = |point: &Point| point.shown.time_ns / self.width_ns.max(1);
        let mut high: Option<usize> = None;
        for at in 0..points.len() {
            if !points[at].is_high {
                continue;
            }
            if let Some(other) = high.filter(|&other| slot(&points[other]) == slot(&points[at])) {
                let is_fuller = points[at].is_fuller(&points[other]);
                points[if is_fuller { other } else { at }].is_high = false;
                if !is_fuller {
                    continue;
                }
            }
            high = Some(at);
        }
        points.retain(|point| point.is_high || point.is_held);
        self.points = points;
    }

    /// Bytes of a row that was made at `first_epoch` and still lives had another name.
    pub fn rename(
        &mut self,
        first_epoch: u32,
        (from, to): (CellId, CellId),
        change: Change,
        cells: &CellTable,
    ) {
        for point in self.points.iter_mut().rev() {
            if point.epoch < first_epoch {
                break;
            }
            point.add(from, change.bytes.wrapping_neg(), cells);
            point.add(to, change.bytes, cells);
            point.unnamed = point.unnamed.wrapping_add(change.unnamed);
        }
    }
}

/// Bytes that get another name, and how many more of them are idle or opaque by that.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Change {
    pub bytes: i64,
    pub unnamed: i64,
}
