//! Order of a process's records: which were applied, which are missing, and up to which time all have arrived.

use gpumem_wire::{Body, ByeReason, Record, Stamp};

/// State between ResyncBegin and ResyncEnd.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resync {
    /// Number of rows restated so far.
    pub rows: u64,
    /// Last record before the resync; younger rows arrive by the ring.
    pub after_seq: u64,
    /// Nothing was lost, so the restated rows are already booked, and more exactly: restated rows are a mix of several moments.
    /// They are not booked again, so that peaks before the ring's head are recorded. Each new connection begins with such a
    /// resync.
    pub confirms: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Stream {
    /// Number of the latest ordered record.
    pub last_seq: u64,
    /// Latest time of an applied record.
    pub applied_ns: u64,
    /// Time of the next search for books that have been silent for long.
    pub look_ns: u64,
    /// All records up to this time have been applied.
    pub done_ns: u64,
    pub near_tag: u32,
    /// The agent sends watermarks. Then only watermarks close samples, because the times of several threads' records are not
    /// exactly in record order.
    pub has_watermarks: bool,
    /// Between ResyncBegin and ResyncEnd.
    pub resync: Option<Resync>,
    /// End of the last resync that recovered from a loss: the state at earlier times is unknown.
    pub known_from_ns: u64,
    /// A resync is in progress or has completed, and nothing was lost since it began.
    pub healing: bool,
    /// Number of programs that the process ran before the present one.
    pub programs_before: u16,
    /// Time of the last `Agent` record.
    pub state_ns: u64,
    /// The agent has observed the program's calls at some time.
    pub is_watched_over: bool,
    /// The agent has sent Bye: no records follow until the next Hello.
    pub silent: bool,
    pub bye: Option<(u64, ByeReason)>,
}

impl Stream {
    /// Returns the number of records lost before the ordered record with this number; `None` if it was applied before.
    #[inline]
    pub fn missing_before(&self, seq: u64) -> Option<u64> {
        seq.checked_sub(self.last_seq)?.checked_sub(1)
    }

    /// Returns the time of a record; the latest known time if it has none.
    #[inline]
    pub fn time_of(&self, stamp: &Stamp) -> u64 {
        if stamp.time_ns == 0 { self.applied_ns } else { stamp.time_ns }
    }

    /// Whether a record advances the time of the stream. Records of the agent's sender carry the sender's time, which may be
    /// ahead of the ring. With watermarks, such records do not count.
    #[inline]
    pub fn moves_time(&self, stamp: &Stamp) -> bool {
        stamp.time_ns > self.applied_ns && (stamp.seq != 0 || !self.has_watermarks)
    }

    /// Whether a resync is in progress that changes rows.
    #[inline]
    pub fn is_restating(&self) -> bool {
        self.resync.is_some_and(|resync| !resync.confirms)
    }

    /// Counts a restated record; returns whether it must be booked.
    pub fn takes_restated(&mut self, record: &Record<'_>) -> bool {
        let Some(resync) = &mut self.resync else { return true };
        let is_name = matches!(record.body, Body::Tag { .. } | Body::Module { .. } | Body::Stack { .. });
        resync.rows += u64::from(!is_name);
        if resync.confirms && !is_name && !matches!(record.body, Body::Device { .. }) {
            return false;
        }
        // Rows created while the table was read arrive by the ring, in order.
        let is_pool = matches!(record.body, Body::PoolCreate { .. } | Body::PoolState { .. });
        record.stamp.seq <= resync.after_seq || is_pool
    }
}
