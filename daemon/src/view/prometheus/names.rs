//! Assigns names to the cells of a process (its units of tracked memory): categories by the rules, or its largest tags.

use super::amounts::Named;
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

/// Tag or category of each cell of a process, in the order of the cells.
pub(super) struct Names<'a>(Vec<Label<'a>>);

impl<'a> Names<'a> {
    pub(crate) fn categories(process: &ProcessView, rules: &'a Rules) -> Self {
        let name = |cell: &CellView| match cell.class {
            _ if cell.is_idle() => "pool idle".into(),
            Class::Opaque => "opaque pools".into(),
            Class::Direct | Class::Block | Class::PoolIdle => rules.category(cell).unwrap_or(OTHERS).into(),
        };
        Names(process.cells.iter().map(name).collect())
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
        Names(process.cells.iter().map(name).collect())
    }

    /// Returns the bytes of each tag or category. `amounts` has the bytes of each cell.
    pub(crate) fn sums(&self, amounts: &[i64]) -> Named<'a> {
        let mut sums = Named::new();
        for (name, &bytes) in self.0.iter().zip(amounts).filter(|(_, bytes)| **bytes != 0) {
            match sums.get_mut(name) {
                Some(sum) => *sum = sum.wrapping_add(bytes),
                None => drop(sums.insert(name.clone(), bytes)),
            }
        }
        sums
    }
}
