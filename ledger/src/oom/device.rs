//! State of a device when memory ran out: an NVML reading, corrected by the bytes that the process has allocated since.

use crate::base::device::AgreedReading;
use crate::base::identity::ProcessKey;
use gpumem_model::run::{DeviceReading, Holder, OomDevice};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Maximum number of processes that are listed one by one; the others are one sum.
const MAX_HOLDERS: usize = 16;

/// An NVML reading of a device, and the processes that it listed with their used bytes.
#[derive(Debug)]
pub(crate) struct Listing {
    pub agreed: AgreedReading,
    /// Readings share the list while it does not change.
    pub listed: Arc<[(ProcessKey, u64)]>,
    /// Highest used bytes of the device from this reading to the next one; atomic because the listing is shared.
    highest_bytes: AtomicU64,
}

impl Listing {
    pub fn new(agreed: AgreedReading, listed: Arc<[(ProcessKey, u64)]>) -> Self {
        let highest_bytes = AtomicU64::new(agreed.reading.used_bytes);
        Listing { agreed, listed, highest_bytes }
    }

    /// Records the device's used bytes at a time after the reading.
    pub fn note_used(&self, used_bytes: u64) {
        self.highest_bytes.fetch_max(used_bytes, Relaxed);
    }

    /// Returns the lowest free bytes between this reading and the next one.
    pub fn least_free_bytes(&self) -> u64 {
        let DeviceReading { used_bytes, free_bytes, .. } = self.agreed.reading;
        free_bytes.saturating_sub(self.highest_bytes.load(Relaxed).saturating_sub(used_bytes))
    }

    /// Returns the used bytes of a process; `None` if the reading did not list it.
    pub fn used_by(&self, key: ProcessKey) -> Option<u64> {
        self.listed.iter().find(|(listed, _)| *listed == key).map(|(_, used)| *used)
    }

    /// Returns the state of the device when memory ran out in process `key`. `own`: bytes that the process holds now, if known, and
    /// its tracked bytes, which are their lower bound. `owner`: returns the user, growth and first time of a process.
    pub fn oom_device(
        &self,
        total_bytes: Option<u64>,
        key: ProcessKey,
        own: (Option<i64>, i64),
        owner: impl Fn(ProcessKey) -> Holder,
    ) -> OomDevice {
        let DeviceReading { time_ns, used_bytes, free_bytes, system_reserved_bytes, unified, .. } =
            self.agreed.reading;
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let read = self.used_by(key).map_or(0, signed);
        let own = own.0.unwrap_or(read.max(own.1));
        let grown = own.saturating_sub(read);
        let holder = |key: ProcessKey, used_bytes: i64, grown: i64| {
            let owner = owner(key);
            let growth_bytes = owner.growth_bytes.map(|bytes| bytes.saturating_add(grown));
            Holder { pid: key.pid, used_bytes, growth_bytes, ..owner }
        };
        let others = self.listed.iter().filter(|(other, _)| *other != key);
        let mut holders: Vec<Holder> = others.map(|&(key, used)| holder(key, signed(used), 0)).collect();
        holders.sort_by_key(|holder| (std::cmp::Reverse(holder.used_bytes), holder.pid));
        let more = holders.split_off(holders.len().min(MAX_HOLDERS));
        let rest = more.iter().fold(0_i64, |sum, holder| sum.saturating_add(holder.used_bytes));
        holders.insert(0, holder(key, own, grown));
        let system = system_reserved_bytes.unwrap_or(0);
        let reported = used_bytes.saturating_add(free_bytes).saturating_add(system);
        // The device's size may exceed the sum by bytes that NVML does not report; these bytes count as unaccounted.
        let total_bytes = total_bytes.unwrap_or(reported);
        let unreported = signed(total_bytes).saturating_sub(signed(reported));
        OomDevice {
            read_ns: time_ns,
            total_bytes,
            free_bytes: signed(free_bytes).saturating_sub(grown),
            system_bytes: system_reserved_bytes,
            unaccounted_bytes: self.agreed.unaccounted_bytes.saturating_add(unreported),
            unified,
            holders,
            others: (more.len() as u32, rest),
        }
    }
}
