//! Detects the steps of a program that does not report them, from live bytes that rise and fall periodically.
//!
//! When a window of 10 ms ends, the book's live bytes (without idle and opaque bytes of pools) are compared with two levels. The
//! levels divide the range between the recent minimum and maximum in thirds. Above the upper level the state is `up`, below the
//! lower level `down`. A period lasts from one rise to the next, and its lowest moment becomes a point of growth. Only periods of
//! nearly constant length count; other programs are judged by the minute. Periods of only a few windows are not detected.

/// Number of latest periods whose lengths are compared.
const INTERVALS: usize = 16;
/// Each window moves minimum and maximum toward each other by 1/1024 of their distance, so that old extremes are forgotten.
const FORGET: i64 = 1024;
/// Minimum distance between the recent minimum and maximum for periods to be detected (bytes).
const LEAST_SWING: i64 = 1 << 20;
/// The same minimum as a fraction of the maximum (1/64).
const LEAST_PART: i64 = 64;

#[derive(Debug, Default)]
pub(super) struct Period {
    /// Recent minimum (bytes).
    low: i64,
    /// Recent maximum (bytes).
    high: i64,
    is_up: bool,
    /// Lowest live bytes since they began to fall (state `down`).
    trough: i64,
    /// Number of periods that have begun.
    count: u64,
    began_ns: u64,
    intervals: [u64; INTERVALS],
}

impl Period {
    /// Adds the live bytes at the end of a window. Returns the index of the present period if this is its lowest moment so far.
    pub fn trough(&mut self, time_ns: u64, live: i64) -> Option<u64> {
        let swing = self.high.saturating_sub(self.low);
        self.low = live.min(self.low.saturating_add(swing / FORGET));
        self.high = live.max(self.high.saturating_sub(swing / FORGET));
        let swing = self.high.saturating_sub(self.low);
        if swing < LEAST_SWING.max(self.high / LEAST_PART) {
            return None;
        }
        let above = live.saturating_sub(self.low);
        if self.is_up {
            if above > swing / 3 {
                return None;
            }
            (self.is_up, self.trough) = (false, live);
            return self.count.checked_sub(1);
        }
        if above > swing / 3 * 2 {
            let last = (self.count % INTERVALS as u64) as usize;
            self.intervals[last] = time_ns.saturating_sub(self.began_ns);
            (self.is_up, self.began_ns, self.count) = (true, time_ns, self.count + 1);
            return None;
        }
        if live >= self.trough {
            return None;
        }
        self.trough = live;
        self.count.checked_sub(1)
    }

    /// Returns the median length of a period, if the latest periods have similar lengths and the last one is recent.
    pub fn length_ns(&self, now_ns: u64) -> Option<u64> {
        if self.count <= INTERVALS as u64 {
            return None; // the first interval is not a whole period
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
