//! Writes a table with one row for each device of a process, and facts about all of them.

use crate::amounts::{apportioned, folded_parts, ranked_parts, sum, sum_of, sums};
use crate::group::{self, Line, ProcessAmounts};
use crate::labels::device_title;
use crate::lines::{Lines, clean_name, flags};
use crate::{Report, growth};
use gpumem_model::run::Device;
use gpumem_model::time::Times;
use gpumem_model::units::Unit;
use std::cmp::Reverse;

/// Maximum number of rows for devices on the first screen.
const MOST_DEVICES: usize = 9;
/// Maximum number of categories in the line on all devices.
const NAMED: usize = 9;

/// Adds the table. With `is_verbose`, also adds the sums of PyTorch's memory, and the growth of each device.
pub(super) fn overview(report: &Report<'_>, times: Times, is_verbose: bool, out: &mut Lines) {
    let devices = &report.run.devices;
    let line = |device: &Device| Line {
        names: vec![device_title(device)],
        amounts: ProcessAmounts::of(report.run, device),
        note: note(device, times),
    };
    out.line("");
    let mut lines: Vec<Line> = devices.iter().map(line).collect();
    if !is_verbose {
        fold_smallest(&mut lines);
    }
    for line in group::table(&[""], &lines) {
        out.line(&line);
    }
    out.line("");
    largest(report, &lines, out);
    if !is_verbose {
        return;
    }
    super::bridge::of_all(report, out);
    for device in devices {
        if growth::growth_report(report, device).is_some_and(|verdicts| verdicts.moves())
            && let Some(line) = growth::line(report, device)
        {
            out.prose(&format!("GPU {} {line}", device.ordinal));
        }
    }
}

/// Sums the devices with the least memory in one row, if there are more than [`MOST_DEVICES`].
fn fold_smallest(lines: &mut Vec<Line>) {
    if lines.len() <= MOST_DEVICES {
        return;
    }
    lines.sort_by_key(|line| Reverse(line.amounts.used_bytes.or(line.amounts.tracked_bytes)));
    let smaller = lines.split_off(MOST_DEVICES - 1);
    let names = vec![format!("{} smaller", smaller.len())];
    let amounts = ProcessAmounts::sum(smaller.iter().map(|line| &line.amounts));
    lines.push(Line { names, amounts, note: String::new() });
}

/// Returns the note of a device's row: the peak of `tracked`, and flags such as `partial`.
fn note(device: &Device, times: Times) -> String {
    let last = &device.last;
    let peak = device.peak.tracked_bytes.filter(|tracked| Some(*tracked) != last.tracked_bytes);
    let peak = peak.map(|tracked| {
        let amount = Unit::for_largest(tracked).amount_with_name(tracked);
        format!("peak of tracked {amount} at {}", times.time(device.peak.time_ns))
    });
    let inexact = flags([(last.partial, "partial"), (last.stale, "stale"), (last.torn.is_some(), "torn")]);
    let absence = last.used_absence.as_ref().map(|absence| format!("NVML says {absence}"));
    let words = Some(inexact).filter(|flags| !flags.is_empty()).into_iter().chain(absence).chain(peak);
    words.collect::<Vec<_>>().join(", ")
}

/// Adds the largest categories of all devices together.
fn largest(report: &Report<'_>, lines: &[Line], out: &mut Lines) {
    let parts = report.run.devices.iter().flat_map(|device| {
        let idle = ("idle".to_owned(), report.composition(&device.last, report.by).pool_idle);
        report.busy_parts(&device.last).chain([idle])
    });
    let sums = folded_parts(ranked_parts(sums(parts)), NAMED, |number| format!("({number} smaller)"));
    if sums.is_empty() {
        return;
    }
    let total = sum_of(&sums);
    // The total is the sum that the table above shows, which was rounded by row.
    let above = group::tracked(lines)
        .filter(|_| sum(lines.iter().filter_map(|line| line.amounts.tracked_bytes)) == total);
    let (unit, printed) = above.unwrap_or_else(|| {
        let unit = Unit::for_largest(total);
        (unit, unit.round(total))
    });
    let parts = apportioned(unit, printed, &sums);
    let parts: Vec<String> =
        parts.iter().map(|(name, amount)| format!("{} {amount}", clean_name(name))).collect();
    let (parts, printed) = (parts.join(" + "), unit.print(printed));
    out.prose(&format!("tracked on all of them ({}): {parts} = {printed}", unit.name));
}
