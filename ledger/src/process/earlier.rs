//! What an earlier life of the daemon had heard of a process. This ledger starts from a resync and counts all before it as lost;
//! what that life had booked is in the store, and was not.

use crate::process::Coverage;
use gpumem_model::run::Program;

/// Of the process's ordered records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Earlier {
    /// Booked then.
    pub events: u64,
    /// Lost then.
    pub lost: u64,
    /// The program that spoke, where that is known. Records of programs that the process was before are no part of what this
    /// ledger missed.
    pub program: Option<Program>,
}

impl Earlier {
    /// Of what this ledger missed at the beginning, so much at most was heard then.
    fn heard(&self, first: Option<&Program>) -> u64 {
        match self.program {
            Some(then) if first.is_some_and(|first| first.instance != then.instance) => 0,
            Some(then) => then.heard,
            None => self.events.saturating_add(self.lost),
        }
    }
}

impl Coverage {
    /// Ordered records that nobody has booked, neither this ledger nor the daemon's earlier life.
    pub fn lost_in_all(&self) -> u64 {
        let Some(earlier) = self.earlier else { return self.lost };
        let heard = earlier.heard(self.programs.first());
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
        let earlier = |events, lost| Some(Earlier { events, lost, program: None });
        let mut coverage = Coverage { lost: 100, before: 100, partial: partial(true), ..Coverage::default() };
        assert_eq!((coverage.lost_in_all(), coverage.is_partial()), (100, true));
        coverage.earlier = earlier(100, 0);
        assert_eq!((coverage.lost_in_all(), coverage.is_partial()), (0, true), "its state is not known yet");
        coverage.partial = partial(false);
        assert!(!coverage.is_partial());
        // Said to the daemon that was killed, which had not stored it.
        coverage.earlier = earlier(90, 0);
        assert_eq!((coverage.lost_in_all(), coverage.is_partial()), (10, true));
        // Lost by that life, and by this one.
        coverage = Coverage { lost: 103, earlier: earlier(95, 5), ..coverage };
        assert_eq!((coverage.lost_in_all(), coverage.is_partial()), (8, true));
        coverage.earlier = earlier(1000, 0);
        assert_eq!(coverage.lost_in_all(), 3, "no more than was missing at the beginning");
        let blind = crate::Blind { doubt: true, ..crate::Blind::default() };
        assert!(Coverage { blind, ..Coverage::default() }.is_partial());
    }
    #[test]
    fn records_of_another_program_were_not_heard_of_this_one() {
        let program = |instance, heard| Program { instance, heard };
        let earlier = Some(Earlier { events: 120, lost: 0, program: Some(program(2, 100)) });
        // The process was another program first, which said 20 records.
        let mut coverage = Coverage {
            lost: 110,
            before: 110,
            earlier,
            programs: vec![program(2, 130)],
            ..Coverage::default()
        };
        assert_eq!(coverage.lost_in_all(), 10);
        // It became one that the daemon's earlier life never heard.
        coverage.programs = vec![program(3, 130), program(2, 1)];
        assert_eq!(coverage.lost_in_all(), 110);
    }
}
