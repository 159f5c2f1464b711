//! A run and rules -> one statement -> text, JSON, CSV, HTML, pictures. Every form is made from the same [`Statement`], so
//! they cannot disagree, and every total in it is the sum of its parts.
//!
//! A report is made from a [`gpumem_model::run::Run`] alone, so that a live process, a stored run, a recording and an import are told in the
//! same words. `diff` compares runs, `plot` draws, `judge` decides whether an amount grows, `rules` name categories.
#![forbid(unsafe_code)]

pub mod bridge;
pub mod brief;
pub mod category;
pub mod csv;
pub mod diff;
pub mod explain;
pub mod group;
pub mod growth;
pub mod html;
pub mod iterations;
pub mod json;
pub mod judge;
mod labels;
mod lines;
pub mod names;
pub mod oom;
mod over_time;
pub mod own;
pub mod panel;
pub mod plot;
pub mod redacted;
pub mod rules;
pub mod steps;
pub mod table;
pub mod text;
pub mod trace;
pub mod tree;

use crate::category::{OTHERS, Rules};
use crate::rules::{Groupings, NO_TAG, cell_view};
use gpumem_ledger::CellView;
use gpumem_model::run::{Class, Device, Moment, Parts, Run};
use gpumem_model::time::Times;
use gpumem_model::window::Window;
use std::collections::BTreeMap;

/// What the rows under `tracked` are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// Categories of the layer rules.
    Layer,
    /// Categories of the structure rules.
    Structure,
    /// Tag paths.
    Tag,
}

impl By {
    /// Name of the row for tracked bytes that no other row names.
    pub fn name_of_rest(self) -> &'static str {
        if self == By::Tag { NO_TAG } else { OTHERS }
    }
}

/// A run, ready to be told.
#[derive(Debug)]
pub struct Report<'r> {
    /// The run.
    pub run: &'r Run,
    /// How the store calls it, if it is stored.
    pub id: Option<String>,
    /// Rules.
    pub groupings: Groupings,
    /// Rows.
    pub by: By,
    /// Pids of other processes in the same file.
    pub others: Vec<u32>,
    /// What tells of its job's other processes (`--job ID`), and how many there are.
    pub job: Option<(String, u64)>,
    /// It is of a part of the run's life.
    pub window: Option<Window>,
    /// What was typed to get it, without what chooses rows and form: the next command begins with it.
    pub command: String,
    /// It has no tags, because its reader may not know them.
    veiled: bool,
    cells: Vec<CellView>,
    /// Category of each cell by layer, by structure, and by tag.
    categories: [Vec<Option<String>>; 3],
}

/// What a line of a statement is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// What NVML charges; sum of the next three.
    Used,
    /// Older than the agent.
    Predates,
    /// Sum of everything below it up to `Untrackable`.
    Tracked,
    /// A category, or a tag.
    Category,
    /// What no rule takes.
    Others,
    /// Segments that no block covers.
    PoolIdle,
    /// Pools that report no blocks.
    Opaque,
    /// used - predates - tracked.
    Untrackable,
    /// What creating contexts cost.
    Context,
    /// Code and globals of modules.
    Modules,
    /// Stacks of kernels.
    LocalMemory,
    /// Heaps on the device, and what the driver adds to sizes.
    Heaps,
    /// What of it has no cause.
    Unexplained,
}

/// A line of a statement: one amount per column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// What it is.
    pub part: Part,
    /// Its name.
    pub name: String,
    /// Index of the row it is a part of.
    pub parent: Option<usize>,
    /// Bytes per column; absent where not known.
    pub bytes: Vec<Option<i64>>,
}

/// The identity of one device at several moments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statement {
    /// Rows, parents before their parts.
    pub rows: Vec<Row>,
}

impl Statement {
    /// Whether each row that has parts is exactly their sum, in every column in which it is known.
    pub fn adds_up(&self) -> bool {
        self.rows.iter().enumerate().all(|(index, row)| {
            let parts: Vec<&Row> = self.rows.iter().filter(|part| part.parent == Some(index)).collect();
            parts.is_empty()
                || row.bytes.iter().enumerate().all(|(column, bytes)| {
                    let known: Vec<i64> = parts.iter().filter_map(|part| part.bytes[column]).collect();
                    bytes.is_none_or(|bytes| bytes == known.iter().sum::<i64>() && !known.is_empty())
                })
        })
    }

    fn push(&mut self, part: Part, name: &str, parent: Option<usize>, bytes: Vec<Option<i64>>) -> usize {
        self.rows.push(Row { part, name: name.to_owned(), parent, bytes });
        self.rows.len() - 1
    }
}

