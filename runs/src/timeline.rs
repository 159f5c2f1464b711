//! What a process held on a device over time, by cell: a bounded number of points, from which pictures are drawn and past
//! moments are told.

use serde::{Deserialize, Serialize};

/// Cells a point names at most, sums of smaller ones included; what the others held is one sum.
pub use gpumem_ledger::MAX_POINT_CELLS as MAX_CELLS;
/// Points a timeline holds at most; when it is full, its width doubles and of two points the fuller one stays.
pub use gpumem_ledger::MAX_POINTS;
use gpumem_ledger::{TimelinePoint, TimelineView};

pub(crate) use gpumem_ledger::SUM;

/// What was held on a device over time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Timeline {
    /// Width in record time of the slots of which each point is the fullest moment: that with most tracked bytes, and among
    /// those with the least idle ones. What was held when a silence of more than a width began is a point too. 0
    /// where there are none.
    pub width_ns: u64,
    /// By time. Where at least one whole slot lies between two of them, nothing happened in it: what the first one held was held
    /// until the slot of the second. Other points are true of their own moment alone.
    pub points: Vec<Point>,
}

/// What was held at a moment: the sum of `amounts` and `rest_bytes` is `tracked`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Point {
    /// When, in record time.
    pub time_ns: u64,
    /// (index in [`Run::cells`](crate::run::Run::cells), bytes), by index, without zeros; at most [`MAX_CELLS`]. Where there
    /// are more, the smaller ones are summed: those whose tags differ in numbers in a cell `a/b.*/c (smaller ones)`, those below a path
    /// in `a/(smaller ones)`, what is left of a class, role and phase in `(smaller ones)`; each has what no nearer one has.
    pub amounts: Vec<(u32, i64)>,
    /// What cells that are not named held.
    pub rest_bytes: i64,
}

impl Point {
    /// Tracked bytes of that moment.
    pub fn tracked_bytes(&self) -> i64 {
        // Of a damaged store, they may be anything.
        self.amounts.iter().fold(self.rest_bytes, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

impl Timeline {
    /// Goes on with what was kept later, in no more points than a timeline has: the fullest of each slot, and what was held
    /// where nothing happened for a whole slot.
    pub fn go_on(&mut self, later: Timeline) {
        let last_ns = self.points.last().map(|point| point.time_ns);
        self.points.extend(later.points.into_iter().filter(|point| Some(point.time_ns) > last_ns));
        self.width_ns = self.width_ns.max(later.width_ns).max(1);
        while self.points.len() > MAX_POINTS {
            self.width_ns = self.width_ns.saturating_mul(2);
            let slot = |point: &Point| point.time_ns / self.width_ns;
            let slots = self.points.chunk_by(|one, other| slot(one) == slot(other)).collect::<Vec<_>>();
            let mut kept: Vec<Point> = Vec::new();
            for (at, points) in slots.iter().enumerate() {
                let Some(last) = points.last() else { continue };
                let fullest = points.iter().rev().max_by_key(|point| point.tracked_bytes()).unwrap_or(last);
                kept.push(fullest.clone());
                let next = slots.get(at + 1).and_then(|points| points.first());
                if fullest.time_ns < last.time_ns && next.is_none_or(|next| slot(next) > slot(last) + 1) {
                    kept.push(last.clone());
                }
            }
            self.points = kept;
        }
    }
}

impl From<TimelineView> for Timeline {
    fn from(view: TimelineView) -> Self {
        let points = view.points.into_iter().map(|point| {
            let TimelinePoint { time_ns, amounts, rest_bytes } = point;
            Point { time_ns, amounts, rest_bytes }
        });
        Timeline { width_ns: view.width_ns, points: points.collect() }
    }
}
