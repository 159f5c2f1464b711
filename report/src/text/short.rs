//! The first screen of a report: how the run ended, what explains it, and one table of one moment.

use super::prose;
use super::table::{note, printed};
use crate::findings::{self, Finding, Findings};
use crate::labels::command_line;
use crate::lines::{Lines, clean_name};
use crate::table::{Table, shorten};
use crate::{Part, Report, Row};
use gpumem_model::run::{Clock, Device, Moment, Run, State};
use gpumem_model::time::{Times, duration};
use gpumem_model::units::{Unit, plural, signed};
use gpumem_model::window::WindowKind;

/// Columns for the command in the title.
const COMMAND: usize = 72;
/// Columns for names in a table.
const NAME: usize = 56;
/// Columns of a table beside names.
const NUMBERS: usize = 24;
/// Categories smaller than the total divided by this are summed in one row.
const SMALLEST_PART: i64 = 1_000;
/// Lines after the notes.
const LINES_AFTER_NOTES: usize = 2;
/// Number of lines that are not rows of the table.
const OTHER_LINES: usize = 13;

/// Returns the moment that the table shows, with its name: the one with the most used bytes.
fn moment<'d>(report: &Report<'_>, device: &'d Device) -> (&'d Moment, &'static str) {
    let last = if report.run.state == State::Open { "now" } else { "at the end" };
    let kind = report.window.map(|window| window.part);
    let used = |moment: &Moment| moment.used_bytes().or(moment.tracked_bytes);
    match kind {
        Some(WindowKind::At) => (&device.peak, "at that time"),
        Some(_) => (&device.peak, "at the highest moment"),
        None if used(&device.last) > used(&device.peak) => (&device.last, last),
        None => (&device.peak, "at the peak"),
    }
}

/// Returns the report with at most `most` lines, as far as folding small categories can reach that.
pub(super) fn lines(
    report: &Report<'_>,
    categories: usize,
    width: Option<usize>,
    most: usize,
) -> Vec<String> {
    let run = report.run;
    let times = report.times();
    let mut out = Lines::new(width);
    out.prose(&title(report));
    // Conclusions are about the whole run.
    let findings = match report.window {
        None => conclusions(report, times, &mut out),
        Some(window) => {
            out.prose(&prose::window_line(window, times));
            Vec::new()
        }
    };
    match run.devices.as_slice() {
        [] => out.prose("no GPU memory was observed"),
        [device] => {
            let rows = categories.min(most.saturating_sub(OTHER_LINES));
            out.line("");
            let shown = moment(report, device);
            statement(report, device, shown, (rows, &findings), &mut out);
            device_line(report, device, shown.0, &mut out);
        }
        _ => super::overview::overview(report, times, &mut out),
    }
    out.line("");
    out.prose(&format!("data: {}", data(report, times)));
    notes(run, most.saturating_sub(out.lines.len() + LINES_AFTER_NOTES), &mut out);
    prose::navigation(report, false, &mut out);
    out.lines
}

fn title(report: &Report<'_>) -> String {
    prose::heading_of(report, &command_line(report.run, COMMAND))
}

/// Adds the outcome and the findings; without findings, that nothing is wrong, if the data can show it. Returns the findings.
fn conclusions(report: &Report<'_>, times: Times, out: &mut Lines) -> Vec<Finding> {
    let found = Findings::of(report);
    match findings::text::outcome(report, &found) {
        Some(outcome) => out.prose(&outcome),
        None => out.prose(&state(report.run, times)),
    }
    findings::text::list(report, &found).iter().for_each(|line| out.prose(line));
    found.findings
}

/// Returns the time from the first to the last moment of the run in nanoseconds.
fn length(run: &Run) -> Option<u64> {
    let from = run.devices.iter().filter_map(|device| device.series.buckets.first());
    let from = from.map(|bucket| bucket.time_ns).min()?;
    (run.clock != Clock::Lines).then(|| prose::end_ns(run).saturating_sub(from))
}

