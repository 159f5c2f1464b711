//! Writes the first screen of a report: how the run ended, what explains its memory, and one table of one moment.

use super::prose;
use super::table::{highest_reading, note, printed};
use crate::advice;
use crate::category::{CACHED, OF_CUDA};
use crate::findings::{self, Finding, Findings, Outcome};
use crate::labels::length_ns;
use crate::lines::{Lines, clean_name};
use crate::place::{self, OF_PASSES};
use crate::table::{Table, shorten, width as width_of};
use crate::{GroupBy, Part, Report, Row, gap_distance, has_older_gap, held, used_or_tracked};
use gpumem_model::run::{Amounts, Class, Clock, Device, Moment, Run, State};
use gpumem_model::time::{Times, duration};
use gpumem_model::units::{Unit, plural, thousands};
use gpumem_model::window::WindowKind;
use std::borrow::Cow;

/// Maximum width of the names in the table, in columns of the terminal.
const NAME: usize = 56;
/// Width of the table's other columns together, in columns of the terminal.
const NUMBERS: usize = 24;
/// Divisor: categories smaller than the total divided by this are summed in one row.
const SMALLEST_PART: i64 = 1_000;
const MOST_FINDINGS: usize = 4;
/// The table shows the moment when memory runs out if the bytes in use then differ from those at the peak by this share of the
/// used bytes.
const CLEARLY_DIFFERENT: f64 = 0.1;
/// Factor by which the used bytes of a moment must exceed those of another one to be clearly more.
const CLEARLY_MORE: f64 = 1.02;
/// Number of lines of the screen that follow the notes.
const LINES_AFTER_NOTES: usize = 2;
/// Number of lines on the screen that are not rows of the table.
const OTHER_LINES: usize = 13;

/// Returns the moment that the table shows, and its name. Without a window it is the moment that [`failure`] returns, if any, else
/// the peak of tracked memory or the last moment.
fn moment<'d>(report: &Report<'_>, device: &'d Device) -> (Cow<'d, Moment>, &'static str) {
    let last = if report.run.state == State::Open { "now" } else { "at the end" };
    let (moment, when) = match report.window.map(|window| window.part) {
        Some(WindowKind::At) => (&device.peak, "at that time"),
        Some(_) => (&device.peak, "at the highest moment"),
        None => match failure(report, device) {
            Some(failure) => return (Cow::Owned(failure), "when memory ran out"),
            None if is_last_fuller(report, device) => (&device.last, last),
            None => (&device.peak, "at the peak"),
        },
    };
    (Cow::Borrowed(moment), when)
}

/// Returns whether the last moment has more used bytes than the peak. The last moment of a pool that keeps what was freed has
/// little to show: it must have clearly more used bytes, or not less memory in use.
fn is_last_fuller(report: &Report<'_>, device: &Device) -> bool {
    let used = |moment: &Moment| used_or_tracked(moment).unwrap_or(0);
    let (last, peak) = (used(&device.last), used(&device.peak));
    last as f64 > peak as f64 * CLEARLY_MORE
        || last > peak && in_use(report, &device.last.amounts) >= in_use(report, &device.peak.amounts)
}

fn in_use(report: &Report<'_>, amounts: &Amounts) -> i64 {
    held(report.run, amounts, |cell| cell.class != Class::PoolIdle)
}

