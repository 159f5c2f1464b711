//! How complete the sums of a process are, and facts about the process from other sources.

use crate::base::quota::QuotaExceeded;
use gpumem_model::coverage;
use gpumem_model::run::Program;
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

/// Maximum count of lost records of a process: a billion a second for a day. Without this maximum, one hostile process could
/// dominate sums over all processes.
pub(crate) const MAX_LOST: u64 = 1 << 46;

/// Facts that the daemon observed about a process, and claims that the process makes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// User id of the owner, as the daemon observed it.
    pub uid: Option<u64>,
    pub parent_pid: Option<u64>,
    /// Values from the kernel and from files of the machine: command, comm, user, cgroup, ...
    pub seen: BTreeMap<String, String>,
    /// Values from the process's environment, as its agent reports them: rank, job, ... Not verified.
    pub claims: BTreeMap<String, String>,
}

/// Why the agent cannot use CUPTI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocked {
    /// Time at which the agent first reported the refusal (ns).
    pub since_ns: u64,
    pub result: u16,
    /// Name of the client that holds CUPTI, for code [`gpumem_model::run::SUBSCRIPTION_HELD`]; for other codes, the reason.
    pub by: String,
}

/// How complete the sums of a process are: the coverage as a run stores it, and what only the ledger needs. Layers and marks of
/// the run are filled in for snapshots only.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Coverage {
    pub run: coverage::Coverage,
    pub blocked: Option<Blocked>,
    /// Whether the agent sees no calls, because it was paused on request or has stopped.
    pub paused: bool,
    /// Whether the agent has stopped.
    pub disarmed: bool,
    /// Number of records missing before the first one that this ledger received; part of `lost`.
    pub before: u64,
    /// Tracked bytes after the first resync, if earlier records were missing.
    pub held_before: Option<i64>,
    pub earlier: Option<EarlierRecords>,
    /// The limit of the daemon's memory for records that was reached: of the process, its user, or all processes. Records that would
    /// add data are refused and count as lost.
    pub full: Option<QuotaExceeded>,
}

impl Deref for Coverage {
    type Target = coverage::Coverage;

    fn deref(&self) -> &Self::Target {
        &self.run
    }
}

impl DerefMut for Coverage {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.run
    }
}

/// Records of the process that an earlier daemon booked. This ledger starts from a resync and counts all records before it as
/// lost; those that the earlier daemon booked are in the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EarlierRecords {
    /// Number of records that the earlier daemon booked.
    pub events: u64,
    pub lost: u64,
    /// The program that ran then, if known: exec() replaces the program of a process.
    pub program: Option<Program>,
}

impl EarlierRecords {
    /// Returns how many of the records that this ledger missed at its start the earlier daemon may have received. `first`: the
    /// first program that this ledger has records of.
    fn received(&self, first: Option<&Program>) -> u64 {
        match self.program {
            Some(program) if first.is_some_and(|first| first.instance != program.instance) => 0,
            Some(program) => program.heard,
            None => self.events.saturating_add(self.lost),
        }
    }
}

impl Coverage {
    pub(crate) fn lose(&mut self, count: u64) {
        self.run.lost = self.run.lost.saturating_add(count).min(MAX_LOST);
        if self.events == 0 {
            self.before = self.before.saturating_add(count);
        }
        self.mark_partial();
    }

    /// Marks the sums as unknown until a resync has completed, and the peaks as lower bounds.
    pub(crate) fn mark_partial(&mut self) {
        (self.run.partial_state, self.run.partial_history) = (true, true);
    }

    /// Returns the number of records that neither this ledger nor the earlier daemon has booked.
    pub fn lost_in_all(&self) -> u64 {
        let Some(earlier) = self.earlier else { return self.lost };
        let received = earlier.received(self.programs.first());
        self.lost.saturating_sub(self.before.min(received)).saturating_add(earlier.lost)
    }

    /// Whether sums or peaks are `partial`, because records are missing.
    pub fn is_partial(&self) -> bool {
        let has_lost = self.earlier.is_none() || self.lost_in_all() > 0;
        self.partial_state || self.blind_doubt || self.partial_history && has_lost
    }
}

/// Parses `key=value` lines; a line without `=` is a key with an empty value.
pub(crate) fn parse_lines(text: &str) -> BTreeMap<String, String> {
    text.lines()
        .filter(|line| !line.is_empty())
        .map(|line| line.split_once('=').unwrap_or((line, "")))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost(count: u64, programs: Vec<Program>) -> Coverage {
        let run = coverage::Coverage { lost: count, programs, ..coverage::Coverage::default() };
        Coverage { run, before: count, ..Coverage::default() }
    }

    #[test]
    fn what_was_heard_before_is_not_lost() {
        let earlier = |events, lost| Some(EarlierRecords { events, lost, program: None });
        let mut coverage = lost(100, Vec::new());
        coverage.mark_partial();
        assert_eq!((coverage.lost_in_all(), coverage.is_partial()), (100, true));
        coverage.earlier = earlier(100, 0);
        assert_eq!((coverage.lost_in_all(), coverage.is_partial()), (0, true), "its state is not known yet");
        coverage.partial_state = false;
        assert!(!coverage.is_partial());
        // Received by the daemon that was killed, but not stored.
        coverage.earlier = earlier(90, 0);
        assert_eq!((coverage.lost_in_all(), coverage.is_partial()), (10, true));
        // Lost by both daemons.
        (coverage.lost, coverage.earlier) = (103, earlier(95, 5));
        assert_eq!((coverage.lost_in_all(), coverage.is_partial()), (8, true));
        coverage.earlier = earlier(1000, 0);
        assert_eq!(coverage.lost_in_all(), 3, "no more than was missing at the beginning");
        let run = coverage::Coverage { blind_doubt: true, ..coverage::Coverage::default() };
        assert!(Coverage { run, ..Coverage::default() }.is_partial());
    }

    #[test]
    fn records_of_another_program_were_not_heard_of_this_one() {
        let program = |instance, heard| Program { instance, heard };
        // The process was another program first, which sent 20 records.
        let mut coverage = lost(110, vec![program(2, 130)]);
        coverage.earlier = Some(EarlierRecords { events: 120, lost: 0, program: Some(program(2, 100)) });
        assert_eq!(coverage.lost_in_all(), 10);
        // It became a program that the earlier daemon never received records from.
        coverage.programs = vec![program(3, 130), program(2, 1)];
        assert_eq!(coverage.lost_in_all(), 110);
    }
}