fn state(run: &Run, times: Times) -> String {
    let length = length(run).map(duration);
    let after = length.as_ref().map(|length| format!(" after {length}")).unwrap_or_default();
    match run.state {
        State::Open => {
            format!("running{}", length.map(|length| format!(" for {length}")).unwrap_or_default())
        }
        State::Closed { status: Some(status), .. } => {
            format!("ended{after}, {}", crate::labels::exit(status))
        }
        State::Closed { time_ns, status: None } if run.clock == Clock::Lines => {
            format!("ends at {}", times.time(time_ns))
        }
        State::Closed { .. } if run.own.snapshot.is_some() => "a snapshot of one moment".to_owned(),
        State::Closed { .. } => format!("ended{after}"),
        State::Interrupted => format!("interrupted{after}: the numbers are the last stored ones"),
        State::Rolled { .. } => format!("continues{after} in the next part of the run"),
    }
}

/// A row of the table, with the causes of its amount as a note.
struct Line {
    cells: [String; 2],
    bytes: Option<i64>,
    note: String,
}

/// Adds the table of one moment: each part with its share, and the total.
fn statement(
    report: &Report<'_>,
    device: &Device,
    (moment, when): (&Moment, &str),
    (most, findings): (usize, &[Finding]),
    out: &mut Lines,
) {
    let times = report.times();
    let total = moment.used_bytes().or(moment.tracked_bytes);
    let unit = Unit::for_largest(total.unwrap_or(0));
    let lines = rows(report, device, moment, (unit, most), findings);
    let room = out.width.map_or(NAME, |width| width.saturating_sub(NUMBERS).clamp(10, NAME));
    let mut table = Table::of_numbers(1, 3);
    table.row([format!("{when}, {}", times.time(moment.time_ns)), unit.name.to_owned(), "%".to_owned()]);
    let mut shares = Shares { total: total.unwrap_or(0), seen: 0, shown: 0 };
    let last = lines.len() - 1;
    for (number, Line { cells: [name, amount], bytes, .. }) in lines.iter().enumerate() {
        let share = if number == last { String::new() } else { shares.next(*bytes) };
        table.row([shorten(name, room, name.contains('/')), amount.clone(), share]);
    }
    let notes = [""].into_iter().chain(lines.iter().map(|line| line.note.as_str()));
    for (line, note) in table.lines().iter().zip(notes) {
        out.with_note(line, note);
    }
    let Some((highest, time_ns)) = device.peak_used.filter(|_| report.window.is_none()) else { return };
    let highest = signed(highest);
    if total.is_some_and(|total| unit.round(highest) > unit.round(total)) {
        let at = times.time(time_ns);
        out.prose(&format!("highest reading of NVML: {} at {at}", unit.amount_with_name(highest)));
    }
}

/// Returns at most about `most` rows of a moment, without those that print as 0, and last the total.
fn rows(
    report: &Report<'_>,
    device: &Device,
    moment: &Moment,
    (unit, most): (Unit, usize),
    findings: &[Finding],
) -> Vec<Line> {
    let total = moment.used_bytes().or(moment.tracked_bytes).unwrap_or(0);
    let smallest = unit.smallest().max(total / SMALLEST_PART);
    let statement = report.statement_of(report.by, [moment, moment], most, smallest);
    let amounts: Vec<Option<i64>> = printed(&statement, unit).into_iter().map(|[amount, _]| amount).collect();
    let name = |row: &Row| match row.part {
        Part::PoolIdle => "cached by the allocator".to_owned(),
        _ => clean_name(&row.name),
    };
    let text = |amount: Option<i64>| amount.map_or("-".to_owned(), |amount| unit.print(amount));
    let near = if moment.gap_distance_ns != 0 || moment.stale { "~" } else { "" };
    let grows = |row: &Row| findings.iter().any(|finding| finding.structure.as_deref() == Some(&row.name));
    let mut lines: Vec<Line> = Vec::new();
    let (mut whole, mut causes) = (None, Vec::new());
    for (row, amount) in statement.rows.iter().zip(amounts) {
        let (bytes, cells) = (row.bytes[0], [name(row), text(amount)]);
        match row.part {
            Part::Used => whole = amount.map(|_| ("total = nvidia-smi", format!("{near}{}", cells[1]))),
            Part::Tracked if statement.has_parts(row) => {
                whole = whole.or(Some(("total tracked", text(amount))));
            }
            Part::Untrackable if amount.is_some() => {
                let cells = [cells[0].clone(), format!("{near}{}", cells[1])];
                lines.push(Line { cells, bytes, note: String::new() });
            }
            Part::Untrackable => lines.push(Line { cells, bytes, note: note(row, device) }),
            _ if amount == Some(0) => {}
            part if part.rests_on_gap() => causes.push(cells.join(" ")),
            _ => {
                let note = if grows(row) { "<- grows" } else { "" };
                lines.push(Line { cells, bytes, note: note.to_owned() });
            }
        }
    }
    if let Some(untrackable) = lines.last_mut().filter(|_| !causes.is_empty()) {
        untrackable.note = causes.join(", ");
    }
    let (name, amount) = whole.unwrap_or(("total = nvidia-smi", "-".to_owned()));
    lines.push(Line { cells: [name.to_owned(), amount], bytes: None, note: String::new() });
    lines
}

