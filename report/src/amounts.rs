//! Sums, order and rounding of amounts of memory with names.

use gpumem_model::units::{Unit, thousands};
use std::collections::BTreeMap;

/// Adds up amounts by name. Sums that overflow become the largest number.
pub(crate) fn sums<K: Ord>(amounts: impl IntoIterator<Item = (K, i64)>) -> BTreeMap<K, i64> {
    let mut sums = BTreeMap::new();
    for (name, bytes) in amounts {
        let sum: &mut i64 = sums.entry(name).or_default();
        *sum = sum.saturating_add(bytes);
    }
    sums
}

/// Sorts by amount, the largest first; equal amounts by name.
pub(crate) fn largest_first<K: Ord, B: Ord>(amounts: impl IntoIterator<Item = (K, B)>) -> Vec<(K, B)> {
    let mut amounts: Vec<(K, B)> = amounts.into_iter().collect();
    amounts.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    amounts
}

/// Sorts amounts by absolute value, the largest first, and drops zeros.
pub(crate) fn ranked_parts(parts: impl IntoIterator<Item = (String, i64)>) -> Vec<(String, i64)> {
    let mut parts: Vec<(String, i64)> = parts.into_iter().filter(|(_, bytes)| *bytes != 0).collect();
    parts.sort_by(|a, b| b.1.saturating_abs().cmp(&a.1.saturating_abs()).then_with(|| a.0.cmp(&b.0)));
    parts
}

/// Returns whether an amount differs from another by at most a share of the other.
pub(crate) fn is_about(amount: i64, other: i64, share: f64) -> bool {
    amount.abs_diff(other) as f64 <= other as f64 * share
}

/// Returns the sum of amounts; a sum that overflows becomes the largest number.
pub(crate) fn sum(amounts: impl IntoIterator<Item = i64>) -> i64 {
    amounts.into_iter().fold(0, i64::saturating_add)
}

pub(crate) fn sum_of(parts: &[(String, i64)]) -> i64 {
    sum(parts.iter().map(|(_, bytes)| *bytes))
}

/// Formats named bytes so that the printed numbers add up to the printed `total`, which is in steps of the unit's last printed
/// digit.
pub(crate) fn apportioned(unit: Unit, total: i64, parts: &[(String, i64)]) -> Vec<(&str, String)> {
    let bytes: Vec<i64> = parts.iter().map(|(_, bytes)| *bytes).collect();
    let steps = unit.apportion(total, &bytes);
    parts.iter().zip(steps).map(|((name, _), steps)| (name.as_str(), unit.print(steps))).collect()
}

/// Reduces amounts to at most `limit` by replacing the last ones by their sum. `name` returns the name of the sum for the number of
/// replaced amounts.
pub(crate) fn folded_parts(
    mut parts: Vec<(String, i64)>,
    limit: usize,
    name: impl Fn(&str) -> String,
) -> Vec<(String, i64)> {
    if parts.len() > limit {
        let rest = parts.split_off(limit - 1);
        parts.push((name(&thousands(rest.len() as u64)), sum_of(&rest)));
    }
    parts
}

/// Adds up amounts of two columns by name. Sorts them by the larger of the two amounts, the largest first.
pub(crate) fn ranked_columns<K: Ord>(amounts: impl Iterator<Item = (K, [i64; 2])>) -> Vec<(K, [i64; 2])> {
    let mut sums: BTreeMap<K, [i64; 2]> = BTreeMap::new();
    for (name, bytes) in amounts {
        let sum = sums.entry(name).or_default();
        *sum = [0, 1].map(|column| sum[column].saturating_add(bytes[column]));
    }
    let mut sums: Vec<(K, [i64; 2])> = sums.into_iter().collect();
    sums.sort_by(|a, b| larger(b.1).cmp(&larger(a.1)).then_with(|| a.0.cmp(&b.0)));
    sums
}

pub(crate) fn larger([a, b]: [i64; 2]) -> i64 {
    a.saturating_abs().max(b.saturating_abs())
}
