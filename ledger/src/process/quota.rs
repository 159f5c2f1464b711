//! What processes may take of the ledger's memory: rows of one process, bytes of the processes of one user, bytes of all.
//!
//! A process is weighed now and then, and what it takes is estimated from the tables that a peer can fill: their places, and
//! what the next growth of a nearly full one takes for a moment, while the old and the new one are both there. Who is at a
//! limit may free and end things, and say no more of them; what is refused is lost, and the sums say `partial`.

use crate::Map;
use crate::ledger::Ledger;
use crate::process::{NO_BOOK, Process};
use crate::rules::holdings::Holdings;
use gpumem_wire::{Body, Record};
use std::mem::size_of;

/// Records between two looks at a process, at most: what it may take beyond its limit. The first looks are closer: there may be
/// many processes that say little.
const EVERY: usize = 1024;
/// Bytes of a name that count like a record.
const NAME_BYTES: usize = 64;
/// Calls that one process may have entered without having left them: as many threads no program has, and each is looked at
/// when a row is said again.
const MAX_IN_FLIGHT: usize = 4096;
/// A node of a `BTreeMap` is half full at worst; a key and a value of that size.
const fn sorted(entry: usize) -> usize {
    2 * entry
}

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
pub enum Full {
    /// [`Limits::rows_per_process`].
    Rows,
    /// [`Limits::bytes_per_user`].
    User,
    /// [`Limits::bytes`].
    All,
}

/// Records that were refused because of a limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Refused {
    /// By [`Full::Rows`].
    pub rows: u64,
    /// By [`Full::User`].
    pub user: u64,
    /// By [`Full::All`].
    pub all: u64,
}

impl Refused {
    fn add(&mut self, full: Option<Full>, count: u64) {
        match full {
            Some(Full::Rows) => self.rows += count,
            Some(Full::User) => self.user += count,
            Some(Full::All) => self.all += count,
            None => {}
        }
    }
}

/// Of one process.
#[derive(Debug, Default)]
pub(crate) struct Load {
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

impl Load {
    /// A name takes the place of another one.
    pub fn rename(&mut self, new: &str, old: Option<&str>) {
        let held = |name: &str| name.len() + 2 * size_of::<usize>();
        self.left = self.left.saturating_sub(new.len() / NAME_BYTES);
        self.names = (self.names + held(new)).saturating_sub(old.map_or(0, held));
    }

