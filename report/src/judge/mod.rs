//! Verdicts on the growth of a run: the points that the ledger kept are judged when somebody asks.
//!
//! `tracked` is judged without the slack of pools: what a pool holds in reserve comes and goes with fragmentation, and is
//! judged by itself. Where a program reported steps, everything is per step; where it has a stable period, per period; else
//! per minute.

pub mod trend_test;

pub use gpumem_model::growth::{Axis, Growth};
use trend_test::{ALPHA, Judgement, Verdict, judge};

/// What has been watched for less is not judged by time: it is still starting.
const LEAST_MINUTES: f64 = 10.0;
const MINUTE_NS: f64 = 60e9;
/// Least change that is worth a word.
const LEAST_CHANGE: f64 = 1_048_576.0;
/// The same, as a share of what the process uses.
const LEAST_SHARE: f64 = 0.001;

/// Judges amounts at the points, one of `among` that are judged at once. `used`: what the process uses in all.
pub fn judge_amounts(growth: &Growth, amounts: &[i64], used: i64, among: usize) -> Judgement {
    let place = |&(index, time_ns): &(u64, u64)| match growth.axis {
        Axis::Step | Axis::Period => index as f64,
        Axis::Minute => time_ns as f64 / MINUTE_NS,
    };
    let points = growth.points.iter().map(place).zip(amounts.iter().map(|&bytes| bytes as f64));
    verdict(growth, &points.collect::<Vec<_>>(), used, among)
}

/// Judges amounts of samples.
pub fn judge_samples(growth: &Growth, samples: &[(u64, i64)], used: i64) -> Judgement {
    let place = |time_ns: u64| match growth.axis {
        Axis::Step | Axis::Period => step_at(growth, time_ns),
        Axis::Minute => Some(time_ns as f64 / MINUTE_NS),
    };
    let points = samples.iter().filter_map(|&(time_ns, bytes)| Some((place(time_ns)?, bytes as f64)));
    verdict(growth, &points.collect::<Vec<_>>(), used, 1)
}

fn verdict(growth: &Growth, points: &[(f64, f64)], used: i64, among: usize) -> Judgement {
    let material = (used as f64 * LEAST_SHARE).max(LEAST_CHANGE);
    let watched = points.last().map_or(0.0, |last| last.0) - points.first().map_or(0.0, |first| first.0);
    if growth.axis == Axis::Minute && watched < LEAST_MINUTES {
        return Judgement::none(points.len());
    }
    judge(points, material, ALPHA / among.max(1) as f64)
}

/// The step in which the process was, with its share that was over; `None` before the first and after the last.
fn step_at(growth: &Growth, time_ns: u64) -> Option<f64> {
    let at = growth.points.partition_point(|(_, begin)| *begin <= time_ns);
    let before = growth.points.get(at.checked_sub(1)?)?;
    let after = growth.points.get(at).unwrap_or(&growth.latest);
    if time_ns > after.1 {
        return None;
    }
    let share = (time_ns - before.1) as f64 / after.1.saturating_sub(before.1).max(1) as f64;
    Some(before.0 as f64 + share * after.0.saturating_sub(before.0) as f64)
}

/// Steps or minutes over which something was judged, in whole ones.
pub fn units(growth: &Growth, judgement: &Judgement) -> u64 {
    let stride = match growth.axis {
        Axis::Step | Axis::Period => growth.stride as f64,
        Axis::Minute => 0.0,
    };
    (judgement.units() + stride).round() as u64
}

impl Verdict {
    /// It goes on changing.
    pub fn moves(self) -> bool {
        matches!(self, Verdict::Growing | Verdict::Shrinking)
    }
}
