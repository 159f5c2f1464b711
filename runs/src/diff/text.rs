//! The comparison as people read it in a terminal: a sentence, a table that adds up in rows and columns as printed, the
//! other grouping, the tags that differ most.

use super::{Diff, Pair, SIDES, Table, difference, nameless, words};
use crate::report::text::{Lines, clean, clean_name, device_name, label, printed, shorten};
use crate::report::units::{Unit, thousands};
use crate::report::{By, Part, Row, Statement};
use crate::run::Moment;

/// How much is printed, and where.
#[derive(Debug, Clone, Copy, Default)]
pub struct Layout {
    /// Columns of the terminal; `None` when piped.
    pub width: Option<usize>,
    /// Every category, tag and device.
    pub all: bool,
    /// Every tag instead of categories.
    pub tags: bool,
}

/// Lines of a comparison, if fewer rows can bring it there.
const MOST_LINES: usize = 35;
/// Rows of categories: of the first table, of the other grouping, and tags; each at least the second number.
const ROWS: [(usize, usize); 3] = [(9, 4), (5, 2), (6, 2)];

/// A table as it is printed: folded, in one unit, each column apportioned from the top. A difference is that of the
/// printed numbers, so rows add up across as well.
pub(super) struct Shown {
    pub(super) statement: Statement,
    pub(super) unit: Unit,
    pub(super) only: Vec<Option<usize>>,
    steps: Vec<Vec<Option<i64>>>,
}

impl Shown {
    /// At most `limit` categories, the unchanged ones as one row, the smaller differences as another.
    pub(super) fn of(table: &Table, limit: usize) -> Self {
        let unit = unit(&table.statement);
        let (statement, only) = folded(table, limit, if limit == usize::MAX { 0 } else { unit.smallest() });
        let steps = printed(&statement, unit);
        Shown { statement, unit, only, steps }
    }

    fn cell(&self, row: usize, column: usize) -> Option<i64> {
        *self.steps.get(row)?.get(column)?
    }

    /// B less A in steps of the unit, as printed.
    pub(super) fn difference(&self, row: usize) -> Option<i64> {
        Some(self.cell(row, 1)? - self.cell(row, 0)?)
    }
}

fn unit(statement: &Statement) -> Unit {
    let totals = statement.rows.iter().filter(|row| matches!(row.part, Part::Used | Part::Tracked));
    let largest = totals.flat_map(|row| row.bytes.iter().flatten()).map(|bytes| bytes.saturating_abs()).max();
    Unit::for_largest(largest.unwrap_or(0))
}

/// The statement with fewer categories, and `only` of its rows.
fn folded(table: &Table, limit: usize, smallest: i64) -> (Statement, Vec<Option<usize>>) {
    let rows = &table.statement.rows;
    let first = rows.iter().position(|row| row.part == Part::Category);
    let Some(first) = first.filter(|_| limit < usize::MAX) else {
        return (table.statement.clone(), table.only.clone());
    };
    let count = rows.iter().filter(|row| row.part == Part::Category).count();
    let (before, rest) = rows.split_at(first);
    let (categories, after) = rest.split_at(count.min(rest.len()));
    let is_same = |row: &Row| difference(&row.bytes).is_some_and(|bytes| bytes.saturating_abs() < smallest);
    // One side alone has nothing to be the same as.
    let same: Vec<&Row> = categories.iter().filter(|row| is_same(row)).collect();
    let differ: Vec<&Row> = categories.iter().filter(|row| !is_same(row)).collect();
    let (named, smaller) = if differ.len() > limit {
        differ.split_at(limit.saturating_sub(1))
    } else {
        (differ.as_slice(), &[][..])
    };
    let mut statement = Statement { rows: before.to_vec() };
    statement.rows.extend(named.iter().map(|row| (*row).clone()));
    for (what, group) in [("smaller differences", smaller), ("unchanged", &same)] {
        if let [one] = group {
            statement.rows.push((*one).clone());
        } else if let Some(row) = sum(group, what) {
            statement.rows.push(row);
        }
    }
    // Rows behind the categories are parts of rows before them, or of each other.
    let moved = (statement.rows.len() as isize) - (first + count) as isize;
    let parent = |parent: usize| if parent < first { parent } else { parent.saturating_add_signed(moved) };
    let after = after.iter().map(|row| Row { parent: row.parent.map(parent), ..row.clone() });
    statement.rows.extend(after);
    let only_of = |row: &Row| {
        let index = rows.iter().position(|other| other.part == row.part && other.name == row.name)?;
        table.only.get(index).copied().flatten()
    };
    let only = statement.rows.iter().map(only_of).collect();
    (statement, only)
}

