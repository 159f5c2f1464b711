//! Bytes of each individual parameter and gradient in each iteration, for tables with a column for each.
//!
//! A model has hundreds of parameters, and few change from one iteration to the next, so only differences are kept. A parameter
//! counts with its bytes at the end of the iteration. Gradients are temporary. They count with their bytes at the latest moment
//! at which their sum was highest. So the columns of an iteration add up to the parameters and gradients of its row.

use crate::book::Book;
use crate::book::cells::{CellId, CellKey};
use gpumem_model::fields::merge;
use gpumem_model::parameters::{self, Column, MAX_COLUMNS};
use gpumem_wire::Role;
use std::collections::{BTreeMap, VecDeque};
use std::mem::size_of;

/// Maximum number of differences for each device; those of the oldest iterations are dropped.
const MAX_AMOUNTS: usize = 16_384;

/// Parameters and gradients of one device over its iterations, by cell.
#[derive(Debug, Default)]
pub(crate) struct Parameters {
    /// Cell of each column, and whether it is a gradient.
    columns: Vec<(CellId, bool)>,
    /// Number of cells already checked for parameters and gradients.
    checked: usize,
    /// Whether there was no room for a column.
    is_cut: bool,
    /// Bytes by column when the sum of all gradients was highest in the present iteration.
    gradients: Vec<i64>,
    /// Sum of `gradients`: the highest sum so far in this iteration (bytes).
    max_gradients: i64,
    /// Value of [`Book::role_changes`] at the last measurement of the gradients.
    measured: u64,
    /// Bytes by column before the first of `changes`.
    base: Vec<i64>,
    /// Bytes by column after the last of `changes`.
    last: Vec<i64>,
    /// Start time and differences (column, bytes) of each iteration that differs from the one before.
    changes: VecDeque<(u64, Vec<(u32, i64)>)>,
    /// Number of differences in `changes`.
    amounts: usize,
}

impl Parameters {
    /// Adds columns for new cells, and measures the gradients if their sum is not lower than before.
    pub fn measure(&mut self, book: &Book, keys: &[CellKey]) {
        for (cell, key) in (0..).zip(keys).skip(self.checked) {
            let is_gradient = key.role == Role::Gradient;
            if !is_gradient && key.role != Role::Parameter {
                continue;
            }
            if self.columns.len() == MAX_COLUMNS {
                self.is_cut = true;
                continue;
            }
            self.columns.push((cell, is_gradient));
        }
        self.checked = keys.len();
        let total = book.by_role(Role::Gradient);
        if total <= 0 || total < self.max_gradients || self.measured == book.role_changes {
            return;
        }
        (self.max_gradients, self.measured) = (total, book.role_changes);
        self.gradients.resize(self.columns.len(), 0);
        for ((cell, is_gradient), bytes) in self.columns.iter().zip(&mut self.gradients) {
            *bytes = if *is_gradient { book.now(*cell) } else { 0 };
        }
    }

    /// Subtracts `mistaken` bytes of a cell from the measured gradients. Returns whether they were measured; if columns are
    /// missing, true for a cell without a column.
    pub fn correct_gradients(&mut self, cell: CellId, mistaken: i64) -> bool {
        let Some(column) = self.columns.iter().position(|(other, _)| *other == cell) else {
            return self.is_cut;
        };
        let Some(bytes) = self.gradients.get_mut(column).filter(|bytes| **bytes >= mistaken) else {
            return false;
        };
        *bytes -= mistaken;
        self.max_gradients -= mistaken;
        true
    }

    pub fn close(&mut self, start_ns: u64, book: &Book) {
        self.last.resize(self.columns.len(), 0);
        self.gradients.resize(self.columns.len(), 0);
        let mut differs = Vec::new();
        for (column, (cell, is_gradient)) in (0..).zip(&self.columns) {
            let at = column as usize;
            let bytes = if *is_gradient { self.gradients[at] } else { book.now(*cell) };
            if bytes != self.last[at] {
                self.last[at] = bytes;
                differs.push((column, bytes));
            }
        }
        self.gradients.fill(0);
        (self.max_gradients, self.measured) = (0, u64::MAX);
        if differs.is_empty() {
            return;
        }
        self.amounts += differs.len();
        self.changes.push_back((start_ns, differs));
        while self.amounts > MAX_AMOUNTS && self.changes.len() > 1 {
            self.forget_first();
        }
    }

    /// Drops the oldest change; `base` then includes it.
    fn forget_first(&mut self) {
        let Some((_, amounts)) = self.changes.pop_front() else { return };
        self.amounts -= amounts.len();
        self.base.resize(self.columns.len(), 0);
        for (column, bytes) in amounts {
            self.base[column as usize] = bytes;
        }
    }

    /// Drops the recorded changes; keeps the present amounts.
    pub fn restart(&mut self, now_ns: u64) {
        while !self.changes.is_empty() {
            self.forget_first();
        }
        if self.base.iter().any(|bytes| *bytes != 0) {
            self.changes.push_back((now_ns, Vec::new()));
        }
    }

    /// Returns all changes, with one column for all cells of the same name; `name` returns role and tag of a cell.
    pub fn view(&self, name: impl Fn(CellId) -> Column) -> parameters::Parameters {
        let mut columns: Vec<Column> = Vec::new();
        let merged = merge(&mut columns, self.columns.iter().map(|(cell, _)| name(*cell)));
        let mut held = vec![0_i64; self.columns.len()];
        let mut sums = vec![0_i64; columns.len()];
        let before: Vec<(u32, i64)> = (0..).zip(self.base.iter().copied()).collect();
        let mut changes: Vec<(u64, Vec<(u32, i64)>)> = Vec::new();
        for (time_ns, differs) in &self.changes {
            // The first change also lists all bytes that were held before it.
            let before = if changes.is_empty() { before.as_slice() } else { &[] };
            let mut touched: BTreeMap<u32, i64> = BTreeMap::new();
            for &(cell, bytes) in before.iter().chain(differs) {
                let (Some(was), Some(&column)) = (held.get_mut(cell as usize), merged.get(cell as usize))
                else {
                    continue;
                };
                let Some(sum) = sums.get_mut(column as usize) else { continue };
                touched.entry(column).or_insert(*sum);
                *sum = sum.wrapping_add(bytes).wrapping_sub(*was);
                *was = bytes;
            }
            let differs = touched.into_iter().filter_map(|(column, was)| {
                let now = *sums.get(column as usize)?;
                (now != was).then_some((column, now))
            });
            changes.push((*time_ns, differs.collect()));
        }
        // Drops iterations in which bytes only moved between cells of the same name. The first change stays, because amounts are
        // known from its time on.
        let mut first = true;
        changes.retain(|(_, differs)| std::mem::take(&mut first) || !differs.is_empty());
        parameters::Parameters { columns, is_cut: self.is_cut, changes }
    }

    pub fn bytes(&self) -> usize {
        self.columns.capacity() * (size_of::<(CellId, bool)>() + 3 * size_of::<i64>())
            + self.amounts * size_of::<(u32, i64)>()
            + self.changes.capacity() * size_of::<(u64, Vec<(u32, i64)>)>()
    }
}
