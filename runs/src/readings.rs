//! Series and sample counts of each process, and the last readings of each device. Runs need them; the ledger does not keep them.
//!
//! The daemon looks up each process of every reading, up to a hundred times a second. Therefore a lookup by process is one hash
//! lookup, and a lookup by reading starts at the latest one.

use gpumem_ledger::{AgreedReading, Place, ProcessKey};
use gpumem_model::coverage::Before;
use gpumem_model::series::Series;
use std::collections::{HashMap, VecDeque};

/// Number of readings kept for each device. A sample whose agent is silent is closed only half a second after newer readings.
const READINGS: usize = 64;

/// Series and counts of a process.
#[derive(Debug, Default)]
pub(crate) struct ProcessSeries {
    /// Number of samples.
    pub samples: u64,
    /// Number of torn samples.
    pub torn: u64,
    /// Counts of earlier parts, if the run has been rolled.
    pub before: Option<Box<Before>>,
    /// Series of each device. A device that had samples before its name was known has a second one.
    series: Vec<(Place, Series)>,
}

impl ProcessSeries {
    /// Returns the empty state of a new part.
    pub fn of_part(before: Before) -> Self {
        ProcessSeries { before: Some(Box::new(before)), ..ProcessSeries::default() }
    }

    /// Returns the series of an account; creates it with this bucket width if needed.
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

/// State of each process.
pub(crate) type Processes = HashMap<ProcessKey, ProcessSeries, foldhash::fast::RandomState>;

/// One reading of a device.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    /// Device memory, if it was the same before and after the process list was read.
    pub agreed: Option<AgreedReading>,
    /// Listed processes with their used bytes; complete where device memory agreed.
    pub listed: Vec<(Option<u64>, ProcessKey)>,
}

/// The last readings of each device. A run needs the reading of its last sample: when the run is made, other processes of that
/// reading may have ended or may have newer samples.
#[derive(Debug, Default)]
pub(crate) struct RecentReadings {
    /// Readings by index of the device, sorted by number.
    devices: Vec<VecDeque<(u64, Reading)>>,
}

impl RecentReadings {
    /// Returns the reading with a number and creates it if needed; `None` if it is older than all kept readings.
    pub fn entry(&mut self, device: usize, number: u64) -> Option<&mut Reading> {
        if self.devices.len() <= device {
            self.devices.resize_with(device + 1, VecDeque::new);
        }
        let readings = self.devices.get_mut(device)?;
        // Almost always the latest reading, or the one after it.
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

    /// Returns the reading with a number, if it is kept.
    pub fn get(&self, device: usize, number: u64) -> Option<&Reading> {
        let mut latest_first = self.devices.get(device)?.iter().rev();
        latest_first.find(|(known, _)| *known == number).map(|(_, reading)| reading)
    }

    /// Iterates over device, number and reading of all kept readings.
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
