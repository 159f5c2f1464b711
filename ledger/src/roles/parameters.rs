//! Individual parameters and gradients in each iteration, for tables with a column for each.
//!
//! A model has hundreds of parameters, and few change from one iteration to the next, so only differences are kept. Parameters
//! count with their size at the end of an iteration. Gradients are temporary and may be named late (by a sweep over the program's
//! objects). They count with their size at the latest moment when their sum was highest. So the columns of an iteration add up to
//! the parameters and gradients of its row.

use crate::book::Book;
use crate::book::cells::{CellId, CellKey};
use gpumem_wire::Role;
use std::collections::VecDeque;
use std::mem::size_of;

/// Maximum number of columns for each device.
pub const MAX_COLUMNS: usize = 2048;
/// Maximum number of amounts for each device; the oldest iterations are dropped.
const MAX_AMOUNTS: usize = 16_384;

/// Parameters and gradients of one device over its iterations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParametersView {
    /// Cells of parameters and gradients, by index of [`crate::ProcessView::cells`].
    pub columns: Vec<u32>,
    /// Some columns are missing, because there were too many.
    pub is_cut: bool,
    /// Each iteration that differs from the one before: its begin, and the bytes of the columns that changed (by index of
    /// `columns`). The first entry has all nonzero columns; earlier iterations are unknown.
    pub changes: Vec<(u64, Vec<(u32, i64)>)>,
}

/// Parameters and gradients in internal form.
#[derive(Debug, Default)]
pub(crate) struct Parameters {
    columns: Vec<(CellId, bool)>,
    /// Number of cells checked so far.
    looked: usize,
    is_cut: bool,
    /// Gradients of the open iteration by column, and the book's `role_changes` when they were measured.
    gradients: Vec<i64>,
    most: i64,
    measured: u64,
    /// Amounts by column before the first of `changes`, and after the last.
    base: Vec<i64>,
    last: Vec<i64>,
    changes: VecDeque<(u64, Vec<(u32, i64)>)>,
    amounts: usize,
}

impl Parameters {
    /// Measures the amounts of the book.
    pub fn measure(&mut self, book: &Book, keys: &[CellKey]) {
        for (cell, key) in (0..).zip(keys).skip(self.looked) {
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
        self.looked = keys.len();
        let total = book.by_role(usize::from(Role::Gradient.to_code()));
        if total <= 0 || total < self.most || self.measured == book.role_changes {
            return;
        }
        (self.most, self.measured) = (total, book.role_changes);
        self.gradients.resize(self.columns.len(), 0);
        for ((cell, is_gradient), bytes) in self.columns.iter().zip(&mut self.gradients) {
            *bytes = if *is_gradient { book.now(*cell) } else { 0 };
        }
    }

    /// Notes that `mistaken` measured bytes of a cell are no gradients. Returns whether they were measured; true for cells
    /// without a column if columns are missing.
    pub fn correct_gradients(&mut self, cell: CellId, mistaken: i64) -> bool {
        let Some(column) = self.columns.iter().position(|(other, _)| *other == cell) else {
            return self.is_cut;
        };
        let Some(bytes) = self.gradients.get_mut(column).filter(|bytes| **bytes >= mistaken) else {
            return false;
        };
        *bytes -= mistaken;
        self.most -= mistaken;
        true
    }

    /// Ends the iteration that began at `start_ns`.
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
        (self.most, self.measured) = (0, u64::MAX);
        if differs.is_empty() {
            return;
        }
        self.amounts += differs.len();
        self.changes.push_back((start_ns, differs));
        while self.amounts > MAX_AMOUNTS && self.changes.len() > 1 {
            self.forget_first();
        }
    }

    /// Drops the oldest entry; its amounts become the base of the next one.
    fn forget_first(&mut self) {
        let Some((_, amounts)) = self.changes.pop_front() else { return };
        self.amounts -= amounts.len();
        self.base.resize(self.columns.len(), 0);
        for (column, bytes) in amounts {
            self.base[column as usize] = bytes;
        }
    }

    /// Removes all changes except their final amounts.
    pub fn restart(&mut self, now_ns: u64) {
        while !self.changes.is_empty() {
            self.forget_first();
        }
        if self.base.iter().any(|bytes| *bytes != 0) {
            self.changes.push_back((now_ns, Vec::new()));
        }
    }

    pub fn view(&self) -> ParametersView {
        let mut changes: Vec<(u64, Vec<(u32, i64)>)> = self.changes.iter().cloned().collect();
        if let Some((_, first)) = changes.first_mut() {
            let known: Vec<u32> = first.iter().map(|(column, _)| *column).collect();
            let before = (0..).zip(self.base.iter().copied());
            first.extend(before.filter(|(column, bytes)| *bytes != 0 && !known.contains(column)));
            first.retain(|(_, bytes)| *bytes != 0);
            first.sort_unstable();
        }
        let columns = self.columns.iter().map(|(cell, _)| *cell).collect();
        ParametersView { columns, is_cut: self.is_cut, changes }
    }

    pub fn bytes(&self) -> usize {
        self.columns.capacity() * (size_of::<(CellId, bool)>() + 3 * size_of::<i64>())
            + self.amounts * size_of::<(u32, i64)>()
            + self.changes.capacity() * size_of::<(u64, Vec<(u32, i64)>)>()
    }
}
