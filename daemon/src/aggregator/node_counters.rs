//! What has happened on this node since the daemon started, and is still known when the process is gone: a metric of a
//! process that ran out of memory ends with it, mostly before anybody scrapes.

use gpumem_ledger::{DeviceName, OomKind, ProcessKey, Snapshot};
use std::collections::BTreeMap;

/// Since the daemon started.
#[derive(Debug, Clone, Default)]
pub(crate) struct Totals {
    ooms: BTreeMap<(DeviceName, OomKind), u64>,
    lost: u64,
}

/// Who counts.
#[derive(Debug, Default)]
pub(super) struct NodeCounters {
    /// So far.
    pub totals: Totals,
    /// What has been counted of processes that live.
    seen: BTreeMap<ProcessKey, Seen>,
}

#[derive(Debug, Clone, Default)]
struct Seen {
    lost: u64,
    /// Times of each entry, by account and the moment of the first.
    ooms: BTreeMap<(usize, u64), u64>,
}

impl Totals {
    /// Times that memory ran out on a device.
    pub(crate) fn ooms(&self, device: DeviceName, kind: OomKind) -> u64 {
        self.ooms.get(&(device, kind)).copied().unwrap_or(0)
    }

    /// Ordered records that were lost.
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }
}

impl NodeCounters {
    /// Counts what is new. Those that are gone from the ledger are forgotten.
    pub(crate) fn update(&mut self, snapshot: &Snapshot) {
        let mut before = std::mem::take(&mut self.seen);
        for process in &snapshot.processes {
            let mut seen = before.remove(&process.key).unwrap_or_default();
            // A process of which a new part begins may count anew.
            let lost = process.coverage.lost_in_all();
            let more = lost.checked_sub(seen.lost).unwrap_or(lost);
            self.totals.lost = self.totals.lost.saturating_add(more);
            seen.lost = lost;
            let known = std::mem::take(&mut seen.ooms);
            // A refusal that nobody gave up for is not the end of anything; it may become one.
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
