//! What a book held over time: a bounded number of points that goes on for ever, each exact.
//!
//! **Which moments.** Time is cut into slots. Of each slot in which the book was touched the fullest moment stays: the
//! highest `tracked`, and among equal ones that with the least idle and opaque bytes (a framework's pool stays at its
//! highest reservation for hours). When silence follows that is longer than a slot, the last state stays too: it is
//! what was held meanwhile. When all points are taken, slots become twice as wide, and of two the fuller one
//! stays: no peak is ever lost, and the point at the peak of the whole run is always there.
//!
//! **What it costs.** The composition at a slot's fullest moment is kept by copy on write like the peak's, with the
//! same epochs (book.rs), so an event costs no more than without it. Cells are walked once per slot; n slots' worth of time cost some
//! hundred times log n walks.
//!
//! **What arrives later** corrects points as it corrects the peak, as long as the row lives: one that was made in epoch e was
//! live at every point since.

use crate::book::{Book, CellId, CellTable};
use crate::holdings::Holdings;
use gpumem_model::timeline as told;

/// Cells of a point at most.
pub use gpumem_model::timeline::MAX_CELLS as MAX_POINT_CELLS;
/// Points at most.
pub use gpumem_model::timeline::MAX_POINTS;
/// Of these, cells and sums of some of them where there are more (sums.rs); the others are sums of uses.
pub(crate) const NAMED: usize = 40;

#[derive(Debug, Clone)]
pub(crate) struct Point {
    said: told::Point,
    bytes: i64,
    /// Idle and opaque bytes in it.
    unnamed: i64,
    /// Of the moment: rows of this and earlier epochs that still live were live then.
    epoch: u32,
    /// The fullest moment of its slot.
    is_high: bool,
    /// The state that a silence of more than a slot began with.
    is_held: bool,
    /// Cells that are not among its amounts may be in sums.
    is_folded: bool,
    /// Those that are in none are in the rest.
    has_rest: bool,
}

impl Point {
    fn of(moment: Moment, amounts: Vec<(CellId, i64)>, cells: &CellTable) -> Self {
        let Moment { time_ns, bytes, unnamed, epoch, is_high } = moment;
        let said = told::Point { time_ns, amounts: amounts.into(), rest_bytes: 0 };
        let mut point = Point {
            said,
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

    /// No more amounts than there is room for.
    fn fold(&mut self, cells: &CellTable) {
        let said = &mut self.said;
        if said.amounts.len() > MAX_POINT_CELLS {
            let mut rest = self.has_rest.then_some(said.rest_bytes);
            said.amounts = cells.fewer(std::mem::take(&mut *said.amounts), &mut rest).into();
            (self.is_folded, self.has_rest, said.rest_bytes) = (true, rest.is_some(), rest.unwrap_or(0));
        }
    }

    fn is_fuller(&self, than: &Point) -> bool {
        (self.bytes, than.unnamed) > (than.bytes, self.unnamed)
    }

    /// Adds to a cell, or to the sum that it is in.
    fn add(&mut self, id: CellId, bytes: i64, cells: &CellTable) {
        let amounts = &mut self.said.amounts;
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
            None if self.has_rest => self.said.rest_bytes = self.said.rest_bytes.wrapping_add(bytes),
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
    /// The fullest of its slot; else the state that a silence began with.
    pub is_high: bool,
}

/// The points of a book.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    /// 0 until the first slot.
    width_ns: u64,
    points: Vec<Point>,
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

    /// A moment that is not before the last one, with its cells by id.
    pub fn push(&mut self, moment: Moment, amounts: Vec<(CellId, i64)>, cells: &CellTable) {
        let point = Point::of(moment, amounts, cells);
        let slot = |point: &Point| point.said.time_ns / self.width_ns.max(1);
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
            point.is_held &= until_ns - point.said.time_ns >= self.width_ns;
            until_ns = point.said.time_ns;
        }
        let slot = |point: &Point| point.said.time_ns / self.width_ns.max(1);
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

    /// Bytes of a row that was made at `first_epoch` and still lives turn out to have had another name.
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

/// Bytes that change their name, and how many more of them are idle or opaque by that.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Change {
    pub bytes: i64,
    pub unnamed: i64,
}

impl Book {
    /// The open slot is over.
    #[cold]
    pub fn end_slot(&mut self, cells: &CellTable) {
        if let Some(moment) = self.high_moment() {
            let amounts = self.sparse(|id| self.at_high(id));
            self.past.push(moment, amounts, cells);
        }
        self.close_high();
    }

    /// Before a record of `now_ns` is booked: if the book had not been touched for long, its last state is a point.
    pub fn end_silence(&mut self, now_ns: u64, cells: &CellTable) {
        if self.high_moment().is_none() || !self.past.is_long(now_ns.saturating_sub(self.touched_ns)) {
            return;
        }
        // Rows of now were live then.
        let held = match (self.present(), self.high_moment()) {
            (Some(present), _) => Some(Moment { epoch: self.next_epoch(), ..present }),
            (None, high) => high.map(|high| Moment { is_high: false, ..high }),
        };
        self.end_slot(cells);
        if let Some(moment) = held {
            self.reach_epoch(moment.epoch);
            let amounts = self.sparse(|id| self.now(id));
            self.past.push(moment, amounts, cells);
        }
    }

    /// The points so far, with the fullest moment of the open slot and the last state, if it `is_known`. The point at the
    /// peak is what is known of the peak by now.
    pub fn timeline(&self, cells: &CellTable, is_known: bool) -> told::Timeline {
        let high =
            self.high_moment().map(|moment| Point::of(moment, self.sparse(|id| self.at_high(id)), cells));
        let present = self.present().filter(|_| is_known);
        let present = present.map(|moment| Point::of(moment, self.sparse(|id| self.now(id)), cells));
        let points = self.past.points.iter().cloned().chain(high).chain(present);
        let said = points.map(|point| {
            let Point { bytes, unnamed, epoch, is_high, .. } = point;
            let is_peak = epoch == self.peak.epoch && is_high;
            if is_peak {
                let moment = Moment { time_ns: point.said.time_ns, bytes, unnamed, epoch, is_high };
                Point::of(moment, self.sparse(|id| self.at_peak(id)), cells).said
            } else {
                point.said
            }
        });
        told::Timeline { width_ns: self.past.width_ns, points: said.collect() }
    }
}

impl Holdings {
    /// What was held over time on a device.
    pub fn timeline(&self, book: usize) -> told::Timeline {
        self.books.get(book).map(|book| book.timeline(&self.cells, !self.mixed)).unwrap_or_default()
    }
}
