//! What a process held on a device at one time. `used` is `predates + tracked + untrackable` wherever all of them are known.

use crate::gap::Parts;
use gpumem_wire::Absence;
use serde::{Deserialize, Serialize};

/// One identity.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Moment {
    /// When.
    pub time_ns: u64,
    /// Sum of `amounts`; absent for a process without an agent.
    pub tracked_bytes: Option<i64>,
    /// (index in [`Run::cells`], bytes), without zeros.
    pub amounts: Vec<(u32, i64)>,
    /// Bytes older than the agent; absent where it came late and nothing has told them yet.
    pub predates_bytes: Option<i64>,
    /// What NVML charges beyond that; absent without a sample.
    pub untrackable_bytes: Option<i64>,
    /// Why `untrackable_bytes` is what it is; absent where nothing tells.
    #[serde(default)]
    pub parts: Option<Parts>,
    /// Why the newest sample had no `used`, see [`absence_name`]: the moment is then an older sample's.
    #[serde(default)]
    pub used_absence: Option<String>,
    /// For processes without an agent: what NVML charges.
    pub uncovered_used_bytes: Option<u64>,
    /// The gap was taken from a sample this far away; 0: it was measured at this moment.
    pub gap_distance_ns: i64,
    /// Memory moved while NVML was read: lowest and highest `tracked`. Equal ones are a lower bound: a call was under way whose
    /// bytes nobody knew.
    pub torn: Option<(i64, i64)>,
    /// The sample was closed without the agent's word.
    pub stale: bool,
    /// Records had been lost and no resync had ended.
    pub partial: bool,
}

impl Moment {
    /// The parts of the gap; all of it is unexplained where nothing told them (runs of older versions).
    pub fn gap_parts(&self) -> Option<Parts> {
        let untrackable = self.untrackable_bytes?;
        Some(self.parts.filter(|parts| parts.sum() == untrackable).unwrap_or(Parts::unknown(untrackable)))
    }

    /// What NVML charges (or, with a gap from elsewhere, would have charged).
    pub fn used_bytes(&self) -> Option<i64> {
        match self.tracked_bytes {
            Some(tracked) => Some(self.predates_bytes? + tracked + self.untrackable_bytes?),
            None => self.uncovered_used_bytes.and_then(|used| i64::try_from(used).ok()),
        }
    }
}

/// Why a sample has no `used`, in words.
pub fn absence_name(absence: Absence, list_failed: bool) -> &'static str {
    match absence {
        Absence::NotAvailable => "not available",
        Absence::NoPermission => "no permission",
        Absence::NotListed => "not listed",
        Absence::GpuLost => "gpu lost",
        Absence::Timeout => "timeout",
        Absence::NotSupported => "not supported",
        Absence::WrongNamespace => "wrong namespace",
        Absence::Impossible => "impossible value",
        _ if list_failed => "list failed",
        _ => "unknown",
    }
}
