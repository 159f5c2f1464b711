//! What the process itself held.

use crate::{By, Report};
use gpumem_ledger::category::OTHERS;
use gpumem_model::run::{Moment, Oom};
use gpumem_model::units::{Unit, thousands};

/// Names of what the process held.
const NAMED: usize = 8;

/// What the process held, named.
pub(super) struct Own {
    pub parts: Vec<(String, i64)>,
    pub total: i64,
    /// Something of `used` is missing in it.
    pub is_tracked_only: bool,
}

impl Own {
    pub fn sum(&self, unit: Unit) -> String {
        let bytes: Vec<i64> = self.parts.iter().map(|(_, bytes)| *bytes).collect();
        let total = unit.round(self.total);
        let shown = unit.apportion(total, &bytes).into_iter().zip(&self.parts);
        // What prints as nothing says nothing.
        let shown = shown.filter(|(steps, _)| *steps != 0);
        let mut shown: Vec<String> =
            shown.map(|(steps, (name, _))| format!("{name} {}", unit.print(steps))).collect();
        if shown.is_empty() {
            shown.push("nothing".to_owned());
        }
        let what = if self.is_tracked_only { " tracked" } else { "" };
        format!("{} = {}{what}", shown.join(" + "), unit.print(total))
    }
}

pub(super) fn composition(report: &Report<'_>, oom: &Oom) -> Own {
    let moment = Moment { amounts: oom.amounts.clone(), ..Moment::default() };
    let composition = report.composition(&moment, report.by);
    let mut parts: Vec<(String, i64)> = composition.categories.into_iter().collect();
    parts.retain(|(_, bytes)| *bytes != 0);
    parts.sort_by(|a, b| b.1.saturating_abs().cmp(&a.1.saturating_abs()).then_with(|| a.0.cmp(&b.0)));
    if parts.len() > NAMED {
        let rest = parts.split_off(NAMED - 1);
        let sum = rest.iter().fold(0_i64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        parts.push((format!("({} smaller)", thousands(rest.len() as u64)), sum));
    }
    let others = if report.by == By::Tag { "(no tag)" } else { OTHERS };
    let beside = [
        (others, composition.others),
        ("opaque pools", composition.opaque),
        ("idle", composition.pool_idle),
        ("predates the agent", oom.predates_bytes.unwrap_or(0)),
        ("Untrackable", oom.untrackable_bytes.unwrap_or(0)),
    ];
    parts.extend(
        beside.into_iter().filter(|(_, bytes)| *bytes != 0).map(|(name, bytes)| (name.to_owned(), bytes)),
    );
    let total = parts.iter().fold(0_i64, |sum, (_, bytes)| sum.saturating_add(*bytes));
    let is_tracked_only = oom.untrackable_bytes.is_none() || oom.predates_bytes.is_none();
    Own { parts, total, is_tracked_only }
}