/// Several rows as one.
fn sum(rows: &[&Row], what: &str) -> Option<Row> {
    let (first, rest) = rows.split_first()?;
    let add = |bytes: Vec<Option<i64>>, row: &&Row| -> Vec<Option<i64>> {
        let both = bytes.iter().zip(&row.bytes);
        both.map(|(a, b)| Some((*a)?.saturating_add((*b)?))).collect()
    };
    let bytes = rest.iter().fold(first.bytes.clone(), add);
    let name = format!("({} {what})", thousands(rows.len() as u64));
    Some(Row { name, bytes, ..(*first).clone() })
}

/// The comparison.
pub fn text(diff: &Diff<'_>, layout: Layout) -> String {
    let told = |saved: usize| {
        let rows = ROWS
            .map(|(most, least)| if layout.all { usize::MAX } else { most.saturating_sub(saved).max(least) });
        lines(diff, layout, rows)
    };
    let most_saved = ROWS.iter().map(|(most, least)| most - least).max().unwrap_or(0);
    let mut out = told(0);
    for saved in 1..=most_saved {
        if layout.all || layout.tags || out.len() <= MOST_LINES {
            break;
        }
        out = told(saved);
    }
    out.join("\n") + "\n"
}

fn lines(diff: &Diff<'_>, layout: Layout, [first, second, tags]: [usize; 3]) -> Vec<String> {
    let mut out = Lines::new(layout.width);
    for (side, name) in diff.sides.iter().zip(SIDES) {
        let run = side.run;
        let mut parts = vec![name.to_owned(), label(run)];
        parts.extend(side.id.iter().map(|id| format!("run {id}")));
        if run.process.pid != 0 {
            parts.push(format!("pid {}", run.process.pid));
        }
        parts.push(match run.source.kind.as_str() {
            "daemon" => format!("on {}", run.source.origin),
            kind => format!("from {kind} {}", run.source.origin),
        });
        out.prose(&parts.join("  "));
    }
    let Some(whole) = diff.whole() else {
        out.prose("neither has memory on a GPU");
        return out.lines;
    };
    out.prose(&words::basis(diff));
    out.line("");
    let by = if layout.tags { By::Tag } else { diff.by };
    let shown = Shown::of(whole.table(by), if layout.tags { usize::MAX } else { first });
    out.prose(&words::sentence(diff, whole, &shown));
    words::shift(&shown).iter().for_each(|line| out.prose(line));
    if diff.pairs.len() > 1 {
        devices(diff, &mut out);
    }
    out.line("");
    table(diff, whole, &shown, by, &mut out);
    if !layout.tags {
        for (of, limit) in [(other(diff.by), second), (By::Tag, tags)] {
            if of != diff.by && has_names(whole.table(of)) {
                composition(whole, of, limit, layout, &mut out);
            }
        }
    }
    if layout.all && diff.pairs.len() > 1 {
        for pair in &diff.pairs {
            out.line("");
            words::paired(diff, pair).iter().for_each(|line| out.prose(line));
            table(diff, pair, &Shown::of(pair.table(by), usize::MAX), by, &mut out);
        }
    }
    words::doubts(whole).iter().for_each(|line| out.prose(&format!("note: {line}")));
    out.prose(&next(diff));
    out.lines
}

