//! Findings that do not depend on how a run ended: unused memory of pools, unexplained memory, losses.

use super::{Finding, Kind, Severity};
use crate::Report;
use gpumem_model::run::{Class, Device};
use gpumem_model::units::{plural, thousands};

/// Minimum unused memory of pools, as a share of the process's memory.
const UNUSED_SHARE: f64 = 0.25;
/// Minimum unexplained Untrackable memory, as a share of the process's memory.
const UNEXPLAINED_SHARE: f64 = 0.10;
/// Smaller amounts are not worth a finding.
const LEAST_BYTES: i64 = 512 << 20;

pub(super) fn unused_pool(report: &Report<'_>, device: &Device) -> Option<Finding> {
    let moment = &device.peak;
    let idle = moment.amounts.iter().filter(|(cell, _)| {
        report.run.cells.get(*cell as usize).is_some_and(|cell| cell.class == Class::PoolIdle)
    });
    let idle = idle.fold(0_i64, |sum, (_, bytes)| sum.saturating_add(*bytes));
    let used = moment.used_bytes().or(moment.tracked_bytes)?.max(1);
    let share = idle as f64 / used as f64;
    (share >= UNUSED_SHARE && idle >= LEAST_BYTES).then(|| Finding {
        kind: Kind::UnusedPool,
        severity: Severity::Note,
        device: device.ordinal,
        bytes: idle,
        share,
        confidence: 1.0,
        what: format!(
            "{} MiB were cached by the allocator and not in use at the peak",
            thousands(idle as u64 >> 20)
        ),
        names: Vec::new(),
        advice: None,
    })
}

pub(super) fn untrackable(report: &Report<'_>, device: &Device) -> Option<Finding> {
    let moment = &device.last;
    let unexplained = report.run.coverage.covered.then(|| moment.gap_parts()).flatten()?.unexplained_bytes;
    let used = moment.used_bytes()?.max(1);
    let share = unexplained as f64 / used as f64;
    (share >= UNEXPLAINED_SHARE && unexplained >= LEAST_BYTES).then(|| Finding {
        kind: Kind::Untrackable,
        severity: Severity::Note,
        device: device.ordinal,
        bytes: unexplained,
        share,
        confidence: 1.0,
        what: format!("{} MiB are Untrackable and have no known cause", thousands(unexplained as u64 >> 20)),
        names: Vec::new(),
        advice: None,
    })
}

pub(super) fn losses(report: &Report<'_>) -> Option<Finding> {
    let coverage = &report.run.coverage;
    let is_partial = coverage.partial_state || coverage.partial_history && coverage.lost > 0;
    is_partial.then(|| Finding {
        kind: Kind::Losses,
        severity: Severity::Note,
        device: 0,
        bytes: 0,
        share: 0.0,
        confidence: 1.0,
        what: format!("{} are missing, so the numbers are too low", plural(coverage.lost, "record")),
        names: Vec::new(),
        advice: None,
    })
}
