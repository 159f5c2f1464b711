//! Snapshot of the ledger for views: devices, and a view of each process.

use crate::base::device::DeviceView;
use crate::ledger::Ledger;
use crate::process::Process;
use crate::process::view::{AccountView, ProcessView};
use crate::samples::pending::ClosedSample;
use gpumem_model::run::{Amounts, Clock};
use gpumem_wire::ClockKind;
use std::sync::Arc;

/// Maximum number of processes whose views debug builds compare with new ones. With many processes tests would take too long.
const MAX_CHECKED: usize = 100;

/// The state of the whole ledger at one time, for views.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Latest time of the daemon's own records (ns).
    pub now_ns: u64,
    pub clock: ClockKind,
    /// Wall-clock time of record time 0 (ns); absent without a clock.
    pub wall_offset_ns: Option<i128>,
    pub devices: Vec<DeviceView>,
    /// Processes, sorted by key. Snapshots share the views of processes that have not changed in between, and the list if none has.
    pub processes: Arc<[Arc<ProcessView>]>,
}

impl Snapshot {
    pub fn running(&self) -> impl DoubleEndedIterator<Item = &ProcessView> {
        self.processes.iter().map(Arc::as_ref).filter(|process| process.ended.is_none())
    }

    /// Returns the end of the last reading (ns) that had the values of an account's latest sample.
    pub fn read_ns(&self, process: &ProcessView, account: &AccountView, sample: &ClosedSample) -> u64 {
        let may_repeat = !process.coverage.covered && process.ended.is_none();
        let device = account.device.filter(|_| may_repeat).and_then(|device| self.devices.get(device));
        device.and_then(|device| device.confirmed_ns(sample.number)).unwrap_or(0).max(sample.t1_ns)
    }

    pub fn run_clock(&self) -> Clock {
        match self.clock {
            ClockKind::Ordinal => Clock::Lines,
            _ => Clock::Monotonic {
                wall_offset_ns: self.wall_offset_ns.and_then(|offset| i64::try_from(offset).ok()),
            },
        }
    }
}

impl Ledger {
    /// Returns the present state. Copies the amounts of processes that have changed since the last snapshot, and their cells
    /// if those have changed, but not the rows of allocations and blocks.
    pub fn snapshot(&self) -> Snapshot {
        debug_assert!(
            self.processes.len() > MAX_CHECKED || self.processes.iter().all(Process::has_true_view),
            "each change of a process removes or updates its view"
        );
        debug_assert!(
            self.has_changed.get() || self.processes.iter().all(Process::has_current_view),
            "each change of a process is noted for the list of views"
        );
        if self.has_changed.replace(false) {
            let mut processes: Vec<_> = self.processes.iter().map(Process::shared_view).collect();
            processes.sort_by_key(|process| process.key);
            self.last_views.replace(processes.into());
        }
        Snapshot {
            now_ns: self.now_ns,
            clock: self.clock,
            wall_offset_ns: self.wall_offset_ns,
            devices: self.devices.clone(),
            processes: Arc::clone(&self.last_views.borrow()),
        }
    }
}

/// Returns the nonzero amounts with their indices.
pub fn sparse(amounts: &[i64]) -> Amounts {
    let indexed = amounts.iter().enumerate().map(|(index, &bytes)| (index as u32, bytes));
    indexed.filter(|&(_, bytes)| bytes != 0).collect()
}
