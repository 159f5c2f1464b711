//! The first screen of a report: how the run ended, what explains it, and one table of one moment.

use super::prose;
use super::table::{note, printed};
use crate::findings::{self, Finding, Findings};
use crate::labels::command_line;
use crate::lines::{Lines, clean_name};
use crate::table::{Table, shorten};
use crate::{By, Part, Report, Row};
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
/// A category below this part of the total has no row of its own.
const SMALLEST_PART: i64 = 1_000;
/// Lines after the notes.
const LINES_AFTER_NOTES: usize = 2;
/// Lines of a report beside the rows of its table.
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
    if let Some(window) = report.window {
        out.prose(&prose::window_line(window, times));
    } else {
        conclusions(report, times, &mut out);
    }
    match run.devices.as_slice() {
        [] => out.prose("no GPU memory was observed"),
        [device] => {
            let rows = categories.min(most.saturating_sub(OTHER_LINES));
            out.line("");
            let shown = moment(report, device);
            statement(report, device, shown, rows, &mut out);
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

/// Adds the outcome and the findings; without findings, that nothing is wrong, if the data can show it.
fn conclusions(report: &Report<'_>, times: Times, out: &mut Lines) {
    let found = Findings::of(report);
    match findings::text::outcome(report, &found) {
        Some(outcome) => out.prose(&outcome),
        None => out.prose(&state(report.run, times)),
    }
    findings::text::list(report, &found).iter().for_each(|line| out.prose(line));
}

/// Returns the time from the first to the last moment of the run in nanoseconds.
fn length(run: &Run) -> Option<u64> {
    let from = run.devices.iter().filter_map(|device| device.series.buckets.first());
    let from = from.map(|bucket| bucket.time_ns).min()?;
    let to = match run.state {
        State::Closed { time_ns, .. } | State::Rolled { time_ns } => time_ns,
        State::Open | State::Interrupted => run.devices.iter().map(|device| device.last.time_ns).max()?,
    };
    (run.clock != Clock::Lines).then(|| to.saturating_sub(from))
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

/// A row of the table.
struct Line {
    part: Part,
    name: String,
    steps: Option<i64>,
    bytes: Option<i64>,
    note: String,
}

fn statement(
    report: &Report<'_>,
    device: &Device,
    (moment, when): (&Moment, &str),
    most: usize,
    out: &mut Lines,
) {
    let times = report.times();
    let total = moment.used_bytes().or(moment.tracked_bytes);
    let unit = Unit::for_largest(total.unwrap_or(0));
    let smallest = unit.smallest().max(total.unwrap_or(0) / SMALLEST_PART);
    let statement = report.statement_of(report.by, [moment, moment], most, smallest);
    let steps = printed(&statement, unit);
    let row = |(row, steps): (&Row, &Vec<Option<i64>>)| Line {
        part: row.part,
        name: shown_name(row),
        steps: steps[0],
        bytes: row.bytes[0],
        note: note(row, device),
    };
    let rows: Vec<Line> = statement.rows.iter().zip(&steps).map(row).collect();
    let is_cause = |part: Part| {
        matches!(part, Part::Context | Part::Modules | Part::LocalMemory | Part::Heaps | Part::Unexplained)
    };
    let causes = rows.iter().filter(|row| is_cause(row.part));
    let causes = causes.filter_map(|row| Some((row.name.as_str(), row.steps.filter(|steps| *steps != 0)?)));
    let causes: Vec<String> = causes.map(|(name, steps)| format!("{name} {}", unit.print(steps))).collect();
    let grown = Findings::of(report).findings;
    let grown: Vec<&Finding> = grown.iter().filter(|found| found.kind == findings::Kind::Growth).collect();
    let carried = if moment.gap_distance_ns != 0 || moment.stale { "~" } else { "" };
    let mut table = Table::of_numbers(1, 3);
    table.row([format!("{when}, {}", times.time(moment.time_ns)), unit.name.to_owned(), "%".to_owned()]);
    let room = out.width.map_or(NAME, |width| width.saturating_sub(NUMBERS).clamp(10, NAME));
    let mut shares = Shares { total: total.unwrap_or(0), seen: 0, shown: 0 };
    let mut whole = None;
    let has_parts = rows
        .iter()
        .any(|row| matches!(row.part, Part::Category | Part::Others | Part::PoolIdle | Part::Opaque));
    for row in &rows {
        let amount = row.steps.map_or("-".to_owned(), |steps| unit.print(steps));
        let note = match row.part {
            Part::Used => {
                whole = Some(("total = nvidia-smi", amount)).filter(|_| row.steps.is_some());
                continue;
            }
            Part::Tracked if has_parts => {
                whole = whole.or(Some(("total tracked", amount)));
                continue;
            }
            part if is_cause(part) => continue,
            Part::Untrackable if row.steps.is_some() => causes.join(", "),
            Part::Untrackable => row.note.clone(),
            _ if row.steps == Some(0) => continue,
            _ if grown.iter().any(|found| found.structure.as_deref() == Some(&row.name)) => "<- grows".into(),
            _ => String::new(),
        };
        let mark = if row.part == Part::Untrackable && row.steps.is_some() { carried } else { "" };
        let end = report.by != By::Structure && row.part == Part::Category && row.name.contains('/');
        let cells = [shorten(&row.name, room, end), format!("{mark}{amount}"), shares.next(row.bytes)];
        table.row_with_note(cells, &note);
    }
    let (name, amount) = whole.unwrap_or(("total = nvidia-smi", "-".to_owned()));
    table.row([name.to_owned(), format!("{carried}{amount}")]);
    table.lines().iter().for_each(|line| out.line(line));
    let highest = device.peak_used.map(|(used, time_ns)| (signed(used), time_ns));
    if let Some((used, time_ns)) =
        highest.filter(|(used, _)| total.is_some_and(|total| unit.round(*used) > unit.round(total)))
        && report.window.is_none()
    {
        let at = times.time(time_ns);
        out.prose(&format!("highest reading of NVML: {} at {at}", unit.amount_with_name(used)));
    }
}

fn shown_name(row: &Row) -> String {
    match row.part {
        Part::PoolIdle => "cached by the allocator".to_owned(),
        _ => clean_name(&row.name),
    }
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
    let is_same = moment.used_bytes() == device.last.used_bytes();
    let at = if is_same { String::new() } else { format!(" at {}", times.time(device.last.time_ns)) };
    out.prose(&super::facts::device_line(device, times).replacen("device (", &format!("device{at} ("), 1));
}

/// Returns whether the numbers are complete, else what is missing.
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
    for device in &run.devices {
        let moment = moment(report, device).0;
        if moment.gap_distance_ns != 0 && run.devices.len() == 1 {
            let side = if moment.gap_distance_ns < 0 { "before" } else { "after" };
            let distance = times.clock().distance(moment.gap_distance_ns.unsigned_abs());
            words.push(format!("~ NVML was read {distance} {side} the moment of the table"));
        }
    }
    if words.is_empty() {
        words.push("complete".to_owned());
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
