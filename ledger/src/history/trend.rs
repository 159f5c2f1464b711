//! Points for detecting leaks: amounts of a book at the begin of each step and over time, bounded in number.
//!
//! **Sampling times.** The book is sampled at each `Step` record. A leak is memory that a step allocated and that is still held
//! when the next step begins; temporary memory has been freed by then. The book is also sampled when a forward pass begins, for
//! programs that only infer. The book is sampled at the lowest moments of a stable period (period.rs), for programs without
//! modules. All programs are also sampled when a window of the book ends or an NVML sample is closed, at most every quarter of a
//! second. No record costs more because of that.
//!
//! **Points.** A point is the minimum of its first samples: those of eight steps, or of a minute. When all points are in use,
//! neighbours are merged in pairs. While every sample of a pair counts, the merged point is the lower of the two; later it is the
//! first of them. So every point is the minimum of equally many samples. If old points were the minimum of more samples than new
//! ones, noise would look like growth.
//!
//! **Cost.** A sample compares each cell with its first amount. Only cells that have changed have points. Steps whose samples do
//! not count cost one comparison, so the number of full samples grows with the logarithm of the number of steps.

use crate::book::cells::CellId;
use crate::book::{Book, WINDOW_NS};
use crate::history::period::Period;
use crate::history::ring::Ring;
use gpumem_model::growth::{Axis, Growth};
use std::collections::BTreeMap;

/// Maximum number of cells with points of their own in the ledger; all others are summed.
const COLUMNS: usize = 512;
/// Number of steps, from that of a point on, whose samples count for the point.
const STEPS: u64 = 8;
/// Number of seconds, from that of a point on, whose samples count for the point; a power of two.
const SECONDS: u64 = 64;
/// Number of points by step from which on periods are not detected any more.
const ENOUGH_STEPS: usize = 12;
/// Unit of the time axis of untrackable bytes (ns), and number of units whose samples count for a point. Only NVML samples show
/// these bytes, so both differ from the constants above.
const GAP_UNIT_NS: u64 = 100_000_000;
const GAP_SAMPLES: u64 = 512;
const SECOND_NS: u64 = 1_000_000_000;
/// Minimum time between two samples on the time axis (ns).
const SAMPLE_INTERVAL_NS: u64 = SECOND_NS / 4;
/// Maximum jump of the program's step numbers that is explained by lost records.
const MAX_LOST_STEPS: u64 = 1 << 20;

/// Points from which the growth of one account (one process on one device) is judged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrendView {
    pub steps: Growth,
    /// Points by forward pass (call of an outermost module).
    pub passes: Growth,
    /// Points by period, if live bytes rise and fall with a stable period.
    pub periods: Option<Growth>,
    pub times: Growth,
    /// Time and untrackable bytes of NVML samples during which no memory changed.
    pub gap: Vec<(u64, i64)>,
    /// Instead of `gap`, for a process without an agent: time and `used` bytes.
    pub used: Vec<(u64, i64)>,
    /// Cells with the most live pinned memory, each with its bytes.
    pub pinned_cells: Vec<(CellId, i64)>,
}

/// Maximum number of cells with points of their own in a run; all others are summed.
const GROWTH_CELLS: usize = 64;
/// Minimum number of points by step or period for judging growth; the first two are warm-up.
const LEAST_STEPS: usize = gpumem_model::growth::LEAST_POINTS + 2;

impl TrendView {
    /// Returns the points from which growth is judged: by step, else by forward pass, else by period, else by time. Steps that
    /// ended before half of the time of the forward passes do not count.
    pub fn growth(self) -> Growth {
        let enough = |track: &Growth| track.points.len() >= LEAST_STEPS;
        let mut track = match self.periods.filter(enough) {
            _ if enough(&self.steps) && !self.steps.ends_before_half(&self.passes) => self.steps,
            _ if enough(&self.passes) => self.passes,
            Some(track) => track,
            None => self.times,
        };
        if track.pinned.iter().all(|bytes| *bytes == 0) {
            track.pinned.clear();
            track.early_pinned_cells.clear();
        } else {
            let early: BTreeMap<CellId, i64> = track.early_pinned_cells.drain(..).collect();
            let early = |cell: &CellId| (*cell, early.get(cell).copied().unwrap_or(0));
            track.early_pinned_cells = self.pinned_cells.iter().map(|(cell, _)| early(cell)).collect();
            track.pinned_cells = self.pinned_cells;
        }
        track.cells.sort_by_key(|(cell, points)| (std::cmp::Reverse(rise(points)), *cell));
        for (_, points) in track.cells.drain(GROWTH_CELLS.min(track.cells.len())..) {
            add_changes(&mut track.rest, &points);
        }
        track.cells.sort_by_key(|(cell, _)| *cell);
        Growth { gap: self.gap, used: self.used, ..track }
    }
}

