//! The comparison as text for a terminal: a sentence, a table, the same bytes by the other grouping, and the tags that differ
//! most. The rows and columns of tables add up as printed.

use super::{Diff, Pair, Pairing, SIDES, Table, difference, summary};
use crate::labels::{command_line_of, device_name, exit, length_ns, source};
use crate::lines::{Lines, clean_name};
use crate::table::{Table as Printed, shorten, width as width_of};
use crate::{Columns, GroupBy, Part, Row, Statement, has_older_gap};
use gpumem_model::escape::escape;
use gpumem_model::run::{Moment, State};
use gpumem_model::time::duration;
use gpumem_model::units::{Unit, thousands};

/// Size of the text form.
#[derive(Debug, Clone, Copy, Default)]
pub struct Layout {
    /// Width of the terminal in columns; `None` if the output is not a terminal.
    pub width: Option<usize>,
    /// Whether every category, tag and device is shown.
    pub all: bool,
    /// Whether every tag is shown, instead of categories.
    pub tags: bool,
}

/// Target for the number of lines of the text. Tables get fewer rows to reach it, but at least their minimum.
const MOST_LINES: usize = 35;
/// (Maximum, minimum) number of rows: of categories in the first table, of the other grouping, and of tags.
const ROWS: [(usize, usize); 3] = [(9, 4), (5, 3), (6, 3)];

/// Maximum width of a command, in columns of the terminal.
const COMMAND: usize = 60;

/// A table as printed: with few rows, in one unit, its amounts rounded so that each column adds up. The difference column is
/// computed from the printed amounts, so each row adds up too.
pub(super) struct Shown {
    pub(super) table: Table,
    pub(super) unit: Unit,
    /// For each row, its amounts in multiples of the unit's last printed digit.
    steps: Vec<Columns>,
}

impl Shown {
    /// Reduces a table to at most `limit` categories, one row for unchanged categories, and one for smaller differences.
    pub(super) fn of(table: &Table, limit: usize) -> Self {
        let unit = unit(&table.statement);
        Shown::from(folded(table, limit, unit.smallest()), unit, None)
    }

    /// Rounds the amounts of a table. `head` is the rounded first row, if another table already shows this row.
    fn from(table: Table, unit: Unit, head: Option<Columns>) -> Self {
        let steps = steps(&table.statement, unit, head);
        Shown { table, unit, steps }
    }

    /// Returns B - A of a row, in multiples of the unit's last printed digit.
    pub(super) fn difference(&self, row: usize) -> Option<i64> {
        difference(self.steps[row])
    }
}

/// Returns the amounts in multiples of the unit's last printed digit. Rounds column A and the differences so that their rows add
/// up; B is their sum. So all three columns add up, and unchanged rows show a difference of 0.
fn steps(statement: &Statement, unit: Unit, head: Option<Columns>) -> Vec<Columns> {
    let rows = &statement.rows;
    let round = |row: &Row| row.bytes.map(|bytes| bytes.map(|bytes| unit.round(bytes)));
    let mut steps: Vec<Columns> = rows.iter().map(round).collect();
    if let (Some(first), Some(head)) = (steps.first_mut(), head) {
        *first = head;
    }
    for parent in 0..steps.len() {
        let [total_a, total_b] = steps[parent];
        let parts: Vec<usize> = (0..rows.len()).filter(|index| rows[*index].parent == Some(parent)).collect();
        let shared = |total: Option<i64>, of: fn(Columns) -> Option<i64>| {
            let known = parts.iter().filter_map(|index| Some((*index, of(rows[*index].bytes)?)));
            let (known, amounts): (Vec<usize>, Vec<i64>) = known.unzip();
            known.into_iter().zip(spread(unit, total, &amounts))
        };
        shared(total_a, |[a, _]| a).for_each(|(row, shown)| steps[row][0] = Some(shown));
        let is_both = |index: &usize| rows[*index].bytes[0].is_some() == rows[*index].bytes[1].is_some();
        match (total_a, total_b) {
            (Some(a), Some(b)) if parts.iter().all(is_both) => {
                for (row, shown) in shared(Some(b - a), difference) {
                    steps[row][1] = steps[row][0].map(|a| a + shown);
                }
            }
            _ => shared(total_b, |[_, b]| b).for_each(|(row, shown)| steps[row][1] = Some(shown)),
        }
    }
    steps
}

/// Rounds the parts of a total so that they add up to it as printed.
fn spread(unit: Unit, total: Option<i64>, parts: &[i64]) -> Vec<i64> {
    let Some(total) = total else { return Vec::new() };
    let mut steps = unit.apportion(total, parts);
    let left = total - steps.iter().sum::<i64>();
    if let Some(largest) = (0..parts.len()).max_by_key(|index| parts[*index].unsigned_abs()) {
        steps[largest] += left;
    }
    steps
}

