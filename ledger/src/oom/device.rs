//! Processes that held the device when memory ran out: as of a reading, updated to that moment.

use crate::base::device::AgreedReading;
use crate::base::identity::ProcessKey;
use gpumem_model::run::DeviceReading;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A process that held memory of the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its identity.
    pub key: ProcessKey,
    /// Its user, according to /proc.
    pub user: Option<String>,
    /// Bytes that NVML charged; for the process itself, plus the bytes that it has allocated since.
    pub used_bytes: i64,
    /// Growth in bytes, and the time in ns that it covers: a minute, or less for a younger process.
    pub growth: Option<(i64, u64)>,
}

/// The device when memory ran out. Holders, unaccounted bytes, the driver's share and free bytes sum to its size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OomDevice {
    /// Time of the NVML reading.
    pub read_ns: u64,
    /// Size.
    pub total_bytes: u64,
    /// Free bytes of the reading, less the bytes that the process has allocated since.
    pub free_bytes: i64,
    /// Bytes that the driver reserves; absent where NVML does not report them separately.
    pub system_bytes: Option<u64>,
    /// Device used minus the sum over its processes.
    pub unaccounted_bytes: i64,
    /// The device uses the host's memory: unaccounted bytes are those of the rest of the host.
    pub unified: bool,
    /// The process itself, then the others, the largest first.
    pub holders: Vec<Holder>,
    /// Number of further holders, and their used bytes.
    pub others: (u32, i64),
}

/// A device according to a reading, and the processes that it listed.
#[derive(Debug)]
pub(crate) struct Listing {
    pub agreed: AgreedReading,
    pub listed: Vec<(ProcessKey, u64)>,
    /// Highest `used` of the device from this reading to the next one; updated while the listing is shared.
    highest_bytes: AtomicU64,
}

impl Listing {
    pub fn new(agreed: AgreedReading, listed: Vec<(ProcessKey, u64)>) -> Self {
        let highest_bytes = AtomicU64::new(agreed.reading.used_bytes);
        Listing { agreed, listed, highest_bytes }
    }

    /// Notes a later reading of the device without lists.
    pub fn see(&self, used_bytes: u64) {
        self.highest_bytes.fetch_max(used_bytes, Relaxed);
    }

    /// Returns the minimum of free bytes between this reading and the next one.
    pub fn least_free_bytes(&self) -> u64 {
        let DeviceReading { used_bytes, free_bytes, .. } = self.agreed.reading;
        free_bytes.saturating_sub(self.highest_bytes.load(Relaxed).saturating_sub(used_bytes))
    }

    /// Returns the bytes with which a process was listed.
    pub fn of(&self, key: ProcessKey) -> Option<u64> {
        self.listed.iter().find(|(of, _)| *of == key).map(|(_, used)| *used)
    }
}

impl OomDevice {
    /// Builds the state of the device. `own`: bytes that the process holds now, if known, and their lower bound. `who`: returns
    /// user and growth of a process.
    pub(crate) fn of(
        listing: &Listing,
        total_bytes: Option<u64>,
        key: ProcessKey,
        own: (Option<i64>, i64),
        who: impl Fn(ProcessKey) -> (Option<String>, Option<(i64, u64)>),
    ) -> Self {
        let DeviceReading { time_ns, used_bytes, free_bytes, system_reserved_bytes, unified, .. } =
            listing.agreed.reading;
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let read = listing.of(key).map_or(0, signed);
        let own = own.0.unwrap_or(read.max(own.1));
        let grown = own.saturating_sub(read);
        let mut holders: Vec<Holder> = listing
            .listed
            .iter()
            .filter(|(other, _)| *other != key)
            .map(|&(key, used)| {
                let (user, growth) = who(key);
                Holder { key, user, used_bytes: signed(used), growth }
            })
            .collect();
        holders.sort_by_key(|holder| (std::cmp::Reverse(holder.used_bytes), holder.key));
        let more = holders.split_off(holders.len().min(MAX_HOLDERS));
        let rest = more.iter().fold(0_i64, |sum, holder| sum.saturating_add(holder.used_bytes));
        let (user, growth) = who(key);
        let growth = growth.map(|(bytes, in_ns)| (bytes.saturating_add(grown), in_ns));
        holders.insert(0, Holder { key, user, used_bytes: own, growth });
        let system = system_reserved_bytes.unwrap_or(0);
        let known = used_bytes.saturating_add(free_bytes).saturating_add(system);
        // The size may exceed the sum by bytes that NVML does not report: they are unaccounted.
        let total_bytes = total_bytes.unwrap_or(known);
        OomDevice {
            read_ns: time_ns,
            total_bytes,
            free_bytes: signed(free_bytes).saturating_sub(grown),
            system_bytes: system_reserved_bytes,
            unaccounted_bytes: listing
                .agreed
                .unaccounted_bytes
                .saturating_add(signed(total_bytes).saturating_sub(signed(known))),
            unified,
            holders,
            others: (more.len() as u32, rest),
        }
    }
}

/// Maximum number of holders that are listed separately.
const MAX_HOLDERS: usize = 16;
