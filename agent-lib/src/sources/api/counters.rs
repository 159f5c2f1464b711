//! Counters that the program sets, with statistics since a reset (changes, minimum, maximum, mean over time). Not for callbacks.

use crate::base::fault_injection;
use crate::base::locks::ForkMutex;
use crate::driver::core::Core;
use crate::record::recorder::{self, RecordContext};
use crate::threads::Thread;
use gpumem_wire::Body;

const MAX_COUNTERS: usize = 4096;

/// A counter and its statistics since the last reset.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counter {
    /// Id (tag) of the counter's name.
    pub tag: u32,
    pub value: i64,
    /// Number of times that the counter was set or changed since the reset.
    pub changes: u64,
    pub least: i64,
    pub greatest: i64,
    /// Sum of value × duration (ns) of each value since the reset, up to `changed_ns`.
    area: i128,
    reset_ns: u64,
    changed_ns: u64,
}

impl Counter {
    fn new(tag: u32, now: u64) -> Self {
        Counter { tag, value: 0, changes: 0, least: 0, greatest: 0, area: 0, reset_ns: now, changed_ns: now }
    }

    fn set(&mut self, value: i64, now: u64) {
        // The statistics begin with the first value.
        let is_first = self.changes == 0 && self.changed_ns == self.reset_ns;
        if is_first && (self.least, self.greatest, self.value) == (0, 0, 0) {
            (self.least, self.greatest, self.reset_ns) = (value, value, now);
        }
        self.area = self.area_until(now);
        self.changed_ns = now;
        self.value = value;
        self.changes += 1;
        self.least = self.least.min(value);
        self.greatest = self.greatest.max(value);
    }

    fn area_until(&self, now: u64) -> i128 {
        self.area + i128::from(self.value) * i128::from(now.saturating_sub(self.changed_ns))
    }

    /// Returns the mean since the reset, weighted by time.
    pub(crate) fn mean(&self, now: u64) -> f64 {
        match now.saturating_sub(self.reset_ns) {
            0 => self.value as f64,
            lasted => self.area_until(now) as f64 / lasted as f64,
        }
    }

    fn reset(&mut self, now: u64) {
        (self.changes, self.area, self.reset_ns, self.changed_ns) = (0, 0, now, now);
        (self.least, self.greatest) = (self.value, self.value);
    }
}

static COUNTERS: ForkMutex<Vec<Counter>> = ForkMutex::new(Vec::new);

/// Returns all counters; with `reset`, their statistics restart.
pub(crate) fn all(core: &Core, reset: bool) -> Vec<Counter> {
    let Ok(mut counters) = COUNTERS.lock() else { return Vec::new() };
    let all = counters.clone();
    if reset {
        let now = core.recorder.clock.now();
        counters.iter_mut().for_each(|counter| counter.reset(now));
    }
    all
}

impl Core {
    /// Sets counter `name` to what `change` returns for its current value.
    pub(crate) fn count(&self, thread: &Thread, name: &[u8], change: impl FnOnce(i64) -> i64) {
        let tag = self.recorder.names.intern(0, name);
        let Ok(mut counters) = COUNTERS.lock() else { return };
        fault_injection::at("counters"); // with the lock held
        if tag == 0 {
            return;
        }
        let now = self.recorder.clock.now();
        let known = counters.iter().position(|counter| counter.tag == tag);
        if known.is_none() && counters.len() < MAX_COUNTERS {
            counters.push(Counter::new(tag, now));
        }
        let at = known.unwrap_or(counters.len() - 1);
        let Some(counter) = counters.get_mut(at).filter(|counter| counter.tag == tag) else { return };
        let value = change(counter.value);
        counter.set(value, now);
        if recorder::records(recorder::MARKS) {
            // Recorded under the lock, so that the values keep their order.
            self.recorder.note(thread, RecordContext::tagged(tag), Body::Counter { value });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_weighted_by_time() {
        let mut counter = Counter::new(1, 0);
        counter.set(10, 0);
        counter.set(20, 30);
        assert_eq!((counter.changes, counter.least, counter.greatest), (2, 10, 20));
        assert!((counter.mean(40) - 12.5).abs() < 1e-9);
        counter.reset(40);
        assert_eq!((counter.changes, counter.least, counter.greatest, counter.value), (0, 20, 20, 20));
        counter.set(-5, 50);
        assert!((counter.mean(60) - 7.5).abs() < 1e-9);
        assert_eq!((counter.least, counter.greatest), (-5, 20));
    }
}
