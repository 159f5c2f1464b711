//! Keeps what runs need and the ledger does not keep: series and sample counts of each process, and the last NVML readings of
//! each device.
//!
//! The daemon finds each process of every reading here, up to a hundred times a second. Therefore processes are in a hash map,
//! and the search for a reading starts at the latest one.

use crate::live_series::LiveSeries;
use gpumem_ledger::{AccountRef, AccountView, AgreedReading, ClosedSample, ProcessKey};
use gpumem_model::coverage::PartStart;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Number of readings kept for each device. If an agent is silent, its sample is completed up to half a second after the reading.
const READINGS: usize = 64;

/// Values over time (series) of a process, and the numbers of its samples.
#[derive(Debug, Default)]
pub(crate) struct ProcessSeries {
    /// Number of samples: NVML readings of the process's memory.
    pub samples: u64,
    /// Number of samples during which the process's memory changed (torn samples).
    pub torn: u64,
    /// Counts of the earlier parts of the process's life, if there are any.
    pub before: Option<Box<PartStart>>,
    /// Series of each device. A device whose name was unknown at first has a second series from that time.
    series: Vec<(AccountRef, LiveSeries)>,
}

impl ProcessSeries {
    /// Returns the empty series of a new part of a process's life; `before` has the counts of the earlier parts.
    pub fn new_part(before: PartStart) -> Self {
        ProcessSeries { before: Some(Box::new(before)), ..ProcessSeries::default() }
    }

    /// Returns the series of a device. If there is none, creates one with this bucket width; an existing one keeps its width.
    pub fn series_mut(&mut self, place: AccountRef, width_ns: u64) -> &mut LiveSeries {
        let at = match self.series.iter().position(|(known, _)| *known == place) {
            Some(at) => at,
            None => {
                // Most processes use one device.
                self.series.reserve_exact(1);
                self.series.push((place, LiveSeries::new(width_ns)));
                self.series.len() - 1
            }
        };
        &mut self.series[at].1
    }

    pub fn series(&self, place: AccountRef) -> Option<&LiveSeries> {
        self.series.iter().find(|(known, _)| *known == place).map(|(_, series)| series)
    }
}

pub(crate) type Processes = HashMap<ProcessKey, ProcessSeries, foldhash::fast::RandomState>;

/// Used bytes and key of processes that NVML listed in a reading.
pub(crate) type ListedProcesses = Vec<(Option<u64>, ProcessKey)>;

/// Processes in NVML's list, each with its used bytes; shared by readings with the same list.
pub(crate) type SharedList = Arc<[(ProcessKey, u64)]>;

/// One NVML reading of a device's memory and processes.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    /// Memory of the device, if it was the same before and after NVML's list of processes was read, and that list.
    pub agreed: Option<(AgreedReading, SharedList)>,
    /// Processes with a sample of this reading, while `agreed` is absent.
    pub sampled: ListedProcesses,
}

impl Reading {
    /// Returns the processes in NVML's list, as far as they are known.
    pub fn listed(&self) -> ListedProcesses {
        match &self.agreed {
            Some((_, listed)) => listed.iter().map(|&(key, used)| (Some(used), key)).collect(),
            None => self.sampled.clone(),
        }
    }
}

/// The last readings of each device. A run lists the other processes in the reading of its last sample. When the run is made,
/// these may have ended or may have newer samples.
#[derive(Debug, Default)]
pub(crate) struct RecentReadings {
    /// Readings by index of the device, sorted by number.
    devices: Vec<VecDeque<(u64, Reading)>>,
}

impl RecentReadings {
    /// Returns the reading with this number; creates it if needed. `None` if it is older than all kept readings.
    pub fn entry(&mut self, device: usize, number: u64) -> Option<&mut Reading> {
        if self.devices.len() <= device {
            self.devices.resize_with(device + 1, VecDeque::new);
        }
        let readings = self.devices.get_mut(device)?;
        // The number is almost always that of the latest reading, or of a new one.
        let after = readings.iter().rev().take_while(|(known, _)| *known > number).count();
        let mut at = readings.len() - after;
        let is_there = at > 0 && readings[at - 1].0 == number;
        if is_there {
            at -= 1;
        } else {
            if readings.len() == READINGS {
                if at == 0 {
                    return None;
                }
                readings.pop_front();
                at -= 1;
            }
            readings.insert(at, (number, Reading::default()));
        }
        readings.get_mut(at).map(|(_, reading)| reading)
    }

    pub fn get(&self, device: usize, number: u64) -> Option<&Reading> {
        let mut latest_first = self.devices.get(device)?.iter().rev();
        latest_first.find(|(known, _)| *known == number).map(|(_, reading)| reading)
    }
}

/// Returns the last sample with complete data. If an agent covers the process, that includes its tracked bytes.
pub(crate) fn complete(covered: bool, account: &AccountView) -> Option<&ClosedSample> {
    account.complete.as_deref().filter(|sample| sample.tracked_bytes.is_some() || !covered)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_readings_are_remembered_in_order_whatever_order_they_come_in() {
        let mut readings = RecentReadings::default();
        let numbers = |readings: &RecentReadings| {
            readings.devices.iter().flatten().map(|(number, _)| *number).collect::<Vec<_>>()
        };
        for number in [5, 3, 9, 5, 4, 9] {
            let key = ProcessKey { pid: 1, start_ticks: number };
            readings.entry(2, number).expect("there is room").sampled.push((None, key));
        }
        assert_eq!(numbers(&readings), [3, 4, 5, 9]);
        assert_eq!(readings.get(2, 5).map(|reading| reading.listed().len()), Some(2));
        for number in 10..10 + READINGS as u64 - 4 {
            assert!(readings.entry(2, number).is_some());
        }
        assert!(readings.entry(2, 2).is_none(), "older than all, and there is no room");
        assert!(readings.entry(2, 7).is_some());
        assert_eq!(numbers(&readings)[..4], [4, 5, 7, 9]);
        assert_eq!(numbers(&readings).len(), READINGS);
        assert!(readings.get(2, 3).is_none() && readings.get(0, 5).is_none() && readings.get(9, 5).is_none());
    }
}