/// Adds to `sum` the changes of a cell since its first point.
fn add_changes(sum: &mut [i64], points: &[i64]) {
    let first = points.first().copied().unwrap_or(0);
    for (sum, bytes) in sum.iter_mut().zip(points) {
        *sum = sum.wrapping_add(bytes.wrapping_sub(first));
    }
}

/// Column of all bytes except unused ones (idle and opaque bytes of pools).
const NAMED: usize = 0;
/// Column of the unused bytes.
const SLACK: usize = 1;
/// Column of the changes of all cells without a column of their own.
const REST: usize = 2;
/// Column of pinned host memory.
const PINNED: usize = 3;
/// Number of the fixed columns above; columns of single cells come after them.
const FIXED: usize = 4;
/// Number of points in which programs warm up.
const EARLY_POINTS: usize = 2;
/// In place of a column index: the cell has never changed.
const CONSTANT: usize = usize::MAX;

struct Sample<'b> {
    count: usize,
    amount: &'b dyn Fn(CellId) -> i64,
    unused: &'b [CellId],
    pinned: i64,
    pinned_cells: &'b BTreeMap<CellId, i64>,
}

#[derive(Debug, Clone, Copy)]
struct Cell {
    /// Bytes of the cell at the first point.
    first: i64,
    column: usize,
}

/// Points of a book's bytes at equal distances on one axis (steps, periods or time).
#[derive(Debug)]
struct Track {
    ring: Ring,
    cells: Vec<Cell>,
    /// Cells with pinned memory at the last of the first [`EARLY_POINTS`] points, each with its bytes.
    early_pinned: BTreeMap<CellId, i64>,
}

impl Track {
    fn new(samples: u64) -> Self {
        Track { ring: Ring::new(samples, FIXED), cells: Vec::new(), early_pinned: BTreeMap::new() }
    }

    fn sample_book(&mut self, index: u64, time_ns: u64, book: &Book) {
        let amount = |cell: CellId| book.now(cell);
        let (unused, pinned, pinned_cells) = (&book.unused_cells, book.pinned, &book.pinned_cells);
        let sample = Sample { count: book.len(), amount: &amount, unused, pinned, pinned_cells };
        self.sample(index, time_ns, &sample);
    }

    fn sample(&mut self, index: u64, time_ns: u64, sample: &Sample<'_>) {
        let Some(is_new) = self.ring.place(index, time_ns) else { return };
        let &Sample { count, amount, unused, pinned, pinned_cells } = sample;
        if self.ring.points.len() <= EARLY_POINTS {
            self.early_pinned.clone_from(pinned_cells);
        }
        let is_first = is_new && self.ring.points.len() == 1;
        for id in self.cells.len()..count {
            // A new cell had 0 bytes before.
            let first = if is_first { amount(id as CellId) } else { 0 };
            self.cells.push(Cell { first, column: CONSTANT });
        }
        let (mut named, mut slack, mut rest) = (0_i64, 0_i64, 0_i64);
        for id in 0..self.cells.len() {
            let bytes = amount(id as CellId);
            if unused.contains(&(id as CellId)) {
                slack = slack.wrapping_add(bytes);
                continue;
            }
            named = named.wrapping_add(bytes);
            let Cell { first, column } = self.cells[id];
            match column {
                CONSTANT if bytes == first => {}
                CONSTANT => {
                    let column = self.column(first, is_new);
                    self.cells[id].column = column;
                    if column == REST {
                        rest = rest.wrapping_add(bytes.wrapping_sub(first));
                    } else {
                        self.ring.put(column, bytes, is_new);
                    }
                }
                REST => rest = rest.wrapping_add(bytes.wrapping_sub(first)),
                column => self.ring.put(column, bytes, is_new),
            }
        }
        for (column, bytes) in [(NAMED, named), (SLACK, slack), (REST, rest), (PINNED, pinned)] {
            self.ring.put(column, bytes, is_new);
        }
        self.fold();
    }

    /// Returns a new column for a cell that had `first` bytes until now; [`REST`] if there is no room.
    fn column(&mut self, first: i64, is_new: bool) -> usize {
        if self.ring.columns.len() >= FIXED + COLUMNS {
            return REST;
        }
        let before = self.ring.points.len() - usize::from(is_new);
        self.ring.columns.push(vec![first; before]);
        self.ring.columns.len() - 1
    }

