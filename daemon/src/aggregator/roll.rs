//! Decides when the run of a long-lived process is split into parts ("rolling").
//!
//! Parts end at multiples of the period since 1970. With a period of a day that is midnight UTC, the time zone of all reports. A
//! process rolls only after it has lived for a whole period, so that midnight does not split a job of one hour.

use crate::clock::{process_age, since_boot};
use gpumem_ledger::ProcessKey;
use std::time::Duration;

/// Maximum number of processes that roll (begin a new part) in one tick. Building a run blocks the ledger for some milliseconds.
const AT_ONCE: usize = 8;
/// Length of the parts of runs, and the processes that must begin a new part.
#[derive(Debug, Default)]
pub(super) struct Roll {
    period: Option<Duration>,
    passed: i128,
    /// Processes that lived when the last period ended, and whose part has not ended yet.
    waiting: Vec<ProcessKey>,
}

impl Roll {
    /// Sets the period. The next parts end when the new period ends.
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

    /// Returns the processes whose part ends now, at most `room` and [`AT_ONCE`]. `live` returns all live processes.
    pub(crate) fn take(
        &mut self,
        wall_ns: i128,
        room: usize,
        live: impl FnOnce() -> Vec<ProcessKey>,
    ) -> Vec<ProcessKey> {
        let Some((period, passed)) = self.period.zip(self.periods(wall_ns)) else { return Vec::new() };
        // If the clock was set back, `passed` is smaller; then no part ends.
        if passed > self.passed {
            self.passed = passed;
            let up = since_boot();
            self.waiting = live();
            // A process with an unknown start time rolls too: an unneeded split is better than a run that never ends.
            self.waiting.retain(|key| process_age(key.start_ticks, up) >= period);
        }
        self.waiting.split_off(self.waiting.len().saturating_sub(AT_ONCE.min(room)))
    }
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
        assert!(process_age(young.start_ticks, up) < Duration::from_millis(20));
        let old = ProcessKey { pid: 2, start_ticks: 0 };
        assert_eq!(process_age(old.start_ticks, up), up);
        let mut roll = roll();
        assert_eq!(roll.take(20_000 * DAY_NS + 6, 9, || panic!("the day goes on")), []);
        let rolled = roll.take(20_001 * DAY_NS, 9, || vec![young, old]);
        assert_eq!(rolled, if up >= Duration::from_secs(86_400) { vec![old] } else { vec![] });
        assert_eq!(roll.take(20_000 * DAY_NS, 9, || panic!("a clock that was set back")), []);
    }

    #[test]
    fn many_roll_a_few_at_a_time() {
        let mut roll = Roll::default();
        roll.set(Some(Duration::from_nanos(1)), 0);
        let keys: Vec<_> = (1..=20).map(|pid| ProcessKey { pid, start_ticks: 0 }).collect();
        let turns: Vec<usize> = [99, 7, 99, 99].map(|room| roll.take(1, room, || keys.clone()).len()).into();
        assert_eq!(turns, [8, 7, 5, 0]);
        roll.set(None, 2);
        assert_eq!(roll.take(5, 9, || panic!("never")), []);
    }
}
