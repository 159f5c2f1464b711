//! Counters and ranges (timed scopes) that a program reports. Their names are untrusted text; views escape them.

use crate::fields::{Timed, Window, fields, plain};
use serde::{Deserialize, Serialize};

/// Maximum number of single ranges in a run; the latest are kept.
pub const MAX_SPANS: usize = 16_384;

/// Maximum number of counters of a process; of further counters only the number of changes is kept.
pub const MAX_COUNTERS: usize = 128;
pub const MAX_COUNTER_POINTS: usize = 128;
/// Maximum number of range names of a process; of further names only the number of ranges is kept.
pub const MAX_RANGES: usize = 256;

fields! {
    /// Counters and ranges of a program. Stored as JSON; a field missing in a stored run gets its default.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct ProgramData {
        /// Counters; if there are too many, those that were set first.
        counters: Vec<Counter>             => clip clip_counters;
        /// Number of changes of further counters.
        counters_dropped: u64              => clip keep;
        /// Ranges by name; if there are too many names, those that ended first.
        ranges: Vec<Range>                 => clip keep;
        /// Number of ranges whose names had no room in `ranges`.
        ranges_dropped: u64                => clip keep;
        /// Number of ranges whose begin or end was lost.
        ranges_broken: u64                 => clip keep;
        /// Single ranges in the order of their ends; only the latest if there are many.
        spans: Vec<Span>                   => clip within;
        /// Number of single ranges that were dropped.
        spans_dropped: u64                 => clip keep;
        /// The allocator's totals, if the run was imported from a PyTorch memory snapshot.
        snapshot: Option<SnapshotFigures>  => clip keep;
    }
}

fn clip_counters(counters: &mut Vec<Counter>, window: &Window) {
    for counter in counters {
        // The last change before the window stays, because it sets the value at the window's begin.
        let before = counter.points.iter().rposition(|(time_ns, _)| *time_ns <= window.from_ns).unwrap_or(0);
        counter.points.drain(..before);
        counter.points.retain(|(time_ns, _)| *time_ns <= window.to_ns);
    }
}

/// Device memory totals that a PyTorch memory snapshot states, over all its devices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SnapshotFigures {
    /// Bytes of segments (`memory_reserved`).
    pub reserved_bytes: u64,
    pub segments: u64,
    /// Bytes of blocks in use (`memory_allocated`), including freed blocks that a CUDA stream may still use.
    pub allocated_bytes: u64,
    pub blocks: u64,
    /// Number of freed blocks that a CUDA stream may still use.
    pub pending_blocks: u64,
    /// Bytes that the program requested for the blocks in use; the blocks themselves may be larger.
    pub requested_bytes: u64,
    pub idle_blocks: u64,
    /// Number of entries of the snapshot's allocation history.
    pub trace_entries: u64,
    /// Highest sum of requested bytes in the allocation history.
    pub peak_requested_bytes: u64,
    /// Highest sum of allocated bytes in the allocation history.
    pub peak_allocated_bytes: u64,
}

fields! {
    /// A counter that the program reports.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Counter {
        /// Name of the counter; absent if the record of the name was lost.
        name: Option<String>;
        value: i64;
        /// Number of times that the program reported a value.
        changes: u64;
        min: i64;
        max: i64;
        /// Integral of the value over time (value times ns), from `since_ns` to `until_ns`.
        area: i128;
        /// Time of the first report (ns).
        since_ns: u64;
        /// End of the time that `area` covers (ns).
        until_ns: u64;
        /// Time (ns) and value of each change; if there are many, the last one in each slot of time.
        points: Vec<(u64, i64)>;
    }
}

fields! {
    /// Counts and lengths of all ranges of one name.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Range {
        /// Path of the scope; absent for steps, and if the record of the name was lost.
        name: Option<String>;
        /// Whether the ranges are the program's steps; each lasts until the next.
        is_step: bool;
        /// Number of ranges that ended.
        count: u64;
        /// Sum of the lengths of these ranges (ns); a nested range also counts in the ranges around it.
        total_ns: u64;
        min_ns: u64;
        max_ns: u64;
        /// Number of ranges that are still open.
        open: u64;
    }
}

