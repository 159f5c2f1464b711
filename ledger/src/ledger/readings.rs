//! NVML readings of the devices: from the begin of a reading, through its lists of processes, to its end.

use crate::base::device::{AgreedReading, OpenReading, RepeatedReading};
use crate::base::identity::ProcessKey;
use crate::ledger::Ledger;
use crate::ledger::repeats::updated;
use crate::oom::device::Listing;
use gpumem_model::run::DeviceReading;
use gpumem_wire::{Absence, Stamp};
use std::cmp::Reverse;
use std::sync::Arc;

impl Ledger {
    /// Closes samples whose reading ended by `deadline_ns` and that still wait for their agent's records.
    pub(super) fn close_stale(&mut self, deadline_ns: u64) {
        while let Some(&Reverse((since_ns, index))) = self.waiting.peek()
            && since_ns <= deadline_ns
        {
            self.waiting.pop();
            let process = &mut self.processes[index];
            process.samples.is_queued = false;
            process.close_where(deadline_ns, true);
            self.take_closed(index);
            self.queue_stale_check(index);
        }
    }

    /// Queues a process with pending samples for [`Ledger::close_stale`].
    fn queue_stale_check(&mut self, index: usize) {
        let process = &mut self.processes[index];
        if !process.samples.is_queued
            && let Some(since_ns) = process.samples.first_end_ns()
        {
            process.samples.is_queued = true;
            self.waiting.push(Reverse((since_ns, index)));
        }
    }

    pub(super) fn begin_sample(&mut self, stamp: &Stamp, number: u64) {
        let Some(&device) = self.host_slots.get(&stamp.device) else { return };
        let reading =
            OpenReading { number, t0_ns: stamp.time_ns, listed_bytes: Some(0), ..OpenReading::default() };
        self.open.insert(device, reading);
        for at in 0..self.members[device].len() {
            let index = self.members[device][at];
            if self.lags[index] {
                continue;
            }
            let process = &mut self.processes[index];
            if process.ended.is_none()
                && let Some(book) = process.book_on(device)
            {
                process.begin_sample(book, number, stamp.time_ns);
                self.take_closed(index);
            }
        }
    }

    pub(super) fn sample_device(&mut self, slot: u8, sampled: DeviceReading) {
        let Some(&index) = self.host_slots.get(&slot) else { return };
        let used = sampled.used_bytes;
        let device = &mut self.devices[index];
        device.latest = Some(sampled);
        device.recent.add(sampled.time_ns, used);
        if let Some(listing) = self.listings.get(&index) {
            listing.note_used(used);
        }
        if let Some(reading) = self.open.get_mut(&index) {
            reading.first_used.get_or_insert(used);
            reading.last = device.latest;
            reading.device_samples += 1;
        }
    }

    pub(super) fn sample_process(&mut self, stamp: &Stamp, key: ProcessKey, used: Result<u64, Absence>) {
        let Some(&device) = self.host_slots.get(&stamp.device) else { return };
        let Some(reading) = self.open.get_mut(&device) else { return };
        let (number, t0_ns) = (reading.number, reading.t0_ns);
        reading.listed_bytes = match used {
            Err(Absence::NotListed) => reading.listed_bytes, // a process that is not listed holds no device memory
            used => reading.listed_bytes.zip(used.ok()).and_then(|(sum, used)| sum.checked_add(used)),
        };
        reading.processes.extend(used.ok().map(|used| (key, used)));
        let index = self.process(key);
        let process = &mut self.processes[index];
        let accounts = process.accounts.len();
        let Some(book) = process.sampled_book(device) else { return };
        if process.accounts.len() > accounts {
            self.members[device].push(index);
        }
        process.sample_used(book, number, t0_ns, used);
        self.take_closed(index);
    }

    pub(super) fn end_sample(&mut self, stamp: &Stamp, number: u64, result: u16) {
        let Some(&device) = self.host_slots.get(&stamp.device) else { return };
        let Some(reading) = self.open.get(&device).filter(|reading| reading.number == number) else { return };
        let is_repeated = reading.same.is_some() && reading.agrees(result) && !self.awaits_reading;
        if !is_repeated {
            self.wake_members(device);
        }
        let Some(mut reading) = self.open.remove(&device) else { return };
        let agrees = reading.agrees(result);
        let failed = result != 0 || reading.is_broken;
        let listed = match &reading.same {
            Some(same) => updated(same, &reading.processes),
            None => std::mem::take(&mut reading.processes).into(),
        };
        let agreed = reading.last.zip(reading.sum_of(&listed)).filter(|_| agrees).map(|(last, sum)| {
            let unaccounted_bytes = last.used_bytes.wrapping_sub(sum) as i64;
            AgreedReading { number, reading: last, unaccounted_bytes }
        });
        self.devices[device].agreed = agreed;
        if let Some(agreed) = agreed {
            let last = self.listings.get(&device).map(|last| &last.listed).filter(|last| **last == listed);
            let listing =
                Arc::new(Listing::new(agreed, last.cloned().unwrap_or_else(|| Arc::clone(&listed))));
            self.remember_listing(device, &listing);
            self.listings.insert(device, listing);
        }
        let done = &mut self.readings[device];
        done.count += 1;
        done.listed = Some(listed).filter(|_| !failed && reading.listed_bytes.is_some());
        done.has_removed = reading.has_removed;
        done.drop_removed(&self.by_key);
        let t1_ns = stamp.time_ns;
        if is_repeated {
            let since = done.since;
            self.devices[device].repeated = Some(RepeatedReading { since, t1_ns });
            self.miss_reading(device, number, reading.t0_ns, t1_ns);
        } else {
            done.missed.clear();
            done.since = number;
            self.devices[device].repeated = None;
        }
        for at in 0..self.members[device].len() {
            let index = self.members[device][at];
            if self.lags[index] {
                continue;
            }
            let process = &mut self.processes[index];
            if let Some(book) = process.book_on(device) {
                process.end_sample(book, number, t1_ns, failed);
                self.take_closed(index);
                self.queue_stale_check(index);
                self.end_turn(index, device, book);
            }
        }
    }
}