    #[inline]
    fn is_due(&mut self) -> bool {
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
pub(crate) struct Shares {
    pub limits: Limits,
    all: usize,
    users: Map<Option<u64>, usize>,
    refused: Refused,
}

impl Default for Shares {
    fn default() -> Self {
        Shares { limits: Limits::NONE, all: 0, users: Map::default(), refused: Refused::default() }
    }
}

impl Shares {
    /// Takes back what a process was charged with.
    pub fn release(&mut self, process: &mut Process) {
        let (full, load) = (process.coverage.full, &mut process.load);
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

    fn charge(&mut self, load: &mut Load, user: Option<u64>, bytes: usize) {
        (load.charged, load.user) = (bytes, user);
        self.all = self.all.saturating_add(bytes);
        let of_user = self.users.entry(user).or_default();
        *of_user = of_user.saturating_add(bytes);
    }

    fn full(&self, user: Option<u64>, rows: usize) -> Option<Full> {
        let of_user = self.users.get(&user).copied().unwrap_or(0);
        if rows >= self.limits.rows_per_process {
            Some(Full::Rows)
        } else if of_user >= self.limits.bytes_per_user {
            Some(Full::User)
        } else {
            (self.all >= self.limits.bytes).then_some(Full::All)
        }
    }
}

impl Ledger {
    /// How much processes may make this ledger remember, from now on. One process must not take the memory of all.
    pub fn limit(&mut self, limits: Limits) {
        self.shares.limits = limits;
    }

    /// Bytes, about, that it remembers of what processes said; and records that a limit has refused so far.
    pub fn load(&self) -> (usize, Refused) {
        let mut refused = self.shares.refused;
        self.processes.iter().for_each(|process| refused.add(process.coverage.full, process.load.refused));
        (self.shares.all, refused)
    }

    /// Before a record of a process is taken.
    #[inline]
    pub(crate) fn weigh_now_and_then(&mut self, index: usize) {
        if self.processes[index].load.is_due() {
            self.weigh(index);
        }
    }

    #[cold]
    fn weigh(&mut self, index: usize) {
        let process = &mut self.processes[index];
        let (rows, bytes) = (process.holdings.rows(), process.bytes());
        self.shares.release(process);
        let (user, load) = (process.facts.uid, &mut process.load);
        self.shares.charge(load, user, bytes);
        process.coverage.full = self.shares.full(user, rows);
        // Pools are counted one by one.
        load.interval = (2 * load.interval).clamp(16, EVERY.max(process.holdings.pools.len() / 32));
        load.left = load.interval;
    }
}

/// A hash table with so many entries and places, of that size.
fn table(entries: usize, places: usize, entry: usize) -> usize {
    let is_nearly_full = places - entries.min(places) < EVERY.max(places / 16);
    let bytes = places * (entry + 1) * 8 / 7;
    if places > EVERY && is_nearly_full { 3 * bytes } else { bytes }
}

fn list<T>(list: &Vec<T>) -> usize {
    table(list.len(), list.capacity(), size_of::<T>())
}

fn map<K, V>(map: &Map<K, V>) -> usize {
    table(map.len(), map.capacity(), size_of::<(K, V)>())
}

impl Process {
    /// Whether the record would make the process larger.
    #[inline]
    pub fn is_beyond_limit(&mut self, record: &Record<'_>) -> bool {
        let is_beyond = match record.body {
            Body::FreeBegin { .. } | Body::VmmUnmap { .. } | Body::VmmRelease { .. } => {
                self.holdings.in_flight.len() >= MAX_IN_FLIGHT
            }
            Body::AllocEnd { .. }
            | Body::BlockAlloc { .. }
            | Body::Import { .. }
            | Body::VmmCreate { .. }
            | Body::VmmMap { .. }
            | Body::SegmentAdd { .. }
            | Body::PoolCreate { .. }
            | Body::PoolState { .. }
            | Body::Retag { .. }
            | Body::Tag { .. }
            | Body::Module { .. } => self.coverage.full.is_some(),
            Body::ContextCreate { .. }
            | Body::ContextDestroy { .. }
            | Body::DriverEvent { .. }
            | Body::Baseline { .. } => {
                self.coverage.full.is_some() && self.slots[usize::from(record.stamp.device)] == NO_BOOK
            }
            _ => false,
        };
        self.load.refused += u64::from(is_beyond && self.coverage.full.is_some());
        is_beyond
    }

    /// What it takes, about.
    fn bytes(&self) -> usize {
        let names = map(&self.holdings.cells.tags) + map(&self.modules) + self.load.names;
        let accounts: usize = self.accounts.iter().map(|account| account.bytes()).sum();
        size_of::<Process>()
            + names
            + accounts
            + self.counters.bytes()
            + self.ranges.bytes()
            + self.holdings.bytes()
    }
}

impl Holdings {
    fn bytes(&self) -> usize {
        let rows = map(&self.allocations)
            + map(&self.handles)
            + map(&self.backings)
            + map(&self.carved)
            + self.carved.len() * 64
            + map(&self.waiting)
            + map(&self.pool_ids)
            + self.large.len() * sorted(16)
            + self.mappings.len() * sorted(8 + size_of::<crate::rules::vmm::Mapping>())
            + self.in_flight.bytes();
        let pools = self.pools.iter().map(|pool| {
            map(&pool.blocks)
                + pool.large_blocks.len() * sorted(16)
                // Each segment names what it lies in, and that names the segment.
                + pool.segments.len() * sorted(8 + size_of::<crate::rules::segment::Segment>() + 96)
        });
        let cells = self.cells.bytes();
        let books = self.books.iter().map(|book| book.bytes());
        let follows =
            self.roles.iter().map(|roles| roles.young.bytes() + roles.iterations.bytes()).sum::<usize>()
                + self.ghosts.iter().map(|ghosts| ghosts.bytes()).sum::<usize>();
        let places = list(&self.pools) + list(&self.restated);
        rows + places + pools.sum::<usize>() + cells + books.sum::<usize>() + follows
    }
}