    /// Makes room for cells that begin to change: adds the cells that changed least to [`REST`].
    fn fold(&mut self) {
        if self.ring.columns.len() < FIXED + COLUMNS {
            return;
        }
        let mut rises: Vec<(u64, usize)> =
            (FIXED..self.ring.columns.len()).map(|at| (rise(&self.ring.columns[at]), at)).collect();
        rises.sort_unstable();
        let mut is_folded = vec![false; self.ring.columns.len()];
        rises.iter().take(COLUMNS / 4).for_each(|&(_, at)| is_folded[at] = true);
        let old = std::mem::take(&mut self.ring.columns);
        let mut place = vec![REST; old.len()];
        let mut folded = vec![0_i64; self.ring.points.len()];
        for (at, column) in old.into_iter().enumerate() {
            if is_folded[at] {
                add_changes(&mut folded, &column);
            } else {
                place[at] = self.ring.columns.len();
                self.ring.columns.push(column);
            }
        }
        for (sum, bytes) in self.ring.columns[REST].iter_mut().zip(folded) {
            *sum = sum.wrapping_add(bytes);
        }
        for cell in self.cells.iter_mut().filter(|cell| cell.column != CONSTANT) {
            cell.column = place[cell.column];
        }
    }

    fn view(&self, axis: Axis, period_ns: Option<u64>) -> Growth {
        let columns = &self.ring.columns;
        let own = |(id, cell): (usize, &Cell)| {
            let has_own = cell.column != CONSTANT && cell.column != REST;
            has_own.then(|| (id as CellId, columns[cell.column].clone()))
        };
        Growth {
            axis,
            period_ns,
            stride: self.ring.stride,
            points: self.ring.points.clone(),
            latest: self.ring.latest,
            named: columns[NAMED].clone(),
            slack: columns[SLACK].clone(),
            pinned: columns[PINNED].clone(),
            early_pinned_cells: self.early_pinned.iter().map(|(cell, bytes)| (*cell, *bytes)).collect(),
            cells: self.cells.iter().enumerate().filter_map(own).collect(),
            rest: columns[REST].clone(),
            ..Growth::default()
        }
    }
}

/// Returns the distance between the minima of the two halves: good enough for selecting the cells that grow.
pub fn rise(points: &[i64]) -> u64 {
    let (early, late) = points.split_at(points.len() / 2);
    match (early.iter().min(), late.iter().min()) {
        (Some(early), Some(late)) => late.abs_diff(*early),
        _ => 0,
    }
}

#[derive(Debug)]
pub(crate) struct Trend {
    steps: Track,
    passes: Track,
    pass_count: u64,
    /// `None` once the program has reported enough steps.
    periods: Option<(Period, Track)>,
    times: Track,
    /// Time of the last sample on the time axis (ns).
    sampled_ns: u64,
    now_ns: u64,
}

impl Default for Trend {
    fn default() -> Self {
        Trend {
            steps: Track::new(STEPS),
            passes: Track::new(STEPS),
            pass_count: 0,
            periods: Some((Period::default(), Track::new(STEPS))),
            times: Track::new(SECONDS),
            sampled_ns: 0,
            now_ns: 0,
        }
    }
}

impl Trend {
    /// Samples the book at the begin of step `index`, counted from the first.
    pub fn step(&mut self, index: u64, time_ns: u64, book: &Book) {
        self.steps.sample_book(index, time_ns, book);
        if self.steps.ring.points.len() >= ENOUGH_STEPS {
            self.periods = None;
        }
    }

    pub fn forward_pass(&mut self, time_ns: u64, book: &Book) {
        self.passes.sample_book(self.pass_count, time_ns, book);
        self.pass_count += 1;
    }

    /// Advances the time to the end of a window; samples the book if a sample is due.
    pub fn time(&mut self, time_ns: u64, book: &Book) {
        if time_ns / WINDOW_NS <= self.now_ns / WINDOW_NS {
            return;
        }
        self.now_ns = time_ns;
        if let Some((period, track)) = &mut self.periods {
            let live = book.tracked.wrapping_sub(book.unused());
            if let Some(index) = period.trough(time_ns, live) {
                track.sample_book(index, time_ns, book);
            }
        }
        if self.take_due(time_ns) {
            self.times.sample_book(time_ns / SECOND_NS, time_ns, book);
        }
    }