/// Bytes of a moment by category.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Composition {
    /// Categories without `Others`.
    pub categories: BTreeMap<String, i64>,
    /// What no rule takes.
    pub others: i64,
    /// Segments that no block covers.
    pub pool_idle: i64,
    /// Pools that report no blocks.
    pub opaque: i64,
}

impl Composition {
    /// Sum of all parts.
    pub fn total(&self) -> i64 {
        self.categories.values().sum::<i64>() + self.others + self.pool_idle + self.opaque
    }

    /// Categories by amount, the largest first; without those that hold nothing.
    pub fn ranked(self) -> Vec<(String, i64)> {
        ranked_parts(self.categories)
    }
}

impl<'r> Report<'r> {
    /// How times are printed: with the day where they are of several days.
    pub(crate) fn times(&self) -> Times {
        Times::within(self.run, self.window.map(|window| [window.from_ns, window.to_ns]))
    }

    /// A report with these rules. Rows are layers where the rules name any, else structures, else tags:
    /// whatever names something.
    pub fn new(run: &'r Run, groupings: Groupings, by: Option<By>) -> Self {
        let cells: Vec<CellView> = run.cells.iter().map(cell_view).collect();
        let by_rules = |rules: &Rules| -> Vec<Option<String>> {
            cells.iter().map(|cell| rules.category(cell).map(str::to_owned)).collect()
        };
        let by_tag = cells.iter().map(|cell| cell.tag.as_deref().map(str::to_owned)).collect();
        let mut categories: [Vec<Option<String>>; 3] =
            [by_rules(&groupings.layer), by_rules(&groupings.structure), by_tag];
        let names = |by: &By| categories[*by as usize].iter().any(Option::is_some);
        let by = by.or_else(|| [By::Layer, By::Structure, By::Tag].into_iter().find(names));
        // What rules do not name has a name of its own where there is one; that chooses no rows.
        if groupings.layer.rules.is_empty() {
            categories[By::Layer as usize] = names::rolled_up(run, &cells);
        }
        let has_torch = names::has_torch(run);
        for (of, names) in categories.iter_mut().enumerate() {
            let is_last_resort = |cell: &CellView| of == By::Structure as usize || cell.tag.is_none();
            for (name, cell) in names.iter_mut().zip(&cells) {
                // NCCL's scratch is large, and no allocator of PyTorch's knows it: a row of its own.
                let is_apart = has_torch && of == By::Structure as usize && names::is_apart(cell);
                let is_left = name.is_none() && (has_torch || of != By::Structure as usize);
                if is_apart || is_left && is_last_resort(cell) {
                    *name = names::by_library(cell, has_torch);
                }
            }
        }
        let lines = names::large_lines(run, &cells);
        for names in &mut categories[..By::Tag as usize] {
            for (name, cell) in names.iter_mut().zip(&cells).filter(|(name, _)| name.is_none()) {
                *name = cell.tag.as_deref().filter(|tag| lines.contains(*tag)).map(str::to_owned);
            }
        }
        Report::with(run, groupings, by.unwrap_or(By::Structure), cells, categories)
    }

    /// Rows are lines of the program, in the place of layers: of what has none, `Others`.
    #[must_use]
    pub fn by_line(mut self) -> Self {
        let lines = self.cells.iter().map(|cell| names::line_of(cell).map(str::to_owned));
        self.categories[By::Layer as usize] = lines.collect();
        self.by = By::Layer;
        self
    }

    /// The same with categories that are known.
    fn with(
        run: &'r Run,
        groupings: Groupings,
        by: By,
        cells: Vec<CellView>,
        categories: [Vec<Option<String>>; 3],
    ) -> Self {
        Report {
            run,
            id: None,
            groupings,
            by,
            others: Vec::new(),
            job: None,
            window: None,
            command: "gpumemctl report".to_owned(),
            veiled: false,
            cells,
            categories,
        }
    }

    /// Category of a cell; `None` for `Others`, and for idle and opaque bytes.
    pub fn category(&self, cell: u32, by: By) -> Option<&str> {
        self.categories[by as usize].get(cell as usize)?.as_deref()
    }

    fn rules(&self, by: By) -> Option<&Rules> {
        match by {
            By::Layer => Some(&self.groupings.layer),
            By::Structure => Some(&self.groupings.structure),
            By::Tag => None,
        }
    }