fn other(by: By) -> By {
    if by == By::Structure { By::Layer } else { By::Structure }
}

fn has_names(table: &Table) -> bool {
    table.statement.rows.iter().any(|row| row.part == Part::Category)
}

/// A row per pair of devices, and their sums.
fn devices(diff: &Diff<'_>, out: &mut Lines) {
    let part = match diff.whole().map(|pair| pair.table(diff.by).bytes(Part::Used)) {
        Some([Some(_), Some(_)]) => Part::Used,
        _ => Part::Tracked,
    };
    let name = |pair: &Pair| {
        let device = |side: usize| diff.sides.get(side)?.run.devices.get((*pair.devices.get(side)?)?);
        match (device(0), device(1)) {
            (Some(a), Some(b)) if a.name != b.name => format!("{} : {}", device_name(a), device_name(b)),
            (Some(a), None) => format!("{} (A only)", device_name(a)),
            (None, Some(b)) => format!("{} (B only)", device_name(b)),
            (Some(device), _) => device_name(device),
            (None, None) => "all".to_owned(),
        }
    };
    let rows = diff.pairs.iter().map(|pair| Row {
        part: Part::Category,
        name: name(pair),
        parent: Some(0),
        bytes: pair.table(diff.by).bytes(part).to_vec(),
    });
    let total = diff.whole().map(|pair| pair.table(diff.by).bytes(part)).unwrap_or([None, None]);
    let what = if part == Part::Used { "used" } else { "tracked" };
    let head =
        Row { part: Part::Used, name: format!("{what}, all devices"), parent: None, bytes: total.to_vec() };
    let statement = Statement { rows: std::iter::once(head).chain(rows).collect() };
    let only = vec![None; statement.rows.len()];
    let unit = unit(&statement);
    let steps = printed(&statement, unit);
    out.line("");
    print(&Shown { statement, unit, only, steps }, By::Structure, &[], &[], out);
}

/// The identity of both sides.
fn table(diff: &Diff<'_>, pair: &Pair, shown: &Shown, by: By, out: &mut Lines) {
    let times = words::times(diff, pair);
    print(shown, by, &times, &pair.moments.each_ref(), out);
}

/// Direct and block bytes by another grouping, by how much they differ.
fn composition(pair: &Pair, by: By, limit: usize, layout: Layout, out: &mut Lines) {
    let table = pair.table(by);
    let is_named = |row: &&Row| matches!(row.part, Part::Category | Part::Others);
    let named: Vec<&Row> = table.statement.rows.iter().filter(is_named).collect();
    let name = match by {
        By::Layer => "by layer",
        By::Structure => "by structure",
        By::Tag => "by tag",
    };
    let Some(head) = sum(&named, "") else { return };
    let head = Row { part: Part::Tracked, name: format!("{name} (idle apart)"), parent: None, ..head };
    let mut rows = vec![head];
    let mut only = vec![None];
    for (row, of) in table.statement.rows.iter().zip(&table.only).filter(|(row, _)| is_named(row)) {
        rows.push(Row { parent: Some(0), ..row.clone() });
        only.push(*of);
    }
    let limit = if layout.all { usize::MAX } else { limit };
    let unit = unit(&table.statement);
    let (statement, only) = folded(&Table { statement: Statement { rows }, only }, limit, unit.smallest());
    let steps = printed(&statement, unit);
    let mut shown = Shown { statement, unit, only, steps };
    // A row of nothing says nothing.
    let is_nothing = |row: &Row| row.part == Part::Others && row.bytes.iter().all(|bytes| *bytes == Some(0));
    if let Some(index) = shown.statement.rows.iter().position(is_nothing) {
        shown.statement.rows.remove(index);
        shown.steps.remove(index);
        shown.only.remove(index);
    }
    print(&shown, by, &[], &[], out);
}

