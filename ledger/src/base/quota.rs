//! Limits of the ledger's memory: rows of one process, bytes of the processes of one user, bytes of all.
//!
//! The memory of a process is estimated at intervals, from the tables that a peer can fill. The estimate adds their capacity, and
//! the bytes for the next growth of a nearly full table, while the old and the new table exist. A process at its limit may free
//! memory and end scopes, but add nothing. Refused records count as lost, and the sums are then `partial`.

use crate::Map;
use std::mem::size_of;

/// Maximum number of records between two estimates of a process, and so its possible excess over its limit. The first estimates
/// are more frequent, because there may be many processes with few records.
const EVERY: usize = 1024;

/// Number of bytes of a name that count as one record.
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

/// The limit that a process has reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum QuotaExceeded {
    Rows,
    User,
    All,
}

/// Counts of records that limits refused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
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
    /// Number of records until the next estimate.
    left: usize,
    /// Number of records between the last two estimates.
    interval: usize,
    /// Bytes charged for the process, and the user that they are charged to.
    charged: usize,
    user: Option<u64>,
    /// Number of records refused since the last estimate.
    pub refused: u64,
    /// Bytes of the process's names.
    pub names: usize,
}

impl MemoryUse {
    /// Counts a name that replaces `old`.
    pub fn rename(&mut self, new: &str, old: Option<&str>) {
        let held = |name: &str| name.len() + 2 * size_of::<usize>();
        self.left = self.left.saturating_sub(new.len() / NAME_BYTES);
        self.names = (self.names + held(new)).saturating_sub(old.map_or(0, held));
    }

    /// Schedules the next estimate: after twice as many records as before, at most [`EVERY`] or `least`, whichever is greater.
    pub fn wait(&mut self, least: usize) {
        self.interval = (2 * self.interval).clamp(16, EVERY.max(least));
        self.left = self.interval;
    }

    #[inline]
    pub fn is_due(&mut self) -> bool {
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                false
            }
            None => true,
        }
    }
}

/// Estimated memory of all processes.
#[derive(Debug)]
pub(crate) struct Quotas {
    pub limits: Limits,
    all: usize,
    users: Map<Option<u64>, usize>,
    refused: RefusedRecords,
}

impl Default for Quotas {
    fn default() -> Self {
        Quotas { limits: Limits::NONE, all: 0, users: Map::default(), refused: RefusedRecords::default() }
    }
}

impl Quotas {
    pub fn bytes(&self) -> usize {
        self.all
    }

    /// Returns the refused records, as of the last estimate of each process.
    pub fn refused(&self) -> RefusedRecords {
        self.refused
    }

    /// Removes the charge of a process; `full` is the limit that it has reached.
    pub fn release(&mut self, load: &mut MemoryUse, full: Option<QuotaExceeded>) {
        let bytes = std::mem::take(&mut load.charged);
        self.all = self.all.saturating_sub(bytes);
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
        self.all = self.all.saturating_add(bytes);
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
            (self.all >= self.limits.bytes).then_some(QuotaExceeded::All)
        }
    }
}

/// Returns the bytes of an entry of a `BTreeMap`, whose nodes are at least half full.
pub(crate) const fn sorted(entry: usize) -> usize {
    2 * entry
}

/// Returns the estimated bytes of a hash table with this number of entries, capacity, and entry size.
fn table(entries: usize, places: usize, entry: usize) -> usize {
    let is_nearly_full = places - entries.min(places) < EVERY.max(places / 16);
    let bytes = places * (entry + 1) * 8 / 7;
    if places > EVERY && is_nearly_full { 3 * bytes } else { bytes }
}

pub(crate) fn list<T>(list: &Vec<T>) -> usize {
    table(list.len(), list.capacity(), size_of::<T>())
}

pub(crate) fn map<K, V>(map: &Map<K, V>) -> usize {
    table(map.len(), map.capacity(), size_of::<(K, V)>())
}