    /// A moment by category.
    pub fn composition(&self, moment: &Moment, by: By) -> Composition {
        let mut composition = Composition::default();
        for &(index, bytes) in &moment.amounts {
            match self.run.cells.get(index as usize).map(|cell| cell.class) {
                Some(Class::PoolIdle) => composition.pool_idle += bytes,
                Some(Class::Opaque) => composition.opaque += bytes,
                Some(Class::Direct | Class::Block) | None => match self.category(index, by) {
                    Some(name) => *composition.categories.entry(name.to_owned()).or_default() += bytes,
                    None => composition.others += bytes,
                },
            }
        }
        composition
    }

    /// The tags in `Others` of a moment, largest first; an empty name is memory without a tag.
    pub fn others(&self, moment: &Moment, by: By) -> Vec<(String, i64)> {
        let mut tags: BTreeMap<String, i64> = BTreeMap::new();
        for &(index, bytes) in &moment.amounts {
            let Some(cell) = self.cells.get(index as usize) else { continue };
            let has_rules = crate::category::is_named_by_rules(cell);
            if has_rules && self.category(index, by).is_none() {
                *tags.entry(cell.tag.as_deref().unwrap_or("").to_owned()).or_default() += bytes;
            }
        }
        let mut tags: Vec<_> = tags.into_iter().collect();
        tags.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        tags
    }

    /// Tags that more than one category wants: (tag, winner, loser).
    pub fn conflicts(&self) -> Vec<(String, String, String)> {
        let conflicts = self.rules(self.by).map(|rules| rules.conflicts(&self.cells)).unwrap_or_default();
        let named = conflicts.into_iter().map(|conflict| {
            let tag = self.cells[conflict.cell].tag.as_deref().unwrap_or("").to_owned();
            (tag, conflict.winner, conflict.loser)
        });
        named.collect()
    }

    /// The identity of a device: the last moment, and the peak. At most `limit` categories are named, and
    /// none that is smaller than `smallest` bytes at both; the rest is one row.
    pub fn statement(&self, device: &Device, limit: usize, smallest: i64) -> Statement {
        self.statement_by(self.by, device, limit, smallest)
    }

    /// The same with these rows.
    pub fn statement_by(&self, by: By, device: &Device, limit: usize, smallest: i64) -> Statement {
        let moments = [&device.last, &device.peak];
        let compositions = moments.map(|moment| self.composition(moment, by));
        let mut statement = Statement { rows: Vec::new() };
        let each = |of: &dyn Fn(&Moment) -> Option<i64>| moments.iter().map(|moment| of(moment)).collect();

        let used = statement.push(Part::Used, "used (= nvidia-smi)", None, each(&Moment::used_bytes));
        if !self.run.coverage.covered {
            return statement;
        }
        if moments.iter().any(|moment| moment.predates_bytes != Some(0)) {
            let predates = each(&|moment| moment.predates_bytes);
            statement.push(Part::Predates, "predates the agent", Some(used), predates);
        }
        let tracked =
            statement.push(Part::Tracked, "tracked", Some(used), each(&|moment| moment.tracked_bytes));
        for (name, bytes) in ranked(&compositions, limit, smallest) {
            statement.push(Part::Category, &name, Some(tracked), bytes);
        }
        let column = |of: fn(&Composition) -> i64| -> Vec<Option<i64>> {
            compositions.iter().map(|composition| Some(of(composition))).collect()
        };
        let others = column(|composition| composition.others);
        let idle = column(|composition| composition.pool_idle);
        let opaque = column(|composition| composition.opaque);
        let none = |bytes: &[Option<i64>]| bytes.iter().all(|bytes| *bytes == Some(0));
        let name = by.name_of_rest();
        if by != By::Tag || !none(&others) {
            statement.push(Part::Others, name, Some(tracked), others);
        }
        if !none(&idle) {
            statement.push(Part::PoolIdle, "pool idle", Some(tracked), idle);
        }
        if !none(&opaque) {
            statement.push(Part::Opaque, "opaque pools", Some(tracked), opaque);
        }
        let gap = each(&|moment| moment.untrackable_bytes);
        let row = statement.push(Part::Untrackable, "Untrackable", Some(used), gap.clone());
        if gap.iter().any(Option::is_some) {
            let parts = moments.map(Moment::gap_parts);
            for (part, name, of) in GAP {
                let bytes = parts.map(|parts| parts.map(|parts| of(&parts))).to_vec();
                // What is zero wherever it is known says nothing, unless there is nothing else to say.
                let is_bare = part == Part::Unexplained && statement.rows.len() == row + 1;
                if is_bare || bytes.iter().flatten().any(|&bytes| bytes != 0) {
                    statement.push(part, name, Some(row), bytes);
                }
            }
        }
        statement
    }
}

