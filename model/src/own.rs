//! What a program says of itself beside memory: its own counters, and the times of its ranges. Names are as it said them; views make
//! them harmless.

use serde::{Deserialize, Serialize};

/// Single ranges that a run of several parts or lives has at most: the latest.
pub const MAX_SPANS: usize = 16_384;

/// Counters that are kept of a process; changes of more are counted.
pub const MAX_COUNTERS: usize = 128;
/// Points of a counter that are kept.
pub const MAX_COUNTER_POINTS: usize = 128;
/// Names of ranges that are kept of a process; ranges of more are counted.
pub const MAX_RANGES: usize = 256;

/// Counters and ranges. Kept as JSON in the store: fields that are added read as their default from older runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Own {
    /// Those that were said first.
    pub counters: Vec<Counter>,
    /// Changes of others.
    pub counters_dropped: u64,
    /// By name, those that ended first.
    pub ranges: Vec<Range>,
    /// Ranges of others.
    pub ranges_dropped: u64,
    /// Ranges whose begin or end was lost.
    pub ranges_broken: u64,
    /// Ranges one by one, the latest, in the order of their ends.
    pub spans: Vec<Span>,
    /// More of them.
    pub spans_dropped: u64,
    /// What a snapshot of PyTorch says of the allocator.
    pub snapshot: Option<SnapshotFigures>,
}

/// A PyTorch memory snapshot's own figures of device memory, over all its devices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SnapshotFigures {
    /// Bytes of its segments (`memory_reserved`).
    pub reserved_bytes: u64,
    /// Segments.
    pub segments: u64,
    /// Bytes of blocks in use (`memory_allocated`), those that wait for a stream included.
    pub allocated_bytes: u64,
    /// Blocks in use.
    pub blocks: u64,
    /// Of these, blocks that were freed and wait for a stream.
    pub pending_blocks: u64,
    /// Bytes that the program asked for, of the blocks in use.
    pub requested_bytes: u64,
    /// Blocks that are free.
    pub idle_blocks: u64,
    /// Entries of the history.
    pub trace_entries: u64,
    /// Most bytes that were requested at one time of the history.
    pub peak_requested_bytes: u64,
    /// Most bytes that were allocated at one time of the history.
    pub peak_allocated_bytes: u64,
}

/// A counter of the program's own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counter {
    /// Its name; absent if a loss took it.
    pub name: Option<String>,
    /// What it was last.
    pub value: i64,
    /// Times that it was set or changed.
    pub changes: u64,
    /// Least of its values.
    pub min: i64,
    /// Greatest of them.
    pub max: i64,
    /// Value times ns, from `since_ns` to `until_ns`.
    pub area: i128,
    /// When it was said first.
    pub since_ns: u64,
    /// Until when that is known.
    pub until_ns: u64,
    /// When it was set and to what; of many changes the last in each slot of time.
    pub points: Vec<(u64, i64)>,
}

/// All ranges of one name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Range {
    /// Path of the scope; absent if a loss took it, and of steps.
    pub name: Option<String>,
    /// They are the steps that the program said, from one to the next.
    pub is_step: bool,
    /// How many ended.
    pub count: u64,
    /// Their lengths together; ranges inside of them count in both.
    pub total_ns: u64,
    /// The shortest.
    pub min_ns: u64,
    /// The longest.
    pub max_ns: u64,
    /// How many have not ended.
    pub open: u64,
}

/// One range: index in [`Own::ranges`], thread, begin and end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span(pub u32, pub u32, pub u64, pub u64);

impl Counter {
    /// Weighted by time.
    pub fn mean(&self) -> f64 {
        match self.until_ns.saturating_sub(self.since_ns) {
            0 => self.value as f64,
            lasted_ns => self.area as f64 / lasted_ns as f64,
        }
    }

    /// What a later part of the process's life says of it.
    fn go_on(&mut self, later: Counter) {
        // What it was until it was said anew is what it was last.
        let between_ns = later.since_ns.saturating_sub(self.until_ns);
        let between = i128::from(self.value).saturating_mul(i128::from(between_ns));
        self.area = self.area.saturating_add(between).saturating_add(later.area);
        self.changes = self.changes.saturating_add(later.changes);
        (self.min, self.max) = (self.min.min(later.min), self.max.max(later.max));
        (self.value, self.until_ns) = (later.value, later.until_ns.max(self.until_ns));
        self.points.extend(later.points);
        if self.points.len() > MAX_COUNTER_POINTS {
            // Every other one, and the last.
            let last = self.points.len() - 1;
            let mut at = 0..;
            self.points.retain(|_| at.next().is_some_and(|at| (last - at).is_multiple_of(2)));
        }
    }
}