/// Returns the moment at which memory ran out if clearly more memory was in use then than at the peak: a pool that has taken all
/// memory of the device may use less of it at the peak. If the program ended, also returns it if clearly less was in use, or if
/// the last moment would be shown, when some of the memory was free again.
fn failure(report: &Report<'_>, device: &Device) -> Option<Moment> {
    let (_, oom, outcome) = findings::decisive(report).filter(|(of, ..)| std::ptr::eq(*of, device))?;
    let more = in_use(report, &oom.amounts).saturating_sub(in_use(report, &device.peak.amounts)) as f64;
    let clearly = CLEARLY_DIFFERENT * used_or_tracked(&device.peak)? as f64;
    let is_end = outcome == Outcome::OutOfMemory && oom.tracked_bytes != 0;
    if more < clearly && !(is_end && (-more >= clearly || is_last_fuller(report, device))) {
        return None;
    }
    let parts = [&device.last, &device.peak]
        .into_iter()
        .find_map(|moment| moment.parts.filter(|parts| Some(parts.sum()) == oom.untrackable_bytes));
    let read_ns = oom.device.as_ref().map_or(oom.time_ns, |device| device.read_ns);
    Some(Moment {
        time_ns: oom.time_ns,
        tracked_bytes: Some(oom.tracked_bytes),
        amounts: oom.amounts.clone(),
        predates_bytes: oom.predates_bytes,
        untrackable_bytes: oom.untrackable_bytes,
        parts,
        gap_distance_ns: read_ns.wrapping_sub(oom.time_ns) as i64,
        partial: oom.is_partial,
        ..Moment::default()
    })
}

/// Returns the first screen with at most `max_lines` lines, as far as that is possible by summing small categories.
pub(super) fn lines(
    report: &Report<'_>,
    categories: usize,
    width: Option<usize>,
    max_lines: usize,
) -> Vec<String> {
    let run = report.run;
    let times = report.times();
    let mut out = Lines::new(width);
    out.prose(&prose::heading(report));
    // Conclusions are about the whole run, so a report on a window of time has none.
    let advised = if report.window.is_none() { advice::own_advice(report) } else { Vec::new() };
    let findings = match report.window {
        None => conclusions(report, times, &advised, &mut out),
        Some(window) => {
            out.prose(&prose::window_line(window, times));
            Vec::new()
        }
    };
    match run.devices.as_slice() {
        [] => out.prose("no GPU memory was observed"),
        [device] => {
            let rows = categories.min(max_lines.saturating_sub(OTHER_LINES));
            out.line("");
            let (moment, when) = moment(report, device);
            statement(report, device, (&moment, when), (rows, &findings), &mut out);
            device_line(report, device, &moment, &mut out);
        }
        _ => super::overview::overview(report, times, false, &mut out),
    }
    out.line("");
    out.prose(&format!("data: {}{}", quality(report), distance_of_reading(report)));
    notes(run, max_lines.saturating_sub(out.lines.len() + LINES_AFTER_NOTES), &mut out);
    prose::navigation(report, false, advised.len(), &mut out);
    out.lines
}

/// Adds the lines of the outcome and the findings. Without findings, adds that nothing is wrong, if the data is sufficient for
/// that. Returns the findings.
fn conclusions(report: &Report<'_>, times: Times, advised: &[advice::Item], out: &mut Lines) -> Vec<Finding> {
    let found = Findings::of(report);
    let outcome = findings::text::outcome(report, &found);
    out.prose(&outcome.unwrap_or_else(|| state(report.run, times)));
    let lines = findings::text::list(report, &found);
    let shown = if lines.len() > MOST_FINDINGS { MOST_FINDINGS - 1 } else { lines.len() };
    lines.iter().take(shown).for_each(|line| out.prose(line));
    if lines.len() > shown {
        out.prose(&format!("{} with --verbose", plural((lines.len() - shown) as u64, "more finding")));
    }
    advice::saving_line(report, &found, advised).into_iter().for_each(|line| out.prose(&line));
    found.findings
}

/// Returns the time from the first to the last moment of the run as text, after a blank and `word`; empty if it is unknown.
fn length(run: &Run, word: &str) -> String {
    length_ns(run).map(|length_ns| format!(" {word} {}", duration(length_ns))).unwrap_or_default()
}

fn state(run: &Run, times: Times) -> String {
    let after = length(run, "after");
    match run.state {
        State::Open => format!("running{}", length(run, "for")),
        State::Closed { status: Some(status), .. } => {
            format!("ended{after}, {}", crate::labels::exit(status))
        }
        State::Closed { time_ns, status: None } if run.clock == Clock::Lines => {
            format!("read up to {}", times.time(time_ns))
        }
        State::Closed { .. } if run.own.snapshot.is_some() => "a snapshot of one moment".to_owned(),
        State::Closed { .. } => format!("ended{after}"),
        State::Interrupted => format!("interrupted{after}: the numbers are the last stored ones"),
        State::Rolled { .. } => format!("continues{after} in the next part of the run"),
    }
}

