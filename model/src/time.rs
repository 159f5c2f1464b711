//! Formats times and distances of a run's clock for people.

use crate::run::{Clock, Run, State};
use crate::units::{plural, thousands};

const DAY_S: i128 = 86_400;

impl Clock {
    /// Formats a time; as time of day if the clock has a wall-clock offset.
    pub fn time(&self, time_ns: u64) -> String {
        match self {
            Clock::Lines => format!("line {}", thousands(time_ns)),
            Clock::Monotonic { wall_offset_ns: Some(offset) } => {
                let of_day = wall_seconds(time_ns, *offset).rem_euclid(DAY_S);
                format!("{:02}:{:02}:{:02}Z", of_day / 3600, of_day / 60 % 60, of_day % 60)
            }
            Clock::Monotonic { wall_offset_ns: None } => format!("+{:.1} s", time_ns as f64 / 1e9),
        }
    }

    /// Returns the number of days since 1970; `None` without a wall-clock offset.
    fn day(&self, time_ns: u64) -> Option<i128> {
        match self {
            Clock::Monotonic { wall_offset_ns: Some(offset) } => {
                Some(wall_seconds(time_ns, *offset).div_euclid(DAY_S))
            }
            _ => None,
        }
    }

    pub fn distance(&self, distance_ns: u64) -> String {
        match (self, distance_ns as f64) {
            (Clock::Lines, _) => plural(distance_ns, "line"),
            (_, ns) if distance_ns < 1_000_000 => format!("{:.1} µs", ns / 1e3),
            (_, ns) if distance_ns < 1_000_000_000 => format!("{:.1} ms", ns / 1e6),
            (_, ns) => format!("{:.1} s", ns / 1e9),
        }
    }
}

/// Formats the position of `time_ns` relative to `from_ns`: `12.0 s before`.
pub fn apart(clock: Clock, time_ns: u64, from_ns: u64) -> String {
    let side = if time_ns < from_ns { "before" } else { "after" };
    format!("{} {side}", clock.distance(time_ns.abs_diff(from_ns)))
}

/// Formats seconds since 1970 as day and minute, in UTC.
pub fn date_minute(seconds: i64) -> String {
    let seconds = i128::from(seconds);
    let (year, month, day) = civil(seconds.div_euclid(DAY_S));
    let of_day = seconds.rem_euclid(DAY_S);
    format!("{year}-{month:02}-{day:02} {:02}:{:02}Z", of_day / 3600, of_day / 60 % 60)
}

fn wall_seconds(time_ns: u64, offset_ns: i64) -> i128 {
    (i128::from(time_ns) + i128::from(offset_ns)).div_euclid(1_000_000_000)
}

/// Returns year, month and day in the Gregorian calendar from days since 1970. Computes in eras of 400 years that begin on 1
/// March, so that a leap day is the last day of its year.
fn civil(day: i128) -> (i128, i128, i128) {
    let day = day + 719_468;
    let (era, of_era) = (day.div_euclid(146_097), day.rem_euclid(146_097));
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let of_month = of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (year + era * 400 + next, month, of_month)
}

/// Formats a duration as people say it: `41.2 s`, `10m41s`, `3h02m`, `2d04h`.
pub fn duration(length_ns: u64) -> String {
    let seconds = length_ns / 1_000_000_000;
    let (minutes, hours, days) = (seconds / 60, seconds / 3_600, seconds / 86_400);
    match seconds {
        0..60 => format!("{:.1} s", length_ns as f64 / 1e9),
        60..3_600 => format!("{minutes}m{:02}s", seconds % 60),
        3_600..86_400 => format!("{hours}h{:02}m", minutes % 60),
        _ => format!("{days}d{:02}h", hours % 24),
    }
}

/// Formats a time of a run, with its day if the clock has a wall-clock offset.
pub fn with_day(run: &Run, time_ns: u64) -> String {
    Times { clock: run.clock, dated: true }.time(time_ns)
}

/// Formats the times of one report; includes the day if they span several days.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    clock: Clock,
    dated: bool,
}

