//! Divides the peak of each iteration into parts: memory held at its end, by role or name, and memory that it did not keep.

use super::Column;
use crate::{GroupBy, Report};
use gpumem_model::growth::Growth;
use gpumem_model::run::{Device, Iteration};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Memory of roles that lasts from one iteration to the next.
pub(crate) static HELD: [Column; 9] = [
    ("params", |row| row.parameters.last_bytes),
    ("grads", |row| row.gradients.last_bytes),
    ("optimizer", |row| row.optimizer_state.last_bytes),
    ("activations", |row| row.activations.last_bytes),
    ("inputs", |row| row.inputs.last_bytes),
    ("workspace", |row| row.workspace.last_bytes),
    ("buffers", |row| row.buffers.last_bytes),
    ("kv cache", |row| row.kv_caches.last_bytes),
    ("copies", |row| row.parameter_copies.last_bytes),
];
/// Heading of held memory without a role and without a column of its own.
pub(crate) const OTHERS: &str = "others";
/// Heading of the memory that the iteration used and did not keep, with the memory cached by the allocator.
pub(crate) const IN_STEP: &str = "in step";
/// Maximum number of columns for growing memory without a role.
const NAMES: usize = 3;
/// Divisor: memory without a role has a column if it grows by more than the highest peak divided by this.
const LEAST_GROWTH: i64 = 100;

/// Returns the headings of the parts and, for each row, their amounts, which add up to the row's peak. The amounts are `None`
/// where the memory at the end of the iteration is unknown.
pub(super) fn parts(
    report: &Report<'_>,
    device: &Device,
    rows: &[Iteration],
) -> (Vec<String>, Vec<Vec<Option<i64>>>) {
    let growth = &device.details.growth;
    let roles: Vec<&Column> = HELD.iter().filter(|(_, of)| rows.iter().any(|row| of(row) != 0)).collect();
    let names = growing(report, growth, rows);
    let heads = roles.iter().map(|(name, _)| (*name).to_owned());
    let heads = heads.chain(names.iter().map(|(name, _)| name.clone()));
    let heads = heads.chain([OTHERS, IN_STEP].map(str::to_owned)).collect();
    let of_row = |row: &Iteration| {
        let mut amounts: Vec<Option<i64>> = roles.iter().map(|(_, of)| Some(of(row))).collect();
        // The latest point of the growth data that is not later than the end of the iteration.
        let point = growth.points.iter().rposition(|(_, time_ns)| *time_ns <= row.end_ns);
        let Some((point, held)) = point.and_then(|point| Some((point, *growth.named.get(point)?))) else {
            amounts.extend(std::iter::repeat_n(None, names.len() + 2));
            return amounts;
        };
        amounts.extend(names.iter().map(|(_, bytes)| bytes.get(point).copied()));
        let known = |amounts: &[Option<i64>]| crate::amounts::sum(amounts.iter().flatten().copied());
        amounts.push(Some(held.saturating_sub(known(&amounts)).max(0)));
        amounts.push(Some(row.tracked.peak_bytes.saturating_sub(known(&amounts))));
        amounts
    };
    (heads, rows.iter().map(of_row).collect())
}

/// Returns the categories or tags of growing memory without a role, with their bytes at each point, those that grow most first.
fn growing(report: &Report<'_>, growth: &Growth, rows: &[Iteration]) -> Vec<(String, Vec<i64>)> {
    let mut sums: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for (cell, points) in &growth.cells {
        let has_role = report.cell(*cell).is_none_or(|cell| cell.role.is_some());
        let name = [GroupBy::Structure, GroupBy::Tag].into_iter().find_map(|by| report.category(*cell, by));
        let Some(name) = name.filter(|_| !has_role) else { continue };
        let sum = sums.entry(name).or_insert_with(|| vec![0; growth.points.len()]);
        sum.iter_mut().zip(points).for_each(|(sum, bytes)| *sum = sum.saturating_add(*bytes));
    }
    let least = rows.iter().map(|row| row.tracked.peak_bytes).max().unwrap_or(0) / LEAST_GROWTH;
    let grown = |points: &[i64]| points.last().copied().unwrap_or(0) - points.first().copied().unwrap_or(0);
    let mut names: Vec<(&str, Vec<i64>)> =
        sums.into_iter().filter(|(_, points)| grown(points) > least).collect();
    names.sort_by_key(|(_, points)| Reverse(grown(points)));
    names.truncate(NAMES);
    names.into_iter().map(|(name, points)| (name.to_owned(), points)).collect()
}