impl Range {
    /// Rounded down; `None` of none.
    pub fn mean_ns(&self) -> Option<u64> {
        self.total_ns.checked_div(self.count)
    }

    /// What it is called; steps have a name that no scope can have.
    pub fn title(&self) -> &str {
        match &self.name {
            _ if self.is_step => "(steps)",
            Some(name) => name,
            None => LOST,
        }
    }

    fn go_on(&mut self, later: &Range) {
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

/// Stands for a name that a loss took.
pub const LOST: &str = "(its name was lost)";

impl Own {
    /// There is nothing to tell.
    pub fn is_empty(&self) -> bool {
        *self == Own::default()
    }

    /// What a later part of the process's life says.
    pub fn go_on(&mut self, later: Own) {
        for counter in later.counters {
            let has_room = self.counters.len() < MAX_COUNTERS;
            match self.counters.iter_mut().find(|known| known.name == counter.name) {
                Some(known) => known.go_on(counter),
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
                    self.ranges[at].go_on(&range);
                    places.push(Some(at as u32));
                }
                // One more than there may be names: steps.
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
        for (sum, of) in [
            (&mut self.counters_dropped, later.counters_dropped),
            (&mut self.ranges_dropped, later.ranges_dropped),
            (&mut self.ranges_broken, later.ranges_broken),
            (&mut self.spans_dropped, later.spans_dropped.saturating_add(beyond as u64)),
        ] {
            *sum = sum.saturating_add(of);
        }
    }

    /// Of single ranges and points leaves those of a time.
    pub fn keep(&mut self, from_ns: u64, to_ns: u64) {
        self.spans.retain(|&Span(_, _, begin_ns, end_ns)| end_ns >= from_ns && begin_ns <= to_ns);
        for counter in &mut self.counters {
            // What it was when the time began is in it, too.
            let before = counter.points.iter().rposition(|(time_ns, _)| *time_ns <= from_ns).unwrap_or(0);
            counter.points.drain(..before);
            counter.points.retain(|(time_ns, _)| *time_ns <= to_ns);
        }
    }

    /// Bytes that it takes, about.
    pub fn weight(&self) -> usize {
        let texts = self.counters.iter().map(|counter| &counter.name);
        let texts = texts.chain(self.ranges.iter().map(|range| &range.name));
        let points = self.counters.iter().map(|counter| size_of_val(counter.points.as_slice()));
        texts.flatten().map(String::len).sum::<usize>()
            + points.sum::<usize>()
            + size_of_val(self.counters.as_slice())
            + size_of_val(self.ranges.as_slice())
            + size_of_val(self.spans.as_slice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut own = Own {
            counters: vec![counter("a", 4, 0)],
            ranges: vec![range("x", 0, 0), range("y", 2, 30)],
            spans: vec![Span(1, 7, 0, 30)],
            ..Own::default()
        };
        let steps = Range { is_step: true, count: 1, ..Range::default() };
        own.go_on(Own {
            counters: vec![counter("b", 1, 20), counter("a", 8, 20)],
            ranges: vec![range("y", 1, 10), range("x", 1, 5), steps],
            spans: vec![Span(0, 7, 40, 50), Span(1, 8, 41, 46)],
            ranges_broken: 3,
            ..Own::default()
        });
        let a = &own.counters[0];
        assert_eq!((a.value, a.changes, a.min, a.max), (8, 4, 3, 8));
        // 4 from 0 to 20, 8 from there to 30.
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
        let mut own = Own {
            counters: vec![Counter { points: vec![(0, 1), (10, 2), (20, 3), (30, 4)], ..Counter::default() }],
            spans: vec![Span(0, 1, 0, 5), Span(0, 1, 0, 15), Span(0, 1, 31, 32)],
            ..Own::default()
        };
        own.keep(15, 30);
        assert_eq!(own.counters[0].points, [(10, 2), (20, 3), (30, 4)]);
        assert_eq!(own.spans, [Span(0, 1, 0, 15)]);
    }
}
