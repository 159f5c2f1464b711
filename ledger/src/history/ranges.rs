//! Ranges: count and duration of the program's named scopes and of its steps. Begin and end of scopes are recorded only if the
//! program asks for it (`ranges` of gpumem_configure). The latest single ranges are kept for traces.

use crate::{Map, in_order};
use gpumem_model::program_data::{ProgramData, Range, Span};
use gpumem_wire::{Edge, Stamp};
use std::collections::VecDeque;
use std::mem::size_of;
use std::sync::Arc;

/// Maximum number of range names of a process; those that ended first are kept.
pub use gpumem_model::program_data::MAX_RANGES;
/// Maximum number of single ranges of a process in the daemon; the latest are kept.
pub const MAX_SPANS: usize = 1024;
/// Maximum number of single ranges of a process in a recording or import.
pub use gpumem_model::program_data::MAX_SPANS as MAX_SPANS_OF_FILE;
/// Maximum number of threads with open ranges.
const MAX_THREADS: usize = 256;
/// Maximum number of open ranges of a thread; agents report at most as many.
const MAX_DEPTH: usize = 128;

#[derive(Debug, Default)]
pub(crate) struct Ranges {
    /// Index in `ended` by tag.
    index: Map<u32, u32>,
    /// Tag and sums of all ranges of this tag that have ended.
    ended: Vec<(u32, Range)>,
    /// Open ranges by thread, the innermost last: tag and start time.
    open: Map<u32, Vec<(u32, u64)>>,
    steps: Range,
    /// Start time of the step in progress (ns).
    step_ns: Option<u64>,
    spans: VecDeque<Span>,
    max_spans: usize,
    spans_dropped: u64,
    /// Number of ranges dropped because there were too many names, threads or nested ranges.
    dropped: u64,
    /// Number of ranges whose begin or end is missing.
    broken: u64,
}

impl Ranges {
    pub fn new(max_spans: usize) -> Self {
        Ranges { max_spans, ..Ranges::default() }
    }

    pub fn edge(&mut self, stamp: &Stamp, edge: Edge) {
        match edge {
            Edge::Begin => self.begin(stamp),
            Edge::End => self.end(stamp),
            Edge::Unknown => {}
        }
    }

    fn begin(&mut self, stamp: &Stamp) {
        let has_room = self.open.len() < MAX_THREADS || self.open.contains_key(&stamp.thread);
        let open = has_room.then(|| self.open.entry(stamp.thread).or_default());
        match open.filter(|open| open.len() < MAX_DEPTH) {
            Some(open) => open.push((stamp.tag, stamp.time_ns)),
            None => self.dropped += 1,
        }
    }

    fn end(&mut self, stamp: &Stamp) {
        let open = self.open.get_mut(&stamp.thread);
        let at = open.as_ref().and_then(|open| open.iter().rposition(|&(tag, _)| tag == stamp.tag));
        let (Some(open), Some(at)) = (open, at) else {
            self.broken += 1;
            return;
        };
        let (tag, from_ns) = open.remove(at);
        if open.is_empty() {
            self.open.remove(&stamp.thread);
        }
        let next = self.ended.len();
        let index = match self.index.get(&tag) {
            Some(&index) => index,
            None if next == MAX_RANGES => {
                self.dropped += 1;
                return;
            }
            None => {
                self.index.insert(tag, next as u32);
                self.ended.push((tag, Range::default()));
                next as u32
            }
        };
        let to_ns = stamp.time_ns.max(from_ns);
        if let Some((_, range)) = self.ended.get_mut(index as usize) {
            range.add(to_ns - from_ns);
        }
        if self.spans.len() == self.max_spans {
            self.spans.pop_front();
            self.spans_dropped += 1;
        }
        self.spans.push_back(Span(index, stamp.thread, from_ns, to_ns));
    }

    /// Begins a step, which ends the previous one.
    pub fn step(&mut self, time_ns: u64) {
        if let Some(began_ns) = self.step_ns.replace(time_ns) {
            self.steps.add(time_ns.saturating_sub(began_ns));
        }
    }

    /// Drops all open ranges after a loss, because begins and ends no longer match.
    pub fn lose(&mut self) {
        self.broken += self.open.values().map(|open| open.len() as u64).sum::<u64>();
        self.open.clear();
        self.step_ns = None;
    }

    /// Removes ranges that have ended; open ranges continue.
    pub fn restart(&mut self) {
        let fresh = Ranges::new(self.max_spans);
        *self = Ranges { open: std::mem::take(&mut self.open), step_ns: self.step_ns, ..fresh };
    }

