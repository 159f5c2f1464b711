//! Order of a process's records: which were booked, which are missing, and up to which time all have arrived.

use gpumem_wire::{Body, ByeReason, Record, Stamp};

/// A resync in progress: the agent restates its live rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resync {
    /// Number of live rows that the agent has sent again so far.
    pub rows: u64,
    /// Number of the last record before the resync. Rows of later records arrive through the agent's ring buffer.
    pub after_seq: u64,
    /// Whether nothing was lost, so that all restated rows are booked already. They are not booked again, because they mix
    /// several moments, which has no meaning for peaks. Each new connection begins with a resync.
    pub confirms: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Stream {
    /// Number of the latest record that has a sequence number.
    pub last_seq: u64,
    /// Latest time of a booked record (ns).
    pub applied_ns: u64,
    /// Time of the next check for books in which nothing was booked for long (ns).
    pub next_silence_check_ns: u64,
    /// Time up to which all records have been booked (ns).
    pub done_ns: u64,
    /// Tag of the latest record that has a sequence number.
    pub near_tag: u32,
    /// Whether the agent sends watermarks (times up to which all records were sent). Then only they close samples, because the
    /// times of several threads' records may be out of order.
    pub has_watermarks: bool,
    pub resync: Option<Resync>,
    /// End of the last resync that recovered from a loss (ns); the state at earlier times is unknown.
    pub known_from_ns: u64,
    /// Whether a resync that recovers from a loss has begun, and nothing was lost since.
    pub healing: bool,
    /// Number of programs that the process ran before the present one.
    pub programs_before: u16,
    /// Time of the last `Agent` record (ns).
    pub state_ns: u64,
    /// Whether the agent has observed the program's calls at some time.
    pub has_observed: bool,
    /// Whether the agent has sent `Bye`: no records follow until the next `Hello`.
    pub silent: bool,
    pub bye: Option<(u64, ByeReason)>,
}

impl Stream {
    /// Returns the number of records lost before the record with this sequence number; `None` if that record was booked before.
    #[inline]
    pub fn missing_before(&self, seq: u64) -> Option<u64> {
        seq.checked_sub(self.last_seq)?.checked_sub(1)
    }

    /// Returns the time at which the books change: the latest time of a booked record. Before the first such record it is the end of
    /// the resync that told the state.
    #[inline]
    pub fn booked_ns(&self) -> u64 {
        if self.applied_ns == 0 { self.known_from_ns } else { self.applied_ns }
    }

    /// Returns the time of a record; if it has none, the latest time of a booked record.
    #[inline]
    pub fn time_of(&self, stamp: &Stamp) -> u64 {
        if stamp.time_ns == 0 { self.applied_ns } else { stamp.time_ns }
    }

    /// Whether a record advances the time of the stream. Records without a number have the time of the agent's sender, which may
    /// be ahead of the records in its ring buffer; with watermarks they do not count.
    #[inline]
    pub fn moves_time(&self, stamp: &Stamp) -> bool {
        stamp.time_ns > self.applied_ns && (stamp.seq != 0 || !self.has_watermarks)
    }

    /// Whether a resync is in progress that books the restated rows.
    #[inline]
    pub fn is_restating(&self) -> bool {
        self.resync.is_some_and(|resync| !resync.confirms)
    }

    /// Counts a restated record; returns whether to book it.
    pub fn count_restated(&mut self, record: &Record<'_>) -> bool {
        let Some(resync) = &mut self.resync else { return true };
        let is_name = matches!(record.body, Body::Tag { .. } | Body::Module { .. } | Body::Stack { .. });
        resync.rows += u64::from(!is_name);
        if resync.confirms && !is_name && !matches!(record.body, Body::Device { .. }) {
            return false;
        }
        // Rows created while the agent read its table arrive through the ring buffer, in order.
        let is_pool = matches!(record.body, Body::PoolCreate { .. } | Body::PoolState { .. });
        record.stamp.seq <= resync.after_seq || is_pool
    }
}
