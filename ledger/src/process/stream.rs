//! The order of a process's records: which were applied, which are missing, and up to when all are here.

use gpumem_wire::{Body, ByeReason, Record, Stamp};

/// Between ResyncBegin and ResyncEnd.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resync {
    /// Rows that were restated so far.
    pub rows: u64,
    /// Rows born after it are left to the ring.
    pub after_seq: u64,
    /// Nothing was lost, so the restated rows are known already, and better: they are those of no single moment. They are not booked,
    /// so that a peak is taken that comes before the ring's head. Each new connection begins with such a resync.
    pub confirms: bool,
}

/// Where an ordered record belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// It was applied before.
    Duplicate,
    /// It is the next one, after `missing` records that were lost.
    Next { missing: u64 },
}

/// The records of a process, as an order.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    /// Number of the latest ordered record.
    pub last_seq: u64,
    /// Latest time of a record.
    pub applied_ns: u64,
    /// When the books are next searched for silences that are over.
    pub look_ns: u64,
    /// All records up to this time have been applied.
    pub done_ns: u64,
    /// Tag of the latest ordered record.
    pub near_tag: u32,
    /// The agent sends watermarks. Samples are then closed by them alone: times of records of several threads are
    /// not quite in the order of their numbers.
    pub has_watermarks: bool,
    /// Between ResyncBegin and ResyncEnd.
    pub resync: Option<Resync>,
    /// End of the last resync that healed a loss: the state at any time before is not known.
    pub known_from_ns: u64,
    /// A resync is under way or ended well, and nothing was lost since it began.
    pub healing: bool,
    /// How many programs the process ran before the present one.
    pub programs_before: u16,
    /// Time of the last `Agent` record.
    pub state_ns: u64,
    /// The agent has seen what the program does, at some time.
    pub is_watched_over: bool,
    /// The agent said good-bye: no records follow until the next hello.
    pub silent: bool,
    /// Time of that good-bye, and its reason.
    pub bye: Option<(u64, ByeReason)>,
}

impl Stream {
    /// Where the ordered record with this number belongs.
    #[inline]
    pub fn order(&self, seq: u64) -> Order {
        match seq.checked_sub(self.last_seq) {
            None | Some(0) => Order::Duplicate,
            Some(distance) => Order::Next { missing: distance - 1 },
        }
    }

    /// How many records up to the one with this number have not come.
    pub fn missing_until(&self, seq: u64) -> u64 {
        seq.saturating_sub(self.last_seq)
    }

    /// Time of what a record reports; the latest known time where it has none.
    #[inline]
    pub fn time_of(&self, stamp: &Stamp) -> u64 {
        if stamp.time_ns == 0 { self.applied_ns } else { stamp.time_ns }
    }

    /// Whether a record moves the time of the stream. Records that the agent's sender makes have its time, and the ring may be behind
    /// that: watermarks tell the ring's progress.
    #[inline]
    pub fn moves_time(&self, stamp: &Stamp) -> bool {
        stamp.time_ns > self.applied_ns && (stamp.seq != 0 || !self.has_watermarks)
    }

    /// A resync is under way that changes rows.
    #[inline]
    pub fn is_restating(&self) -> bool {
        self.resync.is_some_and(|resync| !resync.confirms)
    }

    /// Counts a restated record, and returns whether it is to be booked.
    pub fn takes_restated(&mut self, record: &Record<'_>) -> bool {
        let Some(resync) = &mut self.resync else { return true };
        let is_name = matches!(record.body, Body::Tag { .. } | Body::Module { .. } | Body::Stack { .. });
        resync.rows += u64::from(!is_name);
        if resync.confirms && !is_name && !matches!(record.body, Body::Device { .. }) {
            return false;
        }
        // Rows that were born while the table was read come by the ring, in their place.
        let is_pool = matches!(record.body, Body::PoolCreate { .. } | Body::PoolState { .. });
        record.stamp.seq <= resync.after_seq || is_pool
    }
}
