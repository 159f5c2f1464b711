//! Extremes and growth of a reading in the last minute. Extremes between two scrapes would be lost otherwise.

/// Minimum length of [`Recent::range`].
pub const RECENT_NS: u64 = 60_000_000_000;
/// Number of pieces of a minute; up to one piece more is kept.
const PIECES: usize = 6;
const PIECE_NS: u64 = RECENT_NS / PIECES as u64;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Piece {
    /// Number of the piece from time 0, plus one; 0 for none.
    number: u64,
    min: u64,
    max: u64,
    /// Time and value of the first reading.
    first: (u64, u64),
}

/// A reading in the last minute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recent {
    pieces: [Piece; PIECES + 1],
    /// Time and value of the newest reading.
    newest: (u64, u64),
}

impl Recent {
    /// Adds a reading; a reading more than a minute older than the newest is ignored.
    pub(crate) fn add(&mut self, time_ns: u64, value: u64) {
        let number = time_ns / PIECE_NS + 1;
        let piece = &mut self.pieces[(number % (PIECES as u64 + 1)) as usize];
        if piece.number < number {
            *piece = Piece { number, min: value, max: value, first: (time_ns, value) };
        } else if piece.number == number {
            (piece.min, piece.max) = (piece.min.min(value), piece.max.max(value));
        }
        if time_ns >= self.newest.0 {
            self.newest = (time_ns, value);
        }
    }

    /// Returns minimum and maximum of the minute before the newest reading; `None` without readings.
    pub fn range(&self) -> Option<(u64, u64)> {
        let oldest = (self.newest.0 / PIECE_NS + 1).saturating_sub(PIECES as u64).max(1);
        let pieces = self.pieces.iter().filter(|piece| piece.number >= oldest);
        pieces.map(|piece| (piece.min, piece.max)).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
    }

    /// Returns how much the newest value exceeds the oldest value of the minute before it, and the time between them; `None` with
    /// fewer than two values.
    pub(crate) fn growth(&self) -> Option<(i64, u64)> {
        let (time_ns, value) = self.newest;
        let firsts = self.pieces.iter().filter(|piece| piece.number > 0).map(|piece| piece.first);
        let (since_ns, before) =
            firsts.filter(|(since_ns, _)| since_ns.saturating_add(RECENT_NS) >= time_ns).min()?;
        (since_ns < time_ns).then(|| (value.wrapping_sub(before) as i64, time_ns - since_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extremes_stay_for_a_minute_and_then_go() {
        let mut recent = Recent::default();
        assert_eq!(recent.range(), None);
        let second = 1_000_000_000;
        recent.add(1000 * second, 50);
        recent.add(1001 * second, 90);
        recent.add(1001 * second + 1, 50);
        for at in 1002..1061 {
            recent.add(at * second, 50);
        }
        assert_eq!(recent.range(), Some((50, 90)), "59 s later");
        for at in 1061..1071 {
            recent.add(at * second, 50);
        }
        assert_eq!(recent.range(), Some((50, 50)), "70 s later");
        recent.add(1071 * second, 10);
        recent.add(900 * second, 1);
        assert_eq!(recent.range(), Some((10, 50)), "a reading of long ago says nothing");
    }

    #[test]
    fn growth_is_against_a_minute_ago() {
        let second = 1_000_000_000;
        let mut last_minute = Recent::default();
        assert_eq!(last_minute.growth(), None);
        last_minute.add(1000 * second, 50);
        assert_eq!(last_minute.growth(), None, "one reading says nothing");
        last_minute.add(1003 * second, 70);
        assert_eq!(last_minute.growth(), Some((20, 3 * second)));
        (1004..1200).for_each(|at| last_minute.add(at * second, at));
        assert_eq!(last_minute.growth(), Some((59, 59 * second)));
        last_minute.add(1200 * second, 100);
        assert_eq!(last_minute.growth(), Some((100 - 1140, 60 * second)));
        last_minute.add(5000 * second, 7);
        assert_eq!(last_minute.growth(), None, "nothing is known of the minute before");
    }
}