/// A row of the table before its columns are aligned.
struct Line {
    part: Part,
    /// Name of the row, and its amount as printed.
    cells: [String; 2],
    /// Amount in multiples of the unit's last printed digit.
    steps: Option<i64>,
    bytes: Option<i64>,
    note: String,
}

impl Line {
    /// Returns whether the row may be summed with others: it is a positive part of tracked memory.
    fn is_of_tracked(&self) -> bool {
        let is_of_tracked =
            matches!(self.part, Part::Category | Part::Others | Part::PoolIdle | Part::Opaque);
        is_of_tracked && self.bytes.is_some_and(|bytes| bytes >= 0)
    }
}

/// Adds the table of one moment: each part of the memory with its share, and the total.
fn statement(
    report: &Report<'_>,
    device: &Device,
    (moment, when): (&Moment, &str),
    (max_rows, findings): (usize, &[Finding]),
    out: &mut Lines,
) {
    let times = report.times();
    let total = used_or_tracked(moment);
    let unit = Unit::for_largest(total.unwrap_or(0));
    let lines = rows(report, device, moment, (unit, max_rows), findings);
    let room = out.width.map_or(NAME, |width| width.saturating_sub(NUMBERS).clamp(10, NAME));
    let mut table = Table::of_numbers(1, 3);
    let mut heading = format!("{when}, {}", times.time(moment.time_ns));
    // In a narrow terminal the heading would make the column of names wider than the names.
    if width_of(&heading) > room {
        out.prose(&heading);
        heading = String::new();
    }
    table.row([heading, unit.name.to_owned(), "%".to_owned()]);
    let mut shares = Shares { total: total.unwrap_or(0), bytes: 0, printed: 0 };
    let last = lines.len() - 1;
    for (number, Line { cells: [name, amount], bytes, .. }) in lines.iter().enumerate() {
        let share = if number == last { String::new() } else { shares.next(*bytes) };
        table.row([shorten(name, room, name.contains('/')), amount.clone(), share]);
    }
    let notes = [""].into_iter().chain(lines.iter().map(|line| line.note.as_str()));
    for (line, note) in table.lines().iter().zip(notes) {
        out.with_note(line, note);
    }
    highest_reading(report, device, (total, unit), out);
}