fn unit(statement: &Statement) -> Unit {
    let totals = statement.rows.iter().filter(|row| matches!(row.part, Part::Used | Part::Tracked));
    let largest = totals.flat_map(|row| row.bytes.iter().flatten()).map(|bytes| bytes.saturating_abs()).max();
    Unit::for_largest(largest.unwrap_or(0))
}

/// Returns the table with at most `limit` categories, each with a difference of at least `smallest` bytes. The others are summed.
fn folded(table: &Table, limit: usize, smallest: i64) -> Table {
    let rows = &table.statement.rows;
    let Some(first) = table.statement.row(Part::Category).filter(|_| limit < usize::MAX) else {
        return table.clone();
    };
    let count = table.statement.categories().count();
    let (before, rest) = rows.split_at(first);
    let (categories, after) = rest.split_at(count.min(rest.len()));
    // A row whose amount is known only for A or only for B counts as changed.
    let (same, differ): (Vec<&Row>, Vec<&Row>) =
        categories.iter().partition(|row| difference(row.bytes) == Some(0));
    let is_large = |row: &&&Row| difference(row.bytes).is_none_or(|bytes| bytes.saturating_abs() >= smallest);
    let large = differ.iter().take_while(is_large).count();
    let named =
        if large.min(limit) < differ.len() { large.min(limit.saturating_sub(1)) } else { differ.len() };
    let (named, smaller) = differ.split_at(named);
    let mut statement = Statement { rows: before.to_vec() };
    statement.rows.extend(named.iter().map(|row| (*row).clone()));
    for (what, group) in [("smaller differences", smaller), ("unchanged", &same)] {
        if let [one] = group {
            statement.rows.push((*one).clone());
        } else if let Some(row) = sum(group, what) {
            statement.rows.push(row);
        }
    }
    // Rows that follow the categories are parts of rows before the categories, or of each other.
    let moved = (statement.rows.len() as isize) - (first + count) as isize;
    let parent = |parent: usize| if parent < first { parent } else { parent.saturating_add_signed(moved) };
    let after = after.iter().map(|row| Row { parent: row.parent.map(parent), ..row.clone() });
    statement.rows.extend(after);
    let only_of = |row: &Row| {
        let index = rows.iter().position(|other| other.part == row.part && other.name == row.name)?;
        table.only.get(index).copied().flatten()
    };
    let only = statement.rows.iter().map(only_of).collect();
    Table { statement, only }
}

/// Returns the sum of several rows as one row, whose name contains `what`.
fn sum(rows: &[&Row], what: &str) -> Option<Row> {
    let (first, rest) = rows.split_first()?;
    let add =
        |bytes: Columns, row: &&Row| [0, 1].map(|side| Some(bytes[side]?.saturating_add(row.bytes[side]?)));
    let bytes = rest.iter().fold(first.bytes, add);
    let name = format!("({} {what})", thousands(rows.len() as u64));
    Some(Row { name, bytes, ..(*first).clone() })
}

/// Returns the comparison as text.
pub fn text(diff: &Diff<'_>, layout: Layout) -> String {
    // Each further attempt shows one row less in each table, until the text is short enough.
    let attempt = |less: usize| {
        let rows = ROWS
            .map(|(most, least)| if layout.all { usize::MAX } else { most.saturating_sub(less).max(least) });
        lines(diff, layout, rows)
    };
    let most_less = ROWS.iter().map(|(most, least)| most - least).max().unwrap_or(0);
    let fits = |out: &Vec<String>| layout.all || layout.tags || out.len() <= MOST_LINES;
    let out = (0..most_less).map(attempt).find(fits).unwrap_or_else(|| attempt(most_less));
    out.join("\n") + "\n"
}