/// Bytes of a moment that have a name (a tag: a role is derived for bytes that nobody named too), and all that could have one: idle and opaque bytes have none.
pub fn named(run: &Run, moment: &Moment) -> (i64, i64) {
    let mut sums = (0_i64, 0_i64);
    for &(index, bytes) in &moment.amounts {
        let cell = run.cells.get(index as usize);
        let Some(cell) = cell.filter(|cell| matches!(cell.class, Class::Direct | Class::Block)) else {
            continue;
        };
        sums.1 = sums.1.saturating_add(bytes);
        if cell.tag.is_some() {
            sums.0 = sums.0.saturating_add(bytes);
        }
    }
    sums
}

/// Of those with a name, the bytes that only have the line of the program that allocated them.
pub fn named_by_line(run: &Run, moment: &Moment) -> i64 {
    let is_line = |index: u32| {
        let cell =
            run.cells.get(index as usize).filter(|cell| matches!(cell.class, Class::Direct | Class::Block));
        cell.and_then(|cell| cell.tag.as_deref()).is_some_and(names::is_line)
    };
    let bytes = moment.amounts.iter().filter(|(index, _)| is_line(*index)).map(|(_, bytes)| *bytes);
    bytes.fold(0_i64, i64::saturating_add)
}

type GapRow = (Part, &'static str, fn(&Parts) -> i64);

/// Rows under `Untrackable`.
const GAP: [GapRow; 5] = [
    (Part::Context, "context", |parts| parts.context_bytes),
    (Part::Modules, "modules", |parts| parts.modules_bytes),
    (Part::LocalMemory, "local memory", |parts| parts.local_memory_bytes),
    (Part::Heaps, "heaps + rounding", |parts| parts.heaps_bytes.wrapping_add(parts.rounding_bytes)),
    (Part::Unexplained, "unexplained", |parts| parts.unexplained_bytes),
];

/// Parts by amount, the largest first, whatever its sign; without those that are nothing.
pub(crate) fn ranked_parts(parts: impl IntoIterator<Item = (String, i64)>) -> Vec<(String, i64)> {
    let mut parts: Vec<(String, i64)> = parts.into_iter().filter(|(_, bytes)| *bytes != 0).collect();
    parts.sort_by(|a, b| b.1.saturating_abs().cmp(&a.1.saturating_abs()).then_with(|| a.0.cmp(&b.0)));
    parts
}

/// Parts of which at most `limit` are named, and one, made by `name` from their number, for the smaller ones.
pub(crate) fn folded_parts(
    mut parts: Vec<(String, i64)>,
    limit: usize,
    name: impl Fn(&str) -> String,
) -> Vec<(String, i64)> {
    let rest = parts.split_off(limit.min(parts.len()));
    if !rest.is_empty() {
        let sum = rest.iter().fold(0_i64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        parts.push((name(&gpumem_model::units::thousands(rest.len() as u64)), sum));
    }
    parts
}

/// Categories by their largest amount; those beyond `limit` or below `smallest` folded into one row.
fn ranked(compositions: &[Composition; 2], limit: usize, smallest: i64) -> Vec<(String, Vec<Option<i64>>)> {
    let mut all: BTreeMap<&str, [i64; 2]> = BTreeMap::new();
    for (column, composition) in compositions.iter().enumerate() {
        for (name, bytes) in &composition.categories {
            all.entry(name).or_default()[column] = *bytes;
        }
    }
    let mut all: Vec<(&str, [i64; 2])> = all.into_iter().collect();
    let weight = |amounts: &[i64; 2]| amounts[0].saturating_abs().max(amounts[1].saturating_abs());
    all.sort_by(|a, b| weight(&b.1).cmp(&weight(&a.1)).then_with(|| a.0.cmp(b.0)));
    let large = all.iter().filter(|(_, amounts)| weight(amounts) >= smallest).count();
    let named = if large.min(limit) < all.len() { large.min(limit.saturating_sub(1)) } else { all.len() };
    let rest = all.split_off(named);
    let row = |name: String, amounts: [i64; 2]| (name, amounts.map(Some).to_vec());
    let mut rows: Vec<_> = all.into_iter().map(|(name, amounts)| row(name.to_owned(), amounts)).collect();
    if !rest.is_empty() {
        let sum = |column: usize| rest.iter().map(|(_, amounts)| amounts[column]).sum();
        rows.push(row(
            format!("({} smaller)", gpumem_model::units::thousands(rest.len() as u64)),
            [sum(0), sum(1)],
        ));
    }
    rows
}
