//! Readings that found the processes of a device with the same bytes as the reading before.
//!
//! On most machines most processes do not change between two readings. A process without an agent then *lags*: the reading is kept
//! once for the device, and nothing is done for the process. The process catches up, with all readings that it missed, before
//! anything else reads or changes it. The result is the same as if it had been sampled in each reading.

use crate::Map;
use crate::base::identity::ProcessKey;
use crate::ledger::Ledger;
use crate::samples::pending::MissedReading;
use gpumem_wire::{Absence, Stamp};
use std::collections::VecDeque;
use std::sync::Arc;

/// Maximum number of readings of a device that are kept for processes that lag. If there are more, all processes catch up.
const MAX_MISSED: usize = 128;

/// Processes and used bytes in NVML's list of a device.
pub(crate) type List = Arc<[(ProcessKey, u64)]>;

/// Completed readings of one device.
#[derive(Debug, Default)]
pub(crate) struct DoneReadings {
    /// Number of completed readings of the device.
    pub count: u64,
    /// List of the last reading; `None` if it failed or did not have the bytes of all processes.
    pub listed: Option<List>,
    /// The last readings that had the same processes as the reading before, oldest first.
    pub missed: VecDeque<MissedReading>,
    /// Number of the last reading that is not in `missed`.
    pub since: u64,
    /// Whether the ledger has removed processes, which may still be in `listed`.
    pub has_removed: bool,
}

impl DoneReadings {
    /// Drops processes that the ledger has removed from the list. Once for many: each costs a pass over the list.
    pub fn drop_removed(&mut self, known: &Map<ProcessKey, usize>) {
        if std::mem::take(&mut self.has_removed)
            && let Some(listed) = &mut self.listed
            && listed.iter().any(|(key, _)| !known.contains_key(key))
        {
            *listed = listed.iter().filter(|(key, _)| known.contains_key(key)).copied().collect();
        }
    }
}

/// Returns a list with some of its bytes replaced.
pub(super) fn updated(listed: &List, changed: &[(ProcessKey, u64)]) -> List {
    if changed.is_empty() {
        return Arc::clone(listed);
    }
    let mut list = listed.to_vec();
    for &(key, used) in changed {
        match list.iter_mut().find(|(known, _)| *known == key) {
            Some((_, bytes)) => *bytes = used,
            None => list.push((key, used)),
        }
    }
    list.into()
}

/// Earlier samples of a process that had the same values as a sample in [`Ledger::take_samples`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepeatedSample {
    pub key: ProcessKey,
    /// Index of the device in [`Ledger::devices`].
    pub device: usize,
    pub used_bytes: Result<u64, Absence>,
    /// Begins of the readings (ns), in order.
    pub t0_ns: Vec<u64>,
}

impl Ledger {
    /// Handles the record of a reading whose other processes hold the same bytes as in the reading before.
    pub(super) fn same_processes(&mut self, stamp: &Stamp) {
        let Some(&device) = self.host_slots.get(&stamp.device) else { return };
        let Some(reading) = self.open.get_mut(&device) else { return };
        self.readings[device].drop_removed(&self.by_key);
        let Some(listed) = &self.readings[device].listed else {
            // The reading before is not known, for example because this is the first one.
            reading.is_broken = true;
            return;
        };
        let named = std::mem::take(&mut reading.processes);
        let listed = updated(listed, &named);
        let (number, t0_ns) = (reading.number, reading.t0_ns);
        reading.same = Some(Arc::clone(&listed));
        for &(key, used) in listed.iter() {
            let Some(&index) = self.by_key.get(&key).filter(|&&index| !self.lags[index]) else { continue };
            let process = &mut self.processes[index];
            let is_named = named.iter().any(|(named, _)| *named == key);
            if let Some(book) = process.book_on(device).filter(|_| !is_named) {
                process.sample_used(book, number, t0_ns, Ok(used));
                self.take_closed(index);
            }
        }
    }

