//! Points by which the growth of a run is judged, as the ledger kept them; stored with the run.
//!
//! `tracked` is judged without the slack of pools: what a pool holds in reserve comes and goes with fragmentation, and is
//! judged by itself. Where a program said steps, everything is per step; where it has a stable period, per period; else
//! per minute.

use crate::fields::{Field, Window};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Fewer points after warm-up are no evidence of growth.
pub const LEAST_POINTS: usize = 10;

/// What points are counted in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Steps that the program said.
    Step,
    /// Times that what is live has risen and fallen, where that takes the same time again and again.
    Period,
    /// Record time.
    #[default]
    Minute,
}

impl Axis {
    /// What a rate is per.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Step => "step",
            Axis::Period => "period",
            Axis::Minute => "minute",
        }
    }
}

/// Points of one device of a run. Kept as JSON, so it is bounded: 64 points of 64 cells.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Growth {
    /// What points are counted in.
    pub axis: Axis,
    /// How long a period takes.
    pub period_ns: Option<u64>,
    /// Steps, periods or seconds from a point to the next.
    pub stride: u64,
    /// Step since the first, or second, and time of each point.
    pub points: Vec<(u64, u64)>,
    /// The latest step or second, and its time.
    pub latest: (u64, u64),
    /// Direct and block bytes at the points.
    pub named: Vec<i64>,
    /// What pools held in reserve, opaque ones included.
    pub slack: Vec<i64>,
    /// Cells that changed, by index of `Run::cells`.
    pub cells: Vec<(u32, Vec<i64>)>,
    /// What all other cells changed since the first point.
    pub rest: Vec<i64>,
    /// Time and untrackable of samples.
    pub gap: Vec<(u64, i64)>,
    /// Time and `used`, of a process without an agent.
    pub used: Vec<(u64, i64)>,
}

impl Growth {
    /// Leaves the points of a window.
    pub(crate) fn clip(&mut self, window: &Window) {
        let kept: Vec<bool> = self.points.iter().map(|(_, time_ns)| window.has(*time_ns)).collect();
        let columns = self.cells.iter_mut().map(|(_, column)| column);
        for column in columns.chain([&mut self.named, &mut self.slack, &mut self.rest]) {
            let mut is_kept = kept.iter();
            column.retain(|_| is_kept.next().copied().unwrap_or(false));
        }
        self.points.retain(|(_, time_ns)| window.has(*time_ns));
        self.gap.retain(|(time_ns, _)| window.has(*time_ns));
        self.used.retain(|(time_ns, _)| window.has(*time_ns));
    }
}

impl Field for Growth {
    fn remap(&mut self, to: &dyn Fn(u32) -> Option<u32>) {
        let mut sums: BTreeMap<u32, Vec<i64>> = BTreeMap::new();
        for (cell, column) in self.cells.drain(..) {
            let Some(cell) = to(cell) else { continue };
            let sum = sums.entry(cell).or_insert_with(|| vec![0; column.len()]);
            sum.iter_mut().zip(column).for_each(|(sum, bytes)| *sum = sum.wrapping_add(bytes));
        }
        self.cells = sums.into_iter().collect();
    }

    fn heap_bytes(&self) -> usize {
        let columns = [&self.named, &self.slack, &self.rest].into_iter().map(Field::heap_bytes);
        let timed = [&self.gap, &self.used].into_iter().map(Field::heap_bytes);
        columns.chain(timed).sum::<usize>() + self.points.heap_bytes() + self.cells.heap_bytes()
    }
}
