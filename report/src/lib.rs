//! Makes reports. A run and rules give one [`Statement`], from which all forms are made: text, JSON, CSV, HTML and pictures. So
//! the forms cannot disagree, and every total in them is the sum of its parts.
//!
//! A report is made from a [`gpumem_model::run::Run`] alone. So a live process, a stored run, a recording and an import are
//! reported in the same way. `diff` compares runs, `plot` draws, `judge` decides whether an amount grows, `rules` name
//! categories.
#![forbid(unsafe_code)]

pub mod advice;
mod amounts;
mod autocast;
pub mod bridge;
pub mod brief;
pub mod category;
pub mod csv;
pub mod diff;
mod encode;
pub mod explain;
pub mod findings;
pub mod group;
pub mod growth;
pub mod html;
pub mod iterations;
pub mod json;
pub mod judge;
mod labels;
mod lines;
mod model_sizes;
pub mod names;
pub mod oom;
pub mod own;
pub mod panel;
mod place;
pub mod plot;
pub mod redacted;
pub mod rules;
pub mod steps;
pub mod table;
pub mod text;
pub mod trace;
pub mod tree;

use crate::amounts::{larger, largest_first, ranked_columns, ranked_parts, sum, sums};
use crate::category::{OTHERS, Rules, is_named_by_rules};
use crate::rules::{Groupings, NO_TAG};
use gpumem_model::run::{Amounts, Cell, Class, Device, Moment, Oom, Run, UntrackableParts};
use gpumem_model::time::Times;
use gpumem_model::timeline::Point;
use gpumem_model::units::thousands;
use gpumem_model::window::Window;
use serde::Serialize;
use std::collections::BTreeMap;

/// How the rows below `tracked` are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupBy {
    /// By the categories of the `[[layer]]` rules.
    Layer,
    /// By categories of the structure rules.
    Structure,
    /// By tag paths.
    Tag,
}

impl GroupBy {
    /// All groupings, in the order of the enum.
    pub const ALL: [GroupBy; 3] = [GroupBy::Layer, GroupBy::Structure, GroupBy::Tag];

    /// Returns the grouping's name, as the option `--by` has it.
    pub fn name(self) -> &'static str {
        match self {
            GroupBy::Layer => "layer",
            GroupBy::Structure => "structure",
            GroupBy::Tag => "tag",
        }
    }

    /// Returns the name of the row for tracked bytes that are in no other row.
    pub fn name_of_rest(self) -> &'static str {
        if self == GroupBy::Tag { NO_TAG } else { OTHERS }
    }
}

/// A run with the options for its report. All forms of the report are made from this.
#[derive(Debug)]
pub struct Report<'r> {
    pub run: &'r Run,
    /// Id of the run in the run store, if it is stored.
    pub id: Option<String>,
    pub groupings: Groupings,
    pub by: GroupBy,
    /// Pids of the other processes whose runs are in the same file.
    pub others: Vec<u32>,
    /// The command that shows the other processes of the job (`--job ID`), and their number.
    pub job: Option<(String, u64)>,
    /// The part of the run that is reported; `None` for the whole run.
    pub window: Option<Window>,
    /// The command that the user typed, without the options for rows and form. Suggested next commands begin with it.
    pub command: String,
    /// Whether tags are hidden because the reader is not permitted to see them.
    hides_tags: bool,
    /// Category of each cell (memory with one tag, role and so on): by layer, by structure, and by tag.
    categories: [Vec<Option<String>>; 3],
}

/// Kind of a row in the statement of a process's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Bytes that NVML charges to the process: the sum of `Predates`, `Tracked` and `Untrackable`.
    Used,
    /// Memory allocated before the agent was loaded.
    Predates,
    /// Memory that the agent tracks; the sum of all rows between `Tracked` and `Untrackable`.
    Tracked,
    /// A category, or a tag.
    Category,
    /// Tracked bytes that no rule matches.
    Others,
    /// Bytes of pool segments that are in no block, so they can be allocated again.
    #[serde(rename = "idle")]
    PoolIdle,
    /// Bytes of pools that report no blocks, so their use is unknown.
    Opaque,
    /// The gap: used - predates - tracked.
    Untrackable,
    /// Cost of creating CUDA contexts.
    Context,
    /// Code and global variables of CUDA modules.
    Modules,
    /// Local memory of kernels (their stacks).
    LocalMemory,
    /// Heaps on the device, and bytes that the driver adds to round up sizes.
    Heaps,
    /// Untrackable bytes without a known cause.
    Unexplained,
}

