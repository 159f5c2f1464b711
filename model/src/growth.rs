//! Points from which the growth (possible leaks) of a run is judged. The ledger collects them, and runs store them.
//!
//! Tracked bytes are judged without the unused bytes of pools, which vary with fragmentation and are judged separately. Growth is
//! expressed per step if the program makes steps, else per forward pass if it calls modules, else per period if its live bytes
//! rise and fall with a stable period, else per minute.

use crate::fields::{Field, Window};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Minimum number of points after warm-up from which growth is judged.
pub const LEAST_POINTS: usize = 10;
/// Maximum length of [`Growth::pinned_cells`].
pub const PINNED_CELLS: usize = 4;

/// Unit in which the positions of growth points are counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Steps that the program reports.
    Step,
    /// Calls of an outermost module.
    ForwardPass,
    /// Periods in which the live bytes rise and fall.
    Period,
    /// Time. Positions are in seconds, rates per minute.
    #[default]
    Minute,
}

impl Axis {
    /// Returns the unit's name, for rates.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Step => "step",
            Axis::ForwardPass => "forward pass",
            Axis::Period => "period",
            Axis::Minute => "minute",
        }
    }
}

/// Points on one device of a run: at most 64 points, with the bytes of at most 64 cells, because they are stored as JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Growth {
    /// Unit in which the positions of the points are counted.
    pub axis: Axis,
    /// Length of a period in ns; absent unless `axis` is `Period`.
    pub period_ns: Option<u64>,
    /// Number of steps, forward passes, periods or seconds between two points.
    pub stride: u64,
    /// Position of each point (number of the step, forward pass, period or second, from the first one), and its time (ns).
    pub points: Vec<(u64, u64)>,
    /// Position of the latest sample in the same unit, and its time (ns).
    pub latest: (u64, u64),
    /// Bytes of direct allocations and blocks at each point.
    pub named: Vec<i64>,
    /// Bytes at each point that are in no block of their pool, and bytes of pools that report no blocks.
    pub slack: Vec<i64>,
    /// Bytes of page-locked (pinned) host memory at each point; empty if there never was any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pinned: Vec<i64>,
    /// Cells with the most live pinned memory, the largest first, each with its bytes as of the last record; at most
    /// [`PINNED_CELLS`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pinned_cells: Vec<(u32, i64)>,
    /// The cells in `pinned_cells`, each with its bytes at the second point, before which programs warm up; empty in older runs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub early_pinned_cells: Vec<(u32, i64)>,
    /// Each cell that changed: its index in `Run::cells`, and its bytes at each point.
    pub cells: Vec<(u32, Vec<i64>)>,
    /// Change of the sum of all other cells since the first point, at each point (bytes).
    pub rest: Vec<i64>,
    /// Time (ns) and untrackable bytes of NVML samples.
    pub gap: Vec<(u64, i64)>,
    /// Time (ns) and `used` bytes of NVML samples, for a process without an agent.
    pub used: Vec<(u64, i64)>,
}

impl Growth {
    /// Returns whether these points end before half of the time that `other` covers, as after a training that an evaluation
    /// follows.
    pub fn ends_before_half(&self, other: &Growth) -> bool {
        let Some((_, first_ns)) = other.points.first() else { return false };
        let since = |time_ns: u64| time_ns.saturating_sub(*first_ns);
        since(self.latest.1) < since(other.latest.1) / 2
    }

    pub(crate) fn clip(&mut self, window: &Window) {
        let is_inside: Vec<bool> = self.points.iter().map(|(_, time_ns)| window.has(*time_ns)).collect();
        let columns = self.cells.iter_mut().map(|(_, column)| column);
        for column in columns.chain([&mut self.named, &mut self.slack, &mut self.pinned, &mut self.rest]) {
            let mut inside = is_inside.iter();
            column.retain(|_| inside.next().copied().unwrap_or(false));
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
        for cells in [&mut self.pinned_cells, &mut self.early_pinned_cells] {
            let kept = cells.drain(..).filter_map(|(cell, bytes)| Some((to(cell)?, bytes)));
            *cells = kept.collect();
        }
    }

    fn heap_bytes(&self) -> usize {
        let columns = [&self.named, &self.slack, &self.pinned, &self.rest].into_iter().map(Field::heap_bytes);
        let timed = [&self.gap, &self.used].into_iter().map(Field::heap_bytes);
        let pinned = [&self.pinned_cells, &self.early_pinned_cells].into_iter().map(Field::heap_bytes);
        let pairs = self.points.heap_bytes() + pinned.sum::<usize>();
        columns.chain(timed).sum::<usize>() + pairs + self.cells.heap_bytes()
    }
}