/// One range: index in [`ProgramData::ranges`], thread id, begin and end (ns).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span(pub u32, pub u32, pub u64, pub u64);

impl Range {
    /// Adds a range that has ended, with its length.
    pub fn add(&mut self, length_ns: u64) {
        self.min_ns = if self.count == 0 { length_ns } else { self.min_ns.min(length_ns) };
        self.max_ns = self.max_ns.max(length_ns);
        self.total_ns = self.total_ns.saturating_add(length_ns);
        self.count = self.count.saturating_add(1);
    }
}

impl Counter {
    pub fn mean(&self) -> f64 {
        match self.until_ns.saturating_sub(self.since_ns) {
            0 => self.value as f64,
            lasted_ns => self.area as f64 / lasted_ns as f64,
        }
    }

    fn append(&mut self, later: Counter) {
        // Between the two runs the counter kept the last value of the earlier one.
        let between_ns = later.since_ns.saturating_sub(self.until_ns);
        let between = i128::from(self.value).saturating_mul(i128::from(between_ns));
        self.area = self.area.saturating_add(between).saturating_add(later.area);
        self.changes = self.changes.saturating_add(later.changes);
        (self.min, self.max) = (self.min.min(later.min), self.max.max(later.max));
        (self.value, self.until_ns) = (later.value, later.until_ns.max(self.until_ns));
        self.points.extend(later.points);
        if self.points.len() > MAX_COUNTER_POINTS {
            // Keep every other point, counted from the last.
            let last = self.points.len() - 1;
            let mut at = 0..;
            self.points.retain(|_| at.next().is_some_and(|at| (last - at).is_multiple_of(2)));
        }
    }
}

impl Range {
    /// Returns the mean length of the ranges (ns), rounded down; `None` if no range ended.
    pub fn mean_ns(&self) -> Option<u64> {
        self.total_ns.checked_div(self.count)
    }

    /// Returns the name for display; steps have the text `(steps)`, which differs from every scope's name.
    pub fn title(&self) -> &str {
        match &self.name {
            _ if self.is_step => "(steps)",
            Some(name) => name,
            None => LOST,
        }
    }

    fn append(&mut self, later: &Range) {
        self.min_ns = match (self.count, later.count) {
            (_, 0) => self.min_ns,
            (0, _) => later.min_ns,
            _ => self.min_ns.min(later.min_ns),
        };
        self.max_ns = self.max_ns.max(later.max_ns);
        self.total_ns = self.total_ns.saturating_add(later.total_ns);
        self.count = self.count.saturating_add(later.count);
        self.open = later.open;
    }
}

/// Text that is shown instead of a name whose record was lost.
pub const LOST: &str = "(its name was lost)";

impl ProgramData {
    /// Whether the program reported nothing.
    pub fn is_empty(&self) -> bool {
        *self == ProgramData::default()
    }

    /// Appends the data of a later run of the same life.
    pub fn append(&mut self, later: ProgramData) {
        for counter in later.counters {
            let has_room = self.counters.len() < MAX_COUNTERS;
            match self.counters.iter_mut().find(|known| known.name == counter.name) {
                Some(known) => known.append(counter),
                None if has_room => self.counters.push(counter),
                None => self.counters_dropped = self.counters_dropped.saturating_add(counter.changes),
            }
        }
        self.snapshot = later.snapshot.or(self.snapshot);
        let mut places = Vec::new();
        for range in later.ranges {
            let key = |range: &Range| (range.is_step, range.name.clone());
            match self.ranges.iter().position(|known| key(known) == key(&range)) {
                Some(at) => {
                    self.ranges[at].append(&range);
                    places.push(Some(at as u32));
                }
                // The ranges of steps need one entry more than the maximum number of names.
                None if self.ranges.len() <= MAX_RANGES => {
                    places.push(Some(self.ranges.len() as u32));
                    self.ranges.push(range);
                }
                None => {
                    self.ranges_dropped = self.ranges_dropped.saturating_add(range.count);
                    places.push(None);
                }
            }
        }
        let spans = later.spans.iter().filter_map(|&Span(range, thread, from_ns, to_ns)| {
            Some(Span(places.get(range as usize).copied().flatten()?, thread, from_ns, to_ns))
        });
        self.spans.extend(spans);
        let beyond = self.spans.len().saturating_sub(MAX_SPANS);
        self.spans.drain(..beyond);
        for (sum, more) in [
            (&mut self.counters_dropped, later.counters_dropped),
            (&mut self.ranges_dropped, later.ranges_dropped),
            (&mut self.ranges_broken, later.ranges_broken),
            (&mut self.spans_dropped, later.spans_dropped.saturating_add(beyond as u64)),
        ] {
            *sum = sum.saturating_add(more);
        }
    }
}

