//! Comparison of two runs: how their memory differs by category, by tag, in idle memory and in the gap (untrackable memory).
//!
//! In every row A + difference = B. In every table the rows add up to its totals, in all three columns. A difference is unknown,
//! never zero, if the amount of either side is unknown.

pub mod data;

pub mod gate;
mod paired_run;
mod summary;
pub mod text;
mod uncertainty;

pub(crate) use paired_run::sum_of_moments;
pub use paired_run::sum_of_ranks;
pub use uncertainty::Uncertainty;

use crate::category::is_named_by_rules;
use crate::rules::Groupings;
use crate::{Columns, GroupBy, Part, Report, Row, Statement};
use gpumem_model::run::{Device, Moment, Run};
use paired_run::PairedRun;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Names of the sides, in their order.
pub const SIDES: [&str; 2] = ["A", "B"];

/// Which moments of the two runs are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// The moments at which `tracked` had its peak. For a process without an agent: the peak of the bytes that NVML charged.
    Peak,
    /// The last moment of each run at which all amounts are known.
    Now,
}

/// One of the two compared runs.
#[derive(Debug, Clone)]
pub struct Side<'r> {
    pub run: &'r Run,
    pub id: Option<String>,
    /// The argument (pid, run id or file) with which the user selected the run.
    pub typed: String,
}

/// How two devices were matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pairing {
    /// Both devices have the same UUID.
    Uuid,
    /// Both devices have the same number, and neither has a UUID (imported runs).
    Number,
    /// Both devices belong to the same rank of two jobs.
    Rank,
    /// Both devices are at the same position in their runs, because nothing else matched.
    Order,
    /// The device exists in one run only.
    Alone,
}

/// Rows of one grouping; the columns are A and B.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Rows as in a report, but with categories sorted by difference, the largest first.
    pub statement: Statement,
    /// For each row, the side (0 for A, 1 for B) that alone has memory of the row's name. `None` if both sides have.
    pub only: Vec<Option<usize>>,
}

/// A pair of compared devices, or the sum of all pairs.
#[derive(Debug, Clone)]
pub struct Pair {
    /// Indices of the devices in the runs of A and B; both `None` for the sum.
    pub devices: [Option<usize>; 2],
    /// How the two devices were matched.
    pub paired: Pairing,
    /// The compared moments of A and B. Both refer to cells of one list, which contains the cells of both runs.
    pub moments: [Moment; 2],
    /// Tables by layer, by structure and by tag.
    pub tables: [Table; 3],
    /// Reasons why the amounts are not exact.
    pub doubts: Vec<Uncertainty>,
}

/// A comparison of two runs.
#[derive(Debug)]
pub struct Diff<'r> {
    pub sides: [Side<'r>; 2],
    pub at: At,
    pub rules: String,
    /// The grouping that was requested, or else the one that explains most of the difference.
    pub by: GroupBy,
    /// Pairs of devices: first in A's order, then the devices that only B has.
    pub pairs: Vec<Pair>,
    /// The sum of all pairs; `None` if there is only one.
    pub total: Option<Pair>,
    asked: Option<GroupBy>,
}

/// Returns B - A, or `None` if either is unknown.
pub fn difference([a, b]: Columns) -> Option<i64> {
    Some(b?.saturating_sub(a?))
}

impl Table {
    /// Returns the bytes of A and B in the row of `part`; `None` where unknown.
    pub fn bytes(&self, part: Part) -> Columns {
        self.statement.row(part).map_or([None, None], |row| self.statement.rows[row].bytes)
    }
}

impl Pair {
    /// Returns the table of a grouping.
    pub fn table(&self, by: GroupBy) -> &Table {
        &self.tables[by as usize]
    }
}

