//! Bytes of individual parameters and gradients in each iteration, for tables with a column for each.

use crate::fields::{fields, merge};
use crate::iterations::Iteration;
use crate::names::Named;
use gpumem_wire::Role;
use serde::{Deserialize, Serialize};

/// Maximum number of columns for each device.
pub const MAX_COLUMNS: usize = 2048;

fields! {
    /// Parameters and gradients of one device. Only differences between iterations are stored, because few bytes change.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Parameters {
        /// Columns of the table; `changes` refers to them by index.
        columns: Vec<Column>;
        /// Whether some columns are missing because there were more than [`MAX_COLUMNS`].
        is_cut: bool;
        /// Start time of each iteration that differs from the one before, and its differences: column and bytes. Values before
        /// the first change are unknown.
        changes: Vec<(u64, Vec<(u32, i64)>)>;
    }
}

fields! {
    /// Column of one parameter or of its gradient.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Column {
        /// `parameter` or `gradient`.
        role: String;
        /// Tag path; absent if the parameter has no name.
        tag: Option<String>;
    }
}

impl Column {
    pub fn is_gradient(&self) -> bool {
        Role::Gradient.name() == Some(self.role.as_str())
    }
}

impl Parameters {
    /// Returns the values of all columns for each row; rows must be in order of time. A row of several iterations gets the
    /// values of the last one. `None` if the values are unknown.
    pub fn of_rows(&self, rows: &[Iteration]) -> Vec<Option<Vec<i64>>> {
        let mut changes = self.changes.iter().peekable();
        let mut held: Option<Vec<i64>> = None;
        let of_row = |row: &Iteration| {
            // A change at the time at which a row ends belongs to the next row.
            while let Some((_, differs)) =
                changes.next_if(|(time_ns, _)| *time_ns < row.end_ns || *time_ns <= row.start_ns)
            {
                let held = held.get_or_insert_with(|| vec![0; self.columns.len()]);
                for &(column, bytes) in differs {
                    held.get_mut(column as usize).into_iter().for_each(|place| *place = bytes);
                }
            }
            held.clone()
        };
        rows.iter().map(of_row).collect()
    }

    /// Appends the data of a later run of the same life.
    pub fn append(&mut self, later: Parameters) {
        let Some((began_ns, _)) = later.changes.first() else { return };
        let began_ns = *began_ns;
        let place = merge(&mut self.columns, later.columns);
        self.is_cut |= later.is_cut;
        // The later run starts with a full list of nonzero values, so all columns are reset to 0 first.
        self.changes.retain(|(time_ns, _)| *time_ns < began_ns);
        self.changes.push((began_ns, (0..self.columns.len() as u32).map(|column| (column, 0)).collect()));
        let moved = |differs: Vec<(u32, i64)>| {
            differs
                .into_iter()
                .filter_map(|(column, bytes)| Some((*place.get(column as usize)?, bytes)))
                .collect()
        };
        self.changes.extend(later.changes.into_iter().map(|(time_ns, differs)| (time_ns, moved(differs))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(start_ns: u64, end_ns: u64) -> Iteration {
        Iteration { start_ns, end_ns, ..Iteration::default() }
    }

    fn column(role: &str, tag: &str) -> Column {
        Column { role: role.into(), tag: Some(tag.into()) }
    }

    #[test]
    fn a_row_has_what_its_last_iteration_had() {
        let parameters = Parameters {
            columns: vec![column("parameter", "a"), column("gradient", "a")],
            is_cut: false,
            changes: vec![(10, vec![(0, 5)]), (20, vec![(1, 7)]), (40, vec![(0, 0), (1, 8)])],
        };
        let rows = [row(0, 10), row(10, 20), row(20, 30), row(30, 50), row(50, 60)];
        let told = parameters.of_rows(&rows);
        assert_eq!(told[0], None, "that is not known any more");
        assert_eq!(told[1..], [vec![5, 0], vec![5, 7], vec![0, 8], vec![0, 8]].map(Some));
    }

    #[test]
    fn a_life_goes_on_with_the_names_of_the_next() {
        let mut life = Parameters {
            columns: vec![column("parameter", "a"), column("parameter", "b")],
            is_cut: false,
            changes: vec![(10, vec![(0, 5), (1, 6)])],
        };
        life.append(Parameters {
            columns: vec![column("parameter", "c"), column("parameter", "b")],
            is_cut: false,
            changes: vec![(30, vec![(0, 1), (1, 2)]), (40, vec![(1, 3)])],
        });
        let told = life.of_rows(&[row(10, 20), row(30, 40), row(40, 50)]);
        assert_eq!(told, [vec![5, 6, 0], vec![0, 2, 1], vec![0, 3, 1]].map(Some));
    }
}
