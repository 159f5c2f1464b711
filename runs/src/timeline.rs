//! What a process held on a device over time, by cell: a bounded number of points, from which pictures are drawn and past
//! moments are told.

use serde::{Deserialize, Serialize};

/// Points a timeline holds at most; when it is full, every second one goes and its width doubles.
pub const MAX_POINTS: usize = 256;

/// Cells a point names at most; what the others held is one sum.
pub const MAX_CELLS: usize = 64;

/// What was held on a device over time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Timeline {
    /// Least distance of two points in record time; 0 where there are none.
    pub width_ns: u64,
    /// By time.
    pub points: Vec<Point>,
}

/// What was held at a moment: the sum of `amounts` and `rest_bytes` is `tracked`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Point {
    /// When, in record time.
    pub time_ns: u64,
    /// (index in [`Run::cells`](crate::run::Run::cells), bytes), by index, without zeros; the largest, at most [`MAX_CELLS`].
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
