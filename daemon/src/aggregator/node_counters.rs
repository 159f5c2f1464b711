//! Counters of this node since the daemon started. They keep events of processes that are gone: a metric of a process that ran
//! out of memory disappears with the process, mostly before it is scraped.

use gpumem_ledger::{DeviceName, OomKind, ProcessKey, Snapshot};
use std::collections::BTreeMap;

/// Counts since the daemon started.
#[derive(Debug, Clone, Default)]
pub(crate) struct Totals {
    ooms: BTreeMap<(DeviceName, OomKind), u64>,
    lost: u64,
}

/// Derives the counts from successive snapshots.
#[derive(Debug, Default)]
pub(super) struct NodeCounters {
    pub totals: Totals,
    /// Events of live processes that are already in the totals.
    seen: BTreeMap<ProcessKey, Seen>,
}

#[derive(Debug, Clone, Default)]
struct Seen {
    lost: u64,
    /// Count of each out-of-memory entry, by account and time of its first event.
    ooms: BTreeMap<(usize, u64), u64>,
}

impl Totals {
    /// Returns how many times memory ran out on a device.
    pub(crate) fn ooms(&self, device: DeviceName, kind: OomKind) -> u64 {
        self.ooms.get(&(device, kind)).copied().unwrap_or(0)
    }

    /// Returns how many ordered records were lost.
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }
}

impl NodeCounters {
    /// Adds the events that are new in this snapshot. Drops the state of processes that have left the ledger.
    pub(crate) fn update(&mut self, snapshot: &Snapshot) {
        let mut before = std::mem::take(&mut self.seen);
        for process in &snapshot.processes {
            let mut seen = before.remove(&process.key).unwrap_or_default();
            // The count may start again at 0 when a new part of a process begins.
            let lost = process.coverage.lost_in_all();
            let more = lost.checked_sub(seen.lost).unwrap_or(lost);
            self.totals.lost = self.totals.lost.saturating_add(more);
            seen.lost = lost;
            let known = std::mem::take(&mut seen.ooms);
            // A refusal after which the program continued (`Pressure`) is not counted; it may become another kind later.
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
