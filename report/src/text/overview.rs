//! A table of several devices of a process, with a row each.

use crate::group::{self, Identity, Line};
use crate::labels::device_title;
use crate::lines::{Lines, clean_name};
use crate::{Report, growth};
use gpumem_model::run::Device;
use gpumem_model::time::Times;
use gpumem_model::units::{Unit, thousands};
use std::collections::BTreeMap;

/// Most categories named below the rows.
const NAMED: usize = 8;

pub(super) fn overview(report: &Report<'_>, times: Times, out: &mut Lines) {
    let devices = &report.run.devices;
    let line = |device: &Device| Line {
        names: vec![device_title(device)],
        amounts: Identity::of(report.run, device),
        note: note(device, times),
    };
    out.line("");
    let lines: Vec<Line> = devices.iter().map(line).collect();
    for line in group::table(&[""], &lines) {
        out.line(&line);
    }
    out.line("");
    largest(report, &lines, out);
    super::bridge::of_all(report, out);
    for device in devices {
        if growth::growth_report(report, device).is_some_and(|told| growth::moves(&told))
            && let Some(line) = growth::line(report, device)
        {
            out.prose(&format!("GPU {} {line}", device.ordinal));
        }
    }
}

/// Returns the peak of tracked, and flags for amounts that are not certain.
fn note(device: &Device, times: Times) -> String {
    let last = &device.last;
    let peak = match device.peak.tracked_bytes {
        Some(tracked) if Some(tracked) != last.tracked_bytes => {
            let unit = Unit::for_largest(tracked);
            format!(
                "peak of tracked {} {} at {}",
                unit.amount(tracked),
                unit.name,
                times.time(device.peak.time_ns)
            )
        }
        _ => String::new(),
    };
    let doubt = [(last.partial, "partial"), (last.stale, "stale"), (last.torn.is_some(), "torn")];
    let mut words: Vec<String> =
        doubt.into_iter().filter(|(is, _)| *is).map(|(_, word)| word.to_owned()).collect();
    words.extend(last.used_absence.as_ref().map(|absence| format!("NVML says {absence}")));
    words.extend(Some(peak).filter(|peak| !peak.is_empty()));
    words.join(", ")
}

/// Prints the largest categories of all devices together.
fn largest(report: &Report<'_>, lines: &[Line], out: &mut Lines) {
    let mut sums: BTreeMap<String, i64> = BTreeMap::new();
    for device in &report.run.devices {
        let composition = report.composition(&device.last, report.by);
        let others = report.by.name_of_rest();
        let more = [
            (others, composition.others),
            ("idle", composition.pool_idle),
            ("opaque pools", composition.opaque),
        ];
        let named = composition.categories.iter().map(|(name, bytes)| (name.as_str(), *bytes));
        for (name, bytes) in named.chain(more) {
            let sum = sums.entry(name.to_owned()).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }
    let mut sums: Vec<(String, i64)> = sums.into_iter().filter(|(_, bytes)| *bytes != 0).collect();
    if sums.is_empty() {
        return;
    }
    sums.sort_by(|a, b| b.1.saturating_abs().cmp(&a.1.saturating_abs()).then_with(|| a.0.cmp(&b.0)));
    let rest = if sums.len() > NAMED + 1 { sums.split_off(NAMED) } else { Vec::new() };
    if !rest.is_empty() {
        let sum = rest.iter().fold(0_i64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        sums.push((format!("({} smaller)", thousands(rest.len() as u64)), sum));
    }
    let bytes: Vec<i64> = sums.iter().map(|(_, bytes)| *bytes).collect();
    let total = bytes.iter().fold(0_i64, |sum, bytes| sum.saturating_add(*bytes));
    // Uses the sum that is printed above, which is rounded by row.
    let above = group::tracked(lines).filter(|_| {
        let known = lines.iter().filter_map(|line| line.amounts.tracked_bytes);
        known.fold(0_i64, i64::saturating_add) == total
    });
    let (unit, printed) = above.unwrap_or_else(|| {
        let unit = Unit::for_largest(total);
        (unit, unit.round(total))
    });
    let steps = unit.apportion(printed, &bytes);
    let parts: Vec<String> = sums
        .iter()
        .zip(steps)
        .map(|((name, _), steps)| format!("{} {}", clean_name(name), unit.print(steps)))
        .collect();
    out.prose(&format!(
        "tracked on all of them ({}): {} = {}",
        unit.name,
        parts.join(" + "),
        unit.print(printed)
    ));
}
