//! How complete a process's numbers are, and facts about the process from other sources.

use crate::base::quota::QuotaExceeded;
use gpumem_model::run::Program;
use std::collections::BTreeMap;

/// Maximum of the counted losses of a process: a billion records a second for a day. Without this bound, a hostile peer's number
/// would dominate sums over processes.
pub(crate) const MOST_LOST: u64 = 1 << 46;

/// Facts that the daemon observed about a process, and claims that the process makes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// User id of the owner, as the daemon observed it.
    pub uid: Option<u64>,
    /// Parent's pid.
    pub parent_pid: Option<u64>,
    /// From /proc: command, comm, user, cgroup.
    pub seen: BTreeMap<String, String>,
    /// From the agent's environment: rank, job. Not verified.
    pub claims: BTreeMap<String, String>,
}

/// The agent cannot use CUPTI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocked {
    /// Time of the first such report.
    pub since_ns: u64,
    /// CUPTI's result.
    pub result: u16,
    /// With [`Blocked::HELD`], the name of the other client if known; otherwise the reason.
    pub by: String,
}

impl Blocked {
    /// Another client holds the CUPTI subscription.
    pub const HELD: u16 = 39;
}

/// Lost records, and their effect on the sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partial {
    /// Time of the first loss.
    pub since_ns: u64,
    /// The current state is unknown, too: no resync has completed since the last loss.
    pub state: bool,
}

/// How complete the numbers of a process are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Coverage {
    /// An agent reports its allocations.
    pub covered: bool,
    /// The agent attached after the first allocations.
    pub late: bool,
    /// See [`Blocked`].
    pub blocked: Option<Blocked>,
    /// Paused on request.
    pub paused: bool,
    /// See [`Blind`].
    pub blind: Blind,
    /// Set at the first loss and kept: peaks are lower bounds from then on.
    pub partial: Option<Partial>,
    /// Ordered records applied.
    pub events: u64,
    /// Driver allocations among them.
    pub allocations: u64,
    /// Bytes of these driver allocations; frees are not subtracted.
    pub allocated_bytes: u64,
    /// Ordered records lost.
    pub lost: u64,
    /// Records missing before the first one that this ledger received; part of `lost`.
    pub before: u64,
    /// Bytes held when the first records came, if earlier ones were missing.
    pub held_before: Option<i64>,
    /// Ordered records withheld on request (pause, mute): no losses.
    pub withheld: u64,
    /// See [`Earlier`].
    pub earlier: Option<Earlier>,
    /// Programs that the process ran: the first one, which `before` belongs to, and the latest ones, in order.
    pub programs: Vec<Program>,
    /// Samples closed before the agent's records reached their end.
    pub stale_samples: u64,
    /// Driver allocations that failed.
    pub failed_allocations: u64,
    /// Steps that the process reported.
    pub steps: u64,
    /// The quota that it has reached: records that would increase its memory use are rejected and count as lost.
    pub full: Option<QuotaExceeded>,
}

/// Maximum number of blind windows; if there are more, the shortest are dropped.
const KEPT: usize = 32;

/// Why the agent saw nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlindCause {
    /// Another client held CUPTI; its name, if known.
    Held,
    /// CUPTI could not be used, and why.
    Refused,
    /// The program paused the agent.
    Paused,
    /// The agent stopped, and why.
    Disarmed,
}

/// An interval without callbacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlindWindow {
    /// Begin.
    pub from_ns: u64,
    /// End; absent while it lasts.
    pub to_ns: Option<u64>,
    /// Cause.
    pub cause: BlindCause,
    /// Name of the other client, or the reason.
    pub by: String,
}

/// Intervals without callbacks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Blind {
    /// Blind windows, oldest first.
    pub windows: Vec<BlindWindow>,
    /// Number of all intervals, dropped ones included.
    pub count: u64,
    /// Total length of the intervals that have ended.
    pub ended_ns: u64,
    /// Memory was already tracked before one of the intervals: the sums are not exact since then.
    pub doubt: bool,
}

impl Blind {
    /// Returns the total length; an open interval counts up to `now_ns`.
    pub fn total_ns(&self, now_ns: u64) -> u64 {
        let lasting = self.open().map_or(0, |window| now_ns.saturating_sub(window.from_ns));
        self.ended_ns.saturating_add(lasting)
    }

