//! The course of a device's memory, by step or over time.

use crate::amounts::sum;
use crate::category::OTHERS;
use crate::judge::trend_test::Judgement;
use crate::judge::{Axis, rises_rarely};
use crate::rules::NO_TAG;
use crate::{GroupBy, Report};
use gpumem_model::run::{Cell, Device, Oom};
use gpumem_model::timeline::Point;
use std::collections::BTreeMap;

/// Changes in the other steps that are next to nothing, as a share of the growth.
const OTHERS_SHARE: f64 = 0.05;
/// Maximum number of points over time that are judged. The time to judge grows with the square of this number.
const MOST_POINTS: usize = 64;

/// Memory of a device over time. Each series has one amount in bytes for each of `positions`.
pub(super) struct Course<'r> {
    /// Time of each point (ns).
    pub times_ns: Vec<u64>,
    /// For each point: the number of the step, forward pass or period, or the time in seconds.
    pub positions: Vec<f64>,
    /// The sum of all memory that is judged.
    pub whole: Vec<i64>,
    pub tags: BTreeMap<&'r str, Vec<i64>>,
    pub structures: BTreeMap<&'r str, Vec<i64>>,
}

impl<'r> Course<'r> {
    pub(super) fn new(times_ns: Vec<u64>, positions: Vec<f64>) -> Self {
        let whole = vec![0; positions.len()];
        Course { times_ns, positions, whole, tags: BTreeMap::new(), structures: BTreeMap::new() }
    }

    /// Adds the bytes of a cell (memory with one tag, role and so on) at the point with index `at`.
    pub(super) fn add(&mut self, report: &'r Report<'_>, cell: u32, at: usize, bytes: i64) {
        let Some(named) = report.cell(cell) else { return };
        let count = self.positions.len();
        let put = |series: &mut BTreeMap<&'r str, Vec<i64>>, name: &'r str| {
            let amounts = series.entry(name).or_insert_with(|| vec![0; count]);
            amounts[at] = amounts[at].saturating_add(bytes);
        };
        put(&mut self.tags, named.tag.as_deref().unwrap_or(NO_TAG));
        put(&mut self.structures, report.category(cell, GroupBy::Structure).unwrap_or(OTHERS));
    }

    /// Returns the amounts at the time when each step, forward pass or period until `oom` began. A program that catches the failure
    /// may continue without growth.
    pub(super) fn of_steps(report: &'r Report<'_>, device: &Device, oom: Option<&Oom>) -> Option<Self> {
        let points = &device.details.growth;
        if points.axis == Axis::Minute {
            return None;
        }
        let until_ns = oom.map_or(u64::MAX, |oom| oom.time_ns);
        let begun = points.points.iter().filter(|(_, time_ns)| *time_ns <= until_ns);
        let (times_ns, positions): (Vec<u64>, _) =
            begun.map(|(index, time_ns)| (*time_ns, *index as f64)).unzip();
        let mut course = Course::new(times_ns, positions);
        course.whole = points.named.get(..course.times_ns.len())?.to_vec();
        for (cell, amounts) in &points.cells {
            for (at, bytes) in amounts.iter().enumerate().take(course.positions.len()) {
                course.add(report, *cell, at, *bytes);
            }
        }
        Some(course)
    }

