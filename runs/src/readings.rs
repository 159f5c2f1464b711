//! Series and counts of samples per process, and the last readings of each device. Runs need them, and the ledger does not keep them.
//!
//! The daemon asks once per process of each reading, up to a hundred times a second: a look-up by process is one hash, and the latest
//! reading of a device is tried first.

use gpumem_ledger::{AgreedReading, Place, ProcessKey};
use gpumem_model::coverage::Before;
use gpumem_model::series::Series;
use std::collections::{HashMap, VecDeque};

/// Readings that are kept per device. The sample of a process whose agent was silent is closed half a second after newer ones.
const READINGS: usize = 64;

/// Series and counts of a process.
#[derive(Debug, Default)]
pub(crate) struct ProcessSeries {
    /// Samples.
    pub samples: u64,
    /// Of those, torn.
    pub torn: u64,
    /// Counts of the parts before, if its run has rolled.
    pub before: Option<Box<Before>>,
    /// One per device, and one more for each device that had samples before it had its name.
    series: Vec<(Place, Series)>,
}

impl ProcessSeries {
    /// Begins a new part.
    pub fn of_part(before: Before) -> Self {
        ProcessSeries { before: Some(Box::new(before)), ..ProcessSeries::default() }
    }

    /// Returns the series of an account; a new one begins with buckets of this width.
    pub fn series_mut(&mut self, place: Place, width_ns: u64) -> &mut Series {
        let at = match self.series.iter().position(|(known, _)| *known == place) {
            Some(at) => at,
            None => {
                self.series.push((place, Series::new(width_ns)));
                self.series.len() - 1
            }
        };
        &mut self.series[at].1
    }

    /// Returns the series of an account, if there is one.
    pub fn series(&self, place: Place) -> Option<&Series> {
        self.series.iter().find(|(known, _)| *known == place).map(|(_, series)| series)
    }
}

/// By process.
pub(crate) type Processes = HashMap<ProcessKey, ProcessSeries, foldhash::fast::RandomState>;

/// One reading of a device.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    /// Device memory, if it was the same before and after the list.
    pub agreed: Option<AgreedReading>,
    /// Listed processes with their used bytes; complete where device memory agreed.
    pub listed: Vec<(Option<u64>, ProcessKey)>,
}

/// The last readings of each device, for what a run says of its device and of others there: they may have ended, or have
/// newer samples, when it is made.
#[derive(Debug, Default)]
pub(crate) struct RecentReadings {
    /// By index of the device, and in the order of their numbers.
    devices: Vec<VecDeque<(u64, Reading)>>,
}

impl RecentReadings {
    /// That reading, which may be new; none if it is older than all that are remembered.
    pub fn entry(&mut self, device: usize, number: u64) -> Option<&mut Reading> {
        if self.devices.len() <= device {
            self.devices.resize_with(device + 1, VecDeque::new);
        }
        let readings = self.devices.get_mut(device)?;
        // Almost always the latest, or one after it.
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

    /// That reading, if it is remembered.
    pub fn get(&self, device: usize, number: u64) -> Option<&Reading> {
        let mut latest_first = self.devices.get(device)?.iter().rev();
        latest_first.find(|(known, _)| *known == number).map(|(_, reading)| reading)
    }

    /// Device, number and reading of all.
    pub fn iter(&self) -> impl Iterator<Item = (usize, u64, &Reading)> {
        let devices = self.devices.iter().enumerate();
        devices.flat_map(|(device, readings)| readings.iter().map(move |(number, it)| (device, *number, it)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_readings_are_remembered_in_order_whatever_order_they_come_in() {
        let mut readings = RecentReadings::default();
        let numbers =
            |readings: &RecentReadings| readings.iter().map(|(_, number, _)| number).collect::<Vec<_>>();
        for number in [5, 3, 9, 5, 4, 9] {
            let key = ProcessKey { pid: 1, start_ticks: number };
            readings.entry(2, number).expect("there is room").listed.push((None, key));
        }
        assert_eq!(numbers(&readings), [3, 4, 5, 9]);
        assert_eq!(readings.get(2, 5).map(|reading| reading.listed.len()), Some(2));
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
