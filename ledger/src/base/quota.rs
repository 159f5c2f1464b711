//! Limits the memory that the ledger itself uses: rows of one process, bytes for one user's processes, bytes for all processes.
//!
//! The ledger estimates a process's bytes at intervals, from the capacity of each table that the process can fill. A nearly full
//! table counts three times, because the old and the twice as large new table exist while it grows. At a limit, records that
//! would add data are refused and count as lost, so the sums become `partial`. Frees and ends are still booked.

use crate::Map;
use std::mem::size_of;

/// Maximum number of records between two estimates of a process's memory, so that a process cannot exceed its limit by much. The
/// first estimates are more frequent, because many processes have few records.
const EVERY: usize = 1024;

/// Number of bytes of a name that count as one more record towards the next estimate.
const NAME_BYTES: usize = 64;

/// Limits of the memory that the ledger uses for processes' records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of live allocations, blocks, segments and handles of one process.
    pub rows_per_process: usize,
    /// Maximum estimated bytes of all processes of one user.
    pub bytes_per_user: usize,
    /// Maximum estimated bytes of all processes.
    pub bytes: usize,
}

impl Limits {
    /// No limits, for files that the user reads.
    pub const NONE: Limits =
        Limits { rows_per_process: usize::MAX, bytes_per_user: usize::MAX, bytes: usize::MAX };
}

/// Kind of limit that a process has reached: rows of the process, bytes of its user, bytes of all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuotaExceeded {
    Rows,
    User,
    All,
}

/// Numbers of refused records, by kind of limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RefusedRecords {
    pub rows: u64,
    pub user: u64,
    pub all: u64,
}

impl RefusedRecords {
    pub(crate) fn add(&mut self, full: Option<QuotaExceeded>, count: u64) {
        match full {
            Some(QuotaExceeded::Rows) => self.rows += count,
            Some(QuotaExceeded::User) => self.user += count,
            Some(QuotaExceeded::All) => self.all += count,
            None => {}
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct MemoryUse {
    /// Number of records until the memory use is estimated again.
    left: usize,
    /// Number of records between the last two estimates of the memory use.
    interval: usize,
    /// Bytes of the last estimate, which count against the quota of `user`.
    charged: usize,
    user: Option<u64>,
    /// Number of records refused since the last estimate.
    pub refused: u64,
    /// Bytes of the process's tags and library paths.
    pub names: usize,
}

impl MemoryUse {
    /// Counts the bytes of a new tag or library path, which replaces `old`.
    pub fn rename(&mut self, new: &str, old: Option<&str>) {
        let held = |name: &str| name.len() + 2 * size_of::<usize>();
        self.left = self.left.saturating_sub(new.len() / NAME_BYTES);
        self.names = (self.names + held(new)).saturating_sub(old.map_or(0, held));
    }

    /// Schedules the next estimate after twice as many records as before, up to the greater of [`EVERY`] and `min_interval`.
    pub fn schedule(&mut self, min_interval: usize) {
        self.interval = (2 * self.interval).clamp(16, EVERY.max(min_interval));
        self.left = self.interval;
    }

    /// Counts a record; returns whether an estimate is due.
    #[inline]
    pub fn count_record(&mut self) -> bool {
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                false
            }
            None => true,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Quotas {
    pub limits: Limits,
    /// Estimated bytes of all processes.
    pub bytes: usize,
    users: Map<Option<u64>, usize>,
    /// Numbers of refused records, as of the last estimate of each process.
    pub refused: RefusedRecords,
}

impl Default for Quotas {
    fn default() -> Self {
        Quotas { limits: Limits::NONE, bytes: 0, users: Map::default(), refused: RefusedRecords::default() }
    }
}

impl Quotas {
    /// Subtracts a process's estimated bytes, and counts its refused records for `full`, the limit that it has reached.
    pub fn release(&mut self, load: &mut MemoryUse, full: Option<QuotaExceeded>) {
        let bytes = std::mem::take(&mut load.charged);
        self.bytes = self.bytes.saturating_sub(bytes);
        if let Some(of_user) = self.users.get_mut(&load.user) {
            *of_user = of_user.saturating_sub(bytes);
            if *of_user == 0 {
                self.users.remove(&load.user);
            }
        }
        self.refused.add(full, std::mem::take(&mut load.refused));
    }

    pub fn charge(&mut self, load: &mut MemoryUse, user: Option<u64>, bytes: usize) {
        (load.charged, load.user) = (bytes, user);
        self.bytes = self.bytes.saturating_add(bytes);
        let of_user = self.users.entry(user).or_default();
        *of_user = of_user.saturating_add(bytes);
    }

    pub fn full(&self, user: Option<u64>, rows: usize) -> Option<QuotaExceeded> {
        let of_user = self.users.get(&user).copied().unwrap_or(0);
        if rows >= self.limits.rows_per_process {
            Some(QuotaExceeded::Rows)
        } else if of_user >= self.limits.bytes_per_user {
            Some(QuotaExceeded::User)
        } else {
            (self.bytes >= self.limits.bytes).then_some(QuotaExceeded::All)
        }
    }
}

/// Returns the estimated bytes of a `BTreeMap` entry of this size; the map's nodes are at least half full.
pub(crate) const fn sorted(entry: usize) -> usize {
    2 * entry
}

/// Returns the estimated bytes of a table that now takes `bytes`. `places`: its capacity in entries.
pub(crate) fn table(entries: usize, places: usize, bytes: usize) -> usize {
    let is_nearly_full = places - entries.min(places) < EVERY.max(places / 16);
    if places > EVERY && is_nearly_full { 3 * bytes } else { bytes }
}

pub(crate) fn list<T>(list: &Vec<T>) -> usize {
    table(list.len(), list.capacity(), list.capacity() * size_of::<T>())
}

pub(crate) fn map<K, V>(map: &Map<K, V>) -> usize {
    table(map.len(), map.capacity(), map.capacity() * (size_of::<(K, V)>() + 1) * 8 / 7)
}
