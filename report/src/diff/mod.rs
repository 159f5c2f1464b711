//! Two runs beside each other: what one holds more than the other, by category, by tag, idle and in the gap.
//!
//! ```text
//! job       several processes as one side
//! joint     both runs as one, so that rules and names are the same for both
//! doubt     what makes a number less than exact, and between what it lies
//! gate      whether B exceeds A by more than it may
//! words     the first sentence, and what stands around the tables
//! text, json, csv, plot     forms
//! ```
//!
//! In every row A + difference = B; in every table the rows add up to its totals, in all three columns. A row is not
//! known where either side is not: unknown is never zero.

pub mod data;

pub mod gate;
mod paired_run;
pub mod plot;
mod summary;
pub mod text;
mod uncertainty;

pub use paired_run::sum_of_ranks;
pub use uncertainty::Uncertainty;

use crate::rules::Groupings;
use crate::{By, Part, Report, Row, Statement};
use gpumem_model::run::{Class, Device, Moment, Run};
use paired_run::PairedRun;
use std::collections::BTreeSet;

/// What the sides are called, in their order.
pub const SIDES: [&str; 2] = ["A", "B"];

/// What is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// The peaks of `tracked`; of a process without an agent, of what NVML charged.
    Peak,
    /// The last complete moments.
    Now,
}

/// One of the two.
#[derive(Debug, Clone)]
pub struct Side<'r> {
    /// The run.
    pub run: &'r Run,
    /// How the store calls it, if it is stored.
    pub id: Option<String>,
    /// What was typed to get it.
    pub typed: String,
}

/// How two devices came to be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Paired {
    /// The same UUID.
    Uuid,
    /// The same number, where there are no UUIDs (imports).
    Number,
    /// The same rank of two jobs.
    Rank,
    /// None of these: in their order.
    Order,
    /// Only one side has it.
    Alone,
}

/// Rows of one grouping; columns are A and B.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// As in a report; categories by how much they differ.
    pub statement: Statement,
    /// By row: the only side that has anything of that name, at whatever time.
    pub only: Vec<Option<usize>>,
}

/// Two devices, or all of them together.
#[derive(Debug, Clone)]
pub struct Pair {
    /// Indices of the devices in the runs of A and B; both absent for the sum of all.
    pub devices: [Option<usize>; 2],
    /// Why these two.
    pub paired: Paired,
    /// What is compared, by cells of both runs.
    pub moments: [Moment; 2],
    /// By layer, by structure, by tag.
    pub tables: [Table; 3],
    /// What a reader must know of the numbers.
    pub doubts: Vec<Uncertainty>,
}

/// Two runs beside each other.
#[derive(Debug)]
pub struct Diff<'r> {
    /// A and B.
    pub sides: [Side<'r>; 2],
    /// What is compared.
    pub at: At,
    /// Name of the rules.
    pub rules: String,
    /// Which rows name the difference best, or were asked for.
    pub by: By,
    /// Devices, A's order first.
    pub pairs: Vec<Pair>,
    /// All of them together, where there are several.
    pub total: Option<Pair>,
    /// The rows that were asked for.
    asked: Option<By>,
}

/// B less A, if both are known.
pub fn difference(bytes: &[Option<i64>]) -> Option<i64> {
    match bytes {
        [Some(a), Some(b)] => Some(b.saturating_sub(*a)),
        _ => None,
    }
}

impl Table {
    /// Index of the row of a part, if there is one.
    pub fn row(&self, part: Part) -> Option<usize> {
        self.statement.rows.iter().position(|row| row.part == part)
    }

    /// Amounts of a part: `[A, B]`.
    pub fn bytes(&self, part: Part) -> [Option<i64>; 2] {
        let row = self.row(part).and_then(|row| self.statement.rows.get(row));
        match row.map(|row| row.bytes.as_slice()) {
            Some(&[a, b]) => [a, b],
            _ => [None, None],
        }
    }
}

impl Pair {
    /// The table of a grouping.
    pub fn table(&self, by: By) -> &Table {
        let [layer, structure, tag] = &self.tables;
        match by {
            By::Layer => layer,
            By::Structure => structure,
            By::Tag => tag,
        }
    }
}

