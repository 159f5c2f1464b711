//! Data of one device for views: NVML readings, their extremes in the last minute, and driver faults (Xid). The extremes exist
//! because a metrics scrape sees only the value at its own time.

use crate::base::identity::{DeviceName, ProcessKey};
use gpumem_model::run::DeviceReading;
use std::sync::Arc;

/// Maximum number of Xids (NVIDIA's fault codes) with a separate count. About a hundred exist, and a faulty device reports only a
/// few.
const NUMBERS: usize = 16;
/// Maximum number of faults whose times are kept; the latest stay.
const LATEST: usize = 8;

/// One fault (Xid) that the driver reported for a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Time at which the driver reported the fault (ns).
    pub time_ns: u64,
    /// NVIDIA's Xid number.
    pub xid: u64,
}

/// Counts of a device's faults by Xid, and the latest faults with their times.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    /// Xid and number of faults, in the order of first occurrence.
    counts: Vec<(u64, u64)>,
    /// Number of faults whose Xid has no entry in `counts`.
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

/// An NVML reading during which the device's memory did not change, so that the bytes of device and processes can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgreedReading {
    /// Number of the NVML reading; the samples of its processes have the same number.
    pub number: u64,
    /// Device memory, read before and after the process list with the same result; for unified memory, read after the list.
    pub reading: DeviceReading,
    /// Used bytes of the device minus those of all its processes; for unified memory, the memory that the rest of the host uses.
    pub unaccounted_bytes: i64,
}

/// An NVML reading of a device, between its `SampleBegin` and `SampleEnd` records.
#[derive(Debug, Default)]
pub(crate) struct OpenReading {
    pub number: u64,
    pub t0_ns: u64,
    /// Used bytes of the device at the begin of the reading.
    pub first_used: Option<u64>,
    pub last: Option<DeviceReading>,
    pub device_samples: u32,
    /// Used bytes of the processes in `processes`; `None` if those of a listed process are unknown.
    pub listed_bytes: Option<u64>,
    /// Processes that the reading has named, with their used bytes; since `same` was set, if it was.
    pub processes: Vec<(ProcessKey, u64)>,
    /// Processes of the reading before, with the bytes that they have in this one.
    pub same: Option<Arc<[(ProcessKey, u64)]>>,
    /// Whether the ledger has removed a process since the reading began.
    pub has_removed: bool,
    /// Whether the reading refers to one before it that is not known.
    pub is_broken: bool,
}

impl OpenReading {
    /// Returns whether the bytes of device and processes can be compared, if the reading ends with this result.
    pub fn agrees(&self, result: u16) -> bool {
        let (Some(first), Some(last)) = (self.first_used, self.last) else { return false };
        // Unified memory changes all the time with the host's, so it is not compared; the value after the list counts.
        let is_unchanged = last.unified || first == last.used_bytes;
        is_unchanged
            && self.device_samples >= 2
            && result == 0
            && !self.is_broken
            && self.listed_bytes.is_some()
    }

    /// Returns the used bytes of all processes of the reading; `None` if those of one are unknown.
    pub fn sum_of(&self, listed: &[(ProcessKey, u64)]) -> Option<u64> {
        self.listed_bytes?;
        listed.iter().try_fold(0_u64, |sum, (_, used)| sum.checked_add(*used))
    }
}

/// The last reading of a device, if it found the processes without an agent as the reading before did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RepeatedReading {
    /// Number of the first reading that found them so. Samples of this reading and of later ones are confirmed.
    pub since: u64,
    /// End of the reading (ns).
    pub t1_ns: u64,
}

/// One device in a snapshot of the ledger.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceView {
    pub name: DeviceName,
    /// NVML's index of the device; the ordinal that a process reported, while NVML has not reported the device.
    pub ordinal: u16,
    pub model: String,
    pub total_bytes: Option<u64>,
    pub latest: Option<DeviceReading>,
    /// Used bytes of the device in the last minute.
    pub recent: LastMinute,
    /// The last reading in which device memory was the same before and after the process list; absent if there was none.
    pub agreed: Option<AgreedReading>,
    /// The last reading, if it only confirmed the samples of processes without an agent.
    pub repeated: Option<RepeatedReading>,
    pub faults: Faults,
}

