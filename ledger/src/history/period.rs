//! Detects the steps of a program that does not report them: its live bytes rise and fall periodically.
//!
//! When a window ends, the book's named bytes are compared with two levels between their recent minimum and maximum. Above the
//! upper level the book is up, below the lower level it is down. A period lasts from one rise to the next, and its lowest moment
//! is a point. Only periods of nearly constant length count; other programs are judged by the minute. Periods of only a few
//! windows are not detected.

/// Number of periods whose lengths are compared.
const INTERVALS: usize = 16;
/// With each window the extremes approach each other by this fraction (1/1024) of their distance, so that old ones are forgotten.
const FORGET: i64 = 1024;
const LEAST_SWING: i64 = 1 << 20;
/// Minimum swing as a fraction (1/64) of the maximum.
const LEAST_PART: i64 = 64;

#[derive(Debug, Default)]
pub(super) struct Period {
    low: i64,
    high: i64,
    is_up: bool,
    /// Lowest value since the level went down.
    trough: i64,
    count: u64,
    began_ns: u64,
    intervals: [u64; INTERVALS],
}

impl Period {
    /// Returns the index of the period if this is its lowest moment so far.
    pub fn trough(&mut self, time_ns: u64, named: i64) -> Option<u64> {
        let swing = self.high.saturating_sub(self.low);
        self.low = named.min(self.low.saturating_add(swing / FORGET));
        self.high = named.max(self.high.saturating_sub(swing / FORGET));
        let swing = self.high.saturating_sub(self.low);
        if swing < LEAST_SWING.max(self.high / LEAST_PART) {
            return None;
        }
        let above = named.saturating_sub(self.low);
        if self.is_up {
            if above > swing / 3 {
                return None;
            }
            (self.is_up, self.trough) = (false, named);
            return self.count.checked_sub(1);
        }
        if above > swing / 3 * 2 {
            let last = (self.count % INTERVALS as u64) as usize;
            self.intervals[last] = time_ns.saturating_sub(self.began_ns);
            (self.is_up, self.began_ns, self.count) = (true, time_ns, self.count + 1);
            return None;
        }
        if named >= self.trough {
            return None;
        }
        self.trough = named;
        self.count.checked_sub(1)
    }

    /// Returns the length of a period if the last periods were alike and the latest one is recent.
    pub fn length_ns(&self, now_ns: u64) -> Option<u64> {
        if self.count <= INTERVALS as u64 {
            return None; // the first interval has no beginning
        }
        let mut sorted = self.intervals;
        sorted.sort_unstable();
        let (early, middle, late) =
            (sorted[INTERVALS / 8], sorted[INTERVALS / 2], sorted[INTERVALS - 1 - INTERVALS / 8]);
        let is_alike = late - early <= middle / 2;
        let is_over = now_ns.saturating_sub(self.began_ns) > middle.saturating_mul(10);
        (is_alike && !is_over).then_some(middle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u64 = 10_000_000;

    /// Simulates swings between 100 and 900 MiB above a rising floor; `lengths` are periods in windows.
    fn swings(period: &mut Period, lengths: impl Iterator<Item = u64>, rise: i64) -> Vec<(u64, i64)> {
        let (mut found, mut now, mut floor) = (Vec::new(), 0, 100 << 20);
        for length in lengths {
            for at in 0..length {
                let height = (at.min(length - at) * (1600 << 20) / length) as i64;
                found.extend(period.trough(now, floor + height).map(|index| (index, floor + height)));
                now += WINDOW;
            }
            floor += rise;
        }
        found
    }

    #[test]
    fn a_stable_swing_has_a_length_and_a_trough_each_time() {
        let mut period = Period::default();
        let found = swings(&mut period, (0..50).map(|_| 30), 1 << 20);
        assert_eq!(period.length_ns(50 * 30 * WINDOW), Some(30 * WINDOW));
        for index in 20..48 {
            let lowest = found.iter().filter(|(at, _)| *at == index).map(|(_, bytes)| *bytes).min();
            let before = found.iter().filter(|(at, _)| *at == index - 1).map(|(_, bytes)| *bytes).min();
            assert_eq!(lowest.zip(before).map(|(lowest, before)| lowest - before), Some(1 << 20));
        }
        assert_eq!(period.length_ns(1000 * 30 * WINDOW), None, "it is long over");
    }

    #[test]
    fn what_is_irregular_or_still_has_no_length() {
        let mut period = Period::default();
        let mut length = 7_u64;
        let irregular = (0..200).map(|_| {
            length = length * 1_103_515_245 % 997;
            20 + length % 100
        });
        swings(&mut period, irregular, 0);
        assert_eq!(period.length_ns(0), None);
        let mut period = Period::default();
        assert!((0..1000).all(|at| period.trough(at * WINDOW, (5 << 30) + at as i64 % 7 * 4096).is_none()));
        assert_eq!(period.length_ns(1000 * WINDOW), None);
    }
}