impl Part {
    /// Returns whether an amount is computed from untrackable memory, which may have been measured at another time.
    fn rests_on_gap(self) -> bool {
        use Part::{Context, Heaps, LocalMemory, Modules, Unexplained, Untrackable, Used};
        matches!(self, Used | Untrackable | Context | Modules | LocalMemory | Heaps | Unexplained)
    }

    /// Returns how reliable a part of untrackable memory is, for example `measured`.
    fn reliability(self) -> &'static str {
        match self {
            Part::Context => "measured",
            Part::Modules => "upper bound",
            Part::LocalMemory | Part::Heaps => "model",
            Part::Unexplained => "at least",
            _ => "",
        }
    }
}

/// Bytes in the two columns of a statement (last moment and peak, or runs A and B); `None` where unknown.
pub type Columns = [Option<i64>; 2];

/// A row of a statement (memory as rows that add up).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    pub part: Part,
    pub name: String,
    /// Index of the row of which this row is a part.
    pub parent: Option<usize>,
    pub bytes: Columns,
}

/// Memory of one device at two moments, as rows. The parts of each row add up to the row.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statement {
    /// Rows of the statement; each row precedes the rows of its parts.
    pub rows: Vec<Row>,
}

impl Statement {
    fn has_parts(&self, row: &Row) -> bool {
        self.rows.iter().any(|part| part.parent.is_some_and(|parent| std::ptr::eq(&self.rows[parent], row)))
    }

    /// Returns whether each row that has parts is exactly their sum, in every column that has a value.
    pub fn adds_up(&self) -> bool {
        self.rows.iter().enumerate().all(|(index, row)| {
            let parts: Vec<&Row> = self.rows.iter().filter(|part| part.parent == Some(index)).collect();
            let adds_up = |column: usize| {
                let known: Vec<i64> = parts.iter().filter_map(|part| part.bytes[column]).collect();
                row.bytes[column].is_none_or(|bytes| bytes == known.iter().sum::<i64>() && !known.is_empty())
            };
            parts.is_empty() || adds_up(0) && adds_up(1)
        })
    }

    /// Returns the index of the row for `part`.
    pub fn row(&self, part: Part) -> Option<usize> {
        self.rows.iter().position(|row| row.part == part)
    }

    /// Returns the number of rows that contain the row with index `row`.
    fn depth(&self, row: usize) -> usize {
        std::iter::successors(self.rows[row].parent, |parent| self.rows[*parent].parent).count()
    }

    /// Returns the rows for categories and tags.
    pub fn categories(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.part == Part::Category)
    }

    fn push(&mut self, part: Part, name: &str, parent: Option<usize>, bytes: Columns) -> usize {
        self.rows.push(Row { part, name: name.to_owned(), parent, bytes });
        self.rows.len() - 1
    }
}

/// The tracked bytes of one moment, divided into categories.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Composition {
    /// Bytes by category, without `Others`.
    pub categories: BTreeMap<String, i64>,
    /// Bytes that no rule matches.
    pub others: i64,
    /// Bytes of pool segments that are in no allocated block.
    pub pool_idle: i64,
    /// Bytes of pools that report no blocks.
    pub opaque: i64,
}

impl Composition {
    /// Sum of all parts.
    pub fn total(&self) -> i64 {
        self.categories.values().sum::<i64>() + self.others + self.pool_idle + self.opaque
    }

    /// Returns the categories sorted by amount, the largest first, without empty ones.
    pub fn ranked(self) -> Vec<(String, i64)> {
        ranked_parts(self.categories)
    }
}

impl<'r> Report<'r> {
    /// Returns the format of times, which has a date if the times span several days.
    pub(crate) fn times(&self) -> Times {
        Times::within(self.run, self.window.map(|window| [window.from_ns, window.to_ns]))
    }

