//! Intervals in which the agent of a covered process saw no driver calls. Another client had CUPTI, CUPTI had ended, or the
//! program asked for a pause. Memory freed in that time keeps its rows, and allocations are missing. No resync corrects that,
//! because the agent does not know the changes either. So the sums stay `partial`, and the intervals are kept.

use crate::process::Process;
use crate::process::coverage::{BlindCause, Blocked, Coverage};
use gpumem_wire::AgentState;

impl Process {
    /// Takes the agent's state since `time_ns`. The agent repeats its state for each daemon, and with each resync.
    pub(crate) fn set_agent_state(&mut self, state: AgentState, result: u16, detail: &str, time_ns: u64) {
        if time_ns < self.stream.state_ns {
            return; // a repetition
        }
        self.stream.state_ns = time_ns;
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
        // A program that has not used the GPU yet has no calls to miss.
        let has_seen = self.stream.is_watched_over && !self.accounts.is_empty();
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
                // If the agent had seen no calls before, its records begin here.
                *late |= state == AgentState::Late && !has_seen;
                if state == AgentState::Late {
                    self.holdings.set_unseen_segments(true);
                }
                if was_blind && has_seen {
                    self.doubt(time_ns);
                }
                self.stream.is_watched_over = true;
            }
        }
    }

    /// Marks the sums as inexact until the program ends.
    fn doubt(&mut self, time_ns: u64) {
        self.coverage.blind.doubt = true;
        self.coverage.be_partial(time_ns);
        self.holdings.doubt_state(self.stream.last_seq);
        self.samples.doubt();
        self.restart_history(self.stream.applied_ns);
    }
}
