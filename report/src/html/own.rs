//! The program's counters and ranges as data for the page's script.

use super::data::Limits;
use crate::encode::object;
use crate::own::{by_total, mean, name_of, remarks, title_of};
use gpumem_model::program_data::{Counter, Range};
use gpumem_model::run::Run;
use gpumem_model::units::{plural, thousands};
use serde::Serialize;

/// Returns `None` if the program reported none.
pub(super) fn own(run: &Run, limits: Limits) -> Option<impl Serialize + use<>> {
    let own = &run.own;
    let points = (limits.points / 4).max(1);
    let counter = |counter: &Counter| {
        let course = counter.points.iter().step_by(counter.points.len().div_ceil(points).max(1));
        // Values are limited to 2^52, because a script cannot represent larger integers exactly.
        let course: Vec<u64> = course.map(|&(_, value)| value.abs_diff(counter.min).min(1 << 52)).collect();
        object! {
            name: name_of(counter),
            // Printed values: current, number of changes, least, greatest, mean.
            told: [
                thousands(counter.value),
                thousands(counter.changes),
                thousands(counter.min),
                thousands(counter.max),
                mean(counter),
            ],
            // Values over time above the least one, for a sparkline.
            course,
        }
    };
    // Name, count, printed lengths (total, least, greatest, mean), and the number of open ranges.
    let range = |range: &Range| {
        let length = |ns: u64| (range.count > 0).then(|| run.clock.distance(ns));
        let lengths = [range.total_ns, range.min_ns, range.max_ns, range.mean_ns().unwrap_or(0)].map(length);
        (title_of(range), range.count, lengths, range.open)
    };
    let ranges = by_total(own);
    let (most_counters, most_ranges) = (2 * limits.ooms, limits.steps + 1);
    let left_out =
        own.counters.len().saturating_sub(most_counters) + ranges.len().saturating_sub(most_ranges);
    let mut remarks = remarks(own);
    remarks.extend(
        (left_out > 0).then(|| plural(left_out as u64, "name") + " more: gpumemctl report --counters"),
    );
    (!own.is_empty()).then(|| {
        object! {
            counters: own.counters.iter().take(most_counters).map(counter).collect::<Vec<_>>(),
            ranges: ranges.into_iter().take(most_ranges).map(range).collect::<Vec<_>>(),
            remarks,
        }
    })
}
