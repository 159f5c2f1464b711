//! The report as text for a terminal. Every column adds up as printed, the unit is named once, and the last line suggests the
//! next command.

mod bridge;
mod facts;
mod overview;
mod prose;
mod short;
mod spark;
mod table;

pub use crate::labels::{command_line, exit, label, length_ns};
pub use crate::lines::{wrapped, wrapped_to};
pub(super) use facts::device_parts;
pub use gpumem_model::escape::escape;
pub use spark::{BLOCKS, sparkline};
pub use table::PrintedRow;
pub(super) use table::{Shown, has_older_reading, heads, note};

use crate::Report;
use crate::labels::device_title;
use crate::lines::Lines;
use crate::panel::{Panel, Table};
use gpumem_model::run::Device;
use gpumem_model::time::Times;
pub(crate) use short::quality;

/// Size and form of the text.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// Columns of the terminal; `None` if the output is piped, so that sentences are not wrapped.
    pub width: Option<usize>,
    /// Maximum number of categories shown for each device; the others are summed in one row. Fewer are shown if the report would
    /// have more than 35 lines, or 25 if `is_short`. `usize::MAX` shows all, and the tables of all devices if there are several.
    pub categories: usize,
    /// Whether the terminal can show non-ASCII characters.
    pub unicode: bool,
    /// Whether only the first screen is shown: the outcome, the findings and one table of one moment, in at most 25 lines.
    pub is_short: bool,
}

impl Default for Layout {
    fn default() -> Self {
        Layout { width: None, categories: 16, unicode: false, is_short: false }
    }
}

/// Target for the number of lines of a report. Small categories are summed in one row to reach it.
const MOST_LINES: usize = 35;
/// Target for the number of lines of the first screen alone.
const MOST_SHORT_LINES: usize = 25;
/// Number of categories that keep their rows even if the report then has more lines.
const LEAST_CATEGORIES: usize = 6;

/// Returns the report as text. A process on several devices has a row for each; `--all`, or a report on one device, shows the
/// full tables.
pub fn text(report: &Report<'_>, layout: Layout) -> String {
    let all = layout.categories == usize::MAX;
    if layout.is_short {
        return short::lines(report, layout.categories, layout.width, MOST_SHORT_LINES).join("\n") + "\n";
    }
    let several = report.run.devices.len() > 1;
    let devices: &[Device] = if several && !all { &[] } else { &report.run.devices };
    let times = report.times();
    let part = |fill: &dyn Fn(&mut Lines)| filled(layout.width, fill);
    let mut head = part(&|out| prose::head(report, times, out));
    if several {
        head.extend(part(&|out| overview::overview(report, times, true, out)));
    }
    let facts = devices.iter().map(|device| {
        part(&|out| {
            let spark = spark::line(&device.series, times, layout.width, layout.unicode);
            spark.iter().for_each(|line| out.line(line));
            facts::facts(report, device, times, out);
        })
    });
    let facts: Vec<Vec<String>> = facts.collect();
    let tail = part(&|out| prose::tail(report, out));
    let lines_with = |categories: usize| {
        let mut lines = head.clone();
        for (device, facts) in devices.iter().zip(&facts) {
            lines.push(String::new());
            lines.extend(part(&|out| {
                if several {
                    out.prose(&device_title(device));
                }
                let shown = table::Shown::of(report, device, categories);
                table::table(report, device, times, &shown, out);
                if !several {
                    out.line("");
                }
                bridge::bridge(report, device, &shown, out);
            }));
            lines.extend_from_slice(facts);
        }
        lines.extend_from_slice(&tail);
        lines
    };
    let mut categories = layout.categories;
    let mut lines = lines_with(categories);
    while !all && lines.len() > MOST_LINES && categories > LEAST_CATEGORIES {
        let too_many = (lines.len() - MOST_LINES).div_ceil(devices.len().max(1));
        categories = categories.saturating_sub(too_many).max(LEAST_CATEGORIES);
        lines = lines_with(categories);
    }
    lines.join("\n") + "\n"
}

fn filled(width: Option<usize>, fill: &dyn Fn(&mut Lines)) -> Vec<String> {
    let mut out = Lines::new(width);
    fill(&mut out);
    out.lines
}

/// Returns the name and owner of the process.
pub(super) fn heading(report: &Report<'_>) -> String {
    escape(&prose::heading(report))
}

/// Returns the texts of a report, for other output forms: a panel whose tables have facts, but no headings and rows.
pub(super) fn panel_without_rows(report: &Report<'_>) -> Panel {
    let times = Times::of(report.run);
    let part = |fill: &dyn Fn(&mut Lines)| filled(None, fill);
    let escaped = |lines: Vec<String>| lines.iter().map(|line| escape(line)).collect();
    let table = |device: &Device| Table {
        title: device_title(device),
        facts: part(&|out| facts::facts(report, device, times, out)),
        ..Table::default()
    };
    Panel {
        heading: heading(report),
        verdict: escaped(prose::verdict(report)),
        warnings: escaped(prose::warnings(report.run)),
        coverage: part(&|out| prose::source(report, times, out)),
        devices: report.run.devices.iter().map(table).collect(),
        tail: part(&|out| prose::tail(report, out)),
    }
}
