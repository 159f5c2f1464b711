//! Splits the run of a long-lived process into parts ("rolling").
//!
//! Parts end at multiples of the period since 1970. With a period of a day that is midnight UTC, the time zone of all reports. A
//! process rolls only after it has lived for a whole period, so that midnight does not split a job of one hour.

use crate::clock::since_boot;
use gpumem_ledger::ProcessKey;
use std::time::Duration;

/// Maximum number of processes that roll in one tick. Building a run blocks the ledger for up to some milliseconds.
const AT_ONCE: usize = 8;
/// Ticks of `start_ticks` in a second, on every supported architecture.
const USER_HZ: u64 = 100;

#[derive(Debug, Default)]
pub(super) struct Roll {
    period: Option<Duration>,
    /// Number of complete periods since 1970.
    passed: i128,
    /// Processes that still have to roll at the end of the last period.
    waiting: Vec<ProcessKey>,
}

impl Roll {
    /// Sets the period. A changed period takes effect at its next end.
    pub(crate) fn set(&mut self, period: Option<Duration>, wall_ns: i128) {
        if period == self.period {
            return;
        }
        self.period = period;
        self.waiting.clear();
        self.passed = self.periods(wall_ns).unwrap_or(0);
    }

    fn periods(&self, wall_ns: i128) -> Option<i128> {
        let period_ns = i128::try_from(self.period?.as_nanos()).ok().filter(|ns| *ns > 0)?;
        Some(wall_ns.div_euclid(period_ns))
    }

    /// Returns up to [`AT_ONCE`] processes that roll now. `living` returns all live processes.
    pub(crate) fn take(
        &mut self,
        wall_ns: i128,
        living: impl FnOnce() -> Vec<ProcessKey>,
    ) -> Vec<ProcessKey> {
        let Some((period, passed)) = self.period.zip(self.periods(wall_ns)) else { return Vec::new() };
        // Greater, not different: a clock that was set back must not cause another roll.
        if passed > self.passed {
            self.passed = passed;
            let up = since_boot();
            self.waiting = living();
            self.waiting.retain(|key| age(*key, up) >= period);
        }
        self.waiting.split_off(self.waiting.len().saturating_sub(AT_ONCE))
    }
}

/// Returns the age of a process, where `up` is the time since boot. Without a start time it is `up`: an unneeded split is better
/// than a run that never ends.
fn age(key: ProcessKey, up: Duration) -> Duration {
    up.saturating_sub(Duration::from_millis(key.start_ticks.saturating_mul(1000 / USER_HZ)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY_NS: i128 = 86_400_000_000_000;

    fn roll() -> Roll {
        let mut roll = Roll::default();
        roll.set(Some(Duration::from_secs(86_400)), 20_000 * DAY_NS + 5);
        roll
    }

    #[test]
    fn at_midnight_those_roll_that_have_lived_for_a_day() {
        let up = since_boot();
        let young = ProcessKey { pid: 1, start_ticks: (up.as_millis() / 10) as u64 };
        assert!(age(young, up) < Duration::from_millis(20));
        let old = ProcessKey { pid: 2, start_ticks: 0 };
        assert_eq!(age(old, up), up);
        let mut roll = roll();
        assert_eq!(roll.take(20_000 * DAY_NS + 6, || panic!("the day goes on")), []);
        let rolled = roll.take(20_001 * DAY_NS, || vec![young, old]);
        assert_eq!(rolled, if up >= Duration::from_secs(86_400) { vec![old] } else { vec![] });
        assert_eq!(roll.take(20_000 * DAY_NS, || panic!("a clock that was set back")), []);
    }

    #[test]
    fn many_roll_a_few_at_a_time() {
        let mut roll = Roll::default();
        roll.set(Some(Duration::from_nanos(1)), 0);
        let keys: Vec<_> = (1..=20).map(|pid| ProcessKey { pid, start_ticks: 0 }).collect();
        let turns: Vec<usize> = [1, 1, 1, 1].map(|now| roll.take(now, || keys.clone()).len()).into();
        assert_eq!(turns, [8, 8, 4, 0]);
        roll.set(None, 2);
        assert_eq!(roll.take(5, || panic!("never")), []);
    }
}
