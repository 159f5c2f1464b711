//! Growth in the first few steps, before there are enough points for a statistical test: a program that runs out of memory after
//! five steps. The amounts at the end of each step must rise by nearly the same bytes in every step.

use super::{Growth, largest, main_parts, sum};
use crate::amounts::{sum_of, sums};
use crate::judge::Axis;
use crate::{GroupBy, Report};
use gpumem_model::names::Named;
use gpumem_model::run::{Cell, Device, Iteration, Oom};
use gpumem_wire::Role;

/// Minimum number of completed steps.
const LEAST_STEPS: usize = 5;
/// Minimum growth as a share of the process's memory.
const LEAST_SHARE: f64 = 0.25;
/// Maximum deviation of the bytes that one step adds from the mean, as a share of the mean.
const SAME_SHARE: f64 = 0.25;
/// Minimum share of the growth that a role must have.
const ROLE_SHARE: f64 = 0.1;

/// Returns the growth of gradients and activations that are held at the end of each step. The first step makes gradients, and does not
/// count.
pub(super) fn growth(report: &Report<'_>, device: &Device, oom: &Oom, used: i64) -> Option<Growth> {
    let rows = device.details.iterations.rows.iter();
    let rows: Vec<&Iteration> =
        rows.take_while(|row| row.end_ns <= oom.time_ns && row.count == 1 && !row.partial).collect();
    let roles = [Role::Gradient, Role::Activation];
    let level = |row: &Iteration, role| match role {
        Role::Gradient => row.gradients.last_bytes,
        _ => row.activations.last_bytes,
    };
    if rows.len() < LEAST_STEPS {
        return None;
    }
    let held = |row: &Iteration| sum(roles.iter().map(|role| level(row, *role)));
    let changes: Vec<i64> = rows.windows(2).map(|pair| held(pair[1]).saturating_sub(held(pair[0]))).collect();
    let bytes = sum(changes.iter().copied());
    let mean = bytes as f64 / changes.len() as f64;
    let is_steady = changes.iter().all(|change| (*change as f64 - mean).abs() <= mean * SAME_SHARE);
    if !is_steady || (bytes as f64) < used as f64 * LEAST_SHARE {
        return None;
    }
    let (first, last) = (rows.first()?, rows.last()?);
    let added = roles.map(|role| (role, level(last, role).saturating_sub(level(first, role))));
    let added: Vec<(Role, i64)> =
        added.into_iter().filter(|(_, added)| *added as f64 >= bytes as f64 * ROLE_SHARE).collect();
    let is_added = |cell: &Cell| added.iter().any(|(role, _)| cell.role.as_deref() == role.name());
    let cells = || oom.amounts.iter().filter(|(cell, _)| report.cell(*cell).is_some_and(is_added));
    let tags = cells().filter_map(|(cell, bytes)| Some((report.cell(*cell)?.tag.clone()?, *bytes)));
    let tags: Vec<(String, i64)> = sums(tags).into_iter().collect();
    let categories = cells()
        .filter_map(|(cell, bytes)| Some((report.category(*cell, GroupBy::Structure)?.to_owned(), *bytes)));
    let categories: Vec<(String, i64)> = sums(categories).into_iter().collect();
    Some(Growth {
        bytes,
        axis: Axis::Step.name(),
        over: changes.len() as u64,
        confidence: 1.0 - 0.5_f64.powi(changes.len() as i32),
        lasted_ns: None,
        until_ns: oom.time_ns,
        names: largest(tags.clone(), sum_of(&tags)),
        since_first: 0,
        is_in_many: true,
        is_in_few_steps: false,
        jumps: None,
        is_varied: false,
        kept_by: None,
        structures: main_parts(categories.clone(), sum_of(&categories)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Groupings;
    use gpumem_model::run::{Amounts, Class, Level};

    const MIB: i64 = 1 << 20;

    /// Returns the MiB of growth and the category in a run whose steps end with these MiB of gradients.
    fn grown(ends: &[i64]) -> Option<(i64, Vec<String>)> {
        let log = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        let mut run = gpumem_import::read_file(&log, None).expect("a log").remove(0);
        let role = Role::Gradient.name().map(str::to_owned);
        run.cells = vec![Cell { class: Class::Block, role, tag: Some("Net".into()), ..Cell::default() }];
        let row = |(at, mib): (u64, &i64)| Iteration {
            count: 1,
            end_ns: at,
            gradients: Level { peak_bytes: 0, last_bytes: mib * MIB },
            ..Iteration::default()
        };
        let oom = Oom {
            time_ns: u64::MAX,
            amounts: Amounts::from(vec![(0, ends.iter().sum::<i64>() * MIB)]),
            ..Oom::default()
        };
        run.devices[0].details.iterations.rows = (0..).zip(ends).map(row).collect();
        let report = Report::new(&run, Groupings::default(), None);
        let found = growth(&report, &report.run.devices[0], &oom, 16_000 * MIB)?;
        assert_eq!(found.over, ends.len() as u64 - 1);
        Some((found.bytes / MIB, found.names.into_iter().map(|(name, _)| name).collect()))
    }

    #[test]
    fn a_few_steps_that_each_keep_as_much_are_growth() {
        let net = || vec!["Net".to_owned()];
        assert_eq!(grown(&[1500, 2900, 4300, 5700, 7100, 8500]), Some((7000, net())));
        assert_eq!(grown(&[1500, 2900, 4300]), None, "too few");
        assert_eq!(grown(&[200, 210, 220, 230, 240, 250]), None, "a small part of the memory");
        assert_eq!(grown(&[200, 7000, 7000, 7000, 7000, 7000]), None, "made once");
    }
}
