//! What of a run grows: points as the ledger kept them, stored with the run, and judged when somebody asks.
//!
//! `tracked` is judged without the slack of pools: what a pool holds in reserve comes and goes with fragmentation, and is
//! judged by itself. Where a program said steps, everything is per step; where it has a stable period, per period; else
//! per minute.

pub mod judge;

use gpumem_ledger::{TrackView, TrendView, rise};
use judge::{ALPHA, Judgement, LEAST_POINTS, Verdict, judge};
use serde::{Deserialize, Serialize};

/// Cells that a run keeps points of; the rest is one sum.
const CELLS: usize = 64;
/// A program that says its steps is judged by them from so many points on: two are warm-up.
const LEAST_STEPS: usize = LEAST_POINTS + 2;
/// What has been watched for less is not judged by time: it is still starting.
const LEAST_MINUTES: f64 = 10.0;
const MINUTE_NS: f64 = 60e9;
/// Least change that is worth a word.
const LEAST_CHANGE: f64 = 1_048_576.0;
/// The same, as a share of what the process uses.
const LEAST_SHARE: f64 = 0.001;

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
    /// What the ledger has of an account.
    pub fn of(trend: TrendView) -> Self {
        let enough = |track: &TrackView| track.points.len() >= LEAST_STEPS;
        let periods = trend.periods.filter(|(_, track)| enough(track));
        let (axis, period_ns, track) = match periods {
            _ if enough(&trend.steps) => (Axis::Step, None, trend.steps),
            Some((length_ns, track)) => (Axis::Period, Some(length_ns), track),
            None => (Axis::Minute, None, trend.times),
        };
        let TrackView { stride, points, latest, named, slack, mut cells, mut rest } = track;
        cells.sort_by_key(|(cell, points)| (std::cmp::Reverse(rise(points)), *cell));
        for (_, points) in cells.drain(CELLS.min(cells.len())..) {
            let first = points.first().copied().unwrap_or(0);
            for (sum, bytes) in rest.iter_mut().zip(points) {
                *sum = sum.wrapping_add(bytes.wrapping_sub(first));
            }
        }
        cells.sort_by_key(|(cell, _)| *cell);
        let (gap, used) = if trend.gap_is_used { (Vec::new(), trend.gap) } else { (trend.gap, Vec::new()) };
        Growth {
            axis,
            period_ns,
            stride,
            points: points.iter().map(|point| (point.index, point.time_ns)).collect(),
            latest: (latest.index, latest.time_ns),
            named,
            slack,
            cells,
            rest,
            gap,
            used,
        }
    }

    /// Leaves the points of some times.
    pub fn keep(&mut self, is_of: impl Fn(u64) -> bool) {
        let kept: Vec<bool> = self.points.iter().map(|(_, time_ns)| is_of(*time_ns)).collect();
        let columns = self.cells.iter_mut().map(|(_, column)| column);
        for column in columns.chain([&mut self.named, &mut self.slack, &mut self.rest]) {
            let mut is_kept = kept.iter();
            column.retain(|_| is_kept.next().copied().unwrap_or(false));
        }
        self.points.retain(|(_, time_ns)| is_of(*time_ns));
        self.gap.retain(|(time_ns, _)| is_of(*time_ns));
        self.used.retain(|(time_ns, _)| is_of(*time_ns));
    }

    /// Judges amounts at the points, one of `among` that are judged at once. `used`: what the process uses in all.
    pub fn judge(&self, amounts: &[i64], used: i64, among: usize) -> Judgement {
        let place = |&(index, time_ns): &(u64, u64)| match self.axis {
            Axis::Step | Axis::Period => index as f64,
            Axis::Minute => time_ns as f64 / MINUTE_NS,
        };
        let points = self.points.iter().map(place).zip(amounts.iter().map(|&bytes| bytes as f64));
        self.verdict(&points.collect::<Vec<_>>(), used, among)
    }

    /// Judges amounts of samples.
    pub fn judge_samples(&self, samples: &[(u64, i64)], used: i64) -> Judgement {
        let place = |time_ns: u64| match self.axis {
            Axis::Step | Axis::Period => self.step_at(time_ns),
            Axis::Minute => Some(time_ns as f64 / MINUTE_NS),
        };
        let points = samples.iter().filter_map(|&(time_ns, bytes)| Some((place(time_ns)?, bytes as f64)));
        self.verdict(&points.collect::<Vec<_>>(), used, 1)
    }

    fn verdict(&self, points: &[(f64, f64)], used: i64, among: usize) -> Judgement {
        let material = (used as f64 * LEAST_SHARE).max(LEAST_CHANGE);
        let watched = points.last().map_or(0.0, |last| last.0) - points.first().map_or(0.0, |first| first.0);
        if self.axis == Axis::Minute && watched < LEAST_MINUTES {
            return Judgement::none(points.len());
        }
        judge(points, material, ALPHA / among.max(1) as f64)
    }

    /// The step in which the process was, with its share that was over; `None` before the first and after the last.
    fn step_at(&self, time_ns: u64) -> Option<f64> {
        let at = self.points.partition_point(|(_, begin)| *begin <= time_ns);
        let before = self.points.get(at.checked_sub(1)?)?;
        let after = self.points.get(at).unwrap_or(&self.latest);
        if time_ns > after.1 {
            return None;
        }
        let share = (time_ns - before.1) as f64 / after.1.saturating_sub(before.1).max(1) as f64;
        Some(before.0 as f64 + share * after.0.saturating_sub(before.0) as f64)
    }

    /// Steps or minutes over which something was judged, in whole ones.
    pub fn units(&self, judgement: &Judgement) -> u64 {
        let stride = match self.axis {
            Axis::Step | Axis::Period => self.stride as f64,
            Axis::Minute => 0.0,
        };
        (judgement.units() + stride).round() as u64
    }
}

impl Verdict {
    /// It goes on changing.
    pub fn moves(self) -> bool {
        matches!(self, Verdict::Growing | Verdict::Shrinking)
    }
}
