//! View of one process in a snapshot: a copy with resolved names. The process keeps its view until it changes, because most
//! processes change little between two snapshots.
//!
//! Amounts are lists of bytes by index of [`ProcessView::cells`]. The present, the peak and the latest sample have a list each,
//! whose sum is their `tracked` bytes.

use crate::base::identity::ProcessKey;
use crate::book::cells::{CellKey, CellView};
use crate::process::coverage::{Coverage, Facts};
use crate::process::{BEYOND, Process};
use crate::rows;
use crate::rows::row::AnomalyCounts;
use crate::rules::holdings::Holdings;
use crate::samples::pending::{ClosedSample, PeakGap};
use crate::untrackable::event::Names;
use gpumem_model::run::{Oom, Pool, SideMemory, UntrackableChange, UntrackableParts};
use gpumem_wire::{ByeReason, PoolOwner};
use std::sync::Arc;

/// The moment with the highest tracked bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct PeakView {
    pub tracked_bytes: i64,
    /// Time of the peak (ns); among equal moments, of the one with the fewest idle and opaque bytes.
    pub time_ns: u64,
    /// Amounts at the peak, by index of [`ProcessView::cells`].
    pub amounts: Vec<i64>,
    /// Used minus tracked bytes at the peak; absent without a sample.
    pub gap: Option<PeakGap>,
}

/// One process on one device.
#[derive(Debug, Clone, PartialEq)]
pub struct AccountView {
    /// Index in [`Snapshot::devices`](crate::Snapshot); absent while the device is not known.
    pub device: Option<usize>,
    /// Whether the account is the sum of all devices beyond the maximum number of a process.
    pub is_beyond: bool,
    pub tracked_bytes: i64,
    pub amounts: Vec<i64>,
    pub beside: SideMemory,
    /// Untracked bytes allocated before the agent started; absent if unknown.
    pub predates_bytes: Option<i64>,
    pub peak: PeakView,
    /// Highest used bytes of all samples, and their time (ns).
    pub peak_used: Option<(u64, u64)>,
    /// Highest used bytes according to the driver's accounting mode; absent while that mode is off.
    pub accounted_peak_bytes: Option<u64>,
    /// Part of the newest used bytes that confidential computing protects; absent without confidential computing.
    pub protected_bytes: Option<u64>,
    pub latest: Option<Arc<ClosedSample>>,
    /// Last closed sample with known used bytes; with an agent, also with known tracked bytes.
    pub complete: Option<Arc<ClosedSample>>,
    /// Parts of the untrackable bytes of `complete`.
    pub parts: Option<UntrackableParts>,
    /// Changes of the untrackable bytes by time. If there are many, the smallest are merged into one, which comes first.
    pub steps: Arc<[UntrackableChange]>,
    /// Number of CUDA graphs that were instantiated.
    pub graphs: u64,
    pub pools: Vec<Pool>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ProcessView {
    pub key: ProcessKey,
    /// Facts from the daemon, and claims of the process.
    pub facts: Arc<Facts>,
    pub coverage: Arc<Coverage>,
    /// Counts of records that contradicted the known state.
    pub odd: AnomalyCounts,
    /// Time of the end (ns), and wait status if known; absent while the process runs.
    pub ended: Option<(u64, Option<u64>)>,
    pub cells: Arc<[CellView]>,
    pub accounts: Vec<AccountView>,
    /// Index in `accounts`, and OOM record, in order of time. The fate is open, or survived if the thread of the failed request has
    /// got memory since.
    pub ooms: Arc<[(usize, Oom)]>,
    /// Latest time of the process's records (ns).
    pub heard_ns: u64,
    /// Time (ns) and reason of the agent's `Bye` record.
    pub bye: Option<(u64, ByeReason)>,
}

/// View of a process in the last snapshot.
#[derive(Debug, Default)]
pub(crate) enum LastView {
    /// There was no snapshot.
    #[default]
    None,
    Current(Arc<ProcessView>),
    /// The process has changed since the snapshot. Its cells are mostly the same.
    Changed(Arc<ProcessView>),
    /// Since the snapshot, only the accounts of these books have changed (one bit for each book).
    Outdated(Arc<ProcessView>, u64),
}

impl LastView {
    fn changed(self) -> Self {
        match self {
            LastView::None => LastView::None,
            LastView::Current(view) | LastView::Outdated(view, _) | LastView::Changed(view) => {
                LastView::Changed(view)
            }
        }
    }
}

impl Process {
    /// Returns the view of the last snapshot, with those accounts made anew that have changed since.
    pub(crate) fn shared_view(&self) -> Arc<ProcessView> {
        let view = match self.view.take() {
            LastView::Current(view) => view,
            LastView::Outdated(view, books) => {
                let make = |accounts| self.updated_view(&view, books, accounts);
                let updated = match self.spare_view.take() {
                    Some(spare) => view_in_place_of(spare, make),
                    None => Arc::new(make(Vec::new())),
                };
                self.spare_view.replace(Some(view));
                updated
            }
            LastView::Changed(view) => {
                self.spare_view.take();
                Arc::new(process_view(self, Some(&view.cells)))
            }
            LastView::None => Arc::new(process_view(self, None)),
        };
        self.view.replace(LastView::Current(Arc::clone(&view)));
        view
    }

    pub(crate) fn has_current_view(&self) -> bool {
        matches!(&*self.view.borrow(), LastView::Current(_))
    }

    pub(crate) fn has_true_view(&self) -> bool {
        match &*self.view.borrow() {
            LastView::None | LastView::Changed(_) => true,
            LastView::Current(view) => **view == process_view(self, None),
            LastView::Outdated(view, books) => {
                self.updated_view(view, *books, Vec::new()) == process_view(self, None)
            }
        }
    }