fn lines(diff: &Diff<'_>, layout: Layout, [first, second, tags]: [usize; 3]) -> Vec<String> {
    let mut out = Lines::new(layout.width);
    let mut page = Page::default();
    for (side, name) in diff.sides.iter().zip(SIDES) {
        let run = side.run;
        let mut parts = vec![name.to_owned(), command_line_of(run, COMMAND)];
        parts.extend(side.id.iter().map(|id| format!("run {id}")));
        if run.process.pid != 0 {
            parts.push(format!("pid {}", run.process.pid));
        }
        match run.devices.as_slice() {
            [] => {}
            [device] => parts.push(device_name(device)),
            devices => parts.push(format!("{} GPUs", devices.len())),
        }
        parts.extend(length_ns(run).map(duration));
        if let State::Closed { status: Some(status), .. } = run.state {
            parts.push(exit(status));
        }
        parts.extend(run.caveats.iter().filter(|caveat| caveat.code == "job").map(|job| escape(&job.text)));
        parts.push(source(run));
        out.prose(&parts.join("  "));
    }
    let Some(whole) = diff.whole() else {
        out.prose("neither has memory on a GPU");
        return out.lines;
    };
    out.prose(&summary::basis(diff));
    out.line("");
    let by = if layout.tags { GroupBy::Tag } else { diff.by };
    let shown = Shown::of(whole.table(by), if layout.tags { usize::MAX } else { first });
    out.prose(&summary::sentence(diff, whole, &shown));
    summary::shift(&shown).iter().for_each(|line| out.prose(line));
    if diff.pairs.len() > 1 {
        devices(diff, &mut page);
    }
    page.rows.push(None);
    table(diff, whole, &shown, by, &mut page);
    if !layout.tags {
        let other = if diff.by == GroupBy::Structure { GroupBy::Layer } else { GroupBy::Structure };
        for (of, limit) in [(other, second), (GroupBy::Tag, tags)] {
            let has_categories = whole.table(of).statement.row(Part::Category).is_some();
            if of != diff.by && has_categories {
                composition(whole, &shown, of, limit, layout, &mut page);
            }
        }
    }
    if layout.all && diff.pairs.len() > 1 {
        for pair in &diff.pairs {
            page.rows.push(None);
            page.rows.extend(summary::paired(diff, pair).map(|title| head(&title, [""; 2], "")));
            table(diff, pair, &Shown::of(pair.table(by), usize::MAX), by, &mut page);
        }
    }
    page.print(&mut out);
    summary::doubts(whole).iter().for_each(|line| out.prose(&format!("note: {line}")));
    out.prose(&next_commands(diff));
    out.lines
}

/// Adds a row for each pair of devices, and a row for their sum.
fn devices(diff: &Diff<'_>, page: &mut Page) {
    let part = match diff.whole().map(|pair| pair.table(diff.by).bytes(Part::Used)) {
        Some([Some(_), Some(_)]) => Part::Used,
        _ => Part::Tracked,
    };
    let name = |pair: &Pair| match (diff.device(pair, 0), diff.device(pair, 1)) {
        (Some(a), Some(b)) if a.name != b.name => format!("{} : {}", device_name(a), device_name(b)),
        (Some(a), None) => format!("{} (A only)", device_name(a)),
        (None, Some(b)) => format!("{} (B only)", device_name(b)),
        (Some(device), _) => device_name(device),
        (None, None) => "all".to_owned(),
    };
    let rows = diff.pairs.iter().map(|pair| Row {
        part: Part::Category,
        name: name(pair),
        parent: Some(0),
        bytes: pair.table(diff.by).bytes(part),
    });
    let bytes = diff.whole().map_or([None, None], |pair| pair.table(diff.by).bytes(part));
    let what = if part == Part::Used { "used" } else { "tracked" };
    let is_job = diff.pairs.iter().any(|pair| pair.paired == Pairing::Rank);
    let whose = if is_job { "ranks" } else { "devices" };
    let sum = Row { part: Part::Used, name: format!("{what}, all {whose}"), parent: None, bytes };
    let statement = Statement { rows: std::iter::once(sum).chain(rows).collect() };
    let only = vec![None; statement.rows.len()];
    let unit = unit(&statement);
    page.rows.push(None);
    page.rows.push(head(unit.name, SIDES, "B - A"));
    page.add(&Shown::from(Table { statement, only }, unit, None), GroupBy::Structure, &[]);
}

fn head(name: &str, [a, b]: [&str; 2], differs: &str) -> Option<Line> {
    let cells = [a.to_owned(), b.to_owned(), differs.to_owned()];
    Some(Line { name: name.to_owned(), cells, ..Line::default() })
}

fn table(diff: &Diff<'_>, pair: &Pair, shown: &Shown, by: GroupBy, page: &mut Page) {
    page.rows.push(head(shown.unit.name, SIDES, "B - A"));
    let [a, b] = summary::times(diff, pair);
    if !a.is_empty() || !b.is_empty() {
        page.rows.push(head("", [&a, &b], ""));
    }
    page.add(shown, by, &pair.moments.each_ref());
}

/// Returns the printed sum of the memory that can have a category: `tracked` without idle memory and opaque pools (pools that
/// report no blocks).
fn busy(shown: &Shown) -> Columns {
    let of = |part: Part| shown.table.statement.row(part).map_or([None, None], |row| shown.steps[row]);
    let [tracked, idle, opaque] = [Part::Tracked, Part::PoolIdle, Part::Opaque].map(of);
    let without = |side: usize| Some(tracked[side]? - idle[side].unwrap_or(0) - opaque[side].unwrap_or(0));
    [without(0), without(1)]
}