    /// Adds the amounts of a closed NVML sample, which are those at the sample's time.
    pub fn sample(&mut self, time_ns: u64, amounts: &[i64], book: &Book) {
        if self.take_due(time_ns) {
            let amount = |cell: CellId| amounts.get(cell as usize).copied().unwrap_or(0);
            let (unused, pinned, pinned_cells) = (&book.unused_cells, book.pinned, &book.pinned_cells);
            let sample = Sample { count: amounts.len(), amount: &amount, unused, pinned, pinned_cells };
            self.times.sample(time_ns / SECOND_NS, time_ns, &sample);
        }
    }

    /// Returns whether a sample on the time axis is due; if so, schedules the next one.
    fn take_due(&mut self, time_ns: u64) -> bool {
        let is_due = time_ns / SAMPLE_INTERVAL_NS > self.sampled_ns / SAMPLE_INTERVAL_NS;
        if is_due {
            self.sampled_ns = time_ns;
        }
        is_due
    }

    /// Returns the points by step, forward pass, period and time; those of untrackable bytes are in [`GapTrend`].
    pub fn view(&self) -> TrendView {
        let periods = self.periods.as_ref().and_then(|(period, track)| {
            let length_ns = period.length_ns(self.now_ns)?;
            Some(track.view(Axis::Period, Some(length_ns)))
        });
        let passes = self.passes.view(Axis::ForwardPass, None);
        let (steps, times) = (self.steps.view(Axis::Step, None), self.times.view(Axis::Minute, None));
        TrendView { steps, passes, periods, times, ..TrendView::default() }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Trends {
    /// Trends by book; the list grows when a book is first sampled.
    pub books: Vec<Trend>,
    pub steps: StepCount,
}

/// Untrackable bytes over time; for a process without an agent, `used` bytes.
#[derive(Debug)]
pub(crate) struct GapTrend {
    ring: Ring,
    is_used: bool,
}

impl Default for GapTrend {
    fn default() -> Self {
        GapTrend { ring: Ring::new(GAP_SAMPLES, 1), is_used: false }
    }
}

impl GapTrend {
    /// Adds a value; a change of `is_used` clears the earlier ones.
    pub fn add(&mut self, time_ns: u64, bytes: i64, is_used: bool) {
        if self.is_used != is_used {
            *self = GapTrend { is_used, ..GapTrend::default() };
        }
        if let Some(is_new) = self.ring.place(time_ns / GAP_UNIT_NS, time_ns) {
            self.ring.put(0, bytes, is_new);
        }
    }

    /// Returns times and bytes, and whether the bytes are `used` bytes.
    pub fn view(&self) -> (Vec<(u64, i64)>, bool) {
        let times = self.ring.points.iter().map(|(_, time_ns)| *time_ns);
        (times.zip(self.ring.columns[0].iter().copied()).collect(), self.is_used)
    }
}

/// Counts the steps that a process has begun. The program's own step numbers may restart or jump, so they are used only after a
/// loss of records.
#[derive(Debug, Default)]
pub(crate) struct StepCount {
    count: Option<u64>,
    number: u64,
    lost: bool,
}

impl StepCount {
    /// Records that steps may be among lost records.
    pub fn lose(&mut self) {
        self.lost = true;
    }

    /// Returns the index of the step that begins now and that the program calls `number`; the first has index 0.
    pub fn next(&mut self, number: u64) -> u64 {
        let ahead = number.checked_sub(self.number).filter(|ahead| (1..=MAX_LOST_STEPS).contains(ahead));
        let ahead = ahead.filter(|_| std::mem::take(&mut self.lost)).unwrap_or(1);
        let index = self.count.map_or(0, |count| count.saturating_add(ahead));
        (self.count, self.number, self.lost) = (Some(index), number, false);
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::book::cells::{IDLE, OPAQUE};
    use crate::history::ring::POINTS;

    fn sample(track: &mut Track, index: u64, amounts: &[i64]) {
        track.sample(
            index,
            index.wrapping_mul(1000),
            &Sample {
                count: amounts.len(),
                amount: &|cell| amounts[cell as usize],
                unused: &[IDLE, OPAQUE],
                pinned: 0,
                pinned_cells: &BTreeMap::new(),
            },
        );
    }

    #[test]
    fn points_go_on_for_ever_and_are_the_lowest_of_equally_many_looks() {
        let mut track = Track::new(STEPS);
        for step in 0..100_000_u64 {
            // The minimum of eight samples from a multiple of eight on is 0; the minimum of fewer is greater.
            sample(&mut track, step, &[0, 0, 0, (7 - step % 8) as i64]);
        }
        let view = track.view(Axis::Step, None);
        assert!((POINTS / 2..=POINTS).contains(&view.points.len()), "{}", view.points.len());
        assert_eq!(view.stride, 2048);
        assert_eq!(view.latest, (99_999, 99_999_000));
        assert!(view.points.iter().enumerate().all(|(at, point)| point.0 == at as u64 * 2048));
        assert_eq!(view.cells.len(), 1);
        assert!(view.cells[0].1.iter().all(|bytes| *bytes == 0), "{:?}", view.cells[0].1);
        assert_eq!(view.named, view.cells[0].1);
    }

    #[test]
    fn few_looks_are_all_there() {
        let mut track = Track::new(STEPS);
        (0..64).for_each(|step| sample(&mut track, step, &[5, 6, 0, 100, 7 * step as i64]));
        let view = track.view(Axis::Step, None);
        assert_eq!((view.stride, view.points.len()), (1, 64));
        let grows: Vec<i64> = (0..64).map(|step| 7 * step).collect();
        assert_eq!(view.cells, [(4, grows.clone())], "what never changes needs no points");
        assert_eq!(view.named, grows.iter().map(|bytes| bytes + 100).collect::<Vec<_>>());
        assert_eq!(view.slack, vec![11; 64]);
        sample(&mut track, 64, &[5, 6, 0, 100, 448]);
        let view = track.view(Axis::Step, None);
        assert_eq!((view.stride, view.points.len()), (2, 33));
        assert_eq!(view.cells[0].1[..3], [0, 14, 28], "the lower of each pair");
    }

    #[test]
    fn a_cell_that_comes_later_was_nothing_before() {
        let mut track = Track::new(STEPS);
        sample(&mut track, 0, &[0, 0, 0, 50]);
        sample(&mut track, 1, &[0, 0, 0, 50, 9]);
        sample(&mut track, 2, &[0, 0, 0, 40, 9]);
        assert_eq!(track.view(Axis::Step, None).cells, [(3, vec![50, 50, 40]), (4, vec![0, 9, 9])]);
    }

    #[test]
    fn cells_without_room_are_summed_and_one_that_grows_later_still_finds_a_place() {
        let mut track = Track::new(STEPS);
        let many = 3 + COLUMNS + 100;
        for step in 0..1000_u64 {
            let mut amounts: Vec<i64> = (0..many).map(|cell| (step % 2) as i64 + cell as i64).collect();
            amounts[0..3].fill(0);
            if step > 200 {
                amounts.push(1000 * (step - 200) as i64);
            }
            sample(&mut track, step, &amounts);
        }
        let view = track.view(Axis::Step, None);
        assert!(view.cells.len() <= COLUMNS, "{}", view.cells.len());
        let late = view.cells.iter().find(|(cell, _)| *cell as usize == many);
        assert!(late.is_some_and(|(_, points)| rise(points) > 100_000), "{late:?}");
        let last = view.points.len() - 1;
        let firsts: i64 = (3..many as i64).sum();
        let own: i64 = view.cells.iter().map(|(_, points)| points[last] - points[0]).sum();
        assert_eq!(view.named[last] - firsts, own + view.rest[last], "the rest is all the rest");
    }

    #[test]
    fn times_that_run_away_cost_nothing() {
        let mut track = Track::new(SECONDS);
        let times = [0, 1, 1 << 20, 1 << 40, (1 << 40) + 1, 5, u64::MAX - 1, u64::MAX];
        times.iter().for_each(|&time| sample(&mut track, time, &[0, 0, 0, 1]));
        assert!(track.view(Axis::Step, None).points.len() <= POINTS);
        for time in 0..1000 {
            sample(&mut track, u64::MAX - 1000 + time, &[0, 0, 0, 1]);
        }
        let mut gap = GapTrend::default();
        (0..10_000).for_each(|second| gap.add(second * SECOND_NS, second as i64, false));
        let (points, is_used) = gap.view();
        assert!(points.len() <= POINTS && !is_used && points[0] == (0, 0), "{points:?}");
        gap.add(10_000 * SECOND_NS, 7, true);
        assert_eq!(gap.view(), (vec![(10_000 * SECOND_NS, 7)], true), "another amount begins anew");
    }

    #[test]
    fn steps_are_counted_and_lost_ones_are_told_by_their_numbers() {
        let mut steps = StepCount::default();
        assert_eq!([700, 701, 1, 2, 2].map(|number| steps.next(number)), [0, 1, 2, 3, 4]);
        steps.lose();
        assert_eq!([10, 11].map(|number| steps.next(number)), [12, 13]);
        steps.lose();
        assert_eq!([3, u64::MAX].map(|number| steps.next(number)), [14, 15], "no number to go by");
        steps.lose();
        assert_eq!(steps.next(0), 16);
    }
}