/// Shares of a total in tenths of a per cent, rounded so that they add up as printed.
struct Shares {
    total: i64,
    seen: i64,
    shown: i64,
}

impl Shares {
    fn next(&mut self, bytes: Option<i64>) -> String {
        let Some(bytes) = bytes.filter(|_| self.total > 0) else { return "-".to_owned() };
        self.seen = self.seen.saturating_add(bytes);
        let shown = (1_000.0 * self.seen as f64 / self.total as f64).round() as i64;
        let tenths = shown - std::mem::replace(&mut self.shown, shown);
        format!("{:.1}", tenths as f64 / 10.0)
    }
}

/// Adds the line of the whole device, with its time if that is not the time of the table.
fn device_line(report: &Report<'_>, device: &Device, moment: &Moment, out: &mut Lines) {
    // Other processes at a past time are not recorded.
    let is_past = report.window.is_some_and(|window| window.part == WindowKind::Between);
    if is_past || device.reading.is_none() {
        return;
    }
    let times = report.times();
    let is_same = moment.used_bytes() == device.last.used_bytes() || super::device_parts(device).is_none();
    let at = if is_same { String::new() } else { format!(" at {}", times.time(device.last.time_ns)) };
    out.prose(&(super::facts::device_line(device, times) + &at));
}

/// Returns `complete`, or the reasons why the numbers are not complete.
fn data(report: &Report<'_>, times: Times) -> String {
    let run = report.run;
    let coverage = &run.coverage;
    let mut words = prose::warnings(run);
    if !coverage.covered {
        words.push("no agent in this process, so only NVML's figure is known".to_owned());
    } else if coverage.samples == 0 {
        words.push("NVML was not read, so Untrackable is unknown".to_owned());
    }
    for (count, what) in
        [(coverage.rejected, "could not be read"), (coverage.odd, "contradicted earlier ones")]
    {
        if count > 0 {
            words.push(format!("{} {what}", plural(count, "record")));
        }
    }
    if coverage.late {
        words.push("the agent was loaded late".to_owned());
    }
    if words.is_empty() {
        words.push("complete".to_owned());
    }
    for device in &run.devices {
        let moment = moment(report, device).0;
        if moment.gap_distance_ns != 0 && run.devices.len() == 1 {
            let side = if moment.gap_distance_ns < 0 { "before" } else { "after" };
            let distance = times.clock().distance(moment.gap_distance_ns.unsigned_abs());
            words.push(format!("~ NVML was read {distance} {side} the moment of the table"));
        }
    }
    words.join("; ")
}

/// Adds at most `most` notes, and the number of the others.
fn notes(run: &Run, most: usize, out: &mut Lines) {
    let shown = if run.caveats.len() > most { most.saturating_sub(1) } else { run.caveats.len() };
    let (shown, others) = run.caveats.split_at(shown);
    shown.iter().for_each(|caveat| out.prose(&format!("note: {}", caveat.text)));
    if !others.is_empty() {
        out.prose(&format!("{} with --verbose", plural(others.len() as u64, "more note")));
    }
}