    /// Returns the amounts of the cells that `counts` selects, at the highest moment of each interval of time.
    pub(super) fn over_time(
        report: &'r Report<'_>,
        device: &'r Device,
        oom: Option<&Oom>,
        counts: fn(&Cell) -> bool,
    ) -> Option<Self> {
        let until_ns = oom.map_or(u64::MAX, |oom| oom.time_ns);
        let points = &device.details.timeline.points;
        let points: Vec<_> = points.iter().filter(|point| point.time_ns <= until_ns).collect();
        let fullest = |points: &[&'r Point]| points.iter().copied().max_by_key(|point| point.tracked_bytes());
        let points: Vec<_> =
            points.chunks(points.len().div_ceil(MOST_POINTS).max(1)).filter_map(fullest).collect();
        let first_ns = points.first()?.time_ns;
        let seconds = |time_ns: u64| time_ns.saturating_sub(first_ns) as f64 / 1e9;
        let (times_ns, positions) =
            points.iter().map(|point| (point.time_ns, seconds(point.time_ns))).unzip();
        let mut course = Course::new(times_ns, positions);
        for (at, point) in points.iter().enumerate() {
            for &(cell, bytes) in &point.amounts {
                if report.cell(cell).is_some_and(counts) {
                    course.whole[at] = course.whole[at].saturating_add(bytes);
                    course.add(report, cell, at, bytes);
                }
            }
        }
        Some(course)
    }

    /// Returns the amounts of the tags `names` together, or of all memory if these are paths of many, at the points that `judgement`
    /// covers.
    fn named_amounts(&self, judgement: &Judgement, names: &[(String, i64)]) -> Vec<i64> {
        let series: Option<Vec<&Vec<i64>>> =
            names.iter().map(|(name, _)| self.tags.get(name.as_str())).collect();
        let series = series.filter(|series| !series.is_empty()).unwrap_or_else(|| vec![&self.whole]);
        let amount = |at: usize| sum(series.iter().filter_map(|amounts| amounts.get(at).copied()));
        self.covered(judgement, &(0..self.positions.len()).map(amount).collect::<Vec<_>>())
    }

    /// Returns the part of an amount's points that `judgement` covers.
    fn covered(&self, judgement: &Judgement, amounts: &[i64]) -> Vec<i64> {
        let Some((first, last)) = judgement.span else { return Vec::new() };
        let points = self.positions.iter().zip(amounts);
        points.filter(|(position, _)| (first..=last).contains(*position)).map(|(_, bytes)| *bytes).collect()
    }

    /// Returns whether the tags `names`, or all memory if these are paths of many, grew in the minority of the steps.
    pub(super) fn is_in_few_steps(&self, judgement: &Judgement, names: &[(String, i64)]) -> bool {
        let amounts = self.named_amounts(judgement, names);
        rises_rarely(&amounts, judgement.units() / amounts.len().saturating_sub(1).max(1) as f64)
    }

    /// Returns the number of steps that added memory, and the bytes that they added together, if these are the minority, the others
    /// added next to nothing, and each step is a point.
    pub(super) fn jumps(&self, judgement: &Judgement, names: &[(String, i64)]) -> Option<(u64, i64)> {
        let amounts = self.named_amounts(judgement, names);
        let intervals = amounts.len().checked_sub(1).filter(|count| *count > 0)?;
        let is_each_step = judgement.units().round() as usize == intervals;
        let changes = differences(&amounts);
        let mean = sum(changes.iter().copied()) / intervals as i64;
        let (jumps, others): (Vec<i64>, Vec<i64>) =
            changes.into_iter().partition(|change| *change > mean / 2);
        let added = sum(jumps.iter().copied());
        let of_others = sum(others.into_iter().map(i64::saturating_abs));
        let is_all = of_others as f64 <= added as f64 * OTHERS_SHARE;
        (is_each_step && is_all && rises_rarely(&amounts, 1.0)).then_some((jumps.len() as u64, added))
    }

    /// Returns the changes of an amount between the points that `judgement` covers.
    pub(super) fn changes(&self, judgement: &Judgement, amounts: &[i64]) -> Vec<i64> {
        differences(&self.covered(judgement, amounts))
    }
}

fn differences(amounts: &[i64]) -> Vec<i64> {
    amounts.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_in_few_steps_has_the_number_of_them() {
        let rate = |bytes: fn(i64) -> i64, stride: i64| {
            let positions = (0..60).map(|at| (at * stride) as f64).collect();
            let whole = (0..60).map(|at| bytes(at * stride) << 20).collect();
            let course = Course { whole, ..Course::new((0..60).collect(), positions) };
            course.judged(1e6, "step", |judged| Some(judged.units() as u64)).map(|growth| growth.rate())
        };
        let jumps = rate(|at| at / 6 * 60, 1).expect("it grows");
        assert!(
            jumps.ends_with("over 53 steps (8 of them add about 60 MiB each, the others nothing)"),
            "{jumps}"
        );
        let both = rate(|at| at / 6 * 60 + at * 4, 1).expect("it grows");
        assert!(!both.contains("of them add"), "the other steps add, too: {both}");
        let steady = rate(|at| at * 10, 1).expect("it grows");
        assert_eq!(steady, "+10.0 MiB per step over 53 steps");
        let unknown = rate(|at| at / 6 * 60, 4).expect("it grows");
        assert!(!unknown.contains("of them add"), "several steps for each point: {unknown}");
    }
}
