//! The report as CSV, with one line for each cell (memory with the same tag, role and so on) and moment. The bytes of a device at
//! a moment add up to the bytes that NVML charges, or to `tracked` if NVML was not read.
//!
//! Column `part` is `direct`, `block`, `pool_idle`, `opaque` (a pool that reports no blocks), `predates`, `uncovered` (a process
//! without an agent), or a part of untrackable memory: `context`, `modules`, `local_memory`, `heaps`, `rounding`, `unexplained`.

use super::{GroupBy, Report};
use crate::category::{OTHERS, is_named_by_rules};
use crate::encode::csv_field;
use gpumem_model::names::Named;
use gpumem_model::run::{Device, Moment};
use gpumem_model::units::signed;
use std::fmt::Write;

/// Returns the report as CSV.
pub fn csv(report: &Report<'_>) -> String {
    let head = "device,moment,time_ns,part,layer,structure,tag,origin,role,phase,library,bytes\n";
    let mut out = head.to_owned();
    for device in &report.run.devices {
        for (name, moment) in [("last", &device.last), ("peak", &device.peak)] {
            moment_rows(report, device, name, moment, &mut out);
        }
    }
    out
}

fn moment_rows(report: &Report<'_>, device: &Device, name: &str, moment: &Moment, out: &mut String) {
    let mut row = |part: &str, texts: [&str; 7], bytes: i64| {
        let _ = write!(out, "{},{name},{},{part}", csv_field(&device.name), moment.time_ns);
        for text in texts {
            let _ = write!(out, ",{}", csv_field(text));
        }
        let _ = writeln!(out, ",{bytes}");
    };
    for &(index, bytes) in &moment.amounts {
        // A run that no daemon wrote may refer to a cell that it does not contain; the cell's bytes stay in the sum.
        let Some(cell) = report.cell(index) else {
            row("direct", [OTHERS, OTHERS, "", "", "", "", ""], bytes);
            continue;
        };
        let fallback = if is_named_by_rules(cell.class) { OTHERS } else { "" };
        let layer = report.category(index, GroupBy::Layer).unwrap_or(fallback);
        let structure = report.category(index, GroupBy::Structure).unwrap_or(fallback);
        let [tag, origin, role, phase, library] =
            [&cell.tag, &cell.origin, &cell.role, &cell.phase, &cell.library]
                .map(|text| text.as_deref().unwrap_or_default());
        row(cell.class.name_or_unknown(), [layer, structure, tag, origin, role, phase, library], bytes);
    }
    if moment.tracked_bytes.is_none() {
        if let Some(used) = moment.uncovered_used_bytes {
            row("uncovered", [""; 7], signed(used));
        }
        return;
    }
    if let Some(predates) = moment.predates_bytes.filter(|&bytes| bytes != 0) {
        row("predates", [""; 7], predates);
    }
    if let Some(parts) = moment.gap_parts() {
        for (part, _, bytes) in parts.each() {
            if bytes != 0 || part == "unexplained" {
                row(part, [""; 7], bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run that refers to a missing cell may come from a daemon of another version, or from a source that is not a daemon.
    #[test]
    fn an_amount_of_a_cell_that_is_not_there_stays_in_the_sum() {
        let log = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        let mut run = gpumem_import::read_file(&log, None).expect("a log").remove(0);
        run.devices[0].last.amounts.push((u32::MAX, 7));
        let told = csv(&Report::new(&run, crate::rules::Groupings::preset(None).clone(), None));
        assert!(
            told.lines().any(|line| line.contains(",direct,Others,Others,") && line.ends_with(",7")),
            "{told}"
        );
    }
}
