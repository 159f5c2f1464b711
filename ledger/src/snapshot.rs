//! Snapshot of the ledger for views: a copy with resolved names.
//!
//! Amounts are lists of bytes by index of [`ProcessView::cells`]. The present, the peak and the latest sample have a list each,
//! whose sum is their `tracked` bytes.

use crate::base::device::DeviceView;
use crate::base::identity::ProcessKey;
use crate::book::cells::{CellKey, CellView};
use crate::ledger::Ledger;
use crate::process::coverage::{Coverage, Facts};
use crate::process::{BEYOND, Process};
use crate::rows;
use crate::rows::row::AnomalyCounts;
use crate::rules::holdings::Holdings;
use crate::samples::pending::{ClosedSample, PeakGap};
use crate::untrackable::event::Names;
use gpumem_model::run::{Amounts, Clock, Oom, Pool, SideMemory, UntrackableChange, UntrackableParts};
use gpumem_wire::{ByeReason, ClockKind, PoolOwner};
use std::sync::Arc;

/// The state of the whole ledger at one time, for views.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct Snapshot {
    /// Latest time of the daemon's own records (ns).
    pub now_ns: u64,
    pub clock: ClockKind,
    /// Wall-clock time of record time 0 (ns); absent without a clock.
    pub wall_offset_ns: Option<i128>,
    pub devices: Vec<DeviceView>,
    /// Processes, sorted by key.
    pub processes: Vec<ProcessView>,
}

impl Snapshot {
    /// Returns the clock of runs made from the snapshot.
    pub fn run_clock(&self) -> Clock {
        match self.clock {
            ClockKind::Ordinal => Clock::Lines,
            _ => Clock::Monotonic {
                wall_offset_ns: self.wall_offset_ns.and_then(|offset| i64::try_from(offset).ok()),
            },
        }
    }
}

/// The moment with the highest tracked bytes.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct PeakView {
    pub tracked_bytes: i64,
    /// Time of the peak (ns); among equal moments, of the one with the fewest idle and opaque bytes.
    pub time_ns: u64,
    /// Amounts at the peak, by index of [`ProcessView::cells`].
    pub amounts: Vec<i64>,
    /// Used minus tracked bytes at the peak; absent without a sample.
    pub gap: Option<PeakGap>,
}

/// The memory of one process on one device.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct AccountView {
    /// Index in [`Snapshot::devices`]; absent while the device is not known.
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
    pub latest: Option<ClosedSample>,
    /// Last closed sample with known used bytes; with an agent, also with known tracked bytes.
    pub complete: Option<ClosedSample>,
    /// Parts of the untrackable bytes of `complete`.
    pub parts: Option<UntrackableParts>,
    /// Changes of the untrackable bytes by time. If there are many, the smallest are merged into one, which comes first.
    pub steps: Arc<[UntrackableChange]>,
    pub pools: Vec<Pool>,
}

/// One process.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct ProcessView {
    pub key: ProcessKey,
    /// Facts from the daemon, and claims of the process.
    pub facts: Facts,
    pub coverage: Coverage,
    /// Numbers of records that contradicted the ledger's state.
    pub odd: AnomalyCounts,
    /// Time of the end (ns), and wait status if known; absent while the process runs.
    pub ended: Option<(u64, Option<u64>)>,
    pub cells: Vec<CellView>,
    /// One account for each device.
    pub accounts: Vec<AccountView>,
    /// Index in `accounts`, and OOM record, in order of time. The fate is open unless the process has continued.
    pub ooms: Vec<(usize, Oom)>,
    /// Latest time of the process's records (ns).
    pub heard_ns: u64,
    /// Time (ns) and reason of the agent's `Bye` record.
    pub bye: Option<(u64, ByeReason)>,
}

impl Ledger {
    /// Returns the present state. Copies all cells, but not the rows of allocations and blocks.
    pub fn snapshot(&self) -> Snapshot {
        let mut processes: Vec<_> = self.processes.iter().map(process_view).collect();
        processes.sort_by_key(|process| process.key);
        Snapshot {
            now_ns: self.now_ns,
            clock: self.clock,
            wall_offset_ns: self.wall_offset_ns,
            devices: self.devices.clone(),
            processes,
        }
    }
}

fn process_view(process: &Process) -> ProcessView {
    let holdings = &process.holdings;
    let table = &holdings.cells;
    let cell = |key: &CellKey| table.view(key, process.modules.get(&key.module).cloned());
    let cells = table.keys.iter().map(cell).collect();
    let accounts = process
        .accounts
        .iter()
        .enumerate()
        .map(|(index, account)| {
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
                pools: holdings
                    .pools
                    .iter()
                    .filter(|pool| usize::from(pool.book) == index && !pool.is_over())
                    .map(|pool| pool_view(holdings, pool))
                    .collect(),
            }
        })
        .collect();
    ProcessView {
        key: process.key,
        facts: process.facts.clone(),
        coverage: process.coverage(),
        odd: process.odd(),
        ended: process.ended,
        cells,
        accounts,
        ooms: process
            .ooms
            .view(&Names { cells: table, modules: &process.modules }, process.coverage.allocations),
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
        own: pool.reported,
        check: pool.check,
    }
}

/// Returns the nonzero amounts with their indices.
pub fn sparse(amounts: &[i64]) -> Amounts {
    let indexed = amounts.iter().enumerate().map(|(index, &bytes)| (index as u32, bytes));
    indexed.filter(|&(_, bytes)| bytes != 0).collect()
}
