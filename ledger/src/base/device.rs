//! Devices as views read them, and their faults (Xid).

use crate::base::identity::DeviceName;
use crate::base::recent::Recent;
use gpumem_model::run::DeviceReading;

/// Fault numbers that are counted one by one; there are about a hundred, and a faulty device reports a few of them.
const NUMBERS: usize = 16;
/// Faults that are kept with their times.
const LATEST: usize = 8;

/// One fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// When it was reported.
    pub time_ns: u64,
    /// NVIDIA's number for it.
    pub xid: u64,
}

/// The faults of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    counts: Vec<(u64, u64)>,
    /// Faults of further numbers.
    other: u64,
    latest: Vec<Fault>,
}

impl Faults {
    pub(crate) fn add(&mut self, time_ns: u64, xid: u64) {
        match self.counts.iter().position(|(of, _)| *of == xid) {
            Some(place) => self.counts[place].1 += 1,
            None if self.counts.len() < NUMBERS => self.counts.push((xid, 1)),
            None => self.other += 1,
        }
        if self.latest.len() == LATEST {
            self.latest.remove(0);
        }
        self.latest.push(Fault { time_ns, xid });
    }

    /// Returns the count of each number, in the order of first occurrence. `None`: the sum of all that came after the first sixteen.
    pub fn counts(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let other = Some((None, self.other)).filter(|(_, count)| *count > 0);
        self.counts.iter().map(|&(xid, count)| (Some(xid), count)).chain(other)
    }

    /// The latest, oldest first.
    pub fn latest(&self) -> &[Fault] {
        &self.latest
    }
}

/// A reading in which the device and its processes can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgreedReading {
    /// Number of the reading: samples with it belong to it.
    pub number: u64,
    /// Device memory, the same before and after the process list; unified memory as it was after the list.
    pub reading: DeviceReading,
    /// used minus the sum over the processes; with unified memory, what the rest of the host uses.
    pub unaccounted_bytes: i64,
}

/// One device.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceView {
    /// Identity.
    pub name: DeviceName,
    /// The host's number of the device, or the process's where the host has not named it.
    pub ordinal: u16,
    /// Product name, where known.
    pub model: String,
    /// Size, where known.
    pub total_bytes: Option<u64>,
    /// Last reading.
    pub latest: Option<DeviceReading>,
    /// Lowest and highest `used` of the last minute.
    pub recent: Recent,
    /// The last reading with its processes; absent unless device memory agreed before and after the
    /// process list.
    pub agreed: Option<AgreedReading>,
    /// Faults that the driver reported.
    pub faults: Faults,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_bounded_and_no_fault_is_lost() {
        let mut faults = Faults::default();
        for xid in (0..40).chain([3, 3, 39]) {
            faults.add(1000 + xid, xid);
        }
        let counts: Vec<_> = faults.counts().collect();
        assert_eq!((counts[0], counts[3]), ((Some(0), 1), (Some(3), 3)));
        assert_eq!(counts.last(), Some(&(None, 25)));
        assert_eq!((counts.len(), counts.iter().map(|(_, count)| count).sum::<u64>()), (17, 43));
        assert_eq!((faults.latest().len(), faults.latest()[7]), (8, Fault { time_ns: 1039, xid: 39 }));
        assert_eq!(Faults::default().counts().count(), 0);
    }
}
