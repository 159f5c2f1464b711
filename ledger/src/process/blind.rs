//! Blind intervals: times in which a process's agent saw no driver calls, because another client held CUPTI, CUPTI had ended, or
//! the program asked for a pause. Memory freed then stays booked, and memory allocated then is missing. No resync corrects that,
//! because the agent does not know the changes either. So the sums stay `partial`.

use crate::process::Process;
use crate::process::coverage::Blocked;
use gpumem_model::run::SUBSCRIPTION_HELD;
use gpumem_wire::AgentState;

impl Process {
    /// Handles an `Agent` record: the agent's state since `time_ns`. Agents send the record again to each daemon and in each
    /// resync.
    pub(crate) fn set_agent_state(&mut self, state: AgentState, result: u16, detail: &str, time_ns: u64) {
        if time_ns < self.stream.state_ns {
            return; // an older state, repeated
        }
        self.stream.state_ns = time_ns;
        let why = match (state, detail) {
            (AgentState::Covered | AgentState::Late | AgentState::Unknown, _) => None,
            (AgentState::Blocked, "") if result == SUBSCRIPTION_HELD => {
                Some("another CUPTI client held CUPTI".to_owned())
            }
            (AgentState::Blocked, by) if result == SUBSCRIPTION_HELD => Some(format!("{by} held CUPTI")),
            (AgentState::Paused, "") => Some("paused by the program".to_owned()),
            (_, "") => Some("not known why".to_owned()),
            (_, why) => Some(why.to_owned()),
        };
        let coverage = &mut self.coverage;
        let was_blind = coverage.open_blind().is_some();
        coverage.paused = matches!(state, AgentState::Paused | AgentState::Disarmed);
        coverage.disarmed = state == AgentState::Disarmed;
        let since_ns = coverage.blocked.take().map_or(time_ns, |blocked| blocked.since_ns);
        if state == AgentState::Blocked {
            coverage.blocked = Some(Blocked { since_ns, result, by: detail.into() });
        }
        // A program that has not used a GPU has made no calls that the agent could miss.
        let has_seen = self.stream.has_observed && !self.accounts.is_empty();
        match why {
            Some(why) => {
                coverage.begin_blind(time_ns, why);
                self.accounts.iter_mut().for_each(|account| account.causes.note_blind());
                if has_seen {
                    self.mark_inexact();
                }
            }
            None => {
                coverage.end_blind(time_ns);
                // If the agent has seen no calls before, its records begin now.
                coverage.late |= state == AgentState::Late && !has_seen;
                if state == AgentState::Late {
                    self.holdings.unseen_segments = true;
                }
                if was_blind && has_seen {
                    self.mark_inexact();
                }
                self.stream.has_observed = true;
            }
        }
    }

    /// Marks the process's sums as inexact until the program ends.
    fn mark_inexact(&mut self) {
        self.coverage.blind_doubt = true;
        self.coverage.mark_partial();
        self.holdings.mark_doubtful(self.stream.last_seq);
        self.samples.mark_doubtful();
        self.restart_history(self.stream.applied_ns);
    }
}