impl Times {
    /// Returns the format for a run's times: includes the day if its moments span several days.
    pub fn of(run: &Run) -> Self {
        let end = match run.state {
            State::Closed { time_ns, .. } | State::Rolled { time_ns } => Some(time_ns),
            State::Open | State::Interrupted => None,
        };
        let moments = run.devices.iter().flat_map(|device| {
            let reading = device.reading.map(|reading| reading.time_ns);
            let steps = &device.details.steps;
            let [first, last] = [steps.first(), steps.last()].map(|step| step.map(|step| step.time_ns));
            [Some(device.last.time_ns), Some(device.peak.time_ns), reading, first, last]
        });
        let mut days = moments.chain([end]).flatten().map(|time_ns| run.clock.day(time_ns));
        let first = days.next();
        Times { clock: run.clock, dated: days.any(|day| Some(day) != first) }
    }

    /// Like [`Times::of`], for a run and a window `[from, to]`. Also includes the day if the window is not on the day of the last
    /// moment.
    pub fn within(run: &Run, window: Option<[u64; 2]>) -> Self {
        let times = Times::of(run);
        let days = window.into_iter().flatten().map(|time_ns| times.clock.day(time_ns));
        let last = run.devices.iter().map(|device| times.clock.day(device.last.time_ns)).next();
        let is_another = days.zip(last.into_iter().cycle()).any(|(day, last)| day != last);
        Times { dated: times.dated || is_another, ..times }
    }

    /// Returns a format without days.
    pub fn of_clock(clock: Clock) -> Self {
        Times { clock, dated: false }
    }

    pub fn clock(self) -> Clock {
        self.clock
    }

    pub fn is_dated(self) -> bool {
        self.dated
    }

    pub fn time(self, time_ns: u64) -> String {
        match self.clock.day(time_ns).filter(|_| self.dated).map(civil) {
            Some((year, month, day)) => format!("{year:04}-{month:02}-{day:02} {}", self.clock.time(time_ns)),
            None => self.clock.time(time_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_those_of_the_calendar() {
        let days = [
            (0, (1970, 1, 1)),
            (-1, (1969, 12, 31)),
            (11_016, (2000, 2, 29)),
            (11_017, (2000, 3, 1)),
            (20_777, (2026, 11, 20)),
            (47_540, (2100, 2, 28)),
            (47_541, (2100, 3, 1)),
        ];
        for (day, date) in days {
            assert_eq!(civil(day), date);
        }
    }

    #[test]
    fn a_time_has_its_day_where_there_are_several() {
        let clock = Clock::Monotonic { wall_offset_ns: Some(1_795_139_200_000_000_000) };
        assert_eq!(Times { clock, dated: true }.time(0), "2026-11-20 01:46:40Z");
        assert_eq!(Times { clock, dated: false }.time(0), "01:46:40Z");
        let before = Clock::Monotonic { wall_offset_ns: Some(-1) };
        assert_eq!(Times { clock: before, dated: true }.time(0), "1969-12-31 23:59:59Z");
        assert_eq!(Times { clock: Clock::Lines, dated: true }.time(1234), "line 1,234");
    }

    #[test]
    fn distances_have_the_unit_that_shows_them() {
        let clock = Clock::Monotonic { wall_offset_ns: None };
        let told = [1_500, 2_000_000, 40_300_000, 1_000_000_000, u64::MAX].map(|ns| clock.distance(ns));
        assert_eq!(told, ["1.5 µs", "2.0 ms", "40.3 ms", "1.0 s", "18446744073.7 s"]);
        let lengths = [900, 59_900, 60_000, 641_000, 10_920_000, 187_200_000];
        let told = lengths.map(|ms| duration(ms * 1_000_000));
        assert_eq!(told, ["0.9 s", "59.9 s", "1m00s", "10m41s", "3h02m", "2d04h"]);
        assert_eq!([1, 2000].map(|lines| Clock::Lines.distance(lines)), ["1 line", "2,000 lines"]);
    }
}