    /// Returns the processes that the open reading of a device has not named, with the bytes that they had in the reading before.
    pub fn same_as_before(&self, slot: u8) -> Vec<(ProcessKey, u64)> {
        let device = self.host_slots.get(&slot);
        let Some((device, reading)) = device.and_then(|device| Some((device, self.open.get(device)?))) else {
            return Vec::new();
        };
        let named = |key| reading.processes.iter().any(|(named, _)| *named == key);
        let listed = self.readings[*device].listed.iter().flat_map(|listed| listed.iter());
        listed.filter(|(key, _)| self.by_key.contains_key(key) && !named(*key)).copied().collect()
    }

    /// Lets a process catch up and take part in the readings that have begun. It no longer lags.
    pub(super) fn wake(&mut self, index: usize) {
        if !std::mem::replace(&mut self.lags[index], false) {
            return;
        }
        self.catch_up(index);
        for book in 0..self.processes[index].accounts.len() {
            let process = &mut self.processes[index];
            let Some(reading) = process.accounts[book].device.and_then(|device| self.open.get(&device))
            else {
                continue;
            };
            let book = book as u8;
            process.begin_sample(book, reading.number, reading.t0_ns);
            let same = reading.same.iter().flat_map(|same| same.iter()).find(|(key, _)| *key == process.key);
            if let Some(&(_, used)) = same {
                process.sample_used(book, reading.number, reading.t0_ns, Ok(used));
            }
            self.take_closed(index);
        }
    }

    /// Wakes all processes that lag and have an account on a device.
    pub(crate) fn wake_members(&mut self, device: usize) {
        for at in 0..self.members[device].len() {
            self.wake(self.members[device][at]);
        }
    }

    /// Lets some processes catch up, because their runs are about to be made. They lag again with the next reading.
    pub fn catch_up_with(&mut self, wanted: impl Fn(ProcessKey) -> bool) {
        for index in 0..self.processes.len() {
            if self.lags[index] && wanted(self.processes[index].key) {
                self.catch_up(index);
            }
        }
    }

    /// Adds the readings that a process has missed to its accounts.
    fn catch_up(&mut self, index: usize) {
        for book in 0..self.processes[index].accounts.len() {
            let process = &mut self.processes[index];
            let account = &process.accounts[book];
            let Some(device) = account.device else { continue };
            let missed = &self.readings[device].missed;
            let first = missed.partition_point(|reading| reading.position <= account.position);
            let (Some(&last), Some(used_bytes)) =
                (missed.range(first..).last(), account.latest.as_ref().map(|latest| latest.used_bytes))
            else {
                continue;
            };
            let t0_ns: Vec<u64> =
                missed.range(first..missed.len() - 1).map(|reading| reading.t0_ns).collect();
            process.repeat_sample(book as u8, used_bytes, &t0_ns, &last);
            let account = &mut process.accounts[book];
            account.position = last.position;
            if used_bytes.is_ok() {
                account.listing = self.listings.get(&device).cloned();
            }
            if !t0_ns.is_empty() {
                self.repeated.push(RepeatedSample { key: process.key, device, used_bytes, t0_ns });
            }
            self.take_closed(index);
        }
    }

    /// Notes that a reading ended which had the same processes as the one before. Those that lag miss it.
    pub(super) fn miss_reading(&mut self, device: usize, number: u64, t0_ns: u64, t1_ns: u64) {
        let readings = &mut self.readings[device];
        let position = readings.count;
        readings.missed.push_back(MissedReading { position, number, t0_ns, t1_ns });
        if readings.missed.len() > MAX_MISSED {
            for at in 0..self.members[device].len() {
                let index = self.members[device][at];
                if self.lags[index] {
                    self.catch_up(index);
                }
            }
            self.readings[device].missed.clear();
        }
    }

    /// Notes that the process was sampled in the last completed reading of a device. From now on it lags if it may.
    pub(super) fn end_turn(&mut self, index: usize, device: usize, book: u8) {
        let process = &mut self.processes[index];
        process.accounts[usize::from(book)].position = self.readings[device].count;
        if process.may_lag() {
            self.lags[index] = true;
            // The next record of the process must find that it lags.
            self.last = self.last.filter(|(_, last)| *last != index);
        }
    }
}
