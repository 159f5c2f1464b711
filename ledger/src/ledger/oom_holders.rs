//! Finds the processes that held a device's memory when memory ran out, from the NVML reading nearest to that time. For a process
//! that ended without a report, uses the last reading that listed it.

use crate::base::identity::ProcessKey;
use crate::ledger::Ledger;
use crate::oom::device::Listing;
use crate::oom::records::OomEntry;
use gpumem_model::oom::{Holder, Oom, OomDevice, OomKind};
use gpumem_wire::Stamp;
use std::sync::Arc;

/// A device is nearly full if at most 1/16 of its memory is free.
const NEARLY_FULL: i64 = 16;

impl Ledger {
    /// Adds the processes that held the device to the newest OOM entry of a process.
    #[cold]
    pub(crate) fn record_holders(&mut self, index: usize) {
        self.processes[index].ooms.wants_holders = false;
        let process = &self.processes[index];
        let Some(entry) = process.ooms.entries.last() else { return };
        let account = &process.accounts[usize::from(entry.book)];
        let time_ns = entry.record.time_ns;
        let Some((device, listing)) =
            account.device.and_then(|device| Some((device, Arc::clone(self.listings.get(&device)?))))
        else {
            return;
        };
        let record = entry.record.clone();
        self.wake_members(device);
        let holders = self.holders(index, device, &listing, &record);
        let ooms = &mut self.processes[index].ooms;
        // The next reading may be nearer.
        ooms.awaits_reading = holders.read_ns < time_ns;
        self.awaits_reading |= ooms.awaits_reading;
        if let Some(entry) = ooms.entries.last_mut() {
            entry.record.device = Some(holders);
        }
    }

    /// Returns the processes that NVML listed in the reading with this number, with their used bytes. `None` unless it is the
    /// device's last reading during which memory did not change.
    pub fn listed(&self, device: usize, number: u64) -> Option<&Arc<[(ProcessKey, u64)]>> {
        let listing = self.listings.get(&device)?;
        (listing.agreed.number == number).then_some(&listing.listed)
    }

    /// Keeps the process list of a reading for processes without an agent, and updates the newest OOM entries.
    pub(crate) fn remember_listing(&mut self, device: usize, listing: &Arc<Listing>) {
        let read_ns = listing.agreed.reading.time_ns;
        for (key, _) in listing.listed.iter() {
            // Processes that lag get it when they catch up.
            let Some(&index) = self.by_key.get(key).filter(|&&index| !self.lags[index]) else { continue };
            let process = &mut self.processes[index];
            if !process.coverage.covered
                && let Some(book) = process.book_on(device)
            {
                process.accounts[usize::from(book)].listing = Some(Arc::clone(listing));
            }
        }
        if std::mem::take(&mut self.awaits_reading) {
            for at in 0..self.members[device].len() {
                let index = self.members[device][at];
                if self.processes[index].ooms.awaits_reading {
                    self.record_nearer_holders(index, device, read_ns, listing);
                }
            }
            self.awaits_reading = self.processes.iter().any(|process| process.ooms.awaits_reading);
        }
    }

    /// Replaces the holders in the newest OOM entry of a process, if this reading is nearer to it.
    #[cold]
    fn record_nearer_holders(&mut self, index: usize, device: usize, read_ns: u64, listing: &Listing) {
        let process = &self.processes[index];
        let Some(entry) = process.ooms.entries.last() else {
            // Its run began a new part meanwhile.
            self.processes[index].ooms.awaits_reading = false;
            return;
        };
        if process.accounts[usize::from(entry.book)].device != Some(device) {
            return;
        }
        let before_ns = entry.record.device.as_ref().map_or(0, |device| device.read_ns);
        let is_nearer = read_ns.abs_diff(entry.record.time_ns) < before_ns.abs_diff(entry.record.time_ns);
        let holders = (is_nearer && listing.used_by(process.key).is_some())
            .then(|| self.holders(index, device, listing, &entry.record));
        self.has_changed.set(true);
        let process = &mut self.processes[index];
        process.forget_view();
        let ooms = &mut process.ooms;
        ooms.awaits_reading = false;
        if let (Some(holders), Some(entry)) = (holders, ooms.entries.last_mut()) {
            entry.record.device = Some(holders);
        }
    }

    /// Returns the device's state and holders at the time of an OOM of process `index`.
    fn holders(&self, index: usize, device: usize, listing: &Listing, record: &Oom) -> OomDevice {
        let own = record.untrackable_bytes.zip(record.predates_bytes);
        let own = own.map(|(gap, predates)| record.tracked_bytes.wrapping_add(gap).wrapping_add(predates));
        let owner = |key: ProcessKey| self.holder(key, device);
        let key = self.processes[index].key;
        listing.oom_device(self.devices[device].total_bytes, key, (own, record.tracked_bytes), owner)
    }

    /// Returns the user of a process, and since when and by how much it holds memory of a device. Its pid and bytes are not set.
    pub fn holder(&self, key: ProcessKey, device: usize) -> Holder {
        let found = self.by_key.get(&key).and_then(|&index| self.processes.get(index));
        let account = found.and_then(|process| {
            let book = process.book_on(device)?;
            Some(&process.accounts[usize::from(book)])
        });
        let user = found.and_then(|process| process.facts.seen.get("user").cloned());
        let (growth_bytes, growth_ns) = account.and_then(|account| account.last_minute.growth()).unzip();
        let since_ns = account.and_then(|account| account.listed_since_ns);
        Holder { user, growth_bytes, growth_ns, since_ns, ..Holder::default() }
    }

    /// Adds a suspected OOM if a process without an agent ended, not with status 0, while its device was nearly full.
    #[cold]
    pub(crate) fn record_suspected_oom(&mut self, index: usize, time_ns: u64, status: Option<u64>) {
        let process = &self.processes[index];
        if process.coverage.covered || status == Some(0) {
            return;
        }
        for book in 0..self.processes[index].accounts.len() {
            let account = &self.processes[index].accounts[book];
            let (Some(device), Some(listing)) = (account.device, account.listing.clone()) else { continue };
            self.wake_members(device);
            let least_free = listing.least_free_bytes();
            let mut record = Oom {
                kind: OomKind::Suspected,
                time_ns,
                last_ns: time_ns,
                count: 1,
                device_free_bytes: Some(least_free),
                is_unheard: true,
                ..Oom::default()
            };
            let holders = self.holders(index, device, &listing, &record);
            let is_full = i64::try_from(holders.total_bytes)
                .is_ok_and(|total| i64::try_from(least_free).is_ok_and(|free| free <= total / NEARLY_FULL));
            if is_full {
                record.device = Some(holders);
                let stamp = Stamp { time_ns, ..Stamp::default() };
                let book = book as u8;
                self.processes[index].ooms.push(OomEntry {
                    book,
                    stamp,
                    record,
                    new_refusals: 0,
                    failed_seq: 0,
                    at_allocations: 0,
                });
                self.processes[index].ooms.wants_holders = false;
            }
        }
    }
}
