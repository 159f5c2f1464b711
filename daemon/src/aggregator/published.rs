//! The state that the aggregator publishes for views, and the requests that views send to it.

use super::node_counters::Totals;
use crate::clock;
use crate::limits::user_share::CpuCharge;
use gpumem_ledger::{ProcessView, Snapshot};
use gpumem_model::run::Run;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tokio::sync::{oneshot, watch};

#[derive(Debug)]
pub(crate) struct Published {
    /// Time of publication (ns, CLOCK_MONOTONIC).
    pub at_ns: u64,
    /// The same time as an `Instant`, from which [`Published::now_ns`] measures the elapsed time.
    pub made: Instant,
    pub snapshot: Snapshot,
    pub totals: Totals,
    /// Estimated memory of the ledger's data about processes, in bytes.
    pub remembered_bytes: usize,
}

impl Published {
    /// Returns the current CLOCK_MONOTONIC time (ns). Views compute ages from it, so samples age even between snapshots.
    pub(crate) fn now_ns(&self) -> u64 {
        self.at_ns.saturating_add(u64::try_from(self.made.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Gives views the latest published snapshot of the ledger. Reading never blocks.
#[derive(Debug, Clone)]
pub struct SnapshotReader {
    pub(super) published: watch::Receiver<Arc<Published>>,
    pub(super) read_ns: Arc<AtomicU64>,
    pub(super) ticked_ns: Arc<AtomicU64>,
}

impl SnapshotReader {
    /// Returns the latest published state. It is at most about 1.2 s old. If a view has read within 10 s and batches arrive, it is
    /// about 0.1 s old.
    pub(crate) fn read(&self) -> Arc<Published> {
        self.read_ns.store(clock::now_ns(), Ordering::Relaxed);
        self.published.borrow().clone()
    }

    /// Returns when a view last called [`SnapshotReader::read`] (ns, CLOCK_MONOTONIC).
    pub(crate) fn read_ns(&self) -> u64 {
        self.read_ns.load(Ordering::Relaxed)
    }

    /// Returns when the aggregator last called `Aggregator::tick` (ns, CLOCK_MONOTONIC), which it does at least about once a second.
    pub(crate) fn ticked_ns(&self) -> u64 {
        self.ticked_ns.load(Ordering::Relaxed)
    }
}

/// Filter of a query: returns whether a process is wanted.
pub type ProcessFilter = Box<dyn Fn(&ProcessView) -> bool + Send>;

/// Requests that views send to the aggregator.
pub enum Query {
    /// Returns the current runs of processes that match the filter. The processor time is charged to the requesting user.
    Runs(ProcessFilter, CpuCharge, oneshot::Sender<Vec<Run>>),
    /// Adds a mark (a named time) to the runs of live processes that match the filter. Returns the time of the mark (ns,
    /// CLOCK_MONOTONIC), and the pids of the processes.
    Mark(String, ProcessFilter, oneshot::Sender<(u64, Vec<u32>)>),
}
