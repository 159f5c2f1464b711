//! What processes may take of the ledger's memory: rows of one process, bytes of the processes of one user, bytes of all.
//!
//! A process is weighed now and then, and what it takes is estimated from the tables that a peer can fill: their places, and
//! what the next growth of a nearly full one takes for a moment, while the old and the new one are both there. Who is at a
//! limit may free and end things, and say no more of them; what is refused is lost, and the sums say `partial`.

use crate::Map;
use std::mem::size_of;

/// Records between two looks at a process, at most: what it may take beyond its limit. The first looks are closer: there may be
/// many processes that say little.
const EVERY: usize = 1024;

/// Bytes of a name that count like a record.
const NAME_BYTES: usize = 64;

/// How much the ledger may remember of what processes say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Live allocations, blocks, segments and handles of one process.
    pub rows_per_process: usize,
    /// Bytes, about, for all processes of one user.
    pub bytes_per_user: usize,
    /// For all processes.
    pub bytes: usize,
}

impl Limits {
    /// What is read from a file of one's own has none.
    pub const NONE: Limits =
        Limits { rows_per_process: usize::MAX, bytes_per_user: usize::MAX, bytes: usize::MAX };
}

/// Which limit a process is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuotaExceeded {
    /// [`Limits::rows_per_process`].
    Rows,
    /// [`Limits::bytes_per_user`].
    User,
    /// [`Limits::bytes`].
    All,
}

/// Records that were refused because of a limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RefusedRecords {
    /// By [`QuotaExceeded::Rows`].
    pub rows: u64,
    /// By [`QuotaExceeded::User`].
    pub user: u64,
    /// By [`QuotaExceeded::All`].
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

/// Of one process.
#[derive(Debug, Default)]
pub(crate) struct MemoryUse {
    /// Records until it is weighed again.
    left: usize,
    /// How many there were between the last two looks.
    interval: usize,
    /// What it was charged with, and to whom.
    charged: usize,
    user: Option<u64>,
    /// Records that were refused since it was weighed last.
    pub refused: u64,
    /// Bytes of its names.
    pub names: usize,
}

impl MemoryUse {
    /// A name takes the place of another one.
    pub fn rename(&mut self, new: &str, old: Option<&str>) {
        let held = |name: &str| name.len() + 2 * size_of::<usize>();
        self.left = self.left.saturating_sub(new.len() / NAME_BYTES);
        self.names = (self.names + held(new)).saturating_sub(old.map_or(0, held));
    }

    /// The next look is after twice as many records, but for `least` at most after [`EVERY`].
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

/// Of all processes.
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
    /// What all processes are charged with.
    pub fn bytes(&self) -> usize {
        self.all
    }

    /// Refused records of processes that were weighed.
    pub fn refused(&self) -> RefusedRecords {
        self.refused
    }

    /// Takes back what a process was charged with; `full`: the limit that it is at.
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

/// A node of a `BTreeMap` is half full at worst; a key and a value of that size.
pub(crate) const fn sorted(entry: usize) -> usize {
    2 * entry
}

/// A hash table with so many entries and places, of that size.
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
