//! Timeline of a book: amounts by cell at a bounded number of moments, each exact, for runs of any length.
//!
//! **Choice of moments.** Time is divided into slots. A slot in which the book changed has one point, its *fullest moment*: the
//! highest `tracked`, and among equal moments the one with the fewest unused bytes (mod.rs). If a silence longer than a slot
//! follows, the last state gets a point too, because it was held during the silence. When all points are in use, slots become
//! twice as wide, and the fuller of two moments stays. So the peak of the whole run always has a point.
//!
//! **Cost.** Amounts at a slot's fullest moment are copied on write, with the same epochs as those at the peak (mod.rs). So a
//! record costs no more than without a timeline. All cells are visited once for each slot. Slots widen, so their number grows
//! with the logarithm of the time.
//!
//! **Late names.** A live allocation or block may get another tag or role. Then its bytes move to the new cell in all points
//! since it was created.

use crate::book::cells::{CellId, CellTable, MAX_POINT_CELLS};
use gpumem_model::timeline as model;

pub use gpumem_model::timeline::MAX_POINTS;

/// A timeline point as runs store it, and data with which the ledger corrects it.
#[derive(Debug, Clone)]
pub(crate) struct Point {
    pub view: model::Point,
    pub moment: Moment,
    /// Whether the point is the state at the begin of a silence longer than a slot.
    is_held: bool,
    /// Whether bytes of cells that `view.amounts` lacks may be in groups.
    is_folded: bool,
    /// Whether bytes of cells that are in no amount and no group are in `rest_bytes`.
    has_rest: bool,
}

impl Point {
    /// Returns the timeline point of a moment; small cells are summed if there are too many.
    pub fn new(moment: Moment, amounts: Vec<(CellId, i64)>, cells: &CellTable) -> Self {
        let view = model::Point { time_ns: moment.time_ns, amounts: amounts.into(), rest_bytes: 0 };
        let is_held = !moment.is_high;
        let mut point = Point { view, moment, is_held, is_folded: false, has_rest: false };
        point.fold(cells);
        point
    }

    fn fold(&mut self, cells: &CellTable) {
        let view = &mut self.view;
        if view.amounts.len() > MAX_POINT_CELLS {
            let mut rest = self.has_rest.then_some(view.rest_bytes);
            view.amounts = cells.fold_small(std::mem::take(&mut *view.amounts), &mut rest).into();
            (self.is_folded, self.has_rest, view.rest_bytes) = (true, rest.is_some(), rest.unwrap_or(0));
        }
    }

    /// Whether the moment has more tracked bytes than `than`, or equal tracked bytes and fewer unused ones.
    fn is_fuller(&self, than: &Point) -> bool {
        (self.moment.bytes, than.moment.unused) > (than.moment.bytes, self.moment.unused)
    }

    /// Adds bytes to a cell, or to the group that contains it.
    fn add(&mut self, id: CellId, bytes: i64, cells: &CellTable) {
        let amounts = &mut self.view.amounts;
        let find = |id| amounts.binary_search_by_key(&id, |&(id, _)| id);
        let sums = cells.groups_of(id).filter(|_| self.is_folded);
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
            None if self.has_rest => self.view.rest_bytes = self.view.rest_bytes.wrapping_add(bytes),
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
    /// Unused bytes: idle bytes of pools, and all bytes of opaque pools (see mod.rs).
    pub unused: i64,
    /// Epoch of the book: live rows created in this or an earlier epoch were live at the moment.
    pub epoch: u32,
    /// Whether the moment is the fullest of its slot; otherwise it is the state at the begin of a silence.
    pub is_high: bool,
}

impl Moment {
    /// Means that there is no moment yet: every other moment has more bytes.
    pub const NONE: Moment = Moment { time_ns: 0, bytes: i64::MIN, unused: 0, epoch: 0, is_high: true };

    pub fn is_some(&self) -> bool {
        self.bytes != i64::MIN
    }
}

#[derive(Debug, Default)]
pub(crate) struct Timeline {
    /// Width of a slot (ns); 0 until the first slot.
    pub width_ns: u64,
    pub points: Vec<Point>,
}

impl Timeline {
    /// Returns the end of the slot that contains `time_ns`, after widening slots to at least `least_ns`.
    pub fn slot_end_ns(&mut self, time_ns: u64, least_ns: u64) -> u64 {
        self.width_ns = self.width_ns.max(least_ns).max(1);
        (time_ns - time_ns % self.width_ns).saturating_add(self.width_ns)
    }

    pub fn is_long(&self, silence_ns: u64) -> bool {
        silence_ns >= self.width_ns
    }

    /// Adds the point of a moment that is not earlier than the last one.
    pub fn push(&mut self, moment: Moment, amounts: Vec<(CellId, i64)>, cells: &CellTable) {
        let point = Point::new(moment, amounts, cells);
        let slot = |point: &Point| point.view.time_ns / self.width_ns.max(1);
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
            self.widen(); // leaves room for the open slot's fullest moment and the present state, which a view adds
        }
    }

    /// Doubles the width of slots and removes points that are no longer needed.
    fn widen(&mut self) {
        self.width_ns = self.width_ns.saturating_mul(2);
        let mut points = std::mem::take(&mut self.points);
        // A silence keeps its point only if it is longer than the wider slot.
        let mut until_ns = u64::MAX;
        for point in points.iter_mut().rev() {
            point.is_held &= until_ns - point.view.time_ns >= self.width_ns;
            until_ns = point.view.time_ns;
        }
        let slot = |point: &Point| point.view.time_ns / self.width_ns.max(1);
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

    /// Moves the bytes of a live allocation or block to another cell, in all points since its creation at `first_epoch`.
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
            point.moment.unused = point.moment.unused.wrapping_add(change.unused);
        }
    }
}

/// Bytes that move to another cell, and the resulting change of the moment's unused bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Change {
    pub bytes: i64,
    pub unused: i64,
}