plain!(SnapshotFigures, Span);

impl Timed for Span {
    fn time_ns(&self) -> (u64, u64) {
        let &Span(_, _, begin_ns, end_ns) = self;
        (begin_ns, end_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::WindowKind;

    fn counter(name: &str, value: i64, since_ns: u64) -> Counter {
        Counter {
            name: Some(name.into()),
            value,
            changes: 2,
            min: value - 1,
            max: value,
            area: i128::from(value) * 10,
            since_ns,
            until_ns: since_ns + 10,
            points: (0..100).map(|at| (since_ns + at / 10, value)).collect(),
        }
    }

    fn range(name: &str, count: u64, each_ns: u64) -> Range {
        let total_ns = count * each_ns;
        Range {
            name: Some(name.into()),
            count,
            total_ns,
            min_ns: each_ns,
            max_ns: each_ns,
            ..Range::default()
        }
    }

    #[test]
    fn a_life_goes_on_where_it_was() {
        let mut own = ProgramData {
            counters: vec![counter("a", 4, 0)],
            ranges: vec![range("x", 0, 0), range("y", 2, 30)],
            spans: vec![Span(1, 7, 0, 30)],
            ..ProgramData::default()
        };
        let steps = Range { is_step: true, count: 1, ..Range::default() };
        own.append(ProgramData {
            counters: vec![counter("b", 1, 20), counter("a", 8, 20)],
            ranges: vec![range("y", 1, 10), range("x", 1, 5), steps],
            spans: vec![Span(0, 7, 40, 50), Span(1, 8, 41, 46)],
            ranges_broken: 3,
            ..ProgramData::default()
        });
        let a = &own.counters[0];
        assert_eq!((a.value, a.changes, a.min, a.max), (8, 4, 3, 8));
        // 4 from 0 to 20, 8 from 20 to 30.
        assert!((a.mean() - 160.0 / 30.0).abs() < 1e-9, "{}", a.mean());
        assert_eq!((a.points.len(), a.points.last()), (100, Some(&(29, 8))));
        assert_eq!(own.counters[1].name.as_deref(), Some("b"));
        let times: Vec<_> =
            own.ranges.iter().map(|of| (of.title(), of.count, of.min_ns, of.max_ns)).collect();
        assert_eq!(times, [("x", 1, 5, 5), ("y", 3, 10, 30), ("(steps)", 1, 0, 0)]);
        assert_eq!(own.spans, [Span(1, 7, 0, 30), Span(1, 7, 40, 50), Span(0, 8, 41, 46)]);
        assert_eq!(own.ranges_broken, 3);
    }

    #[test]
    fn a_window_has_what_was_in_it() {
        let mut own = ProgramData {
            counters: vec![Counter { points: vec![(0, 1), (10, 2), (20, 3), (30, 4)], ..Counter::default() }],
            spans: vec![Span(0, 1, 0, 5), Span(0, 1, 0, 15), Span(0, 1, 31, 32)],
            ..ProgramData::default()
        };
        own.clip(&Window { part: WindowKind::Since, from_ns: 15, to_ns: 30, exact: false });
        assert_eq!(own.counters[0].points, [(10, 2), (20, 3), (30, 4)]);
        assert_eq!(own.spans, [Span(0, 1, 0, 15)]);
    }
}
