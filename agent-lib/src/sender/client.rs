//! Keeps the CUPTI subscription: checks that its callbacks arrive, and decides when to request a new one.
//!
//! CUPTI has no lock that several clients could share, so a call may coincide with another client's finalizing of CUPTI. To
//! avoid that, the agent calls nothing while its subscription works. After the last callback at least two seconds pass before
//! the first attempt (finalizing takes milliseconds). Each refusal doubles the delay.

use crate::driver::core::Core;
use crate::sources::cupti::subscribe::{self, Pulse, SubscriptionState};

/// First and longest delay between attempts to subscribe, in ns. Each failed attempt doubles the delay.
const FIRST_DELAY_NS: u64 = 1_000_000_000;
const LONGEST_DELAY_NS: u64 = 60_000_000_000;
/// Maximum number of checks, one a round, for a new subscription's first callback. Some drivers never report the checked call.
const QUICK_CHECKS: u32 = 50;
/// Number of checks in a row without a callback after which the subscription counts as lost.
const SILENT_CHECKS: u32 = 2;

#[derive(Debug, Default)]
pub(super) struct Client {
    /// Time of the next attempt to subscribe; 0 until it is set.
    next_attempt_ns: u64,
    failed_attempts: u32,
    /// Time of the last check that found a callback of this subscription. Before the first one, missing callbacks mean nothing.
    last_callback_ns: Option<u64>,
    /// Number of checks without a callback since `last_callback_ns`.
    silent_checks: u32,
    /// Whether the next check is due in the sender's next round, not after a second.
    pub check_soon: bool,
    subscription: u64,
}

impl Client {
    fn of(subscription: u64) -> Self {
        Client { subscription, ..Client::default() }
    }

    /// Checks the subscription; called about once a second. Returns true if there is a new subscription after an earlier one.
    pub(crate) fn check(&mut self, core: &Core, now: u64) -> bool {
        let before = self.subscription;
        let (held, number) = subscribe::subscription_state();
        if number != self.subscription {
            *self = Client::of(number);
        }
        match held {
            SubscriptionState::Ours => self.check_callbacks(core, now),
            // The subscription was not lost: its callbacks arrive again without a new one.
            SubscriptionState::Lost if subscribe::check_pulse(core) == Pulse::Arrived => {
                subscribe::mark_found(core)
            }
            SubscriptionState::Lost | SubscriptionState::Nothing => self.retry(core, now),
            SubscriptionState::Unwanted => *self = Client::of(number),
        }
        let (held, number) = subscribe::subscription_state();
        self.check_soon = held == SubscriptionState::Ours
            && self.last_callback_ns.is_none()
            && self.silent_checks < QUICK_CHECKS;
        held == SubscriptionState::Ours && number > 1 && number != before
    }

    fn check_callbacks(&mut self, core: &Core, now: u64) {
        match (subscribe::check_pulse(core), self.last_callback_ns) {
            (Pulse::Arrived, _) => (self.last_callback_ns, self.silent_checks) = (Some(now), 0),
            (Pulse::Silent, last_callback_ns) => {
                self.silent_checks = self.silent_checks.saturating_add(1);
                if let Some(last) = last_callback_ns.filter(|_| self.silent_checks >= SILENT_CHECKS) {
                    subscribe::mark_lost(last);
                    (self.silent_checks, self.next_attempt_ns) = (0, now + self.delay_ns());
                }
            }
            (Pulse::Unknown, _) => {}
        }
    }

    fn delay_ns(&self) -> u64 {
        (FIRST_DELAY_NS << self.failed_attempts.min(6)).min(LONGEST_DELAY_NS)
    }

    fn retry(&mut self, core: &Core, now: u64) {
        if self.next_attempt_ns == 0 {
            self.next_attempt_ns = now + self.delay_ns(); // injection or resume has made the first attempt
        }
        if now < self.next_attempt_ns {
            return;
        }
        subscribe::note_late();
        if subscribe::is_uninitialised(core) {
            subscribe::note_no_device();
        } else if subscribe::attach(core) {
            *self = Client::of(subscribe::subscription_state().1);
            return self.check_callbacks(core, now);
        }
        self.failed_attempts = self.failed_attempts.saturating_add(1);
        self.next_attempt_ns = now + self.delay_ns();
    }
}
