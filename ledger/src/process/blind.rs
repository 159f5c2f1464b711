//! Times in which the agent of a covered process saw nothing: somebody else had CUPTI, or had ended it, or the program wanted
//! a pause. Frees of that time leave rows that are gone, allocations are missing; no resync heals that, because the agent does
//! not know better. So the sums stay `partial`, and the times are told.

use crate::process::{Blocked, Coverage, Partial, Process};
use crate::samples::pending::Pending;
use gpumem_wire::AgentState;

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
    fn begin(&mut self, from_ns: u64, cause: BlindCause, by: &str) {
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

impl Process {
    /// The agent says how it stands since `time_ns`. It says that again to each daemon, and with each resync.
    pub(crate) fn set_state(&mut self, state: AgentState, result: u16, detail: &str, time_ns: u64) {
        if time_ns < self.state_ns {
            return; // heard before
        }
        self.state_ns = time_ns;
        let cause = match state {
            AgentState::Covered | AgentState::Late | AgentState::Unknown => None,
            AgentState::Blocked if result == Blocked::HELD => Some(BlindCause::Held),
            AgentState::Blocked => Some(BlindCause::Refused),
            AgentState::Paused => Some(BlindCause::Paused),
            AgentState::Disarmed => Some(BlindCause::Disarmed),
        };
        let Coverage { blind, blocked, paused, late, .. } = &mut self.coverage;
        let was_blind = blind.open().is_some();
        *paused = matches!(state, AgentState::Paused | AgentState::Disarmed);
        let since_ns = blocked.take().map_or(time_ns, |blocked| blocked.since_ns);
        if state == AgentState::Blocked {
            *blocked = Some(Blocked { since_ns, result, by: detail.into() });
        }
        // Nothing that the agent has to know: a program that has not come to the GPU.
        let has_seen = self.is_watched_over && !self.accounts.is_empty();
        match cause {
            Some(cause) => {
                blind.begin(time_ns, cause, detail);
                self.accounts.iter_mut().for_each(|account| account.causes.go_blind());
                if has_seen {
                    self.doubt(time_ns);
                }
            }
            None => {
                blind.end(time_ns);
                // Who had seen nothing before begins here.
                *late |= state == AgentState::Late && !has_seen;
                self.holdings.unseen_segments |= state == AgentState::Late;
                if was_blind && has_seen {
                    self.doubt(time_ns);
                }
                self.is_watched_over = true;
            }
        }
    }

    /// From here on the sums are not exact, until the program ends.
    fn doubt(&mut self, time_ns: u64) {
        self.coverage.blind.doubt = true;
        let since_ns = self.coverage.partial.map_or(time_ns, |partial| partial.since_ns);
        self.coverage.partial = Some(Partial { since_ns, state: true });
        self.holdings.unseen_segments = true;
        self.holdings.doubtful_before = Some(self.last_seq);
        self.pending.iter_mut().for_each(Pending::doubt);
        self.restart_trails(self.applied_ns);
    }
}
