//! Rows during a resync, in which the agent restates all its live rows.

use crate::rows::row::Row;
use crate::rules::holdings::Holdings;
use gpumem_wire::Phase;

impl Holdings {
    /// Handles a loss of records after record `last_seq`, among which ends of frees and of the phase may be.
    pub fn lose_records(&mut self, last_seq: u64) {
        self.phases.last = Phase::Unknown;
        self.roles.iter_mut().for_each(|roles| roles.iterations.lose());
        self.mark_doubtful(last_seq);
    }

    /// Records that frees begun up to record `last_seq` may have ended, and that unreported segments may exist.
    pub fn mark_doubtful(&mut self, last_seq: u64) {
        self.unseen_segments = true;
        self.doubtful_before = Some(last_seq);
    }

    /// Begins a resync: the agent restates its rows from now on.
    pub fn begin_resync(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        (self.mixed, self.unswept) = (true, false);
    }

    /// Ends a resync: removes rows that were not restated. `has_head`: all records up to `head_seq` have been booked, so
    /// allocations can be removed too.
    pub fn end_resync(&mut self, head_seq: u64, has_head: bool) {
        self.end_doubtful_frees();
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

    /// Completes a resync: all records that were made during it have been booked, or no more will come.
    pub fn finish_resync(&mut self) {
        self.mixed = false;
        if self.unswept {
            self.sweep_allocations();
            self.sweep_pools();
        }
    }

    /// Whether a row may have been freed, and its address reused: a resync is in progress and has not restated it.
    pub fn is_in_doubt(&self, row: &Row) -> bool {
        self.mixed && row.generation != self.generation
    }

    /// Removes allocations that were not restated. An allocation whose free is in flight is removed when that free ends.
    fn sweep_allocations(&mut self) {
        let generation = self.generation;
        self.drop_allocations(|row| row.generation != generation);
        self.unswept = false;
    }
}
