//! Counts events of this machine since the daemon started, including those of ended processes. The metrics of a process disappear
//! with it, so its out-of-memory events would mostly be gone before a scrape.

use gpumem_ledger::{DeviceName, OomKind, ProcessKey, ProcessView, Snapshot};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Numbers of events since the daemon started.
#[derive(Debug, Clone, Default)]
pub(crate) struct Totals {
    ooms: BTreeMap<(DeviceName, OomKind), u64>,
    /// Number of records with a sequence number that were lost.
    pub lost: u64,
}

/// Computes the totals from successive snapshots of the ledger.
#[derive(Debug, Default)]
pub(super) struct NodeCounters {
    pub totals: Totals,
    /// Counts of each live process that are already included in the totals.
    seen: BTreeMap<ProcessKey, Seen>,
}

#[derive(Debug, Clone, Default)]
struct Seen {
    lost: u64,
    /// Number of failed allocations of each out-of-memory event. Key: index of the event's account (the process on one device) and
    /// time of its first failure (ns).
    ooms: BTreeMap<(usize, u64), u64>,
}

impl Totals {
    pub(crate) fn ooms(&self, device: DeviceName, kind: OomKind) -> u64 {
        self.ooms.get(&(device, kind)).copied().unwrap_or(0)
    }
}

impl NodeCounters {
    /// Adds the events that are new in this snapshot. Forgets processes that have left the ledger.
    pub(crate) fn update(&mut self, snapshot: &Snapshot) {
        let mut before = std::mem::take(&mut self.seen);
        // Processes without losses and out-of-memory events need no entry.
        let has_events =
            |process: &&Arc<ProcessView>| process.coverage.lost_in_all() > 0 || !process.ooms.is_empty();
        for process in snapshot.processes.iter().filter(has_events) {
            let mut seen = before.remove(&process.key).unwrap_or_default();
            // If the count is lower than before, a new part of the run has begun, and the count began at 0.
            let lost = process.coverage.lost_in_all();
            let more = lost.checked_sub(seen.lost).unwrap_or(lost);
            self.totals.lost = self.totals.lost.saturating_add(more);
            seen.lost = lost;
            let known = std::mem::take(&mut seen.ooms);
            // Events after which the program continued (`Pressure`) are skipped. The ledger may classify them otherwise later.
            for (account, oom) in process.ooms.iter().filter(|(_, oom)| oom.kind != OomKind::Pressure) {
                let device = process.accounts.get(*account).and_then(|account| account.device);
                let Some(device) = device.and_then(|device| snapshot.devices.get(device)) else { continue };
                let id = (*account, oom.time_ns);
                let more = oom.count.saturating_sub(known.get(&id).copied().unwrap_or(0));
                *self.totals.ooms.entry((device.name, oom.kind)).or_insert(0) += more;
                seen.ooms.insert(id, oom.count);
            }
            self.seen.insert(process.key, seen);
        }
    }
}