/// Returns at most about `max_rows` rows of a moment, without rows that print as 0, or whose share does. The last row is the total.
fn rows(
    report: &Report<'_>,
    device: &Device,
    moment: &Moment,
    (unit, max_rows): (Unit, usize),
    findings: &[Finding],
) -> Vec<Line> {
    let total = used_or_tracked(moment).unwrap_or(0);
    let smallest = unit.smallest().max(total / SMALLEST_PART);
    let statement = report.statement_of(report.by, [moment, moment], usize::MAX, 0);
    let amounts: Vec<Option<i64>> = printed(&statement, unit).into_iter().map(|[amount, _]| amount).collect();
    let name = |row: &Row| match row.part {
        Part::PoolIdle => CACHED.to_owned(),
        _ => clean_name(&row.name),
    };
    let text = |amount: Option<i64>| amount.map_or("-".to_owned(), |amount| unit.print(amount));
    let near = if has_older_gap(moment) { "~" } else { "" };
    // The unit is in the heading of the column.
    let place_of = |row: &Row| -> Option<String> {
        let is_named = report.by == GroupBy::Structure && OF_PASSES.contains(&row.name.as_str());
        let is_large = row.bytes[0].unwrap_or(0) >= total / LARGEST_FOLDED;
        let named = (is_named && is_large).then(|| place::of_category(report, &moment.amounts, &row.name));
        let others = || report.others_by_name(moment, report.by).into_iter().next();
        let place = match row.part {
            Part::Others if is_large => others().filter(|(name, _)| name != report.by.name_of_rest()),
            _ => named.flatten(),
        };
        place.map(|(name, bytes)| format!("{} of {}", unit.amount(bytes), clean_name(&name)))
    };
    let growth_of = |row: &Row| findings.iter().find(|finding| finding.structures.first() == Some(&row.name));
    let mut lines: Vec<Line> = Vec::new();
    let (mut whole, mut causes, mut is_explained) = (None, Vec::new(), true);
    for (row, amount) in statement.rows.iter().zip(amounts) {
        let mut cells = [name(row), text(amount)];
        let mut row_note = String::new();
        match row.part {
            Part::Used => {
                whole = amount.map(|_| ("total = nvidia-smi", format!("{near}{}", cells[1])));
                continue;
            }
            Part::Tracked if statement.has_parts(row) => {
                whole = whole.or(Some(("total tracked", text(amount))));
                continue;
            }
            Part::Untrackable if amount.is_some() => cells[1].insert_str(0, near),
            Part::Untrackable => row_note = note(row, device),
            part if part.rests_on_gap() => {
                is_explained &= part != Part::Unexplained || amount == Some(0);
                causes.extend((amount != Some(0)).then(|| cells.join(" ")));
                continue;
            }
            Part::Predates | Part::Tracked if amount == Some(0) => continue,
            part => {
                let of = |finding: &Finding| match finding.names.first().filter(|_| part == Part::Others) {
                    Some((name, _)) => format!("<- {} grows", clean_name(name)),
                    None => "<- grows".to_owned(),
                };
                row_note = growth_of(row).map(of).or_else(|| place_of(row)).unwrap_or_default();
            }
        }
        lines.push(Line { part: row.part, cells, steps: amount, bytes: row.bytes[0], note: row_note });
    }
    fold(&mut lines, unit, max_rows, [smallest, total / LARGEST_FOLDED]);
    // The largest row is the first one, even if it has no name.
    if let Some(others) = lines.iter().position(|line| line.part == Part::Others) {
        let at = lines[..others].iter().take_while(|line| line.bytes >= lines[others].bytes).count();
        lines[at..=others].rotate_right(1);
    }
    if let Some(untrackable) = lines.last_mut().filter(|_| !causes.is_empty()) {
        let of_cuda = if is_explained { format!("{OF_CUDA}: ") } else { String::new() };
        untrackable.note = of_cuda + &causes.join(", ");
    }
    let (name, amount) = whole.unwrap_or(("total = nvidia-smi", "-".to_owned()));
    let cells = [name.to_owned(), amount];
    lines.push(Line { part: Part::Used, cells, steps: None, bytes: None, note: String::new() });
    lines
}

/// A category with more than this fraction of the total is not summed with smaller ones, unless there is no room for its row.
const LARGEST_FOLDED: i64 = 20;

/// Sums the parts of tracked memory that are smaller than `smallest`, and the categories beyond `max_rows`, in one row. The row is
/// omitted if it prints as 0. Otherwise the last categories below `largest` bytes are added until it has `smallest` bytes; if there
/// are none, it is added to `Others`, or else to the last category.
fn fold(lines: &mut Vec<Line>, unit: Unit, max_rows: usize, [smallest, largest]: [i64; 2]) {
    let is_large = |line: &Line| !line.is_of_tracked() || line.bytes >= Some(smallest);
    let is_category = |line: &Line| line.part == Part::Category;
    let (mut shown, mut folded): (Vec<Line>, Vec<Line>) =
        std::mem::take(lines).into_iter().partition(is_large);
    let mut categories = shown.iter().filter(|line| is_category(line)).count();
    let has_more = categories > max_rows || folded.iter().any(is_category);
    let limit = max_rows.saturating_sub(usize::from(has_more));
    let add = |[steps, bytes]: [i64; 2], line: &Line| {
        [steps.saturating_add(line.steps.unwrap_or(0)), bytes.saturating_add(line.bytes.unwrap_or(0))]
    };
    let mut sums = folded.iter().fold([0; 2], add);
    loop {
        let is_too_small = sums[0] != 0 && sums[1] < smallest;
        let is_next = |line: &Line| is_category(line) && (categories > limit || line.bytes < Some(largest));
        let Some(at) = shown.iter().rposition(is_next).filter(|_| categories > limit || is_too_small) else {
            break;
        };
        folded.push(shown.remove(at));
        sums = add(sums, &folded[folded.len() - 1]);
        categories -= 1;
    }
    let count = folded.iter().filter(|line| line.bytes != Some(0)).count();
    let others = shown.iter().position(|line| line.part == Part::Others);
    let host = others.or_else(|| shown.iter().rposition(is_category)).filter(|_| sums[1] < smallest);
    if let Some(host) = host.and_then(|at| shown.get_mut(at)).filter(|_| sums[0] != 0) {
        let [steps, bytes] = add(sums, host);
        (host.steps, host.bytes, host.cells[1]) = (Some(steps), Some(bytes), unit.print(steps));
        if host.part == Part::Category {
            host.cells[0] += &format!(" (+ {} smaller)", thousands(count as u64));
        }
    } else if sums[0] != 0 {
        let after = |line: &Line| is_category(line) || line.part == Part::Predates;
        let at = shown.iter().rposition(after).map_or(0, |at| at + 1);
        let cells = [format!("({} smaller)", thousands(count as u64)), unit.print(sums[0])];
        let note = String::new();
        shown.insert(
            at,
            Line { part: Part::Category, cells, steps: Some(sums[0]), bytes: Some(sums[1]), note },
        );
    }
    *lines = shown;
}