    pub fn view(&self, name: impl Fn(u32) -> Option<Arc<str>>, view: &mut ProgramData) {
        let mut open: Map<u32, u64> = Map::default();
        for (tag, _) in self.open.values().flatten() {
            *open.entry(*tag).or_default() += 1;
        }
        let named = |tag: u32, range: &Range, open: u64| Range {
            name: name(tag).as_deref().map(str::to_owned),
            open,
            ..range.clone()
        };
        let ended = self.ended.iter();
        view.ranges =
            ended.map(|(tag, range)| named(*tag, range, open.get(tag).copied().unwrap_or(0))).collect();
        // A name of which no range has ended yet gets an entry too.
        let begun = open.iter().map(|(&tag, &count)| (tag, count));
        let begun = in_order(begun.filter(|(tag, _)| !self.index.contains_key(tag)));
        let room = MAX_RANGES - self.ended.len();
        let lines = begun.iter().take(room);
        view.ranges.extend(lines.map(|&(tag, count)| named(tag, &Range::default(), count)));
        if self.steps.count > 0 || self.step_ns.is_some() {
            let open = u64::from(self.step_ns.is_some());
            view.ranges.push(Range { is_step: true, open, ..self.steps.clone() });
        }
        view.ranges_dropped = self.dropped;
        view.ranges_broken = self.broken;
        view.spans = self.spans.iter().copied().collect();
        view.spans_dropped = self.spans_dropped;
    }

    pub fn bytes(&self) -> usize {
        let names = self.ended.capacity() * (size_of::<(u32, Range)>() + 16);
        let open = self.open.values().map(|open| open.capacity() * size_of::<(u32, u64)>() + 64);
        names + open.sum::<usize>() + self.spans.capacity() * size_of::<Span>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(thread: u32, tag: u32, time_ns: u64) -> Stamp {
        Stamp { thread, tag, time_ns, ..Stamp::default() }
    }

    fn told(ranges: &Ranges) -> ProgramData {
        let mut view = ProgramData::default();
        ranges.view(|tag| Some(tag.to_string().into()), &mut view);
        view
    }

    #[test]
    fn each_name_has_its_times_whatever_the_order_of_ends() {
        let mut ranges = Ranges::new(2);
        ranges.edge(&at(1, 10, 0), Edge::Begin);
        ranges.edge(&at(1, 11, 10), Edge::Begin);
        ranges.edge(&at(2, 10, 20), Edge::Begin);
        ranges.edge(&at(1, 10, 100), Edge::End); // the outer range ends first, as in NVTX domains
        ranges.edge(&at(1, 11, 110), Edge::End);
        ranges.edge(&at(2, 10, 60), Edge::End);
        ranges.edge(&at(3, 12, 70), Edge::Begin);
        let ProgramData { ranges: rows, spans, spans_dropped, .. } = told(&ranges);
        let row = |row: &Range| {
            (
                row.name.as_deref().map(str::to_owned),
                row.count,
                row.total_ns,
                row.min_ns,
                row.max_ns,
                row.open,
            )
        };
        assert_eq!(
            rows.iter().map(row).collect::<Vec<_>>(),
            [
                (Some("10".into()), 2, 140, 40, 100, 0),
                (Some("11".into()), 1, 100, 100, 100, 0),
                (Some("12".into()), 0, 0, 0, 0, 1),
            ]
        );
        assert_eq!((spans.len(), spans_dropped, spans[1].1, spans[1].2), (2, 1, 2, 20));
    }

    #[test]
    fn after_a_loss_no_end_meets_an_older_begin() {
        let mut ranges = Ranges::new(8);
        ranges.edge(&at(1, 10, 0), Edge::Begin);
        ranges.step(0);
        ranges.lose();
        ranges.step(50);
        ranges.edge(&at(1, 10, 100), Edge::End);
        let view = told(&ranges);
        assert_eq!((view.ranges_broken, view.spans.len()), (2, 0));
        assert_eq!((view.ranges.len(), view.ranges[0].count, view.ranges[0].open), (1, 0, 1), "the step");
        ranges.step(80);
        assert_eq!(told(&ranges).ranges[0].total_ns, 30);
    }

    #[test]
    fn whatever_a_program_says_it_takes_so_much() {
        let mut ranges = Ranges::new(16);
        for number in 0..100_000_u32 {
            ranges.edge(&at(number % 5000, number, u64::from(number)), Edge::Begin);
            if number % 3 == 0 {
                ranges.edge(&at(number % 5000, number, u64::from(number) + 1), Edge::End);
            }
        }
        let view = told(&ranges);
        assert!(view.ranges.len() <= MAX_RANGES && view.spans.len() <= 16);
        assert!(view.ranges_dropped > 50_000, "{}", view.ranges_dropped);
        assert!(ranges.bytes() < 1 << 20, "{}", ranges.bytes());
    }
}
