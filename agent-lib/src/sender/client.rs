//! Keeps the CUPTI subscription among other clients: checks that it works, and decides when to request a new one.
//!
//! CUPTI has no lock that several clients could share. So there is a risk of calling into it while another client finalizes it.
//! To avoid that, nothing is called while a subscription works. After its callbacks have stopped, at least two seconds pass
//! before the first attempt (finalizing takes milliseconds). Each refusal doubles the delay.

use crate::driver::core::Core;
use crate::sources::cupti::subscribe::{self, Held, Pulse};
use std::ops::RangeInclusive;

/// Delay between attempts to subscribe: first and longest.
const RETRY_NS: RangeInclusive<u64> = 1_000_000_000..=60_000_000_000;
/// Maximum number of checks in quick succession for a new subscription's first callback. Some drivers never report this call.
const EAGER: u32 = 50;
/// Checks in a row without a callback after which the subscription counts as lost.
const SILENCES: u32 = 2;

#[derive(Debug)]
pub(super) struct Client {
    /// 0: no attempt is due.
    next_attempt_ns: u64,
    wait_ns: u64,
    /// Time of the last callback. While there is none for this very subscription, missing callbacks mean nothing.
    heard_ns: Option<u64>,
    silences: u32,
    /// The next check should come with the next round.
    pub is_eager: bool,
    /// Number of the subscription that this state is about.
    subscription: u64,
}

impl Default for Client {
    fn default() -> Self {
        let wait_ns = *RETRY_NS.start();
        Client { next_attempt_ns: 0, wait_ns, heard_ns: None, silences: 0, is_eager: false, subscription: 0 }
    }
}

impl Client {
    /// Checks the subscription, once a second, outside of the agent. Returns true if callbacks arrive again after a pause.
    pub(crate) fn look(&mut self, core: &Core, now: u64) -> bool {
        let before = self.subscription;
        self.look_after(core, now);
        let (held, number) = subscribe::held();
        self.is_eager = held == Held::Ours && self.heard_ns.is_none() && self.silences < EAGER;
        held == Held::Ours && number > 1 && number != before
    }

    fn look_after(&mut self, core: &Core, now: u64) {
        let (held, number) = subscribe::held();
        if number != self.subscription {
            *self = Client { subscription: number, ..Client::default() };
        }
        match held {
            Held::Ours => self.listen(core, now),
            // The subscription was not lost: its callbacks arrive again without a new one.
            Held::Lost if subscribe::check_pulse(core) == Pulse::Heard => subscribe::found(core),
            Held::Lost | Held::Nothing => self.retry(core, now),
            Held::Unwanted => *self = Client { subscription: number, ..Client::default() },
        }
    }

    fn listen(&mut self, core: &Core, now: u64) {
        match (subscribe::check_pulse(core), self.heard_ns) {
            (Pulse::Heard, _) => (self.heard_ns, self.silences) = (Some(now), 0),
            (Pulse::Silent, Some(heard_ns)) => {
                self.silences += 1;
                if self.silences >= SILENCES {
                    subscribe::lost(heard_ns);
                    (self.silences, self.next_attempt_ns) = (0, now + self.wait_ns);
                }
            }
            (Pulse::Silent, None) => self.silences = self.silences.saturating_add(1),
            (Pulse::Unknown, _) => {}
        }
    }

    fn retry(&mut self, core: &Core, now: u64) {
        if self.next_attempt_ns == 0 {
            self.next_attempt_ns = now + self.wait_ns; // injection or resume has made the first attempt
        }
        if now < self.next_attempt_ns {
            return;
        }
        subscribe::note_late();
        if subscribe::is_uninitialised(core) {
            subscribe::note_no_device();
        } else if subscribe::attach(core) {
            *self = Client { subscription: subscribe::held().1, ..Client::default() };
            self.listen(core, now);
            return;
        }
        self.wait_ns = (self.wait_ns * 2).min(*RETRY_NS.end());
        self.next_attempt_ns = now + self.wait_ns;
    }
}
