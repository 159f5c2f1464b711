//! Prints the statement of a device (its memory as rows that add up) as a table with two moments as columns. Numbers are never
//! truncated: if the terminal is too narrow, the table is wider than the terminal.

use crate::lines::{Lines, clean_name};
use crate::table::{Table, shorten};
use crate::{Columns, GroupBy, Part, Report, Row, Statement, has_older_gap, largest_total, used_or_tracked};
use gpumem_model::run::{Device, State};
use gpumem_model::time::Times;
use gpumem_model::units::{Unit, signed};
use gpumem_model::window::WindowKind;

const GAP: &str = "  ";
/// The most frequent note after the columns.
const NOTE: &str = "upper bound";
/// Minimum width of names in columns, enough for `  unexplained`. Notes get lines of their own if names would have less.
const LEAST_NAME: usize = 13;

/// Returns the headings and the times of the two columns of amounts.
pub(crate) fn heads(report: &Report<'_>, device: &Device, times: Times) -> [[String; 2]; 2] {
    let last = if report.run.state == State::Open { "now" } else { "last" };
    let heads = match report.window.map(|window| window.part) {
        // The peak is that of tracked memory; NVML may have charged more at another time.
        None if device.last.used_bytes() > device.peak.used_bytes().or(Some(i64::MAX)) => {
            [last, "tracked peak"]
        }
        None => [last, "at peak"],
        Some(WindowKind::At) => [last, "then"],
        Some(WindowKind::Since) => [last, "highest"],
        Some(WindowKind::Between) => ["at the end", "highest"],
    };
    [heads.map(str::to_owned), [&device.last, &device.peak].map(|moment| times.time(moment.time_ns))]
}

/// Rounds each column from the top, so that it adds up as printed. Returns multiples of the unit's last printed digit.
pub(super) fn printed(statement: &Statement, unit: Unit) -> Vec<Columns> {
    let round = |row: &Row| row.bytes.map(|bytes| bytes.map(|bytes| unit.round(bytes)));
    let mut steps: Vec<Columns> = statement.rows.iter().map(round).collect();
    for parent in 0..steps.len() {
        for (column, total) in steps[parent].into_iter().enumerate() {
            let Some(total) = total else { continue };
            let known = |row: &usize| statement.rows[*row].bytes[column].is_some();
            let inside = |row: &usize| statement.rows[*row].parent == Some(parent);
            let parts: Vec<usize> = (0..steps.len()).filter(inside).filter(known).collect();
            let bytes: Vec<i64> = parts.iter().filter_map(|&row| statement.rows[row].bytes[column]).collect();
            for (row, shown) in parts.into_iter().zip(unit.apportion(total, &bytes)) {
                steps[row][column] = Some(shown);
            }
        }
    }
    steps
}

/// A statement (memory as rows that add up) with its amounts as printed.
pub(crate) struct Shown {
    pub(crate) statement: Statement,
    pub(crate) unit: Unit,
    /// For each row, its amounts in multiples of the unit's last printed digit.
    pub(crate) steps: Vec<Columns>,
}

impl Shown {
    /// Makes the statement with at most `categories` categories; `usize::MAX` shows all.
    pub(crate) fn of(report: &Report<'_>, device: &Device, categories: usize) -> Self {
        let unit = Unit::for_largest(largest_total(device));
        let smallest = if categories == usize::MAX { 0 } else { unit.smallest() };
        let statement = report.statement(device, categories, smallest);
        let steps = printed(&statement, unit);
        Shown { statement, unit, steps }
    }

    /// Returns the rows with their amounts as text.
    pub(crate) fn print(&self, device: &Device) -> Vec<PrintedRow> {
        let Shown { statement, unit, steps } = self;
        let row = |(index, row): (usize, &Row)| {
            let cell = |column: usize| {
                let older = if has_older_reading(device, row, column) { "~" } else { "" };
                steps[index][column].map_or("-".to_owned(), |steps| format!("{older}{}", unit.print(steps)))
            };
            PrintedRow {
                part: row.part,
                depth: statement.depth(index),
                name: clean_name(&row.name),
                cells: [cell(0), cell(1)],
                bytes: row.bytes,
                note: note(row, device),
            }
        };
        statement.rows.iter().enumerate().map(row).collect()
    }
}

