//! Columns of the iteration tables for individual parameters and gradients.

use super::number;
use crate::encode::object;
use crate::lines::clean_name;
use crate::rules::NO_TAG;
use crate::table::{Table, shorten};
use gpumem_model::escape::escape_key;
use gpumem_model::parameters::{Column, MAX_COLUMNS};
use gpumem_model::run::{Device, Iteration, Iterations, Run};
use gpumem_model::units::{Unit, thousands};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

const WIDTH: usize = 60;

/// Returns the columns of all devices: parameters first, then gradients, each sorted by name.
pub(super) fn names(run: &Run) -> Vec<Column> {
    let all = run.devices.iter().flat_map(|device| &device.details.parameters.columns);
    let all: BTreeSet<(bool, &Column)> = all.map(|column| (column.is_gradient(), column)).collect();
    all.into_iter().map(|(_, column)| column.clone()).collect()
}

/// Returns a column's title such as `parameter model/fc/weight`; different columns have different titles.
pub(super) fn title(column: &Column) -> String {
    format!("{} {}", column.role, column.tag.as_deref().map_or_else(|| NO_TAG.to_owned(), escape_key))
}

/// Returns for each row (iteration) the bytes of the parameters and gradients in `names`; `None` where unknown.
pub(super) fn amounts(device: &Device, rows: &[Iteration], names: &[Column]) -> Vec<Vec<Option<i64>>> {
    let parameters = &device.details.parameters;
    let places: BTreeMap<&Column, usize> = parameters.columns.iter().zip(0..).collect();
    let of_row = |held: Option<Vec<i64>>| {
        // A column that exists only on another device is 0 for this device.
        let amount = |name: &Column| {
            held.as_ref().map(|held| places.get(name).and_then(|&at| held.get(at)).copied().unwrap_or(0))
        };
        names.iter().map(amount).collect()
    };
    parameters.of_rows(rows).into_iter().map(of_row).collect()
}

/// Returns a table of the last finished iteration, with a row for each parameter and its gradient, the largest sum first.
pub(super) fn text(device: &Device, table: &Iterations) -> String {
    let parameters = &device.details.parameters;
    let last = parameters.of_rows(&table.rows).pop().flatten();
    let (Some(held), Some(row)) = (last, table.rows.last()) else {
        return "\nsingle parameters and gradients are unknown: gpumem.torch.watch names them\n".to_owned();
    };
    let mut both: BTreeMap<&Option<String>, [i64; 2]> = BTreeMap::new();
    for (column, bytes) in parameters.columns.iter().zip(held) {
        both.entry(&column.tag).or_default()[usize::from(column.is_gradient())] += bytes;
    }
    let mut rows: Vec<_> = both.into_iter().filter(|(_, amounts)| *amounts != [0, 0]).collect();
    rows.sort_by_key(|(_, [weight, gradient])| std::cmp::Reverse(weight.saturating_add(*gradient)));
    let largest = rows.iter().flat_map(|(_, amounts)| amounts).copied().max().unwrap_or(0);
    let unit = Unit::for_largest(largest);
    let mut printed = Table::of_numbers(1, 3);
    printed.row(["name", "weight", "gradient"]);
    for (tag, [weight, gradient]) in rows {
        let name = tag.as_deref().map_or_else(|| NO_TAG.to_owned(), clean_name);
        printed.row([shorten(&name, WIDTH, true), unit.amount(weight), unit.amount(gradient)]);
    }
    let mut out = format!("\n{}; each parameter and its gradient in iteration {}\n", unit.name, number(row));
    out += &printed.text();
    if parameters.is_cut {
        let _ = writeln!(out, "there are more than {} names", thousands(MAX_COLUMNS as u64));
    }
    out
}

/// Returns the columns and, for each of `rows` (finished iterations), their amounts as JSON; null where unknown.
pub(super) fn parameters<'a>(device: &'a Device, rows: &[Iteration]) -> impl Serialize + use<'a> {
    let parameters = &device.details.parameters;
    let amounts = parameters.of_rows(rows);
    object! { columns: &parameters.columns, is_cut: parameters.is_cut, amounts }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_model::parameters::Parameters;

    #[test]
    fn every_name_has_a_row_and_what_is_gone_has_none() {
        let column = |role: &str, tag: &str| Column { role: role.into(), tag: Some(tag.into()) };
        let parameters = Parameters {
            columns: vec![column("parameter", "a"), column("gradient", "a"), column("gradient", "b\u{1b}")],
            is_cut: false,
            changes: vec![(0, vec![(0, 20 << 20), (2, 5)]), (10, vec![(1, 10 << 20), (2, 0)])],
        };
        let row = |first: u64| Iteration {
            first,
            last: first,
            count: 1,
            start_ns: first * 10,
            end_ns: first * 10 + 10,
            ..Iteration::default()
        };
        let table = Iterations { rows: vec![row(0), row(1)], open: None };
        let mut device = crate::steps::tests::device(Vec::new());
        device.details.parameters = parameters;
        assert_eq!(
            text(&device, &table),
            "\nMiB; each parameter and its gradient in iteration 1\nname  weight  gradient\na       20.0      10.0\n"
        );
        device.details.parameters.changes.truncate(1);
        assert!(text(&device, &table).contains("b\\u{1b}     0.0       0.0"), "{}", text(&device, &table));
        device.details.parameters = Parameters::default();
        assert!(text(&device, &table).contains("gpumem.torch.watch"));
    }
}
