//! Rows while the state of a process is said again.

use crate::rows::row::Row;
use crate::rules::holdings::Holdings;

impl Holdings {
    /// While the state is said again: a row that was not may be gone, and its address another's.
    pub fn is_in_doubt(&self, row: &Row) -> bool {
        self.mixed && row.generation != self.generation
    }

    /// Allocations that were not said again are gone. One whose free was entered while the table was read is in flight by
    /// now: it goes when the free succeeds.
    pub fn sweep_allocations(&mut self) {
        let generation = self.generation;
        self.drop_allocations(|row| row.generation != generation);
        self.unswept = false;
    }
}