    /// Returns the open interval.
    pub fn open(&self) -> Option<&BlindWindow> {
        self.windows.last().filter(|window| window.to_ns.is_none())
    }

    /// Begins an interval, unless one with the same cause is open.
    pub(crate) fn begin(&mut self, from_ns: u64, cause: BlindCause, by: &str) {
        if self.open().is_some_and(|window| (window.cause, window.by.as_str()) == (cause, by)) {
            return;
        }
        self.end(from_ns);
        if self.windows.len() >= KEPT
            && let Some(shortest) = self.shortest()
        {
            self.windows.remove(shortest);
        }
        self.count += 1;
        self.windows.push(BlindWindow { from_ns, to_ns: None, cause, by: by.to_owned() });
    }

    /// Ends the open interval.
    pub(crate) fn end(&mut self, to_ns: u64) {
        let Some(window) = self.windows.last_mut().filter(|window| window.to_ns.is_none()) else { return };
        let lasted_ns = to_ns.saturating_sub(window.from_ns);
        window.to_ns = Some(to_ns.max(window.from_ns));
        self.ended_ns = self.ended_ns.saturating_add(lasted_ns);
        if lasted_ns == 0 {
            self.windows.pop();
            self.count -= 1;
        }
    }

    fn shortest(&self) -> Option<usize> {
        let lengths = self.windows.iter().map(|window| window.to_ns.unwrap_or(u64::MAX) - window.from_ns);
        lengths.enumerate().min_by_key(|(_, length)| *length).map(|(index, _)| index)
    }
}

/// Records that an earlier daemon had booked for the process. This ledger starts from a resync and counts all records before it
/// as lost. Those that the earlier daemon booked are in the store, and are not lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Earlier {
    /// Booked records.
    pub events: u64,
    /// Lost records.
    pub lost: u64,
    /// The program that ran then, if known. Records of programs before it are not among those that this ledger missed.
    pub program: Option<Program>,
}

impl Earlier {
    /// Returns the maximum number of records that this ledger missed at its beginning but that the earlier daemon received.
    fn heard(&self, first: Option<&Program>) -> u64 {
        match self.program {
            Some(then) if first.is_some_and(|first| first.instance != then.instance) => 0,
            Some(then) => then.heard,
            None => self.events.saturating_add(self.lost),
        }
    }
}

impl Coverage {
    /// Whether the current state is unknown: records were lost, and no resync has completed since.
    #[inline]
    pub fn is_state_unknown(&self) -> bool {
        self.partial.is_some_and(|partial| partial.state)
    }

    /// Counts lost records; `now_ns` is the time of the first loss.
    pub(crate) fn lose(&mut self, count: u64, now_ns: u64) {
        self.lost = self.lost.saturating_add(count).min(MOST_LOST);
        if self.events == 0 {
            self.before = self.before.saturating_add(count);
        }
        self.be_partial(now_ns);
    }

    /// Marks the state as unknown from now on.
    pub(crate) fn be_partial(&mut self, now_ns: u64) {
        let since_ns = self.partial.map_or(now_ns, |partial| partial.since_ns);
        self.partial = Some(Partial { since_ns, state: true });
    }

    /// Returns the number of ordered records that neither this ledger nor an earlier daemon has booked.
    pub fn lost_in_all(&self) -> u64 {
        let Some(earlier) = self.earlier else { return self.lost };
        let heard = earlier.heard(self.programs.first());
        self.lost.saturating_sub(self.before.min(heard)).saturating_add(earlier.lost)
    }

    /// Whether the numbers are `partial`: records are missing from the current state or from the peaks.
    pub fn is_partial(&self) -> bool {
        self.is_state_unknown()
            || self.blind.doubt
            || self.partial.is_some() && (self.earlier.is_none() || self.lost_in_all() > 0)
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
        // Received by the daemon that was killed, but not stored.
        coverage.earlier = earlier(90, 0);
        assert_eq!((coverage.lost_in_all(), coverage.is_partial()), (10, true));
        // Lost by both daemons.
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
        // The process was another program first, which sent 20 records.
        let mut coverage = Coverage {
            lost: 110,
            before: 110,
            earlier,
            programs: vec![program(2, 130)],
            ..Coverage::default()
        };
        assert_eq!(coverage.lost_in_all(), 10);
        // It became a program that the earlier daemon never received records from.
        coverage.programs = vec![program(3, 130), program(2, 1)];
        assert_eq!(coverage.lost_in_all(), 110);
    }
}