/// Shares of a total in tenths of a per cent, rounded so that they add up as printed.
struct Shares {
    total: i64,
    /// Sum of the amounts handled so far, in bytes.
    bytes: i64,
    /// Sum of the printed shares so far, in tenths of a per cent.
    printed: i64,
}

impl Shares {
    fn next(&mut self, bytes: Option<i64>) -> String {
        let Some(bytes) = bytes.filter(|_| self.total > 0) else { return "-".to_owned() };
        self.bytes = self.bytes.saturating_add(bytes);
        let printed = (1_000.0 * self.bytes as f64 / self.total as f64).round() as i64;
        let tenths = printed - std::mem::replace(&mut self.printed, printed);
        format!("{:.1}", tenths as f64 / 10.0)
    }
}

/// Adds the line on the memory of the whole device, with its time if that is not the time of the table.
fn device_line(report: &Report<'_>, device: &Device, moment: &Moment, out: &mut Lines) {
    // The memory of other processes at a past time is not recorded.
    let is_past = report.window.is_some_and(|window| window.part == WindowKind::Between);
    if is_past || device.reading.is_none() {
        return;
    }
    let at_failure = device.details.ooms.iter().find(|oom| oom.time_ns == moment.time_ns);
    if let Some(line) = at_failure.and_then(|oom| oom.device.as_ref()).and_then(super::facts::device_line_at)
    {
        out.prose(&line);
        return;
    }
    let times = report.times();
    let is_same = moment.used_bytes() == device.last.used_bytes() || super::device_parts(device).is_none();
    let at = if is_same { String::new() } else { format!(" at {}", times.time(device.last.time_ns)) };
    out.prose(&(super::facts::device_line(device, times) + &at));
}

/// Returns `complete`, or the reasons why the numbers are not complete.
pub(crate) fn quality(report: &Report<'_>) -> String {
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
    words.join("; ")
}

/// Returns how far the reading of NVML is from the moment of the table; empty if there is no distance or more than one table.
fn distance_of_reading(report: &Report<'_>) -> String {
    let [device] = report.run.devices.as_slice() else { return String::new() };
    let moment = moment(report, device).0;
    if moment.gap_distance_ns == 0 {
        return String::new();
    }
    format!("; ~ NVML was read {} the moment of the table", gap_distance(report.run, &moment))
}