/// A printed row of a statement.
#[derive(Debug, Clone)]
pub struct PrintedRow {
    pub part: Part,
    /// Number of rows that contain this row; determines the indentation.
    pub depth: usize,
    /// Name, without control characters.
    pub name: String,
    /// Amounts as printed, at the last moment and at the peak.
    pub cells: [String; 2],
    /// Bytes at the last moment and at the peak; `None` where unknown.
    pub bytes: Columns,
    pub note: String,
}

pub(super) fn table(report: &Report<'_>, device: &Device, times: Times, shown: &Shown, out: &mut Lines) {
    let heads = heads(report, device, times);
    let rows = shown.print(device);
    let mut numbers = Table::of_numbers(0, 2);
    heads.iter().chain(rows.iter().map(|row| &row.cells)).for_each(|cells| numbers.row(cells));
    let room = out.width.map_or(usize::MAX, |terminal| {
        let free = terminal.saturating_sub(numbers.width());
        free.saturating_sub(GAP.len() + NOTE.len()).max(free.min(LEAST_NAME))
    });
    let room = room.clamp(10, 60);
    let mut table = Table::of_numbers(1, 3);
    for (name, cells) in [shown.unit.name, ""].into_iter().zip(&heads) {
        table.row([name, &cells[0], &cells[1]]);
    }
    for PrintedRow { part, depth, name, cells, .. } in &rows {
        let end = report.by != GroupBy::Structure && *part == Part::Category && name.contains('/');
        let name = " ".repeat(*depth) + &shorten(name, room.saturating_sub(*depth), end);
        table.row([&name, &cells[0], &cells[1]]);
    }
    let lines = table.lines();
    let (heads, lines) = lines.split_at(heads.len());
    heads.iter().for_each(|line| out.line(line));
    for (line, PrintedRow { note, .. }) in lines.iter().zip(&rows) {
        out.with_note(line, note);
    }
    let shown_bytes = [&device.last, &device.peak].into_iter().filter_map(used_or_tracked).max();
    highest_reading(report, device, (shown_bytes, shown.unit), out);
}

/// Adds NVML's highest reading of the process, if it prints larger than `shown_bytes`.
pub(super) fn highest_reading(
    report: &Report<'_>,
    device: &Device,
    (shown_bytes, unit): (Option<i64>, Unit),
    out: &mut Lines,
) {
    let Some((highest, time_ns)) = device.peak_used.filter(|_| report.window.is_none()) else { return };
    let highest = signed(highest);
    if shown_bytes.is_some_and(|shown| unit.round(highest) > unit.round(shown)) {
        let at = report.times().time(time_ns);
        out.prose(&format!("highest reading of NVML: {} at {at}", unit.amount_with_name(highest)));
    }
}

/// Returns the note after a row: how reliable its amount is, or why the amount is unknown.
pub(crate) fn note(row: &Row, device: &Device) -> String {
    let is_negative = |bytes: &Option<i64>| bytes.is_some_and(|bytes| bytes < 0);
    let negative = row.bytes.iter().any(is_negative);
    match row.part {
        Part::Unexplained if negative => {
            let moments = [&device.last, &device.peak];
            let is_over = moments.iter().any(|moment| is_negative(&moment.untrackable_bytes));
            let than = if is_over { "was tracked" } else { "the parts above say" };
            format!("NVML charges less than {than}")
        }
        Part::Untrackable if row.bytes.iter().all(Option::is_none) => match &device.last.used_absence {
            Some(absence) => format!("unknown: NVML reports {absence}"),
            None => "unknown: NVML was not read".into(),
        },
        part => part.reliability().into(),
    }
}

/// Returns whether an amount is computed from untrackable memory that was measured at another time. `column` is 0 for the last
/// moment and 1 for the peak.
pub(crate) fn has_older_reading(device: &Device, row: &Row, column: usize) -> bool {
    row.part.rests_on_gap() && has_older_gap([&device.last, &device.peak][column])
}