/// Adds a table of the memory that can have a category, grouped by `by` and sorted by difference.
fn composition(pair: &Pair, above: &Shown, by: GroupBy, limit: usize, layout: Layout, page: &mut Page) {
    let table = pair.table(by);
    // The row for bytes that no rule matches is omitted if it is zero on both sides.
    let is_shown = |row: &Row| match row.part {
        Part::Category => true,
        Part::Others => row.bytes != [Some(0); 2],
        _ => false,
    };
    let shown = table.statement.rows.iter().zip(&table.only).filter(|(row, _)| is_shown(row));
    let (named, only): (Vec<&Row>, Vec<Option<usize>>) = shown.unzip();
    let Some(head) = sum(&named, "") else { return };
    let name = format!("tracked by {} (without pool idle)", by.name());
    let head = Row { part: Part::Tracked, name, parent: None, ..head };
    let rows = named.into_iter().map(|row| Row { parent: Some(0), ..row.clone() });
    let statement = Statement { rows: std::iter::once(head).chain(rows).collect() };
    let only = std::iter::once(None).chain(only).collect();
    let limit = if layout.all { usize::MAX } else { limit };
    let unit = unit(&table.statement);
    let table = folded(&Table { statement, only }, limit, unit.smallest());
    page.add(&Shown::from(table, unit, Some(busy(above))), by, &[]);
}

/// A row of text before it is aligned: name, note, and in `cells` the texts for A, B and the difference.
#[derive(Default)]
struct Line {
    depth: usize,
    name: String,
    /// Whether the name is a path. A path is shortened at its beginning, because its end is more specific.
    is_path: bool,
    cells: [String; 3],
    note: &'static str,
}

/// Rows of all tables together, so that their columns are aligned; `None` is an empty line.
#[derive(Default)]
struct Page {
    rows: Vec<Option<Line>>,
}

impl Page {
    /// Adds the rows of a table. `moments` are those of its columns, to mark amounts from older readings; may be empty.
    fn add(&mut self, shown: &Shown, by: GroupBy, moments: &[&Moment]) {
        let is_carried = |row: &Row, column: usize| {
            row.part.rests_on_gap() && moments.get(column).is_some_and(|moment| has_older_gap(moment))
        };
        for (index, row) in shown.table.statement.rows.iter().enumerate() {
            let cell = |column: usize| match shown.steps[index][column] {
                None => "-".to_owned(),
                Some(steps) if is_carried(row, column) => format!("~{}", shown.unit.print(steps)),
                Some(steps) => shown.unit.print(steps),
            };
            let differs =
                shown.difference(index).map_or("-".to_owned(), |steps| shown.unit.print_signed(steps));
            let depth = shown.table.statement.depth(index);
            let note = match shown.table.only[index] {
                Some(0) => "in A, not in B",
                Some(_) => "in B, not in A",
                None => row.part.reliability(),
            };
            let name =
                if row.part == Part::Others { by.name_of_rest().to_owned() } else { clean_name(&row.name) };
            let is_path = by != GroupBy::Structure && name.contains('/');
            self.rows.push(Some(Line { depth, name, is_path, cells: [cell(0), cell(1), differs], note }));
        }
    }

    fn print(&self, out: &mut Lines) {
        let is_row = |line: &&Line| !line.cells.concat().is_empty();
        let rows = || self.rows.iter().flatten().filter(is_row);
        let mut numbers = Printed::of_numbers(0, 3);
        rows().for_each(|line| numbers.row(&line.cells));
        let room = out.width.map_or(usize::MAX, |width| width.saturating_sub(numbers.width())).clamp(16, 44);
        let mut table = Printed::of_numbers(1, 4);
        for Line { depth, name, is_path, cells, .. } in rows() {
            let name = " ".repeat(*depth) + &shorten(name, room.saturating_sub(*depth), *is_path);
            table.row(std::iter::once(&name).chain(cells));
        }
        let mut printed = table.lines().into_iter();
        for line in &self.rows {
            match line {
                None => out.line(""),
                Some(line) if !is_row(&line) => out.prose(&line.name),
                Some(Line { note, .. }) => {
                    let line = printed.next().unwrap_or_default();
                    let with_note = format!("{line}  {note}");
                    let fits = out.width.is_none_or(|width| width_of(&with_note) <= width);
                    out.line(if fits { &with_note } else { &line });
                }
            }
        }
    }
}

fn next_commands(diff: &Diff<'_>) -> String {
    let typed = |side: usize| diff.sides.get(side).map(|side| side.typed.clone()).unwrap_or_default();
    let at = if diff.at == super::At::Now { " --now" } else { "" };
    let by = match diff.by {
        GroupBy::Layer => "--by structure",
        GroupBy::Structure | GroupBy::Tag => "--by layer",
    };
    let device = if diff.pairs.len() > 1 { "--device N | " } else { "" };
    escape(&format!(
        "next: gpumemctl diff {} {}{at} {device}{by} | --tags | --all | --json | --csv | --fail-above 2%",
        typed(0),
        typed(1)
    ))
}