/// Adds at most `max_notes` notes (the run's caveats), and the number of the others.
fn notes(run: &Run, max_notes: usize, out: &mut Lines) {
    let shown = if run.caveats.len() > max_notes { max_notes.saturating_sub(1) } else { run.caveats.len() };
    let (shown, others) = run.caveats.split_at(shown);
    shown.iter().for_each(|caveat| out.prose(&format!("note: {}", caveat.text)));
    if !others.is_empty() {
        out.prose(&format!("{} with --verbose", plural(others.len() as u64, "more note")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GroupBy;
    use crate::rules::Groupings;
    use gpumem_model::run::{Cell, Fate, Oom, OomKind};

    const GIB: i64 = 1 << 30;

    fn amounts(in_use: i64, idle: i64) -> Amounts {
        Amounts::from(vec![(0, in_use * GIB), (1, idle * GIB)])
    }

    /// Returns a run with a cell of blocks and one of unused memory.
    fn run() -> Run {
        let log = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        let mut run = gpumem_import::read_file(&log, None).expect("a log").remove(0);
        let of = |class| Cell { class, tag: None, ..run.cells[0].clone() };
        run.cells = vec![of(Class::Block), of(Class::PoolIdle)];
        run
    }

    #[test]
    fn table_shows_the_peak_if_memory_was_freed_until_the_end() {
        let mut run = run();
        let mut shown = |in_use: i64, used: i64| {
            let device = &mut run.devices[0];
            (device.peak.tracked_bytes, device.peak.amounts) = (Some(100 * GIB), amounts(90, 10));
            (device.last.tracked_bytes, device.last.amounts) =
                (Some(used * GIB), amounts(in_use, used - in_use));
            let report = Report::new(&run, Groupings::default(), None);
            moment(&report, &report.run.devices[0]).1
        };
        assert_eq!(shown(2, 101), "at the peak");
        assert_eq!(shown(91, 101), "at the end");
        assert_eq!(shown(2, 110), "at the end", "clearly more is used");
    }

    /// The table shows the peak of tracked memory, which may have less used memory than another moment.
    #[test]
    fn highest_reading_is_shown_if_the_table_has_less() {
        let mut run = run();
        let device = &mut run.devices[0];
        for moment in [&mut device.last, &mut device.peak] {
            (moment.tracked_bytes, moment.amounts) = (Some(8 * GIB), amounts(8, 0));
            (moment.predates_bytes, moment.untrackable_bytes) = (Some(0), Some(0));
        }
        let mut shown = |highest: i64| {
            run.devices[0].peak_used = Some(((highest * GIB) as u64, 7));
            let lines = lines(&Report::new(&run, Groupings::default(), None), 8, None, 25);
            let total =
                lines.iter().any(|line| line.starts_with("total = nvidia-smi") && line.contains("8,192"));
            assert!(total, "{lines:#?}");
            lines.into_iter().find(|line| line.starts_with("highest reading of NVML: "))
        };
        assert!(shown(10).is_some_and(|line| line.contains(" 10,240.0 MiB at ")));
        assert_eq!(shown(8), None);
    }

    #[test]
    fn table_keeps_each_row_on_one_line_in_a_narrow_terminal() {
        let mut run = run();
        let device = &mut run.devices[0];
        for moment in [&mut device.last, &mut device.peak] {
            (moment.tracked_bytes, moment.amounts) = (Some(100 * GIB), amounts(90, 10));
        }
        let lines = lines(&Report::new(&run, Groupings::default(), None), 8, Some(43), 25);
        assert!(lines.iter().all(|line| width_of(line) <= 43), "{lines:#?}");
        let row =
            lines.iter().find(|line| line.starts_with("Others")).unwrap_or_else(|| panic!("{lines:#?}"));
        assert!(row.ends_with(" 92,160  89.6"), "{row}");
        assert!(lines.iter().any(|line| line.starts_with("at the ") && !line.contains("MiB")), "{lines:#?}");
    }

    /// A pool that has taken all memory of the device may have more unused memory at its peak than when a request fails.
    #[test]
    fn table_shows_the_failure_if_other_memory_was_in_use() {
        let mut run = run();
        let mut shown = |(peak, failed): (i64, i64), last: i64, fate: Fate| {
            let device = &mut run.devices[0];
            (device.peak.tracked_bytes, device.peak.amounts) = (Some(15 * GIB), amounts(peak, 15 - peak));
            (device.last.tracked_bytes, device.last.amounts) = (Some(last * GIB), amounts(last, 0));
            let (amounts, tracked_bytes) = (amounts(failed, 14 - failed), 14 * GIB);
            let oom =
                Oom { kind: OomKind::Device, fate, result: 2, amounts, tracked_bytes, ..Oom::default() };
            device.details.ooms = vec![oom];
            let report = Report::new(&run, Groupings::default(), None);
            let (moment, when) = moment(&report, &report.run.devices[0]);
            (when, moment.tracked_bytes.map(|bytes| bytes / GIB))
        };
        let fatal = Fate::Fatal { after_ns: 0, status: None };
        let (failure, peak) = (("when memory ran out", Some(14)), ("at the peak", Some(15)));
        assert_eq!(shown((1, 13), 0, fatal), failure);
        assert_eq!(shown((1, 2), 0, fatal), peak);
        assert_eq!(shown((13, 6), 0, fatal), failure, "half of the memory was freed, and is in small pieces");
        assert_eq!(shown((13, 6), 0, Fate::Open), peak);
        assert_eq!(shown((13, 13), 16, fatal), failure, "not the last moment, when some of it was freed");
    }

    /// Small categories and a small cache of the allocator are summed with the smallest category that is large enough.
    #[test]
    fn no_row_has_a_share_of_nothing() {
        let mut run = run();
        let tags = [("a", 900), ("b", 90), ("c", 8)]
            .map(|(tag, mib)| (Some(tag.to_owned()), Class::Block, mib << 20));
        let idle = [(None, Class::PoolIdle, 300 << 10), (Some("d".to_owned()), Class::Block, 200 << 10)];
        let cells: Vec<_> = tags.into_iter().chain(idle).collect();
        let tracked = cells.iter().map(|(.., bytes)| bytes).sum();
        run.cells = cells
            .iter()
            .map(|(tag, class, _)| Cell {
                tag: tag.clone(),
                class: *class,
                role: None,
                ..run.cells[0].clone()
            })
            .collect();
        let device = &mut run.devices[0];
        device.peak.tracked_bytes = Some(tracked);
        device.peak.amounts =
            Amounts::from((0..).zip(cells.iter().map(|(.., bytes)| *bytes)).collect::<Vec<_>>());
        (device.peak.predates_bytes, device.peak.untrackable_bytes) = (Some(0), None);
        device.last = device.peak.clone();
        let shown = |max_rows: usize| {
            let report = Report::new(&run, Groupings::default(), Some(GroupBy::Tag));
            let device = &report.run.devices[0];
            let unit = Unit::for_largest(tracked);
            let lines = rows(&report, device, &device.peak, (unit, max_rows), &[]);
            let mut shares = Shares { total: tracked, bytes: 0, printed: 0 };
            let parts: Vec<String> = lines
                .iter()
                .filter_map(|line| Some(line.cells[0].clone() + " " + &shares.next(Some(line.bytes?))))
                .collect();
            parts
        };
        assert_eq!(shown(9), ["a 90.1", "b 9.0", "(3 smaller) 0.9"]);
        assert_eq!(shown(2), ["a 90.1", "(4 smaller) 9.9"]);
    }

    #[test]
    fn a_large_category_keeps_its_row_beside_small_ones() {
        let line = |part, name: &str, mib: i64| Line {
            part,
            cells: [name.to_owned(), mib.to_string()],
            steps: Some(mib),
            bytes: Some(mib << 20),
            note: String::new(),
        };
        let shown = |mut lines: Vec<Line>| -> Vec<String> {
            fold(&mut lines, Unit::for_largest(1000 << 20), 9, [1 << 20, 50 << 20]);
            lines.into_iter().map(|line| line.cells[0].clone()).collect()
        };
        let with = |mib: i64| {
            let others = line(Part::Others, "Others", mib);
            vec![line(Part::Category, "a", 900), line(Part::Category, "b", 1), others]
        };
        let small = |mut lines: Vec<Line>| {
            lines[1].bytes = Some(1 << 19);
            lines
        };
        assert_eq!(shown(small(with(8))), ["a", "Others"]);
        assert_eq!(shown(small(with(0))), ["a (+ 1 smaller)"]);
        assert_eq!(shown(with(8)), ["a", "b", "Others"]);
    }
}
