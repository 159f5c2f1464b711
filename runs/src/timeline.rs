//! What a process held on a device over time, by cell: a bounded number of points, from which pictures are drawn and past
//! moments are told.

use serde::{Deserialize, Serialize};

/// Cells a point names at most, sums of smaller ones included; what the others held is one sum.
pub use gpumem_ledger::MAX_POINT_CELLS as MAX_CELLS;
/// Points a timeline holds at most; when it is full, its width doubles and of two points the fuller one stays.
pub use gpumem_ledger::MAX_POINTS;
use gpumem_ledger::{TimelinePoint, TimelineView};
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
    /// are more, the smaller ones are summed in cells of their class, role and phase whose tag is `(smaller ones)`.
    pub amounts: Vec<(u32, i64)>,
    /// What cells that are not named held.
    pub rest_bytes: i64,
}

impl Point {
    /// Tracked bytes of that moment.
    pub fn tracked_bytes(&self) -> i64 {
        self.amounts.iter().map(|(_, bytes)| bytes).sum::<i64>() + self.rest_bytes
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
