//! What a process held on a device at one time. `used` is `predates + tracked + untrackable` wherever all of them are known.

use crate::cell::Amounts;
use crate::fields::fields;
use crate::gap::Parts;
use serde::{Deserialize, Serialize};

fields! {
    /// What was held, and what NVML charged for it.
    #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
    pub struct Moment {
        /// When.
        time_ns: u64;
        /// Sum of `amounts`; absent for a process without an agent.
        tracked_bytes: Option<i64>;
        /// Tracked bytes by cell.
        amounts: Amounts;
        /// Bytes older than the agent; absent where it came late and nothing has told them yet.
        predates_bytes: Option<i64>;
        /// What NVML charges beyond that; absent without a sample.
        untrackable_bytes: Option<i64>;
        /// Why `untrackable_bytes` is what it is; absent where nothing tells.
        #[serde(default)]
        parts: Option<Parts>;
        /// Why the newest sample had no `used`, see [`absence_name`]: the moment is then an older sample's.
        #[serde(default)]
        used_absence: Option<String>;
        /// For processes without an agent: what NVML charges.
        uncovered_used_bytes: Option<u64>;
        /// The gap was taken from a sample this far away; 0: it was measured at this moment.
        gap_distance_ns: i64;
        /// Memory moved while NVML was read: lowest and highest `tracked`. Equal ones are a lower bound: a call was under way whose
        /// bytes nobody knew.
        torn: Option<(i64, i64)>;
        /// The sample was closed without the agent's word.
        stale: bool;
        /// Records had been lost and no resync had ended.
        partial: bool;
    }
}

impl Moment {
    /// Keeps the higher moment of two runs of one life. A run without an agent has `used` alone, which is no height beside `tracked`.
    pub(crate) fn higher(earlier: &mut Moment, later: Moment) {
        let height = |moment: &Moment| {
            (moment.tracked_bytes, moment.uncovered_used_bytes.filter(|_| moment.tracked_bytes.is_none()))
        };
        if height(earlier) <= height(&later) {
            *earlier = later;
        }
    }

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
