//! Verdicts on the growth of a run's memory, computed for a report from the points that the ledger recorded.
//!
//! Idle memory in pools comes and goes with fragmentation, so `tracked` is judged without it, and idle memory is judged
//! separately. Rates are per step if the program made steps, per forward pass if it called modules, per period if it has a stable
//! period, and else per minute.

pub mod trend_test;

pub use gpumem_model::growth::{Axis, Growth};
use trend_test::{ALPHA, Judgement, judge};

/// Minutes of data that a verdict per minute requires, because a shorter run is still starting.
const LEAST_MINUTES: f64 = 10.0;
const MINUTE_NS: f64 = 60e9;
/// Smallest change in bytes that counts as growth.
const LEAST_CHANGE: f64 = 1_048_576.0;
/// Smallest change that counts as growth, as a fraction of the process's used memory. The larger of both limits applies.
const LEAST_SHARE: f64 = 0.001;

/// Judges one amount, given by its value at each point of `growth`. `among` is the number of amounts that are judged together.
/// `used` is the process's used memory in bytes.
pub fn judge_amounts(growth: &Growth, amounts: &[i64], used: i64, among: usize) -> Judgement {
    let place = |&(index, time_ns): &(u64, u64)| match growth.axis {
        Axis::Minute => time_ns as f64 / MINUTE_NS,
        _ => index as f64,
    };
    let points = growth.points.iter().map(place).zip(amounts.iter().map(|&bytes| bytes as f64));
    verdict(growth, &points.collect::<Vec<_>>(), used, among)
}

/// Judges an amount that was read by sampling, given as (time in ns, bytes).
pub fn judge_samples(growth: &Growth, samples: &[(u64, i64)], used: i64) -> Judgement {
    let place = |time_ns: u64| match growth.axis {
        Axis::Minute => Some(time_ns as f64 / MINUTE_NS),
        _ => step_at(growth, time_ns),
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

/// Returns the number of the step at a time, plus the elapsed fraction of it. `None` before the first step and after the last.
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

/// Returns the number of steps, forward passes, periods or minutes that a judgement covers, rounded.
pub fn units(growth: &Growth, judgement: &Judgement) -> u64 {
    let stride = match growth.axis {
        Axis::Minute => 0.0,
        _ => growth.stride as f64,
    };
    (judgement.units() + stride).round() as u64
}

/// Minimum share of the intervals without a rise for an amount that rises rarely: fewer are fluctuations.
const LEAST_STILL: f64 = 0.25;

/// Returns whether an amount rises in the minority of its steps. `stride` is the number of steps between two points. A rise counts
/// from half of the mean change. If steps rise independently of each other, the share of the intervals without a rise is the
/// `stride`-th power of that of the steps.
pub fn rises_rarely(amounts: &[i64], stride: f64) -> bool {
    let changes = || amounts.windows(2).filter_map(|pair| pair.last()?.checked_sub(*pair.first()?));
    let count = amounts.len().saturating_sub(1).max(1) as f64;
    let mean = crate::amounts::sum(changes()) as f64 / count;
    let still = changes().filter(|change| (*change as f64) < mean / 2.0).count() as f64 / count;
    still >= LEAST_STILL && 1.0 - still.powf(1.0 / stride.max(1.0)) < 0.5
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_amount_that_rises_in_few_steps_rises_rarely() {
        // One step of `every` adds bytes; each fourth step is a point.
        let amounts = |every: i64, stride: i64| {
            (0..60).map(|at| at * stride / every * 100 + at % 2).collect::<Vec<i64>>()
        };
        assert_eq!([1, 3, 5].map(|every| rises_rarely(&amounts(every, 1), 1.0)), [false, true, true]);
        assert_eq!([1, 8].map(|every| rises_rarely(&amounts(every, 4), 4.0)), [false, true]);
        let fluctuating: Vec<i64> = amounts(1, 4)
            .iter()
            .enumerate()
            .map(|(at, bytes)| bytes - i64::from(at % 8 == 0) * 300)
            .collect();
        assert!(!rises_rarely(&fluctuating, 4.0), "each step adds, and an eighth of the points are lower");
    }
}
