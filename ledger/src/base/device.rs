//! Devices as views read them, and their faults (Xid).

use crate::base::identity::DeviceName;
use crate::base::recent::Recent;
use gpumem_model::run::DeviceReading;

/// Maximum number of distinct Xids that are counted separately. About a hundred exist, and a faulty device reports only a few.
const NUMBERS: usize = 16;
/// Number of latest faults that are kept with their times.
const LATEST: usize = 8;

/// One fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Time of the report.
    pub time_ns: u64,
    /// NVIDIA's Xid number.
    pub xid: u64,
}

/// The faults of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    counts: Vec<(u64, u64)>,
    /// Number of faults with further Xids.
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

    /// Returns the count of each Xid, in the order of first occurrence. `None` stands for all Xids beyond the first sixteen.
    pub fn counts(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let other = Some((None, self.other)).filter(|(_, count)| *count > 0);
        self.counts.iter().map(|&(xid, count)| (Some(xid), count)).chain(other)
    }

    /// Returns the latest faults, oldest first.
    pub fn latest(&self) -> &[Fault] {
        &self.latest
    }
}

/// A reading in which device memory did not change, so that the device and its processes can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgreedReading {
    /// Number of the reading; its samples have the same number.
    pub number: u64,
    /// Device memory, the same before and after the process list; unified memory as it was after the list.
    pub reading: DeviceReading,
    /// Used bytes minus the sum over the processes; for unified memory, the memory that the rest of the host uses.
    pub unaccounted_bytes: i64,
}

/// One device.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct DeviceView {
    pub name: DeviceName,
    /// The host's number of the device; the process's number if the host has not named it.
    pub ordinal: u16,
    pub model: String,
    pub total_bytes: Option<u64>,
    pub latest: Option<DeviceReading>,
    /// Minimum and maximum of `used` in the last minute.
    pub recent: Recent,
    /// The last reading in which device memory was the same before and after the process list; absent if there was none.
    pub agreed: Option<AgreedReading>,
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
