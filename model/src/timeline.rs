//! Memory that a process held on a device over time, by cell (class, tag, role, phase, library and pool), in a bounded number of
//! points. Charts and requests for past moments use it.

use crate::cell::Amounts;
use crate::fields::{Timed, fields};
use serde::{Deserialize, Serialize};

/// Maximum number of cells of a point, including groups of small cells; all other bytes are in `rest_bytes`.
pub const MAX_CELLS: usize = 64;
/// Maximum number of points. When a timeline is full, its slots (equal intervals of time) double in width, and each slot keeps the
/// point with the most bytes.
pub const MAX_POINTS: usize = 256;

fields! {
    /// Memory held on a device over time.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Timeline {
        /// Width of a slot (ns, or lines of a log); 0 without slots. Each point is the fullest moment of its slot: the one with the
        /// most tracked bytes and, among equal ones, the fewest unused bytes of pools. If nothing happens for more than a width,
        /// the amounts at the start of that silence are a point too.
        width_ns: u64      => join max,          clip keep;
        /// Points in order of time. If at least one whole slot lies between two points, nothing happened there: the amounts of
        /// the first point were held until the slot of the second. Other points are exact only at their own time.
        points: Vec<Point> => join later_points, clip within;
    }
}

/// Appends the points later than all earlier ones. Two runs may overlap, because the later run's ledger may begin before the
/// earlier run ends.
fn later_points(earlier: &mut Vec<Point>, later: Vec<Point>) {
    let last_ns = earlier.last().map(|point| point.time_ns);
    earlier.extend(later.into_iter().filter(|point| Some(point.time_ns) > last_ns));
}

fields! {
    /// Memory held at one moment: `amounts` and `rest_bytes` sum to the tracked bytes.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Point {
        /// Time of the point (ns, or line of a log).
        time_ns: u64;
        /// Bytes by cell, at most [`MAX_CELLS`] cells. Of more, small cells are summed in groups: `a/b.*/c (smaller ones)` for
        /// tags that differ only in numbers, `a/(smaller ones)` for tags below a path, `(smaller ones)` for all tags. A cell
        /// counts in the most specific group of the point that contains it.
        amounts: Amounts;
        /// Bytes of all cells that are not in `amounts`.
        rest_bytes: i64;
    }
}

impl Timed for Point {
    fn time_ns(&self) -> (u64, u64) {
        (self.time_ns, self.time_ns)
    }
}

impl Point {
    pub fn tracked_bytes(&self) -> i64 {
        // The amounts of a damaged store may have any value, so the sum saturates.
        self.amounts.iter().fold(self.rest_bytes, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

impl Timeline {
    /// Reduces the points to at most [`MAX_POINTS`]: the fullest of each slot (most tracked bytes), and the last one before a whole
    /// slot without points or the end.
    pub fn thin(&mut self) {
        self.width_ns = self.width_ns.max(1);
        while self.points.len() > MAX_POINTS {
            self.width_ns = self.width_ns.saturating_mul(2);
            let slot = |point: &Point| point.time_ns / self.width_ns;
            let slots = self.points.chunk_by(|one, other| slot(one) == slot(other)).collect::<Vec<_>>();
            let mut kept: Vec<Point> = Vec::new();
            for (at, points) in slots.iter().enumerate() {
                let Some(last) = points.last() else { continue };
                let fullest = points.iter().rev().max_by_key(|point| point.tracked_bytes()).unwrap_or(last);
                kept.push(fullest.clone());
                let next = slots.get(at + 1).and_then(|points| points.first());
                if fullest.time_ns < last.time_ns && next.is_none_or(|next| slot(next) > slot(last) + 1) {
                    kept.push(last.clone());
                }
            }
            self.points = kept;
        }
    }
}

/// The point of a timeline that applies to a requested time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PointAt<'t> {
    /// The point with the amounts.
    pub point: &'t Point,
    /// Whether the amounts were held at exactly the requested time; otherwise the point is the nearest one.
    pub is_exact: bool,
}

impl Timeline {
    /// Returns the point that applies to a time, or the nearest one; `None` without points.
    pub fn at(&self, time_ns: u64) -> Option<PointAt<'_>> {
        let slot = |time_ns: u64| time_ns / self.width_ns.max(1);
        let after = self.points.partition_point(|point| point.time_ns <= time_ns);
        let next = self.points.get(after);
        let Some(before) = after.checked_sub(1).and_then(|before| self.points.get(before)) else {
            return next.map(|point| PointAt { point, is_exact: false });
        };
        // Nothing changed in a slot without a point.
        let is_exact = before.time_ns == time_ns
            || match next {
                Some(next) => {
                    slot(next.time_ns) > slot(before.time_ns) + 1 && slot(time_ns) < slot(next.time_ns)
                }
                None => true,
            };
        let is_nearer = |next: &&Point| !is_exact && next.time_ns - time_ns < time_ns - before.time_ns;
        Some(PointAt { point: next.filter(is_nearer).unwrap_or(before), is_exact })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(time_ns: u64, bytes: i64) -> Point {
        Point { time_ns, amounts: vec![(0, bytes)].into(), rest_bytes: 0 }
    }

    #[test]
    fn a_time_in_a_silence_is_exact_and_others_have_a_nearest_point() {
        let points = vec![point(12, 1), point(25, 2), point(31, 3), point(77, 4)];
        let timeline = Timeline { width_ns: 10, points };
        let at = |time_ns| timeline.at(time_ns).map(|told| (told.point.time_ns, told.is_exact));
        assert_eq!(at(5), Some((12, false)), "nothing is older");
        assert_eq!([at(12), at(18), at(19)], [Some((12, true)), Some((12, false)), Some((25, false))]);
        assert_eq!(
            [at(31), at(69), at(70), at(76)],
            [Some((31, true)), Some((31, true)), Some((77, false)), Some((77, false))]
        );
        assert_eq!(at(1000), Some((77, true)), "nothing happened since");
        assert_eq!(Timeline::default().at(5), None);
    }
}