    /// Makes a report. Without `by`, groups by layer if the rules give any cell a layer, else by tag if cells have only tags, else
    /// by structure.
    pub fn new(run: &'r Run, groupings: Groupings, by: Option<GroupBy>) -> Self {
        let by_rules = |rules: &Rules| -> Vec<Option<String>> {
            run.cells.iter().map(|cell| rules.category(cell).map(str::to_owned)).collect()
        };
        let by_tag = run.cells.iter().map(|cell| cell.tag.clone()).collect();
        let mut categories: [Vec<Option<String>>; 3] =
            [by_rules(&groupings.layer), by_rules(&groupings.structure), by_tag];
        let names = |by: &GroupBy| categories[*by as usize].iter().any(Option::is_some);
        let by = by.or_else(|| GroupBy::ALL.into_iter().find(names));
        // Cells that no rule names get a derived name if there is one. Derived names do not influence the grouping chosen above.
        if groupings.layer.rules.is_empty() {
            categories[GroupBy::Layer as usize] = names::rolled_up(run);
        }
        let has_torch = names::has_torch(run);
        for (of, names) in categories.iter_mut().enumerate() {
            let is_last_resort = |cell: &Cell| of == GroupBy::Structure as usize || cell.tag.is_none();
            for (name, cell) in names.iter_mut().zip(&run.cells) {
                // NCCL's scratch memory is large and unknown to PyTorch's allocator: it gets a separate row.
                let is_apart = has_torch && of == GroupBy::Structure as usize && names::is_apart(cell);
                let is_left = name.is_none() && (has_torch || of != GroupBy::Structure as usize);
                if is_apart || is_left && is_last_resort(cell) {
                    *name = names::by_library(cell, has_torch);
                }
            }
        }
        autocast::name_copies(run, &mut categories[GroupBy::Structure as usize]);
        let lines = names::large_lines(run);
        for names in &mut categories[..GroupBy::Tag as usize] {
            for (name, cell) in names.iter_mut().zip(&run.cells).filter(|(name, _)| name.is_none()) {
                *name = cell.tag.as_deref().filter(|tag| lines.contains(*tag)).map(str::to_owned);
            }
        }
        Report::with(run, groupings, by.unwrap_or(GroupBy::Structure), categories)
    }

    /// Groups by source lines of the program instead of layers. Memory without a line is in `Others`.
    #[must_use]
    pub fn by_line(mut self) -> Self {
        let lines = self.shown_cells().iter().map(|cell| names::line_of(cell).map(str::to_owned));
        self.categories[GroupBy::Layer as usize] = lines.collect();
        self.by = GroupBy::Layer;
        self
    }

    /// Makes a report from categories that were computed before.
    fn with(run: &'r Run, groupings: Groupings, by: GroupBy, categories: [Vec<Option<String>>; 3]) -> Self {
        Report {
            run,
            id: None,
            groupings,
            by,
            others: Vec::new(),
            job: None,
            window: None,
            command: "gpumemctl report".to_owned(),
            hides_tags: false,
            categories,
        }
    }

