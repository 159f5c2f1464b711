//! Growth in few of the steps: a mean over all steps would hide that most of them add nothing.

use super::{Course, Judgement, sum};
use crate::judge::rises_rarely;

impl Course<'_> {
    /// Returns the amounts of the tags `names` together, or of all memory if these are paths of many, at the points that `judgement`
    /// covers.
    fn named_amounts(&self, judgement: &Judgement, names: &[(String, i64)]) -> Vec<i64> {
        let Some((first, last)) = judgement.span else { return Vec::new() };
        let series: Option<Vec<&Vec<i64>>> =
            names.iter().map(|(name, _)| self.tags.get(name.as_str())).collect();
        let series = series.filter(|series| !series.is_empty()).unwrap_or_else(|| vec![&self.whole]);
        let amount = |at: usize| sum(series.iter().filter_map(|amounts| amounts.get(at).copied()));
        let is_in = |at: &usize| (first..=last).contains(&self.positions[*at]);
        (0..self.positions.len()).filter(is_in).map(amount).collect()
    }

    /// Returns whether the tags `names`, or all memory if these are paths of many, grew in the minority of the steps.
    pub(super) fn is_in_few_steps(&self, judgement: &Judgement, names: &[(String, i64)]) -> bool {
        let amounts = self.named_amounts(judgement, names);
        rises_rarely(&amounts, judgement.units() / amounts.len().saturating_sub(1).max(1) as f64)
    }

    /// Returns the number of steps that added memory, if these are the minority and each step is a point.
    pub(super) fn jumps(&self, judgement: &Judgement, names: &[(String, i64)]) -> Option<u64> {
        let amounts = self.named_amounts(judgement, names);
        let intervals = amounts.len().checked_sub(1).filter(|count| *count > 0)?;
        let is_each_step = judgement.units().round() as usize == intervals;
        let changes = || amounts.windows(2).map(|pair| pair[1].saturating_sub(pair[0]));
        let mean = sum(changes()) / intervals as i64;
        let jumps = changes().filter(|change| *change > mean / 2).count();
        (is_each_step && jumps > 0 && rises_rarely(&amounts, 1.0)).then_some(jumps as u64)
    }

    /// Returns the changes of an amount between the points that `judgement` covers.
    pub(super) fn changes(&self, judgement: &Judgement, amounts: &[i64]) -> Vec<i64> {
        let Some((first, last)) = judgement.span else { return Vec::new() };
        let points = self.positions.iter().zip(amounts);
        let points = points.filter(|(position, _)| (first..=last).contains(*position));
        let amounts: Vec<i64> = points.map(|(_, bytes)| *bytes).collect();
        amounts.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect()
    }
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
            jumps.ends_with("over 53 steps (about +60.0 MiB in each of 8, and nothing in the others)"),
            "{jumps}"
        );
        let steady = rate(|at| at * 10, 1).expect("it grows");
        assert_eq!(steady, "+10.0 MiB per step over 53 steps");
        let unknown = rate(|at| at / 6 * 60, 4).expect("it grows");
        assert!(!unknown.contains("in each of"), "several steps for each point: {unknown}");
    }
}
