//! Resync: rows that the agent restates stay; all others are removed.

use crate::process::Process;
use crate::process::coverage::MOST_LOST;
use crate::process::stream::Resync;

impl Process {
    /// Counts records withheld on request. The state is unknown until it is restated, and peaks are lower bounds, but no record
    /// is lost.
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
        if after_seq > self.stream.last_seq {
            self.lose(after_seq - self.stream.last_seq);
            self.stream.last_seq = after_seq;
        }
        let is_partial = self.coverage.partial_state;
        // A resync that does not end is restarted: the agent restates its rows until nothing changes meanwhile.
        let is_known = self.stream.resync.is_none_or(|resync| resync.confirms);
        let confirms = !is_partial && !self.holdings.is_mixed() && is_known && !self.coverage.blind_doubt;
        self.stream.resync = Some(Resync { rows: 0, after_seq, confirms });
        if confirms {
            return;
        }
        self.holdings.begin_resync();
        self.stream.healing = true;
    }

    pub fn end_resync(&mut self, head_seq: u64, rows: u64, time_ns: u64) {
        let Some(resync) = self.stream.resync.take() else { return };
        if resync.rows != rows {
            // Restated records were lost, and sweeping now would remove live rows. The state stays unknown, as if the resync had
            // not ended.
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

    /// Ends the resync of an earlier program's agent, which will not complete. The state of the new program is complete from its
    /// start.
    pub fn end_resync_of_program(&mut self) {
        self.stream.last_seq = 0;
        self.stream.is_watched_over = false;
        self.coverage.blind_doubt = false;
        self.coverage.end_blind(self.stream.applied_ns);
        self.stream.resync = None;
        self.stream.healing = false;
        self.coverage.partial_state = false;
        self.holdings.settle(self.stream.applied_ns);
        self.restart_history(self.stream.applied_ns);
    }

    /// Ends a resync once the ring has reached its head. The rows were read while the ring grew, so before that they are a mix of
    /// several moments.
    pub fn reach_head(&mut self) {
        if self.stream.last_seq < self.holdings.forgiven_until() {
            return;
        }
        self.holdings.finish_resync();
        if std::mem::take(&mut self.stream.healing) && self.coverage.partial_history {
            let doubt = self.coverage.blind_doubt;
            let was_unknown = std::mem::replace(&mut self.coverage.partial_state, doubt);
            self.holdings.unseen_segments = self.coverage.late || doubt;
            if was_unknown {
                self.restart_history(self.stream.applied_ns);
                self.samples.doubt_until(self.stream.known_from_ns);
            }
        }
    }
}