    fn cell(&self, index: u32) -> Option<&'r Cell> {
        self.run.cells.get(index as usize)
    }

    /// Returns the bytes by tag of those cells that `fits`. Cells without a tag are left out.
    fn by_tag(&self, amounts: &Amounts, fits: impl Fn(&Cell) -> bool) -> BTreeMap<&'r str, i64> {
        sums(amounts.iter().filter_map(|(cell, bytes)| {
            Some((self.cell(*cell).filter(|cell| fits(cell))?.tag.as_deref()?, *bytes))
        }))
    }

    /// Returns the category of the cell with index `cell`; `None` for `Others`, and for idle and opaque bytes (see [`Part`]).
    pub fn category(&self, cell: u32, by: GroupBy) -> Option<&str> {
        self.categories[by as usize].get(cell as usize)?.as_deref()
    }

    fn rules(&self, by: GroupBy) -> Option<&Rules> {
        match by {
            GroupBy::Layer => Some(&self.groupings.layer),
            GroupBy::Structure => Some(&self.groupings.structure),
            GroupBy::Tag => None,
        }
    }

    /// Groups the bytes of a moment (the memory of a device at one time) by category.
    pub fn composition(&self, moment: &Moment, by: GroupBy) -> Composition {
        let mut composition = Composition::default();
        for &(index, bytes) in &moment.amounts {
            match self.cell(index).map(|cell| cell.class) {
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

    /// Divides the bytes of a timeline's point into categories. Bytes that the point records without a cell go to `Others`.
    fn composition_at(&self, point: &Point, by: GroupBy) -> Composition {
        let moment = Moment { amounts: point.amounts.clone(), ..Moment::default() };
        let composition = self.composition(&moment, by);
        Composition { others: composition.others.saturating_add(point.rest_bytes), ..composition }
    }

    /// Returns the cells whose tags may be shown: none if tags are hidden.
    fn shown_cells(&self) -> &[Cell] {
        if self.hides_tags { &[] } else { &self.run.cells }
    }

    /// Returns the tags in `Others` at a moment, the largest first. An empty name means memory without a tag.
    pub fn others(&self, moment: &Moment, by: GroupBy) -> Vec<(String, i64)> {
        let tags = moment.amounts.iter().filter_map(|&(index, bytes)| {
            let cell = self.shown_cells().get(index as usize)?;
            let is_other = is_named_by_rules(cell.class) && self.category(index, by).is_none();
            is_other.then(|| (cell.tag.clone().unwrap_or_default(), bytes))
        });
        largest_first(sums(tags))
    }

    /// Returns the memory without a category, for a sentence: its largest tag by name, if that has at least half of it, and the rest.
    pub(crate) fn others_by_name(&self, moment: &Moment, by: GroupBy) -> Vec<(String, i64)> {
        let total = self.composition(moment, by).others;
        let rest = |bytes| (by.name_of_rest().to_owned(), bytes);
        match self.others(moment, by).into_iter().next() {
            Some((tag, bytes)) if by != GroupBy::Tag && bytes >= total - bytes => {
                vec![(if tag.is_empty() { NO_TAG.to_owned() } else { tag }, bytes), rest(total - bytes)]
            }
            _ => vec![rest(total)],
        }
    }

    /// Returns all parts of a moment but idle memory, for a sentence.
    fn busy_parts(&self, moment: &Moment) -> impl Iterator<Item = (String, i64)> {
        let Composition { categories, opaque, .. } = self.composition(moment, self.by);
        let opaque = ("opaque pools".to_owned(), opaque);
        categories.into_iter().chain(self.others_by_name(moment, self.by)).chain([opaque])
    }

    /// Returns tags that rules of several categories match, as (tag, category that wins, other category).
    pub fn conflicts(&self) -> Vec<(String, String, String)> {
        self.rules(self.by).map(|rules| rules.conflicts(self.shown_cells())).unwrap_or_default()
    }

    /// Returns the statement of a device with two columns: the last moment and the peak. At most `limit` categories have a row,
    /// and none that is smaller than `smallest` bytes at both moments. The others are summed in one row.
    pub fn statement(&self, device: &Device, limit: usize, smallest: i64) -> Statement {
        self.statement_of(self.by, [&device.last, &device.peak], limit, smallest)
    }

    /// Returns the statement described at [`Report::statement`], grouped by `by`, with these moments of a device as columns.
    fn statement_of(&self, by: GroupBy, moments: [&Moment; 2], limit: usize, smallest: i64) -> Statement {
        let compositions = moments.map(|moment| self.composition(moment, by));
        let mut statement = Statement::default();
        let each = |of: &dyn Fn(&Moment) -> Option<i64>| moments.map(of);

        let used = statement.push(Part::Used, "used (= nvidia-smi)", None, each(&Moment::used_bytes));
        if !self.run.coverage.covered {
            return statement;
        }
        if moments.iter().any(|moment| moment.predates_bytes != Some(0)) {
            let predates = each(&|moment| moment.predates_bytes);
            statement.push(Part::Predates, "predates the agent", Some(used), predates);
        }
        let bytes = each(&|moment| moment.tracked_bytes);
        let tracked = statement.push(Part::Tracked, "tracked", Some(used), bytes);
        for (name, bytes) in ranked(&compositions, limit, smallest) {
            statement.push(Part::Category, &name, Some(tracked), bytes);
        }
        let column = |of: fn(&Composition) -> i64| compositions.each_ref().map(|of_one| Some(of(of_one)));
        let rest = [
            (Part::Others, by.name_of_rest(), column(|composition| composition.others)),
            (Part::PoolIdle, "pool idle", column(|composition| composition.pool_idle)),
            (Part::Opaque, "opaque pools", column(|composition| composition.opaque)),
        ];
        for (part, name, bytes) in rest {
            if bytes != [Some(0); 2] || part == Part::Others && by != GroupBy::Tag {
                statement.push(part, name, Some(tracked), bytes);
            }
        }
        let gap = each(&|moment| moment.untrackable_bytes);
        let row = statement.push(Part::Untrackable, "Untrackable", Some(used), gap);
        if gap.iter().any(Option::is_some) {
            let parts = moments.map(Moment::gap_parts);
            for (part, name, of) in GAP {
                let bytes = parts.map(|parts| parts.map(|parts| of(&parts)));
                // Omits a row of zeros, unless it would be the only part of untrackable memory.
                let is_bare = part == Part::Unexplained && statement.rows.len() == row + 1;
                if is_bare || bytes.iter().flatten().any(|&bytes| bytes != 0) {
                    statement.push(part, name, Some(row), bytes);
                }
            }
        }
        statement
    }
}

/// Returns the bytes of a moment that have a tag, and all bytes that could have one. Idle bytes and pools that report no blocks
/// cannot have one. Roles do not count, because they are derived for untagged bytes too.
pub fn named(run: &Run, moment: &Moment) -> (i64, i64) {
    let bytes = |fits: fn(&Cell) -> bool| {
        held(run, &moment.amounts, |cell| is_named_by_rules(cell.class) && fits(cell))
    };
    (bytes(|cell| cell.tag.is_some()), bytes(|_| true))
}

/// Returns the tagged bytes whose tag is only the source line that allocated them.
pub fn named_by_line(run: &Run, moment: &Moment) -> i64 {
    let is_line = |cell: &Cell| cell.tag.as_deref().is_some_and(names::is_line);
    held(run, &moment.amounts, |cell| is_named_by_rules(cell.class) && is_line(cell))
}

/// Returns the out-of-memory records of a run, each with its device.
pub(crate) fn ooms(run: &Run) -> impl Iterator<Item = (&Device, &Oom)> {
    run.devices.iter().flat_map(|device| device.details.ooms.iter().map(move |oom| (device, oom)))
}

/// Returns the bytes of the cells that `fits` selects. `amounts` has (index of a cell, bytes).
pub(crate) fn held(run: &Run, amounts: &[(u32, i64)], fits: impl Fn(&Cell) -> bool) -> i64 {
    let held = amounts.iter().filter(|(cell, _)| run.cells.get(*cell as usize).is_some_and(&fits));
    sum(held.map(|(_, bytes)| *bytes))
}

/// Returns the bytes that NVML charges at a moment, or the tracked bytes if NVML was not read.
pub(crate) fn used_or_tracked(moment: &Moment) -> Option<i64> {
    moment.used_bytes().or(moment.tracked_bytes)
}

/// Returns the larger of [`used_or_tracked`] at the last moment and at the peak of a device.
pub(crate) fn most_used(device: &Device) -> Option<i64> {
    used_or_tracked(&device.last).max(used_or_tracked(&device.peak))
}

/// Returns the largest total of a device's statement, without its sign: `used` or `tracked`, at the last moment or at the peak.
pub(crate) fn largest_total(device: &Device) -> i64 {
    let moments = [&device.last, &device.peak];
    let totals = moments.iter().flat_map(|moment| [moment.used_bytes(), moment.tracked_bytes]).flatten();
    totals.map(i64::saturating_abs).max().unwrap_or(0)
}

/// Returns whether the untrackable memory of a moment was measured at another time; its amount is then printed with `~`.
pub(crate) fn has_older_gap(moment: &Moment) -> bool {
    moment.gap_distance_ns != 0 || moment.stale
}

/// Formats the time from a moment to the NVML reading that its untrackable memory is from: `12.0 s before`.
pub(crate) fn gap_distance(run: &Run, moment: &Moment) -> String {
    let side = if moment.gap_distance_ns < 0 { "before" } else { "after" };
    format!("{} {side}", run.clock.distance(moment.gap_distance_ns.unsigned_abs()))
}

/// Rows for the parts of `Untrackable`: kind, name and bytes.
type GapRow = (Part, &'static str, fn(&UntrackableParts) -> i64);
const GAP: [GapRow; 5] = [
    (Part::Context, "context", |parts| parts.context_bytes),
    (Part::Modules, "modules", |parts| parts.modules_bytes),
    (Part::LocalMemory, "local memory", |parts| parts.local_memory_bytes),
    (Part::Heaps, "heaps + rounding", |parts| parts.heaps_bytes.wrapping_add(parts.rounding_bytes)),
    (Part::Unexplained, "unexplained", |parts| parts.unexplained_bytes),
];

/// Sorts categories by the larger of their two amounts. Adds up those beyond `limit` or below `smallest` in one row.
fn ranked(compositions: &[Composition; 2], limit: usize, smallest: i64) -> Vec<(String, Columns)> {
    let [last, peak] = compositions.each_ref().map(|composition| composition.categories.iter());
    let last = last.map(|(name, bytes)| (name.as_str(), [*bytes, 0]));
    let mut all = ranked_columns(last.chain(peak.map(|(name, bytes)| (name.as_str(), [0, *bytes]))));
    let large = all.iter().filter(|(_, amounts)| larger(*amounts) >= smallest).count();
    let named = if large.min(limit) < all.len() { large.min(limit.saturating_sub(1)) } else { all.len() };
    let rest = all.split_off(named);
    let mut rows: Vec<(String, Columns)> =
        all.into_iter().map(|(name, amounts)| (name.to_owned(), amounts.map(Some))).collect();
    if !rest.is_empty() {
        let sum = |column: usize| Some(rest.iter().map(|(_, amounts)| amounts[column]).sum());
        rows.push((format!("({} smaller)", thousands(rest.len() as u64)), [0, 1].map(sum)));
    }
    rows
}
