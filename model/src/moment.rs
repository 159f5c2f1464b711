//! Moment: memory that a process held on a device at one time. Its used bytes are predating (allocated before the agent started)
//! + tracked + untrackable bytes if all three are known.

use crate::cell::Amounts;
use crate::fields::fields;
use crate::gap::UntrackableParts;
use serde::{Deserialize, Serialize};

fields! {
    /// The process's bytes by cell at one time, and the bytes that NVML charged for them.
    #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
    pub struct Moment {
        time_ns: u64;
        /// Sum of `amounts`; absent for a process without an agent.
        tracked_bytes: Option<i64>;
        amounts: Amounts;
        /// Untracked bytes allocated before the agent started; absent if the agent started late and the amount is not known yet.
        predates_bytes: Option<i64>;
        /// Bytes that NVML charges beyond tracked and predating bytes; absent without a sample.
        untrackable_bytes: Option<i64>;
        /// Parts of `untrackable_bytes`; absent if they are unknown.
        #[serde(default)]
        parts: Option<UntrackableParts>;
        /// Why the newest sample had no used bytes, as text; the moment then comes from an older sample.
        #[serde(default)]
        used_absence: Option<String>;
        /// Bytes that NVML charges to a process without an agent.
        uncovered_used_bytes: Option<u64>;
        /// Time from the moment to the sample that gave `untrackable_bytes` (ns): negative if the sample is earlier, 0 if it was
        /// taken at the moment.
        gap_distance_ns: i64;
        /// Minimum and maximum of the tracked bytes if memory changed while NVML was read. If both are equal, a call of unknown
        /// size was in progress, and they are a lower bound.
        torn: Option<(i64, i64)>;
        /// Whether the sample was closed without the agent's records up to the sample's time.
        stale: bool;
        /// Whether records had been lost and no resync (the agent restates its live rows) had completed since.
        partial: bool;
    }
}

impl Moment {
    /// Keeps the higher moment of two runs of one life. A moment with only used bytes ranks below any with tracked bytes.
    pub(crate) fn higher(earlier: &mut Moment, later: Moment) {
        let height = |moment: &Moment| {
            (moment.tracked_bytes, moment.uncovered_used_bytes.filter(|_| moment.tracked_bytes.is_none()))
        };
        if height(earlier) <= height(&later) {
            *earlier = later;
        }
    }

    /// Returns the parts of the untrackable bytes. If they are unknown (runs of older versions), all bytes are unexplained.
    pub fn gap_parts(&self) -> Option<UntrackableParts> {
        let untrackable = self.untrackable_bytes?;
        Some(
            self.parts
                .filter(|parts| parts.sum() == untrackable)
                .unwrap_or(UntrackableParts::unknown(untrackable)),
        )
    }

    /// Returns the bytes that NVML charges; an estimate if the untrackable bytes come from another time.
    pub fn used_bytes(&self) -> Option<i64> {
        match self.tracked_bytes {
            Some(tracked) => Some(self.predates_bytes? + tracked + self.untrackable_bytes?),
            None => self.uncovered_used_bytes.and_then(|used| i64::try_from(used).ok()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tracked_moment_is_higher_than_one_without_an_agent() {
        let tracked = |bytes| Moment { tracked_bytes: Some(bytes), ..Moment::default() };
        let used = |bytes| Moment { uncovered_used_bytes: Some(bytes), ..Moment::default() };
        let higher = |mut earlier: Moment, later: Moment| {
            Moment::higher(&mut earlier, later);
            earlier
        };
        assert_eq!(higher(used(9), tracked(5)), tracked(5));
        assert_eq!(higher(tracked(5), used(9)), tracked(5));
        assert_eq!(higher(used(9), used(7)), used(9));
        let later = Moment { time_ns: 2, ..tracked(5) };
        assert_eq!(higher(tracked(5), later.clone()), later);
    }
}