impl<'r> Diff<'r> {
    /// Compares B with A. Without `groupings` those that fit A, or B where those of A are only the default. Rows are
    /// `by`, or the grouping whose largest categories say most.
    pub fn new(sides: [Side<'r>; 2], at: At, groupings: Option<Groupings>, by: Option<By>) -> Self {
        let groupings = groupings.unwrap_or_else(|| {
            let [a, b] = [&sides[0], &sides[1]].map(|side| Groupings::of_run(side.run));
            if a.name == "default" { b } else { a }
        });
        let joint = PairedRun::of([sides[0].run, sides[1].run], at);
        let rules = groupings.name.clone();
        let report = Report::new(&joint.run, groupings, None);
        let known = [By::Layer, By::Structure, By::Tag].map(|by| known_names(&report, &joint, by));
        let tables = |device: &Device| {
            let [layer, structure, tag] = &known;
            [(By::Layer, layer), (By::Structure, structure), (By::Tag, tag)]
                .map(|(by, known)| table(&report, device, by, known))
        };
        let pair = |number: usize, device: &Device| {
            let (devices, paired) = joint.paired.get(number).copied().unwrap_or(([None; 2], Paired::Alone));
            Pair {
                devices,
                paired,
                moments: [device.last.clone(), device.peak.clone()],
                tables: tables(device),
                doubts: uncertainty::of_devices(&sides, devices, at),
            }
        };
        let pairs: Vec<Pair> =
            joint.run.devices.iter().enumerate().map(|(number, device)| pair(number, device)).collect();
        let total = (pairs.len() > 1).then(|| {
            let device = joint.total();
            let mut doubts: Vec<Uncertainty> = pairs.iter().flat_map(|pair| pair.doubts.clone()).collect();
            doubts.sort();
            doubts.dedup();
            Pair { doubts, ..pair(usize::MAX, &device) }
        });
        let mut diff = Diff { sides, at, rules, by: By::Structure, pairs, total, asked: by };
        diff.by = by.unwrap_or_else(|| diff.clearest_rows());
        diff
    }

    /// All devices together, or the only one; `None` where neither side has any.
    pub fn whole(&self) -> Option<&Pair> {
        self.total.as_ref().or(self.pairs.first())
    }

    /// Leaves one pair of devices: that of A's device which is meant, else of B's. False, and nothing is left out, where
    /// none or more than one is meant.
    pub fn only(&mut self, is_meant: impl Fn(&Device) -> bool) -> bool {
        let of_side = |side: usize| -> Vec<usize> {
            let device = |pair: &Pair| {
                let run = self.sides.get(side)?.run;
                run.devices.get((*pair.devices.get(side)?)?)
            };
            let meant = self.pairs.iter().enumerate().filter(|(_, pair)| device(pair).is_some_and(&is_meant));
            meant.map(|(index, _)| index).collect()
        };
        let of_a = of_side(0);
        let meant = if of_a.is_empty() { of_side(1) } else { of_a };
        let [index] = meant[..] else { return false };
        self.pairs = vec![self.pairs.swap_remove(index)];
        self.total = None;
        self.by = self.asked.unwrap_or_else(|| self.clearest_rows());
        true
    }

    /// The grouping whose largest categories have the largest share of what differs.
    fn clearest_rows(&self) -> By {
        const NAMED: usize = 3;
        let Some(pair) = self.whole() else { return By::Structure };
        let share = |by: By| {
            let rows = &pair.table(by).statement.rows;
            let weight = |part: Part| {
                let differences = rows.iter().filter(move |row| row.part == part);
                differences
                    .filter_map(|row| difference(&row.bytes))
                    .map(|bytes| u128::from(bytes.unsigned_abs()))
            };
            let named: u128 = weight(Part::Category).take(NAMED).sum();
            let all: u128 = weight(Part::Category).sum::<u128>() + weight(Part::Others).sum::<u128>();
            (named * 1000).checked_div(all).unwrap_or(0)
        };
        let best = [By::Structure, By::Layer].into_iter().rev().max_by_key(|by| share(*by));
        match best {
            Some(by) if share(by) > 0 => by,
            // No rule takes anything that differs.
            _ if share(By::Tag) > 0 => By::Tag,
            _ => By::Structure,
        }
    }
}

/// Names of categories that each side has cells of.
fn known_names(report: &Report<'_>, joint: &PairedRun, by: By) -> [BTreeSet<String>; 2] {
    let mut known = [BTreeSet::new(), BTreeSet::new()];
    for (index, cell) in joint.run.cells.iter().enumerate() {
        if matches!(cell.class, Class::Direct | Class::Block) {
            let [a, b] = &mut known;
            let side = if index < joint.cells_of_a { a } else { b };
            if let Some(name) = report.category(index as u32, by) {
                side.insert(name.to_owned());
            }
        }
    }
    known
}

/// The statement of a joint device: its two moments are A's and B's.
fn table(report: &Report<'_>, device: &Device, by: By, known: &[BTreeSet<String>; 2]) -> Table {
    let mut statement = report.statement_by(by, device, usize::MAX, 0);
    let moments = [&device.last, &device.peak];
    for row in &mut statement.rows {
        for (bytes, moment) in row.bytes.iter_mut().zip(moments) {
            // What nobody tracked is in no category, which is not the same as nothing.
            if moment.tracked_bytes.is_none() && row.part != Part::Used {
                *bytes = None;
            }
        }
    }
    // A row of nothing says nothing; what one knows of itself the other need not say of itself.
    let is_nothing = |row: &Row| {
        let of_side =
            |(bytes, moment): (&Option<i64>, &&Moment)| *bytes == Some(0) || moment.tracked_bytes.is_none();
        row.part == Part::Predates && row.bytes.iter().zip(&moments).all(of_side)
    };
    if let Some(index) = statement.rows.iter().position(is_nothing) {
        statement.rows.remove(index);
        for row in &mut statement.rows {
            row.parent = row.parent.map(|parent| if parent > index { parent - 1 } else { parent });
        }
    }
    let first = statement.rows.iter().position(|row| row.part == Part::Category).unwrap_or(0);
    let count = statement.rows.iter().filter(|row| row.part == Part::Category).count();
    if let Some(categories) = statement.rows.get_mut(first..first + count) {
        let size = |bytes: &[Option<i64>]| bytes.iter().flatten().map(|bytes| bytes.unsigned_abs()).max();
        categories.sort_by_cached_key(|row| {
            let differs = difference(&row.bytes).map(i64::unsigned_abs);
            (std::cmp::Reverse(differs), std::cmp::Reverse(size(&row.bytes)), row.name.clone())
        });
    }
    let only = statement.rows.iter().map(|row| {
        let is_nothing = |side: usize| row.bytes.get(side) == Some(&Some(0));
        let is_known = |side: usize| known.get(side).is_some_and(|names| names.contains(&row.name));
        let has_only = |side: usize| {
            row.part == Part::Category && is_nothing(1 - side) && !is_nothing(side) && !is_known(1 - side)
        };
        (0..2).find(|side| has_only(*side))
    });
    let only = only.collect();
    Table { statement, only }
}

/// What a row without a name is called in a grouping.
pub(crate) fn nameless(by: By) -> &'static str {
    by.name_of_rest()
}
