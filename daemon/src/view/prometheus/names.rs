//! Assigns names to the cells of a process (its units of tracked memory): categories by the rules, or its largest tags.

use crate::view::text::Label;
use gpumem_ledger::{CellView, Class, ProcessView};
use gpumem_report::category::{OTHERS, Rules};
use gpumem_report::rules::NO_TAG;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Name for the sum of the tags without a series of their own.
pub(super) const REST: &str = "(other)";
/// Number of names besides the shown tags: other tags, untagged, idle pool memory, pools that report no blocks (opaque).
pub(super) const EXTRA_TAGS: usize = 4;
/// Number of names besides the categories of the rules: idle pool memory, pools that report no blocks (opaque), `Others`.
pub(super) const EXTRA_CATEGORIES: usize = 3;

/// Bytes by tag or by category, sorted by name.
#[derive(Debug, Default)]
pub(super) struct Named<'a>(pub Vec<(Label<'a>, i64)>);

impl<'a> Named<'a> {
    pub(crate) fn add(&mut self, name: Label<'a>, bytes: i64) {
        match self.0.binary_search_by(|(known, _)| known.cmp(&name)) {
            Ok(at) => self.0[at].1 = self.0[at].1.wrapping_add(bytes),
            Err(at) => self.0.insert(at, (name, bytes)),
        }
    }
}

/// Tag or category of each cell of a process.
#[derive(Debug)]
pub(super) struct Names<'a> {
    /// The different names, sorted.
    names: Vec<Label<'a>>,
    /// Index in `names` for each cell.
    of_cells: Vec<usize>,
}

impl<'a> Names<'a> {
    fn new(of_cells: Vec<Label<'a>>) -> Self {
        let mut names = of_cells.clone();
        names.sort();
        names.dedup();
        let index = |name: &Label<'_>| names.binary_search(name).unwrap_or_default();
        let of_cells = of_cells.iter().map(index).collect();
        Names { names, of_cells }
    }

    pub(crate) fn categories(process: &ProcessView, rules: &'a Rules) -> Self {
        let name = |cell: &CellView| match cell.class {
            _ if cell.is_idle() => "pool idle".into(),
            Class::Opaque => "opaque pools".into(),
            Class::Direct | Class::Block | Class::PoolIdle => rules.category(cell).unwrap_or(OTHERS).into(),
        };
        Names::new(process.cells.iter().map(name).collect())
    }

    /// Returns the tag of each cell. Only the `max_tags` tags with the most bytes in `ranked` are named. The caller passes the
    /// bytes at the peak, so that the choice is stable while memory is allocated and freed.
    pub(crate) fn tags(process: &'a ProcessView, ranked: &[i64], max_tags: usize) -> Self {
        let tag_of = |cell: &'a CellView| match (&cell.tag, cell.class) {
            _ if cell.is_idle() => Err("(pool idle)"),
            (_, Class::Opaque) => Err("(opaque pools)"),
            (Some(tag), _) => Ok(Label::from(&**tag)),
            (None, _) => Err(NO_TAG),
        };
        let mut sums = BTreeMap::new();
        for (cell, &bytes) in process.cells.iter().zip(ranked) {
            if let Ok(tag) = tag_of(cell) {
                let sum: &mut i64 = sums.entry(tag).or_insert(0);
                *sum = sum.wrapping_add(bytes);
            }
        }
        let mut order: Vec<_> = sums.into_iter().collect();
        order.sort_by_key(|(_, bytes)| Reverse(*bytes));
        order.truncate(max_tags);
        let name = |cell| match tag_of(cell) {
            Ok(tag) if order.iter().any(|(shown, _)| *shown == tag) => tag,
            Ok(_) => REST.into(),
            Err(word) => word.into(),
        };
        Names::new(process.cells.iter().map(name).collect())
    }

    /// Returns names that can be kept.
    pub(crate) fn into_owned(self) -> Names<'static> {
        let names = self.names.into_iter().map(Label::into_owned).collect();
        Names { names, of_cells: self.of_cells }
    }

    /// Returns the bytes of each tag or category. `amounts` has the bytes of each cell.
    pub(crate) fn sums(&self, amounts: &[i64]) -> Named<'_> {
        let names = self.names.iter().map(Label::from);
        Named(names.zip(self.totals(amounts)).filter_map(|(name, sum)| Some((name, sum?))).collect())
    }

    /// Like [`Names::sums`].
    pub(crate) fn into_sums(self, amounts: &[i64]) -> Named<'a> {
        let totals = self.totals(amounts);
        Named(self.names.into_iter().zip(totals).filter_map(|(name, sum)| Some((name, sum?))).collect())
    }

    /// Returns the bytes for each of `names`; `None` if no cell has any.
    fn totals(&self, amounts: &[i64]) -> Vec<Option<i64>> {
        let mut totals = vec![None; self.names.len()];
        for (&name, &bytes) in self.of_cells.iter().zip(amounts).filter(|(_, bytes)| **bytes != 0) {
            totals[name] = Some(totals[name].unwrap_or(0_i64).wrapping_add(bytes));
        }
        totals
    }
}
