//! Rows during a resync, in which the agent restates its state.

use crate::rows::row::Row;
use crate::rules::holdings::Holdings;
use gpumem_wire::Phase;

impl Holdings {
    /// Whether the rows are a mix of several moments: a resync is in progress, or the ring has not caught up with it.
    #[inline]
    pub fn is_mixed(&self) -> bool {
        self.mixed
    }

    /// Returns the last record that may refer to rows which a resync has removed.
    #[inline]
    pub fn forgiven_until(&self) -> u64 {
        self.forgiven_until
    }

    /// Handles a loss after record `last_seq`: ends of frees and of the current phase may be among the lost records.
    pub fn lose_records(&mut self, last_seq: u64) {
        self.phases.said = Phase::Unknown;
        self.roles.iter_mut().for_each(|roles| roles.iterations.lose());
        self.doubt_state(last_seq);
    }

    /// Marks the state as doubtful: frees that began up to `last_seq` may have ended, and unreported segments may exist.
    pub fn doubt_state(&mut self, last_seq: u64) {
        self.unseen_segments = true;
        self.doubtful_before = Some(last_seq);
    }

    /// Begins a resync: the agent restates its rows from now on.
    pub fn begin_resync(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        (self.mixed, self.unswept) = (true, false);
    }

    /// Ends a resync: rows that were not restated are removed. `has_head`: the ring's records up to `head_seq` have been applied.
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

    /// Marks the rows as consistent again: the ring has caught up with the resync, or no more records will come.
    pub fn finish_resync(&mut self) {
        self.mixed = false;
        if self.unswept {
            self.sweep_allocations();
            self.sweep_pools();
        }
    }

    /// Whether a row is in doubt during a resync: not restated, it may be freed, and its address may be another row's.
    pub fn is_in_doubt(&self, row: &Row) -> bool {
        self.mixed && row.generation != self.generation
    }

    /// Removes allocations that were not restated. If the free of one was entered while the table was read, the allocation is in
    /// flight and is removed when the free succeeds.
    fn sweep_allocations(&mut self) {
        let generation = self.generation;
        self.drop_allocations(|row| row.generation != generation);
        self.unswept = false;
    }
}
