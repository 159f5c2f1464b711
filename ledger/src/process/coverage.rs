//! How complete the numbers of a process are, and what is known of it from outside.

use crate::base::quota::QuotaExceeded;
use gpumem_model::run::Program;
use std::collections::BTreeMap;

/// Losses of one process that are counted: a day of a billion a second. A liar's numbers would be all that is left of a sum of them.
pub(crate) const MOST_LOST: u64 = 1 << 46;

/// What is known of a process from outside, and what it claims.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Owner, as the daemon saw it.
    pub uid: Option<u64>,
    /// Parent's pid.
    pub parent_pid: Option<u64>,
    /// From /proc: command, comm, user, cgroup.
    pub seen: BTreeMap<String, String>,
    /// From the agent's environment: rank, job. Claims.
    pub claims: BTreeMap<String, String>,
}

/// The agent is not let in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocked {
    /// Since when.
    pub since_ns: u64,
    /// CUPTI's result.
    pub result: u16,
    /// With [`Blocked::HELD`] by whom, where it can be known; else why.
    pub by: String,
}

impl Blocked {
    /// Another client holds the CUPTI subscription.
    pub const HELD: u16 = 39;
}

/// What was lost, and what that does to the sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partial {
    /// When the first loss was seen.
    pub since_ns: u64,
    /// The state of now is not known either: no resync has ended since the last loss.
    pub state: bool,
}

/// How much of the truth the numbers of a process are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Coverage {
    /// An agent speaks for it.
    pub covered: bool,
    /// The agent attached after allocations.
    pub late: bool,
    /// See [`Blocked`].
    pub blocked: Option<Blocked>,
    /// Paused on request.
    pub paused: bool,
    /// See [`Blind`].
    pub blind: Blind,
    /// Set at the first loss and kept: the peak is then a lower bound.
    pub partial: Option<Partial>,
    /// Ordered records applied.
    pub events: u64,
    /// Of those, driver allocations.
    pub allocations: u64,
    /// Their bytes, frees not taken off.
    pub allocated_bytes: u64,
    /// Ordered records lost.
    pub lost: u64,
    /// Of those, what was missing before the first that this ledger heard.
    pub before: u64,
    /// Bytes that were held when it began to hear, if something was missing before.
    pub held_before: Option<i64>,
    /// Ordered records that were kept back on request (pause, mute): no losses.
    pub withheld: u64,
    /// See [`Earlier`].
    pub earlier: Option<Earlier>,
    /// The programs that spoke, oldest first: the first, of which `before` is, and the latest.
    pub programs: Vec<Program>,
    /// Samples closed without the agent's word.
    pub stale_samples: u64,
    /// Driver allocations that failed.
    pub failed_allocations: u64,
    /// Steps that the process reported.
    pub steps: u64,
    /// It may not say more than it has: what it added since is lost.
    pub full: Option<QuotaExceeded>,
}

/// Windows that are kept; of more, the shortest go.
const KEPT: usize = 32;

/// Why nothing was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlindCause {
    /// Another client had CUPTI: its name, where it can be known.
    Held,
    /// CUPTI could not be used: why.
    Refused,
    /// The program wanted it.
    Paused,
    /// The agent has stopped: why.
    Disarmed,
}

/// A time in which nothing was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlindWindow {
    /// From when.
    pub from_ns: u64,
    /// Until when; absent while it lasts.
    pub to_ns: Option<u64>,
    /// Why.
    pub cause: BlindCause,
    /// By whom, or in which words.
    pub by: String,
}

/// When the agent saw nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Blind {
    /// Oldest first.
    pub windows: Vec<BlindWindow>,
    /// How many there were.
    pub count: u64,
    /// How long those were that have ended.
    pub ended_ns: u64,
    /// The agent had seen memory before one of them: what it says since then is not exact.
    pub doubt: bool,
}

impl Blind {
    /// How long all of them were, one that lasts up to `now_ns`.
    pub fn total_ns(&self, now_ns: u64) -> u64 {
        let lasting = self.open().map_or(0, |window| now_ns.saturating_sub(window.from_ns));
        self.ended_ns.saturating_add(lasting)
    }

    /// The one that lasts.
    pub fn open(&self) -> Option<&BlindWindow> {
        self.windows.last().filter(|window| window.to_ns.is_none())
    }

    /// Nothing is seen since `from_ns`.
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

    /// It is over.
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
    /// The state of now is not known: records were lost, and no resync has ended since.
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

    /// From now on the state is not known.
    pub(crate) fn be_partial(&mut self, now_ns: u64) {
        let since_ns = self.partial.map_or(now_ns, |partial| partial.since_ns);
        self.partial = Some(Partial { since_ns, state: true });
    }

    /// Ordered records that nobody has booked, neither this ledger nor the daemon's earlier life.
    pub fn lost_in_all(&self) -> u64 {
        let Some(earlier) = self.earlier else { return self.lost };
        let heard = earlier.heard(self.programs.first());
        self.lost.saturating_sub(self.before.min(heard)).saturating_add(earlier.lost)
    }

    /// Something is missing, now or in what led to the peaks: `partial`.
    pub fn is_partial(&self) -> bool {
        self.is_state_unknown()
            || self.blind.doubt
            || self.partial.is_some() && (self.earlier.is_none() || self.lost_in_all() > 0)
    }
}

/// `key=value` lines; a line without `=` is a key with an empty value.
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
