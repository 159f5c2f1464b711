//! What an earlier life of the daemon had heard of a process. This ledger starts from a resync and counts all before it as lost;
//! what that life had booked is in the store, and was not.

use crate::process::Coverage;

/// Of the process's ordered records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Earlier {
    /// Booked then.
    pub events: u64,
    /// Lost then.
    pub lost: u64,
}

impl Coverage {
    /// Ordered records that nobody has booked, neither this ledger nor the daemon's earlier life.
    pub fn lost_in_all(&self) -> u64 {
        let Some(earlier) = self.earlier else { return self.lost };
        let heard = earlier.events.saturating_add(earlier.lost);
        self.lost.saturating_sub(self.before.min(heard)).saturating_add(earlier.lost)
    }

    /// Something is missing, now or in what led to the peaks: `partial`.
    pub fn is_partial(&self) -> bool {
        let is_open = self.partial.is_some_and(|partial| partial.state);
        is_open
            || self.blind.doubt
            || self.partial.is_some() && (self.earlier.is_none() || self.lost_in_all() > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Partial;

    #[test]
    fn what_was_heard_before_is_not_lost() {
        let partial = |state| Some(Partial { since_ns: 1, state });
        let mut coverage = Coverage { lost: 100, before: 100, partial: partial(true), ..Coverage::default() };
        assert_eq!((coverage.lost_in_all(), coverage.is_partial()), (100, true));
        coverage.earlier = Some(Earlier { events: 100, lost: 0 });
        assert_eq!((coverage.lost_in_all(), coverage.is_partial()), (0, true), "its state is not known yet");
        coverage.partial = partial(false);
        assert!(!coverage.is_partial());
        // Said to the daemon that was killed, which had not stored it.
        coverage.earlier = Some(Earlier { events: 90, lost: 0 });
        assert_eq!((coverage.lost_in_all(), coverage.is_partial()), (10, true));
        // Lost by that life, and by this one.
        coverage = Coverage { lost: 103, earlier: Some(Earlier { events: 95, lost: 5 }), ..coverage };
        assert_eq!((coverage.lost_in_all(), coverage.is_partial()), (8, true));
        coverage.earlier = Some(Earlier { events: 1000, lost: 0 });
        assert_eq!(coverage.lost_in_all(), 3, "no more than was missing at the beginning");
        let blind = crate::Blind { doubt: true, ..crate::Blind::default() };
        assert!(Coverage { blind, ..Coverage::default() }.is_partial());
    }
}
