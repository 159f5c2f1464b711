//! Divides a report into its parts, for a screen with its own layout. Texts and amounts are those of the text form.

use super::{Composition, GroupBy, Report};
pub use crate::text::PrintedRow as Row;
use crate::text::{Shown, heads, panel_without_rows};
use gpumem_model::run::Device;

/// The parts of a report that `gpumemctl top` shows for a process.
#[derive(Debug, Clone, Default)]
pub struct Panel {
    /// Name and owner of the process.
    pub heading: String,
    /// Conclusions about the run.
    pub verdict: Vec<String>,
    /// Reasons why the sums are too low.
    pub warnings: Vec<String>,
    /// Source of the run, and how complete its numbers are.
    pub coverage: Vec<String>,
    pub devices: Vec<Table>,
    /// Reasons for caution with the numbers, and suggestions for next commands.
    pub tail: Vec<String>,
}

/// The statement of a device (its memory as rows that add up), with facts about the device.
#[derive(Debug, Clone, Default)]
pub struct Table {
    pub title: String,
    pub unit: &'static str,
    /// Headings of the two columns, then the times of the two columns.
    pub heads: [[String; 2]; 2],
    /// Rows of the statement; each row precedes the rows of its parts. Columns add up as printed.
    pub rows: Vec<Row>,
    pub facts: Vec<String>,
}

/// Returns the parts of a report. `categories` is the maximum number of categories of each device; `usize::MAX` shows all.
pub fn panel(report: &Report<'_>, categories: usize) -> Panel {
    let times = report.times();
    let mut panel = panel_without_rows(report);
    for (device, table) in report.run.devices.iter().zip(&mut panel.devices) {
        let shown = Shown::of(report, device, categories);
        (table.unit, table.rows) = (shown.unit.name, shown.print(device));
        table.heads = heads(report, device, times);
    }
    panel
}

/// Returns memory over time as (time in ns, bytes by category), with the latest moment at the end. Changes of the memory between
/// two points are not in the result.
pub fn course(report: &Report<'_>, device: &Device, by: GroupBy) -> Vec<(u64, Composition)> {
    let points = device.details.timeline.points.iter();
    let mut course: Vec<(u64, Composition)> =
        points.map(|point| (point.time_ns, report.composition_at(point, by))).collect();
    let last_ns = course.last().map(|(time_ns, _)| *time_ns);
    if device.last.tracked_bytes.is_some() && Some(device.last.time_ns) > last_ns {
        course.push((device.last.time_ns, report.composition(&device.last, by)));
    }
    course
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Groupings;
    use crate::text::{Layout, text};
    use gpumem_import::read_file;
    use std::path::Path;

    #[test]
    fn a_panel_says_what_the_text_says() {
        let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        let run = read_file(&log, None).expect("a log").remove(0);
        for by in [GroupBy::Layer, GroupBy::Structure, GroupBy::Tag] {
            let report = Report::new(&run, Groupings::of_run(&run), Some(by));
            let panel = panel(&report, usize::MAX);
            let text = text(&report, Layout { categories: usize::MAX, ..Layout::default() });
            let words: Vec<&String> = panel.coverage.iter().chain(&panel.tail).collect();
            assert!(words.iter().all(|words| text.contains(words.as_str())), "{text}");
            let [table] = &panel.devices[..] else { panic!("one device") };
            for row in &table.rows {
                let is_it = |line: &str| {
                    let line = line.trim_start();
                    line.starts_with(&row.name) && row.cells.iter().all(|cell| line.contains(cell))
                };
                assert!(text.lines().any(is_it), "{row:?}\n{text}");
            }
            let course = course(&report, &run.devices[0], by);
            assert!(course.len() > 1 && course.is_sorted_by_key(|(time_ns, _)| *time_ns));
            let most = course.iter().map(|(_, held)| held.total()).max();
            assert_eq!(most, run.devices[0].peak.tracked_bytes);
        }
    }
}