impl<'r> Diff<'r> {
    /// Compares B with A. Without `groupings`, the rules that fit A are used, or those of B if only the default rules fit A.
    /// Without `by`, the grouping is used whose largest categories explain most of the difference.
    pub fn new(sides: [Side<'r>; 2], at: At, groupings: Option<Groupings>, by: Option<GroupBy>) -> Self {
        let groupings = groupings.unwrap_or_else(|| {
            let [a, b] = [&sides[0], &sides[1]].map(|side| Groupings::of_run(side.run));
            if a.name == "default" { b } else { a }
        });
        let joint = PairedRun::of([sides[0].run, sides[1].run], at);
        let rules = groupings.name.clone();
        let report = Report::new(&joint.run, groupings, None);
        let known = GroupBy::ALL.map(|by| known_names(&report, &joint, by));
        let pair = |number: usize, device: &Device| {
            let (devices, paired) = joint.paired.get(number).copied().unwrap_or(([None; 2], Pairing::Alone));
            Pair {
                devices,
                paired,
                moments: [device.last.clone(), device.peak.clone()],
                tables: GroupBy::ALL.map(|by| table(&report, device, by, &known[by as usize])),
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
        let mut diff = Diff { sides, at, rules, by: GroupBy::Structure, pairs, total, asked: by };
        diff.by = by.unwrap_or_else(|| diff.clearest_rows());
        diff
    }

    /// Returns the sum of all pairs, or the only pair; `None` if neither side has a device.
    pub fn whole(&self) -> Option<&Pair> {
        self.total.as_ref().or(self.pairs.first())
    }

    /// Returns the device of a side that belongs to a pair; `None` for the sum of all pairs, and if the side has no such device.
    pub fn device(&self, pair: &Pair, side: usize) -> Option<&'r Device> {
        self.sides.get(side)?.run.devices.get((*pair.devices.get(side)?)?)
    }

    /// Keeps only the pair of devices for which `is_meant` selects A's device, or else B's. If `is_meant` selects no pair or
    /// several, keeps all and returns false.
    pub fn only(&mut self, is_meant: impl Fn(&Device) -> bool) -> bool {
        let of_side = |side: usize| -> Vec<usize> {
            let meant = |pair: &Pair| self.device(pair, side).is_some_and(&is_meant);
            let meant = self.pairs.iter().enumerate().filter(|(_, pair)| meant(pair));
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

    /// Returns the grouping whose largest categories have the largest share of the difference.
    fn clearest_rows(&self) -> GroupBy {
        const NAMED: usize = 3;
        let Some(pair) = self.whole() else { return GroupBy::Structure };
        let share = |by: GroupBy| {
            let rows = &pair.table(by).statement.rows;
            let weight = |part: Part| {
                let differences = rows.iter().filter(move |row| row.part == part);
                let differences = differences.filter_map(|row| difference(row.bytes));
                differences.map(|bytes| u128::from(bytes.unsigned_abs()))
            };
            let named: u128 = weight(Part::Category).take(NAMED).sum();
            let all: u128 = weight(Part::Category).sum::<u128>() + weight(Part::Others).sum::<u128>();
            (named * 1000).checked_div(all).unwrap_or(0)
        };
        let best = [GroupBy::Structure, GroupBy::Layer].into_iter().rev().max_by_key(|by| share(*by));
        match best {
            Some(by) if share(by) > 0 => by,
            // No rule matches any memory that differs between A and B.
            _ if share(GroupBy::Tag) > 0 => GroupBy::Tag,
            _ => GroupBy::Structure,
        }
    }
}

/// Returns, for A and for B, the names of the categories in which the run has cells.
fn known_names(report: &Report<'_>, joint: &PairedRun, by: GroupBy) -> [BTreeSet<String>; 2] {
    let mut known = [BTreeSet::new(), BTreeSet::new()];
    for (index, cell) in joint.run.cells.iter().enumerate() {
        let name = report.category(index as u32, by).filter(|_| is_named_by_rules(cell.class));
        known[usize::from(index >= joint.cells_of_a)].extend(name.map(str::to_owned));
    }
    known
}

/// Returns the statement of a device of the combined run, whose two moments are those of A and B.
fn table(report: &Report<'_>, device: &Device, by: GroupBy, known: &[BTreeSet<String>; 2]) -> Table {
    let moments = [&device.last, &device.peak];
    let mut statement = report.statement_of(by, moments, usize::MAX, 0);
    for row in &mut statement.rows {
        for (bytes, moment) in row.bytes.iter_mut().zip(moments) {
            // Without an agent no memory is divided into categories: each amount other than `used` is unknown, not zero.
            if moment.tracked_bytes.is_none() && row.part != Part::Used {
                *bytes = None;
            }
        }
    }
    // Removes the row for memory older than the agent if it is zero on each side that has an agent.
    let is_nothing = |row: &Row| {
        let of_side = |side: usize| row.bytes[side] == Some(0) || moments[side].tracked_bytes.is_none();
        row.part == Part::Predates && of_side(0) && of_side(1)
    };
    if let Some(index) = statement.rows.iter().position(is_nothing) {
        statement.rows.remove(index);
        for row in &mut statement.rows {
            row.parent = row.parent.map(|parent| if parent > index { parent - 1 } else { parent });
        }
    }
    let first = statement.row(Part::Category).unwrap_or(0);
    let count = statement.categories().count();
    statement.rows[first..first + count].sort_by_cached_key(|row| {
        let differs = difference(row.bytes).map(i64::unsigned_abs);
        let size = row.bytes.iter().flatten().map(|bytes| bytes.unsigned_abs()).max();
        (Reverse(differs), Reverse(size), row.name.clone())
    });
    let only = statement.rows.iter().map(|row| {
        let has_only = |&side: &usize| {
            let is_zero_on_other = row.bytes[1 - side] == Some(0) && row.bytes[side] != Some(0);
            row.part == Part::Category && is_zero_on_other && !known[1 - side].contains(&row.name)
        };
        [0, 1].into_iter().find(has_only)
    });
    Table { only: only.collect(), statement }
}