/// Rows with A, B and the difference; the unit and times above them where there are times.
fn print(shown: &Shown, by: By, times: &[String], moments: &[&Moment], out: &mut Lines) {
    let Shown { statement, unit, only, .. } = shown;
    let is_carried = |row: &Row, column: usize| {
        let rests_on_gap = !matches!(
            row.part,
            Part::Tracked | Part::Predates | Part::Category | Part::Others | Part::PoolIdle | Part::Opaque
        );
        let near = |moment: &&Moment| moment.gap_distance_ns != 0 || moment.stale;
        rests_on_gap && moments.get(column).is_some_and(near)
    };
    let cell = |index: usize, row: &Row, column: usize| match shown.cell(index, column) {
        None => "-".to_owned(),
        Some(steps) if is_carried(row, column) => format!("~{}", unit.print(steps)),
        Some(steps) => unit.print(steps),
    };
    let mut rows: Vec<(usize, String, [String; 3], String)> = Vec::new();
    if !moments.is_empty() {
        rows.push((
            0,
            unit.name.to_owned(),
            [SIDES[0].to_owned(), SIDES[1].to_owned(), "B - A".to_owned()],
            String::new(),
        ));
        if let [a, b] = times
            && !(a.is_empty() && b.is_empty())
        {
            rows.push((0, String::new(), [a.clone(), b.clone(), String::new()], String::new()));
        }
    }
    for (index, row) in statement.rows.iter().enumerate() {
        let mut depth = 0;
        let mut at = row;
        while let Some(parent) = at.parent.and_then(|parent| statement.rows.get(parent)).filter(|_| depth < 8)
        {
            (at, depth) = (parent, depth + 1);
        }
        let differs = shown.difference(index).map_or("-".to_owned(), |steps| words::signed(*unit, steps));
        let note = match only.get(index).copied().flatten() {
            Some(0) => "in A, not in B",
            Some(_) => "in B, not in A",
            None => "",
        };
        let cells = [cell(index, row, 0), cell(index, row, 1), differs];
        let name = if row.part == Part::Others { nameless(by).to_owned() } else { clean_name(&row.name) };
        rows.push((depth, name, cells, note.to_owned()));
    }
    let widest = |column: usize| {
        rows.iter().filter_map(|row| row.2.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths = [0, 1, 2].map(|column| widest(column).unwrap_or(0).max(9));
    let numbers: usize = widths.iter().map(|width| width + 2).sum();
    let room = out.width.map_or(usize::MAX, |width| width.saturating_sub(numbers)).clamp(16, 44);
    let names = rows
        .iter()
        .map(|(depth, name, ..)| depth + name.chars().count())
        .max()
        .unwrap_or(0)
        .clamp(24, 44)
        .min(room);
    for (depth, name, cells, note) in &rows {
        let end = by != By::Structure && name.contains('/');
        let name = " ".repeat(*depth) + &shorten(name, names.saturating_sub(*depth), end);
        let [a, b, differs] = cells;
        let [wa, wb, wd] = widths;
        let line = format!("{name:<names$}  {a:>wa$}  {b:>wb$}  {differs:>wd$}");
        let fits = |note: &str| out.width.is_none_or(|width| line.chars().count() + 2 + note.len() <= width);
        let line = if !note.is_empty() && fits(note) { format!("{line}  {note}") } else { line };
        out.line(&line);
    }
}

fn next(diff: &Diff<'_>) -> String {
    let typed = |side: usize| diff.sides.get(side).map(|side| side.typed.clone()).unwrap_or_default();
    let at = if diff.at == super::At::Now { " --now" } else { "" };
    let by = match diff.by {
        By::Layer => "--by structure",
        By::Structure | By::Tag => "--by layer",
    };
    let device = if diff.pairs.len() > 1 { "--device N | " } else { "" };
    clean(&format!(
        "next: gpumemctl diff {} {}{at} {device}{by} | --tags | --all | --json | --csv | --fail-above 2%",
        typed(0),
        typed(1)
    ))
}