impl DeviceView {
    /// Returns the end of the last reading (ns), if it confirmed the samples that processes without an agent have of this reading.
    pub fn confirmed_ns(&self, number: u64) -> Option<u64> {
        self.repeated.filter(|repeated| number >= repeated.since).map(|repeated| repeated.t1_ns)
    }
}

/// Minimum time that [`LastMinute::range`] covers (ns).
pub const RECENT_NS: u64 = 60_000_000_000;
/// Number of pieces that a minute is divided into; one more piece is kept, because the newest is incomplete.
const PIECES: usize = 6;
const PIECE_NS: u64 = RECENT_NS / PIECES as u64;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Piece {
    /// Number of pieces from time 0 up to and including this one; 0 if the piece has no reading.
    number: u64,
    min: u64,
    max: u64,
    /// Time (ns) and value of the first reading in this piece of the last minute.
    first: (u64, u64),
}

/// Minimum, maximum and growth of an amount in the last minute, in seven pieces of ten seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LastMinute {
    pieces: [Piece; PIECES + 1],
    /// Time (ns) and value of the newest reading.
    newest: (u64, u64),
}

impl LastMinute {
    /// Adds a reading. A late one is ignored if its piece (of ten seconds) is in use for a later minute.
    pub(crate) fn add(&mut self, time_ns: u64, value: u64) {
        let number = time_ns / PIECE_NS + 1;
        let piece = &mut self.pieces[(number % (PIECES as u64 + 1)) as usize];
        if piece.number < number {
            *piece = Piece { number, min: value, max: value, first: (time_ns, value) };
        } else if piece.number == number {
            (piece.min, piece.max) = (piece.min.min(value), piece.max.max(value));
        }
        if time_ns >= self.newest.0 {
            self.newest = (time_ns, value);
        }
    }

    /// Returns minimum and maximum of the readings up to the newest one, from at least a minute before it; `None` without readings.
    pub fn range(&self) -> Option<(u64, u64)> {
        let oldest = (self.newest.0 / PIECE_NS + 1).saturating_sub(PIECES as u64).max(1);
        let pieces = self.pieces.iter().filter(|piece| piece.number >= oldest);
        pieces.map(|piece| (piece.min, piece.max)).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
    }

    /// Returns how much the newest value exceeds the oldest value of the minute before it, and the time between them; `None` with
    /// fewer than two values.
    pub(crate) fn growth(&self) -> Option<(i64, u64)> {
        let (time_ns, value) = self.newest;
        let firsts = self.pieces.iter().filter(|piece| piece.number > 0).map(|piece| piece.first);
        let (since_ns, before) =
            firsts.filter(|(since_ns, _)| since_ns.saturating_add(RECENT_NS) >= time_ns).min()?;
        (since_ns < time_ns).then(|| (value.wrapping_sub(before) as i64, time_ns - since_ns))
    }
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

    #[test]
    fn extremes_stay_for_a_minute_and_then_go() {
        let mut recent = LastMinute::default();
        assert_eq!(recent.range(), None);
        let second = 1_000_000_000;
        recent.add(1000 * second, 50);
        recent.add(1001 * second, 90);
        recent.add(1001 * second + 1, 50);
        for at in 1002..1061 {
            recent.add(at * second, 50);
        }
        assert_eq!(recent.range(), Some((50, 90)), "59 s later");
        for at in 1061..1071 {
            recent.add(at * second, 50);
        }
        assert_eq!(recent.range(), Some((50, 50)), "70 s later");
        recent.add(1071 * second, 10);
        recent.add(900 * second, 1);
        assert_eq!(recent.range(), Some((10, 50)), "a reading of long ago says nothing");
    }

    #[test]
    fn growth_is_against_a_minute_ago() {
        let second = 1_000_000_000;
        let mut last_minute = LastMinute::default();
        assert_eq!(last_minute.growth(), None);
        last_minute.add(1000 * second, 50);
        assert_eq!(last_minute.growth(), None, "one reading says nothing");
        last_minute.add(1003 * second, 70);
        assert_eq!(last_minute.growth(), Some((20, 3 * second)));
        (1004..1200).for_each(|at| last_minute.add(at * second, at));
        assert_eq!(last_minute.growth(), Some((59, 59 * second)));
        last_minute.add(1200 * second, 100);
        assert_eq!(last_minute.growth(), Some((100 - 1140, 60 * second)));
        last_minute.add(5000 * second, 7);
        assert_eq!(last_minute.growth(), None, "nothing is known of the minute before");
    }
}
