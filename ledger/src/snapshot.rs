//! Data for views, with names resolved and independent of the ledger.
//!
//! Amounts are lists by index of [`ProcessView::cells`], so that the same names serve the present, the peak and the latest
//! sample. Each list sums to the `tracked` of its structure.

use crate::base::device::DeviceView;
use crate::base::identity::ProcessKey;
use crate::book::cell_groups::SUM_TAG;
use crate::history::program_data::{LayerView, MarkView};
use crate::ledger::Ledger;
use crate::oom::records::OomView;
use crate::process::coverage::{Coverage, Facts};
use crate::process::{BEYOND, Process};
use crate::rows::row::AnomalyCounts;
use crate::samples::pending::{ClosedSample, PeakGap};
use crate::untrackable::change::Step;
use crate::untrackable::event::Names;
use gpumem_model::gap::Parts;
use gpumem_model::run::Beside;
use gpumem_model::run::Class;
use gpumem_wire::{ByeReason, ClockKind, Phase, PoolOwner, Role};
use std::sync::Arc;

/// The ledger at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Latest time of the host's records.
    pub now_ns: u64,
    /// Meaning of times.
    pub clock: ClockKind,
    /// Wall-clock time of record time 0 in ns; absent without a clock.
    pub wall_offset_ns: Option<i128>,
    /// Devices, in the order of naming.
    pub devices: Vec<DeviceView>,
    /// Processes, sorted by key.
    pub processes: Vec<ProcessView>,
}

/// Name of a cell.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CellView {
    /// Part of the identity.
    pub class: Class,
    /// Tag path; absent if the bytes have no name.
    pub tag: Option<Arc<str>>,
    /// First tag, if a later one replaced it.
    pub origin: Option<Arc<str>>,
    /// Use of the bytes.
    pub role: Role,
    /// Phase of the step that allocated them.
    pub phase: Phase,
    /// Library that requested them.
    pub library: Option<Arc<str>>,
    /// Name of the framework pool that contains them.
    pub pool: Option<Arc<str>>,
    /// Freed by their owner; a stream may still use them.
    pub pending: bool,
    /// The tag is that of the process, because the allocating thread had none.
    pub inherited: bool,
}

impl CellView {
    /// Whether the bytes are unused in a pool: not covered by a block, or in a block that its owner has freed.
    pub fn is_idle(&self) -> bool {
        self.class == Class::PoolIdle || self.pending
    }
}

/// The peak: the moment with the highest `tracked`.
#[derive(Debug, Clone, PartialEq)]
pub struct PeakView {
    /// `tracked` at the peak.
    pub tracked_bytes: i64,
    /// Its time; among equal moments the one with the least idle bytes.
    pub time_ns: u64,
    /// Amounts at the peak, by index of [`ProcessView::cells`].
    pub amounts: Vec<i64>,
    /// Gap at the peak; absent without a sample.
    pub gap: Option<PeakGap>,
}

/// One pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolView {
    /// The owner's id of the pool.
    pub id: u64,
    /// The owner's name of the pool.
    pub name: Option<Arc<str>>,
    /// Owner of the pool.
    pub owner: PoolOwner,
    /// Id of the pool whose blocks contain this pool's segments.
    pub parent: Option<u64>,
    /// Bytes of segments (framework pools), or reserved (driver pools).
    pub reserved_bytes: u64,
    /// Bytes of the pool that are booked in this process's book.
    pub booked_bytes: u64,
    /// Bytes of live blocks or allocations.
    pub used_bytes: u64,
    /// Used bytes that their owner has freed and that wait for a stream.
    pub pending_bytes: u64,
    /// The pool reports no blocks.
    pub opaque: bool,
    /// Reserved and used bytes as last reported by the owner; framework pools only.
    pub own: Option<(u64, u64)>,
    /// The owner's total and ours when it last compared.
    pub check: Option<(u64, u64)>,
}

/// One process on one device.
#[derive(Debug, Clone, PartialEq)]
pub struct AccountView {
    /// Index in [`Snapshot::devices`]; absent while the agent has not named the device.
    pub device: Option<usize>,
    /// The account sums all devices beyond the maximum number for a process.
    pub is_beyond: bool,
    /// Sum of `amounts`.
    pub tracked_bytes: i64,
    /// Amounts now.
    pub amounts: Vec<i64>,
    /// Memory outside the sum.
    pub beside: Beside,
    /// Bytes allocated before the agent started, if known.
    pub predates_bytes: Option<i64>,
    /// Highest tracked.
    pub peak: PeakView,
    /// Highest `used` that was read, and its time.
    pub peak_used: Option<(u64, u64)>,
    /// Highest `used` according to the driver's accounting mode, if that is on.
    pub accounted_peak_bytes: Option<u64>,
    /// Part of the newest `used` that confidential computing protects; absent without confidential computing.
    pub protected_bytes: Option<u64>,
    /// Last closed sample.
    pub latest: Option<ClosedSample>,
    /// Last closed sample with a known `used`; if there is an agent, with a known `tracked`, too.
    pub complete: Option<ClosedSample>,
    /// Parts of the untrackable of `complete`.
    pub parts: Option<Parts>,
    /// Changes of untrackable by time; the smallest are merged into one, which comes first.
    pub steps: Arc<[Step]>,
    /// Pools that exist.
    pub pools: Vec<PoolView>,
}

