//! A run without names, for readers who may see amounts, categories, roles and phases, but not the process's own names. Used for
//! the page on a port that everyone on the machine can open.

use super::{GroupBy, Report};
use crate::rules::Groupings;
use gpumem_model::fields::Field;
use gpumem_model::run::{Cell, Run};
use std::collections::{BTreeSet, HashMap};

/// A redacted run, with the categories that its cells had before.
#[derive(Debug)]
pub struct RedactedRun {
    run: Run,
    groupings: Groupings,
    categories: [Vec<Option<String>>; 3],
}

impl RedactedRun {
    /// Redacts a run. Cells keep their category under these rules. Cells that become equal without their names are merged.
    pub fn of(run: &Run, groupings: Groupings) -> Self {
        let report = Report::new(run, groupings, None);
        let of_rules = [&report.groupings.layer, &report.groupings.structure]
            .map(|rules| rules.rules.iter().map(|rule| rule.name.as_str()).collect::<BTreeSet<_>>());
        // A library's name may be private to the user. NCCL's is shown because it is the same on every machine.
        let is_shown =
            |by: GroupBy, name: &str| name.starts_with("libnccl ") || of_rules[by as usize].contains(name);
        let category = |index: u32, by: GroupBy| {
            report.category(index, by).filter(|name| is_shown(by, name)).map(str::to_owned)
        };
        let mut known: HashMap<(Cell, [Option<String>; 2]), u32> = HashMap::new();
        let mut cells: Vec<Cell> = Vec::new();
        let mut categories: [Vec<Option<String>>; 3] = Default::default();
        let merged = (0_u32..).zip(&run.cells).map(|(index, cell)| {
            let mut cell = cell.clone();
            cell.redact();
            let next = cells.len() as u32;
            let key = (cell, [GroupBy::Layer, GroupBy::Structure].map(|by| category(index, by)));
            *known.entry(key).or_insert_with_key(|(cell, [layer, structure])| {
                cells.push(cell.clone());
                let names = [layer.clone(), structure.clone(), None];
                categories.iter_mut().zip(names).for_each(|(all, one)| all.push(one));
                next
            })
        });
        // For each cell of the run, the index of the merged cell that contains it.
        let merged: Vec<u32> = merged.collect();
        let mut redacted = run.clone();
        redacted.redact();
        redacted.remap(&|cell| Some(merged.get(cell as usize).copied().unwrap_or(u32::MAX)));
        redacted.cells = cells;
        RedactedRun { run: redacted, groupings: report.groupings, categories }
    }

    /// Returns a report of the redacted run.
    pub fn report(&self) -> Report<'_> {
        let names = |by: &GroupBy| self.categories[*by as usize].iter().any(Option::is_some);
        let by = [GroupBy::Layer, GroupBy::Structure].into_iter().find(names).unwrap_or(GroupBy::Structure);
        let report = Report::with(&self.run, self.groupings.clone(), by, self.categories.clone());
        Report { hides_tags: true, ..report }
    }
}
