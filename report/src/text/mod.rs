//! The report as people read it in a terminal: every column adds up as it is printed, the unit is named
//! once, the next step is named last.
//!
//! ```text
//! prose     what stands above and below the tables
//! table     the statement of a device
//! overview  several devices, a row each
//! bridge    from a framework's own numbers to nvidia-smi's
//! spark     used or tracked over time, as a line
//! facts     what is known of a device beside its statement
//! ```

mod bridge;
mod facts;
mod overview;
mod prose;
mod spark;
mod table;

pub use crate::labels::{label, short_command};
pub use crate::lines::wrapped;
pub(super) use facts::device_parts;
pub use gpumem_model::harmless::clean;
pub(super) use table::{Printed, Shown, is_carried, note};

use crate::Report;
use crate::labels::device_title;
use crate::lines::Lines;
use gpumem_model::run::{Device, State};
use gpumem_model::time::Times;
use gpumem_model::window::WindowKind;

/// What the two columns of amounts are.
pub(super) fn columns(report: &Report<'_>) -> (&'static str, &'static str) {
    let last = if report.run.state == State::Open { "now" } else { "last" };
    match report.window.map(|window| window.part) {
        None => (last, "at peak"),
        Some(WindowKind::At) => (last, "then"),
        Some(WindowKind::Since) => (last, "highest"),
        Some(WindowKind::Between) => ("at the end", "highest"),
    }
}

/// How much is printed, and where.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// Columns of the terminal; `None` when piped: no sentence is broken.
    pub width: Option<usize>,
    /// Categories named per device, the rest is one row: at most this many, fewer where the report would
    /// have more than 35 lines. `usize::MAX` is all, and the tables of all devices where there are several.
    pub categories: usize,
    /// The terminal has more characters than those of ASCII.
    pub unicode: bool,
}

impl Default for Layout {
    fn default() -> Self {
        Layout { width: None, categories: 16, unicode: false }
    }
}

/// Lines of a report, if fewer categories can bring it there.
const MOST_LINES: usize = 35;
/// Rows of categories that are never saved.
const LEAST_CATEGORIES: usize = 6;

/// The report. A process on several devices is told with a row for each of them; their tables are `--all`,
/// or a run with the one device that is asked for.
pub fn text(report: &Report<'_>, layout: Layout) -> String {
    let all = layout.categories == usize::MAX;
    let several = report.run.devices.len() > 1;
    let devices: &[Device] = if several && !all { &[] } else { &report.run.devices };
    let times = report.times();
    let part = |fill: &dyn Fn(&mut Lines)| {
        let mut out = Lines::new(layout.width);
        fill(&mut out);
        out.lines
    };
    let mut head = part(&|out| prose::head(report, times, out));
    if several {
        head.extend(part(&|out| overview::overview(report, times, out)));
    }
    let facts = devices.iter().map(|device| {
        part(&|out| {
            spark::line(&device.series, times, layout.width, layout.unicode)
                .iter()
                .for_each(|line| out.line(line));
            facts::facts(report, device, times, out);
        })
    });
    let facts: Vec<Vec<String>> = facts.collect();
    let tail = part(&|out| prose::tail(report, out));
    let told = |categories: usize| {
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
    let mut lines = told(categories);
    while !all && lines.len() > MOST_LINES && categories > LEAST_CATEGORIES {
        let too_many = (lines.len() - MOST_LINES).div_ceil(devices.len().max(1));
        categories = categories.saturating_sub(too_many).max(LEAST_CATEGORIES);
        lines = told(categories);
    }
    lines.join("\n") + "\n"
}

/// What a report says beside its tables, for forms that are not lines.
pub(super) struct Words {
    /// Whose memory it is.
    pub heading: String,
    /// Why the sums are less than the truth.
    pub warnings: Vec<String>,
    /// Where it comes from and how it ended, and how much of the truth it is.
    pub coverage: Vec<String>,
    /// Of each device.
    pub facts: Vec<Vec<String>>,
    /// Caveats, and what to type next.
    pub tail: Vec<String>,
}

pub(super) fn words(report: &Report<'_>) -> Words {
    let times = Times::of(report.run);
    let part = |fill: &dyn Fn(&mut Lines)| {
        let mut out = Lines::new(None);
        fill(&mut out);
        out.lines
    };
    let heading = clean(&prose::heading(report));
    let warnings: Vec<String> = prose::warnings(report.run).iter().map(|line| clean(line)).collect();
    // The head begins with both, a line each.
    let coverage = part(&|out| prose::head(report, times, out)).split_off(1 + warnings.len());
    let devices = report.run.devices.iter();
    let facts = devices.map(|device| part(&|out| facts::facts(report, device, times, out))).collect();
    Words { heading, warnings, coverage, facts, tail: part(&|out| prose::tail(report, out)) }
}
