//! Other processes on the devices of a run.

use crate::readings::{ListedProcesses, Reading, RecentReadings, complete};
use gpumem_ledger::{AccountView, Ledger, ProcessView, Snapshot};
use gpumem_model::run::{self, Holder, MAX_TENANTS};
use gpumem_wire::Absence;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Processes that NVML listed, the largest first, by device and number of the reading.
pub(crate) struct Tenants(BTreeMap<(usize, u64), ListedProcesses>);

impl Tenants {
    /// Returns the processes of the readings of the last samples of the `wanted` processes.
    pub fn new(snapshot: &Snapshot, wanted: &[&Arc<ProcessView>], readings: &RecentReadings) -> Self {
        let mut tenants = BTreeMap::<(usize, u64), ListedProcesses>::new();
        for process in wanted {
            let covered = process.coverage.covered;
            let place = |account: &AccountView| Some((account.device?, complete(covered, account)?.number));
            for (device, number) in process.accounts.iter().filter_map(place) {
                let listed = || readings.get(device, number).map(Reading::listed);
                tenants.entry((device, number)).or_insert_with(|| listed().unwrap_or_default());
            }
        }
        for process in snapshot.processes.iter() {
            for account in &process.accounts {
                if let (Some(device), Some(sample)) = (account.device, &account.latest)
                    && sample.used_bytes != Err(Absence::NotListed)
                    && readings.get(device, sample.number).is_none()
                    && let Some(listed) = tenants.get_mut(&(device, sample.number))
                {
                    listed.push((sample.used_bytes.ok(), process.key));
                }
            }
        }
        tenants.values_mut().for_each(|listed| listed.sort_by_key(|&(used, key)| (Reverse(used), key)));
        Tenants(tenants)
    }

    /// Sets the other processes on a device of a run: the largest ones, and the number and sum of the rest.
    pub fn fill_in(
        &self,
        ledger: &Ledger,
        place: (usize, u64),
        process: &ProcessView,
        run_device: &mut run::Device,
    ) {
        let Some(listed) = self.0.get(&place) else { return };
        let mut others = listed.iter().filter(|(_, key)| *key != process.key);
        run_device.details.largest_tenant = others.clone().find_map(|&(used, key)| {
            let used_bytes = i64::try_from(used?).unwrap_or(i64::MAX);
            // A process that lags would have an older growth.
            let holder = Holder { growth_bytes: None, growth_ns: None, ..ledger.holder(key, place.0) };
            Some(Holder { pid: key.pid, used_bytes, ..holder })
        });
        run_device.tenants = others.by_ref().take(MAX_TENANTS).map(|&(used, key)| (key.pid, used)).collect();
        let (count, rest) = others
            .fold((0, 0_u128), |(count, sum), (used, _)| (count + 1, sum + u128::from(used.unwrap_or(0))));
        run_device.other_tenants = (count, u64::try_from(rest).unwrap_or(u64::MAX));
    }
}
