//! Counters that the program reports: present value, extremes, and a bounded number of points over time.

use gpumem_model::program_data::Counter;
use gpumem_wire::Record;
use std::mem::size_of;
use std::sync::Arc;

pub use gpumem_model::program_data::MAX_COUNTER_POINTS;
/// Maximum number of counters of a process; those set first are kept.
pub use gpumem_model::program_data::MAX_COUNTERS;

/// A counter without its name. Its `area` (value times ns, summed) covers the time up to the last change.
#[derive(Debug)]
struct CounterState {
    tag: u32,
    counter: Counter,
    /// Width of the time slots that have one point each (ns); 0 while every change has a point.
    width_ns: u64,
}

impl CounterState {
    fn new(tag: u32, value: i64, time_ns: u64) -> Self {
        let counter = Counter {
            value,
            changes: 1,
            min: value,
            max: value,
            since_ns: time_ns,
            until_ns: time_ns,
            points: vec![(time_ns, value)],
            ..Counter::default()
        };
        CounterState { tag, counter, width_ns: 0 }
    }

    /// Returns the integral of the value from the first report to `time_ns`.
    fn area_at(&self, time_ns: u64) -> i128 {
        let held_ns = time_ns.saturating_sub(self.counter.until_ns);
        self.counter.area.saturating_add(i128::from(self.counter.value).saturating_mul(i128::from(held_ns)))
    }

    fn set(&mut self, value: i64, time_ns: u64) {
        // Records of several threads arrive in order, but their times may not be.
        let time_ns = time_ns.max(self.counter.until_ns);
        let area = self.area_at(time_ns);
        let counter = &mut self.counter;
        (counter.area, counter.until_ns, counter.value) = (area, time_ns, value);
        counter.changes = counter.changes.saturating_add(1);
        (counter.min, counter.max) = (counter.min.min(value), counter.max.max(value));
        add_point(&mut counter.points, &mut self.width_ns, (time_ns, value));
    }

    fn restart(&mut self, now_ns: u64) {
        let time_ns = now_ns.max(self.counter.until_ns);
        *self = CounterState::new(self.tag, self.counter.value, time_ns);
        self.counter.changes = 0;
    }
}

/// Adds a point (time, value); if there are too many, keeps only the last point of each slot of time.
fn add_point(points: &mut Vec<(u64, i64)>, width_ns: &mut u64, point: (u64, i64)) {
    let slot = |(time_ns, _): (u64, i64), width_ns: u64| time_ns.checked_div(width_ns);
    match points.last_mut() {
        Some(last) if *width_ns != 0 && slot(*last, *width_ns) == slot(point, *width_ns) => *last = point,
        _ => points.push(point),
    }
    if points.len() > MAX_COUNTER_POINTS {
        let span_ns = point.0 - points.first().map_or(point.0, |first| first.0);
        // Halves the number of points, so that this happens rarely. Points of the same time become one.
        *width_ns = width_ns.saturating_mul(2).max(span_ns / (MAX_COUNTER_POINTS as u64 / 2) + 1);
        let all = std::mem::take(points);
        for point in all {
            match points.last_mut() {
                Some(last) if slot(*last, *width_ns) == slot(point, *width_ns) => *last = point,
                _ => points.push(point),
            }
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    counters: Vec<CounterState>,
    /// Number of changes of counters beyond [`MAX_COUNTERS`].
    pub dropped: u64,
}

impl Counters {
    pub fn set(&mut self, record: &Record<'_>, value: i64) {
        let stamp = &record.stamp;
        let is_full = self.counters.len() == MAX_COUNTERS;
        match self.counters.iter_mut().find(|counter| counter.tag == stamp.tag) {
            Some(counter) => counter.set(value, stamp.time_ns),
            None if is_full => self.dropped += 1,
            None => self.counters.push(CounterState::new(stamp.tag, value, stamp.time_ns)),
        }
    }

    pub fn restart(&mut self, now_ns: u64) {
        self.counters.iter_mut().for_each(|counter| counter.restart(now_ns));
        self.dropped = 0;
    }

    /// Returns all counters with their values extended to `now_ns`; `name` returns the path of a tag.
    pub fn view(&self, now_ns: u64, name: impl Fn(u32) -> Option<Arc<str>>) -> Vec<Counter> {
        let view = |state: &CounterState| {
            let until_ns = now_ns.max(state.counter.until_ns);
            let name = name(state.tag).as_deref().map(str::to_owned);
            Counter { name, area: state.area_at(until_ns), until_ns, ..state.counter.clone() }
        };
        self.counters.iter().map(view).collect()
    }

    pub fn bytes(&self) -> usize {
        let points =
            self.counters.iter().map(|state| state.counter.points.capacity() * size_of::<(u64, i64)>());
        self.counters.capacity() * size_of::<CounterState>() + points.sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_weighted_by_time_and_the_past_ends_with_a_restart() {
        let mut counter = CounterState::new(1, 10, 100);
        counter.set(20, 130);
        counter.set(-5, 120); // from another thread, which read the clock earlier
        assert_eq!((counter.counter.changes, counter.counter.min, counter.counter.max), (3, -5, 20));
        assert_eq!(counter.area_at(140), 10 * 30 - 5 * 10);
        counter.restart(150);
        assert_eq!(
            (counter.counter.changes, counter.counter.min, counter.counter.max, counter.counter.since_ns),
            (0, -5, -5, 150)
        );
        assert_eq!((counter.area_at(160), counter.counter.points.as_slice()), (-50, &[(150, -5)][..]));
    }

    #[test]
    fn nothing_overflows() {
        let mut counter = CounterState::new(1, i64::MIN, 0);
        counter.set(i64::MAX, u64::MAX);
        assert_eq!(counter.counter.area, i128::from(i64::MIN) * i128::from(u64::MAX));
        for _ in 0..4 {
            counter.restart(u64::MAX);
            counter.set(i64::MIN, u64::MAX);
        }
    }

    #[test]
    fn points_are_bounded_and_the_last_is_the_value() {
        let (mut points, mut width_ns) = (Vec::new(), 0);
        for change in 0..100_000_u64 {
            add_point(&mut points, &mut width_ns, (change * change, change as i64));
            assert!(points.len() <= MAX_COUNTER_POINTS);
            assert_eq!(points.last(), Some(&(change * change, change as i64)));
        }
        assert!(points.len() > MAX_COUNTER_POINTS / 4, "{}", points.len());
        assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0));
        let (mut points, mut width_ns) = (Vec::new(), 0);
        (0..1000).for_each(|change| add_point(&mut points, &mut width_ns, (7, change)));
        assert_eq!(points.last(), Some(&(7, 999)));
    }
}
