//! The state said again: what an agent restates stays, what it does not is gone.

use crate::process::Process;
use crate::process::coverage::{Coverage, MOST_LOST};
use crate::process::stream::Resync;

impl Process {
    /// Records were kept back on request. The state is unknown until it is said again, peaks are lower bounds, and nothing is lost.
    pub fn withhold(&mut self, count: u64) {
        if count == 0 {
            return;
        }
        let (lost, before) = (self.coverage.lost, self.coverage.before);
        self.lose(count);
        (self.coverage.lost, self.coverage.before) = (lost, before);
        self.coverage.withheld = self.coverage.withheld.saturating_add(count).min(MOST_LOST);
    }

    pub fn begin_resync(&mut self, after_seq: u64) {
        if after_seq > self.last_seq {
            self.lose(after_seq - self.last_seq);
            self.last_seq = after_seq;
        }
        let is_partial = self.coverage.partial.is_some_and(|partial| partial.state);
        // One that was not ended is begun anew: the agent says the state again until nothing moved meanwhile.
        let is_known = self.resync.is_none_or(|resync| resync.confirms);
        let confirms = !is_partial && !self.holdings.mixed && is_known && !self.coverage.blind.doubt;
        self.resync = Some(Resync { rows: 0, after_seq, confirms });
        if confirms {
            return;
        }
        self.holdings.generation = self.holdings.generation.wrapping_add(1);
        (self.holdings.mixed, self.holdings.unswept) = (true, false);
        self.healing = true;
    }

    pub fn end_resync(&mut self, head_seq: u64, rows: u64, time_ns: u64) {
        let Some(resync) = self.resync.take() else { return };
        if resync.rows != rows {
            // Entries were lost: sweeping now would take live rows. The state stays unknown, as if the
            // resync had not ended.
            self.resync = Some(resync);
            self.lose(rows.abs_diff(resync.rows));
            return;
        }
        if resync.confirms {
            return;
        }
        let holdings = &mut self.holdings;
        holdings.forget_unfinished();
        holdings.sweep_blocks();
        holdings.unswept = true;
        if self.last_seq >= head_seq {
            holdings.sweep_allocations();
        }
        holdings.sweep_vmm();
        holdings.sweep_pools();
        holdings.replay();
        holdings.forgiven_until = head_seq;
        let Coverage { lost, before, .. } = self.coverage;
        if before > 0 && lost == before && self.coverage.held_before.is_none() {
            let tracked = self.holdings.books.iter().map(|book| book.tracked);
            self.coverage.held_before = Some(tracked.fold(0, i64::saturating_add));
        }
        self.known_from_ns = self.applied_ns.max(time_ns);
    }

    /// What the agent of an earlier program had begun to say will not be ended; the new one's state is known
    /// from its beginning.
    pub fn end_resync_of_image(&mut self) {
        self.last_seq = 0;
        self.is_watched_over = false;
        self.coverage.blind.doubt = false;
        self.coverage.blind.end(self.applied_ns);
        self.resync = None;
        self.healing = false;
        if let Some(partial) = &mut self.coverage.partial {
            partial.state = false;
        }
        self.holdings.settle(self.applied_ns);
        self.restart_trails(self.applied_ns);
    }

    /// No more will come: what was not said again is gone.
    pub fn reach_end(&mut self) {
        self.holdings.mixed = false;
        if self.holdings.unswept {
            self.holdings.sweep_allocations();
            self.holdings.sweep_pools();
        }
    }

    /// Rows were read while the ring grew: until its records up to the head are here too, they are those
    /// of no single moment.
    pub fn reach_head(&mut self) {
        if self.last_seq < self.holdings.forgiven_until {
            return;
        }
        self.reach_end();
        if let (true, Some(partial)) = (std::mem::take(&mut self.healing), &mut self.coverage.partial) {
            let doubt = self.coverage.blind.doubt;
            let was_unknown = std::mem::replace(&mut partial.state, doubt);
            self.holdings.unseen_segments = self.coverage.late || doubt;
            if was_unknown {
                self.restart_trails(self.applied_ns);
                self.doubt_the_unknown();
            }
        }
    }
}