    /// Marks the view as old, because the process changes.
    #[inline]
    pub(crate) fn forget_view(&mut self) {
        let view = self.view.get_mut();
        if matches!(view, LastView::Current(_) | LastView::Outdated(..)) {
            *view = std::mem::take(view).changed();
        }
    }

    /// Notes that a sample of this book was closed. A sample of a process without an agent changes its account only.
    pub(crate) fn outdate_view(&mut self, book: u8) {
        let view = self.view.get_mut();
        *view = match std::mem::take(view) {
            LastView::Current(last) if !self.coverage.covered => LastView::Outdated(last, 1 << book),
            LastView::Outdated(last, books) if !self.coverage.covered => {
                LastView::Outdated(last, books | 1 << book)
            }
            view => view.changed(),
        };
    }

    /// Returns a copy of a view with new accounts of these books. `accounts` is empty; its memory is used.
    fn updated_view(&self, view: &ProcessView, books: u64, mut accounts: Vec<AccountView>) -> ProcessView {
        let account = |(index, account): (usize, &AccountView)| match books >> index & 1 {
            0 => account.clone(),
            _ => account_view(self, index),
        };
        accounts.extend(view.accounts.iter().enumerate().map(account));
        ProcessView {
            key: view.key,
            facts: Arc::clone(&view.facts),
            coverage: Arc::clone(&view.coverage),
            odd: view.odd,
            ended: view.ended,
            cells: Arc::clone(&view.cells),
            accounts,
            ooms: Arc::clone(&view.ooms),
            heard_ns: view.heard_ns,
            bye: view.bye,
        }
    }
}

/// Makes a view in the memory of an earlier one, unless something else uses that. `make` gets an empty list for the accounts.
fn view_in_place_of(
    mut earlier: Arc<ProcessView>,
    make: impl FnOnce(Vec<AccountView>) -> ProcessView,
) -> Arc<ProcessView> {
    match Arc::get_mut(&mut earlier) {
        Some(free) => {
            let mut accounts = std::mem::take(&mut free.accounts);
            accounts.clear();
            *free = make(accounts);
            earlier
        }
        None => Arc::new(make(Vec::new())),
    }
}

fn account_view(process: &Process, index: usize) -> AccountView {
    let (account, holdings) = (&process.accounts[index], &process.holdings);
    let book = &holdings.books[index];
    AccountView {
        device: account.device,
        is_beyond: index == usize::from(BEYOND),
        tracked_bytes: book.tracked,
        amounts: book.amounts(),
        beside: holdings.side_memory[index],
        predates_bytes: if process.coverage.late { account.predates } else { Some(0) },
        peak: PeakView {
            tracked_bytes: book.peak.bytes,
            time_ns: book.peak.time_ns,
            amounts: (0..book.len() as u32).map(|cell| book.at_peak(cell)).collect(),
            gap: process.peak_gap(index as u8),
        },
        peak_used: account.peak_used,
        accounted_peak_bytes: account.accounted_peak,
        protected_bytes: account.protected,
        latest: account.latest.clone(),
        complete: account.complete.clone(),
        parts: account.complete.as_ref().and_then(|sample| sample.parts),
        steps: account.causes.steps(),
        graphs: account.causes.graphs(),
        pools: holdings
            .pools
            .iter()
            .filter(|pool| usize::from(pool.book) == index && !pool.is_over())
            .map(|pool| pool_view(holdings, pool))
            .collect(),
    }
}

/// Returns the view of a process. It shares its cells with an earlier view if they have not changed.
fn process_view(process: &Process, earlier: Option<&Arc<[CellView]>>) -> ProcessView {
    let holdings = &process.holdings;
    let table = &holdings.cells;
    let cell = |key: &CellKey| table.view(key, process.modules.get(&key.module).cloned());
    let is_same = |cells: &&Arc<[CellView]>| {
        cells.len() == table.keys.len()
            && table.keys.iter().zip(cells.iter()).all(|(key, known)| cell(key) == *known)
    };
    let cells = earlier.filter(is_same).cloned();
    let cells = cells.unwrap_or_else(|| table.keys.iter().map(cell).collect());
    ProcessView {
        key: process.key,
        facts: Arc::clone(&process.facts),
        coverage: Arc::new(process.coverage()),
        odd: process.odd(),
        ended: process.ended,
        cells,
        accounts: (0..process.accounts.len()).map(|index| account_view(process, index)).collect(),
        ooms: process
            .ooms
            .view(&Names { cells: table, modules: &process.modules }, process.coverage.allocations)
            .into(),
        heard_ns: process.stream.applied_ns,
        bye: process.stream.bye,
    }
}

fn pool_view(holdings: &Holdings, pool: &rows::pool::Pool) -> Pool {
    let framework = pool.is_framework();
    let owner = match pool.owner {
        PoolOwner::Driver => Some("driver"),
        PoolOwner::Graph => Some("graph"),
        PoolOwner::Framework => Some("framework"),
        PoolOwner::Unknown => None,
    };
    Pool {
        id: pool.id,
        name: holdings.cells.tag(pool.name).as_deref().map(str::to_owned),
        owner: owner.map(str::to_owned),
        parent: pool.parent.map(|index| holdings.pools[index as usize].id),
        opaque: pool.opaque,
        segment_bytes: if framework { pool.segment_bytes } else { pool.reserved },
        booked_bytes: if framework { pool.backed_bytes } else { pool.reserved },
        block_bytes: if framework && !pool.opaque { pool.block_bytes } else { pool.used },
        pending_bytes: pool.pending_bytes,
        streams: (pool.streams != 0).then(|| pool.streams.count_ones()),
        private_pools: (pool.private_pools != 0).then(|| (pool.private_pools >> 1).count_ones()),
        own: pool.reported,
        check: pool.check,
    }
}