/// One process.
#[derive(Debug, Clone, PartialEq)]
pub struct ProcessView {
    /// Identity.
    pub key: ProcessKey,
    /// Facts from the daemon, and claims of the process.
    pub facts: Facts,
    /// How complete its numbers are.
    pub coverage: Coverage,
    /// Records that did not fit.
    pub odd: AnomalyCounts,
    /// Time of the end and wait status, if known.
    pub ended: Option<(u64, Option<u64>)>,
    /// Names of cells.
    pub cells: Vec<CellView>,
    /// One per device.
    pub accounts: Vec<AccountView>,
    /// State of each naming layer, as the agent reports it.
    pub layers: Vec<LayerView>,
    /// Marks, by time.
    pub marks: Vec<MarkView>,
    /// Marks that were dropped.
    pub marks_dropped: u64,
    /// OOM entries in order of time, with the index of their account.
    pub ooms: Vec<(usize, OomView)>,
    /// OOM entries that were dropped.
    pub ooms_dropped: u64,
    /// Latest time of the process's records.
    pub heard_ns: u64,
    /// Time and reason of the agent's Bye.
    pub bye: Option<(u64, ByeReason)>,
}

impl Ledger {
    /// Returns the current state for views. Copies every cell, but not every row.
    pub fn snapshot(&self) -> Snapshot {
        of(self)
    }
}

fn of(ledger: &Ledger) -> Snapshot {
    let mut processes: Vec<_> = ledger.processes.iter().map(process_view).collect();
    processes.sort_by_key(|process| process.key);
    Snapshot {
        now_ns: ledger.now_ns,
        clock: ledger.clock,
        wall_offset_ns: ledger.wall_offset_ns,
        devices: ledger.devices.clone(),
        processes,
    }
}

fn process_view(process: &Process) -> ProcessView {
    let holdings = &process.holdings;
    let names = Names { tags: &holdings.cells().tags, modules: &process.modules };
    let tag_name = |id: u32| names.tag(id);
    let cells: Vec<CellView> = holdings
        .cells()
        .keys
        .iter()
        .map(|key| (key, holdings.cells().sums.name(key).filter(|_| key.tag == SUM_TAG)))
        .map(|(key, sum)| CellView {
            class: key.class,
            origin: if sum.is_some() { None } else { tag_name(key.origin) },
            tag: sum.or_else(|| tag_name(key.tag)),
            role: key.role,
            phase: key.phase,
            library: names.library(key.module),
            pool: tag_name(key.pool),
            pending: key.pending,
            inherited: key.inherited,
        })
        .collect();
    let accounts = process
        .accounts
        .iter()
        .enumerate()
        .map(|(index, account)| {
            let book = &holdings.books()[index];
            AccountView {
                device: account.device,
                is_beyond: index == usize::from(BEYOND),
                tracked_bytes: book.tracked,
                amounts: book.amounts(),
                beside: holdings.side_memory(index),
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
                    .pools()
                    .iter()
                    .filter(|pool| usize::from(pool.book) == index && !pool.is_over())
                    .map(|pool| {
                        let framework = pool.owner == PoolOwner::Framework;
                        PoolView {
                            id: pool.id,
                            name: tag_name(pool.name),
                            owner: pool.owner,
                            parent: pool.parent.map(|index| holdings.pools()[index as usize].id),
                            reserved_bytes: if framework { pool.segment_bytes } else { pool.reserved },
                            booked_bytes: if framework { pool.backed_bytes } else { pool.reserved },
                            used_bytes: if framework && !pool.opaque { pool.block_bytes } else { pool.used },
                            pending_bytes: pool.pending_bytes,
                            opaque: pool.opaque,
                            own: pool.said,
                            check: pool.check,
                        }
                    })
                    .collect(),
            }
        })
        .collect();
    let mut odd = *holdings.anomalies();
    odd.overflowed = holdings.cells().overflowed;
    ProcessView {
        key: process.key,
        facts: process.facts.clone(),
        coverage: process.coverage(),
        odd,
        ended: process.ended,
        cells,
        accounts,
        layers: process.program.layers.view(),
        marks: process.program.marks.view(),
        marks_dropped: process.program.marks.dropped,
        ooms: process.ooms.view(&names),
        ooms_dropped: process.ooms.dropped,
        heard_ns: process.stream.applied_ns,
        bye: process.stream.bye,
    }
}
