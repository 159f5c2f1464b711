//! Resync: the agent restates its live rows (allocations, blocks, pools, ...). All other rows are removed.

use crate::process::Process;
use crate::process::coverage::MAX_LOST;
use crate::process::stream::Resync;

impl Process {
    /// Counts records that the agent withheld on request. Sums are `partial` until a resync, as after a loss, but nothing counts
    /// as lost.
    pub fn withhold(&mut self, count: u64) {
        if count == 0 {
            return;
        }
        let (lost, before) = (self.coverage.lost, self.coverage.before);
        self.lose(count);
        (self.coverage.lost, self.coverage.before) = (lost, before);
        self.coverage.withheld = self.coverage.withheld.saturating_add(count).min(MAX_LOST);
    }

    /// Handles a `ResyncBegin` record; `after_seq` is the number of the last record before it.
    pub fn begin_resync(&mut self, after_seq: u64) {
        if after_seq > self.stream.last_seq {
            self.lose(after_seq - self.stream.last_seq);
            self.stream.last_seq = after_seq;
        }
        let is_partial = self.coverage.partial_state;
        // The agent restarts a resync if records were lost during it, so an earlier one may be unfinished.
        let is_known = self.stream.resync.is_none_or(|resync| resync.confirms);
        let confirms = !is_partial && !self.holdings.mixed && is_known && !self.coverage.blind_doubt;
        self.stream.resync = Some(Resync { rows: 0, after_seq, confirms });
        if confirms {
            return;
        }
        self.holdings.begin_resync();
        self.stream.healing = true;
    }

    /// Handles a `ResyncEnd` record: `rows` were restated, and records up to `head_seq` may have changed them meanwhile.
    pub fn end_resync(&mut self, head_seq: u64, rows: u64, time_ns: u64) {
        let Some(resync) = self.stream.resync.take() else { return };
        if resync.rows != rows {
            // Restated rows were lost, so removing all others would remove live rows. The resync stays open.
            self.stream.resync = Some(resync);
            self.lose(rows.abs_diff(resync.rows));
            return;
        }
        if resync.confirms {
            return;
        }
        self.holdings.end_resync(head_seq, self.stream.last_seq >= head_seq);
        let before = self.coverage.before;
        if before > 0 && self.coverage.lost == before && self.coverage.held_before.is_none() {
            let tracked = self.holdings.books.iter().map(|book| book.tracked);
            self.coverage.held_before = Some(tracked.fold(0, i64::saturating_add));
        }
        self.stream.known_from_ns = self.stream.applied_ns.max(time_ns);
    }

    /// Drops the unfinished resync of an earlier program's agent. The records of the new program are complete from its start.
    pub fn end_resync_of_program(&mut self) {
        self.stream.last_seq = 0;
        self.stream.has_observed = false;
        self.coverage.blind_doubt = false;
        self.coverage.end_blind(self.stream.applied_ns);
        self.stream.resync = None;
        self.stream.healing = false;
        self.coverage.partial_state = false;
        self.holdings.settle(self.stream.applied_ns);
        self.restart_history(self.stream.applied_ns);
    }

    /// Completes a resync once all records up to its end have arrived through the agent's ring buffer. The agent read its rows
    /// while the ring grew, so until then they are a mix of several moments.
    pub fn reach_head(&mut self) {
        if self.stream.last_seq < self.holdings.forgiven_until {
            return;
        }
        self.holdings.finish_resync();
        if std::mem::take(&mut self.stream.healing) && self.coverage.partial_history {
            let doubt = self.coverage.blind_doubt;
            let was_unknown = std::mem::replace(&mut self.coverage.partial_state, doubt);
            self.holdings.unseen_segments = self.coverage.late || doubt;
            if was_unknown {
                self.restart_history(self.stream.applied_ns);
                self.samples.mark_doubtful_until(self.stream.known_from_ns);
            }
        }
    }
}
