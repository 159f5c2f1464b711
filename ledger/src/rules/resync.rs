//! Rows during a resync, in which the agent restates its state.

use crate::rows::row::Row;
use crate::rules::holdings::Holdings;

impl Holdings {
    /// The rows are those of no single moment: a resync is under way, or the ring has not caught up with it.
    #[inline]
    pub fn is_mixed(&self) -> bool {
        self.mixed
    }

    /// Records up to this number may name rows that a resync has taken.
    #[inline]
    pub fn forgiven_until(&self) -> u64 {
        self.forgiven_until
    }

    /// Records up to `last_seq` came, and others were lost: ends of frees among them.
    pub fn lose_records(&mut self, last_seq: u64) {
        self.lose_phases();
        self.doubt_state(last_seq);
    }

    /// Frees that were begun up to `last_seq` may be over, and segments may exist that were not reported.
    pub fn doubt_state(&mut self, last_seq: u64) {
        self.unseen_segments = true;
        self.doubtful_before = Some(last_seq);
    }

    /// The agent restates its rows from now on.
    pub fn begin_resync(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        (self.mixed, self.unswept) = (true, false);
    }

    /// All rows were restated; others are gone. `has_head`: the ring's records up to `head_seq` were applied.
    pub fn end_resync(&mut self, head_seq: u64, has_head: bool) {
        self.forget_unfinished();
        self.sweep_blocks();
        self.unswept = true;
        if has_head {
            self.sweep_allocations();
        }
        self.sweep_vmm();
        self.sweep_pools();
        self.replay();
        self.forgiven_until = head_seq;
    }

    /// The rows are those of one moment again: the ring has caught up, or no more will come.
    pub fn finish_resync(&mut self) {
        self.mixed = false;
        if self.unswept {
            self.sweep_allocations();
            self.sweep_pools();
        }
    }

    /// During a resync: a row that was not restated may be gone, and its address another row's.
    pub fn is_in_doubt(&self, row: &Row) -> bool {
        self.mixed && row.generation != self.generation
    }

    /// Removes allocations that were not restated. One whose free was entered while the table was read is in flight by now: it goes
    /// when the free succeeds.
    fn sweep_allocations(&mut self) {
        let generation = self.generation;
        self.drop_allocations(|row| row.generation != generation);
        self.unswept = false;
    }
}
