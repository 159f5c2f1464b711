//! Changes for memory of one line outside of every pass, judged by its course over time: copies of a model with its optimizer's
//! state, and a queue of tensors.

use super::super::item::{Item, Kind, Memory, mib};
use super::cells::{beyond_others, steps_through};
use super::data::{is_of_lines, lines};
use super::parts::Parts;
use crate::Report;
use crate::amounts::is_about;
use gpumem_model::run::{Cell, Device};

/// Maximum difference of such a copy from the parameters and the state, as a share of these: buffers are copied, too.
const SAME_SHARE: f64 = 0.02;
/// Minimum bytes of a model and its optimizer's state, as a factor of the model's, as Adam has, for no step to read a copy of them.
/// With less, the line may keep other tensors for each parameter that steps read, such as averages and penalties.
const WITH_STATE: i64 = 3;
/// Minimum number of completed steps through which a copy stays.
const LEAST_STEPS: u64 = 3;
/// A queue is full at a level of at least this share of its bytes at the peak.
const FULL_SHARE: f64 = 0.9;
/// Minimum share of the points of the timeline at which a queue is full.
const FULL_POINTS: f64 = 0.3;
/// Minimum number of times that the level of a full queue rises, and that it falls.
const LEAST_CHANGES: usize = 5;
/// Minimum and maximum number of tensors in a queue.
const LEAST_TENSORS: i64 = 8;
const MOST_IN_QUEUE: i64 = 256;
/// A queue rises and falls by at most this many of its tensors between two points, ...
const MOST_TENSORS: i64 = 4;
/// ... in at least this share of its changes. The size of a single tensor that is made anew changes by any amount.
const SMALL_CHANGES: f64 = 0.8;
/// Maximum difference of a change from a multiple of a tensor's size, as a share of this size.
const MULTIPLE: f64 = 0.1;
/// The advice leaves this many tensors of a queue at least.
const LEFT: i64 = 2;

/// The course of the line with the most memory.
struct Course<'r> {
    line: &'r str,
    /// Bytes at the peak.
    bytes: i64,
    /// Time, and bytes of the line, at the points of the timeline.
    points: Vec<(u64, i64)>,
}

/// Returns the change for the line with the most memory, in a program that fits.
pub(super) fn item(report: &Report<'_>, device: &Device, parts: &Parts<'_>) -> Option<Item> {
    let of_peak = lines(report, &device.peak.amounts);
    let (line, bytes) = of_peak.into_iter().max_by_key(|(_, bytes)| *bytes)?;
    if !parts.is_large(bytes) {
        return None;
    }
    let points = device.details.timeline.points.iter().map(|point| {
        let level = lines(report, &point.amounts).get(line).copied().unwrap_or(0);
        (point.time_ns, level)
    });
    let course = Course { line, bytes, points: points.collect() };
    course.copies(report, device, parts).or_else(|| course.queue(device))
}

impl Course<'_> {
    /// Returns the change for copies of a model and its optimizer's state.
    fn copies(&self, report: &Report<'_>, device: &Device, parts: &Parts<'_>) -> Option<Item> {
        let state = parts.parameters.saturating_add(parts.optimizer);
        let count = (self.bytes as f64 / state.max(1) as f64).round() as i64;
        let is_copy = is_about(self.bytes, state.saturating_mul(count), SAME_SHARE);
        let rows = &device.details.iterations.rows;
        // A copy of the state can be made only after the first step has made the state.
        let is_later = self
            .points
            .iter()
            .find(|(_, level)| *level > 0)
            .is_some_and(|(time_ns, _)| rows.first().is_some_and(|row| row.end_ns <= *time_ns));
        let is_kept = || {
            steps_through(device, rows.last().map_or(0, |row| row.end_ns), |point| {
                let level = lines(report, &point.amounts).get(self.line).copied().unwrap_or(0);
                level as f64 >= state as f64 * (1.0 - SAME_SHARE)
            }) >= LEAST_STEPS
        };
        let has_state = parts.parameters > 0 && parts.optimizer > 0 && count > 0;
        if !has_state || !is_copy || !is_later || !is_kept() {
            return None;
        }
        let is_surely_unread =
            state as f64 >= parts.parameters.saturating_mul(WITH_STATE) as f64 * (1.0 - SAME_SHARE);
        let change = match is_surely_unread {
            true => {
                "Keep the copy of the model and its optimizer's state that {0} makes on the host: copy each tensor with .cpu()"
            }
            false => {
                "If no step reads what {0} keeps, which is as large as the model and its optimizer's state, keep it on the host: copy each tensor with .cpu()"
            }
        };
        let item = Item::new(Kind::StateCopy, Memory::Data, device, change).named(self.line);
        let copies = if count == 1 { "1 copy".to_owned() } else { format!("{count} copies") };
        let formula = format!(
            "{} are {copies} of {} of parameters and optimizer state, made after the first step; the least: what the peak has beyond all other moments",
            mib(self.bytes),
            mib(state)
        );
        let is_of_line = |cell: &Cell| is_of_lines(cell) && cell.tag.as_deref() == Some(self.line);
        let least = beyond_others(report, device, &device.peak.amounts, is_of_line);
        let least_saved = if is_surely_unread { least } else { 0 };
        (least > 0).then(|| item.estimated([least_saved, self.bytes], formula))
    }

    /// Returns the change for a line with a queue: of batches that are ready, or of the latest results.
    fn queue(&self, device: &Device) -> Option<Item> {
        let (tensor, change, formula) = match (self.full_queue(), self.drained_queue()) {
            (Some(tensor), _) => (
                tensor,
                "If {0} fills a queue, such as one of prefetched batches, keep fewer of them ready, or keep them in pinned memory of the host; if it keeps the latest results, keep fewer, or keep them on the host",
                "which this line makes and something frees all the time",
            ),
            (None, Some(tensor)) => (
                tensor,
                "If {0} prefetches batches, bound its queue, such as by Queue(maxsize=2), or keep them in pinned memory of the host, and move each to the GPU when it is used",
                "which this line made early and something frees one after another",
            ),
            (None, None) => return None,
        };
        let count = self.bytes / tensor;
        let item = Item::new(Kind::Queue, Memory::Data, device, change).named(self.line);
        let formula = format!("1/2 to all but {LEFT} of about {count} x {}, {formula}", mib(tensor));
        Some(item.estimated([self.bytes / 2, tensor * (count - LEFT)], formula))
    }

    /// Returns the changes of the level between neighbouring points. Small tensors beside the large ones, such as labels, do not count.
    fn changes(&self, is_inside: impl Fn(i64, i64) -> bool) -> Vec<i64> {
        let pairs = self.points.windows(2).map(|pair| (pair[0].1, pair[1].1));
        let changes = pairs.filter(|(before, after)| is_inside(*before, *after));
        changes
            .map(|(before, after)| after - before)
            .filter(|by| by.abs() > self.bytes / MOST_IN_QUEUE)
            .collect()
    }

    /// Returns the size of the tensors of one size whose coming and going explains the changes; `None` if they are few.
    fn tensor(&self, changes: &[i64]) -> Option<i64> {
        let tensor = changes.iter().map(|by| by.abs()).min()?;
        let small = changes.iter().filter(|by| by.abs() <= tensor.saturating_mul(MOST_TENSORS)).count();
        let is_multiple = |bytes: &i64| {
            let rest = bytes.abs() % tensor;
            rest.min(tensor - rest) as f64 <= tensor as f64 * MULTIPLE
        };
        (small as f64 >= changes.len() as f64 * SMALL_CHANGES
            && changes.iter().all(is_multiple)
            && self.bytes / tensor >= LEAST_TENSORS)
            .then_some(tensor)
    }

    /// Returns the size of the tensors of a line that are made and freed all the time while about as many are alive.
    fn full_queue(&self) -> Option<i64> {
        let is_full = |level: i64| level as f64 >= self.bytes as f64 * FULL_SHARE;
        let full = self.points.iter().filter(|(_, level)| is_full(*level)).count();
        let changes = self.changes(|before, after| is_full(before) && is_full(after));
        let rises = changes.iter().filter(|by| **by > 0).count();
        let is_queue = full as f64 >= self.points.len() as f64 * FULL_POINTS
            && rises.min(changes.len() - rises) >= LEAST_CHANGES;
        self.tensor(&changes).filter(|_| is_queue)
    }

    /// Returns the size of the tensors of a line that were all alive before the first of them was freed, and go one after another: the
    /// producer of a queue is faster than its consumer.
    fn drained_queue(&self) -> Option<i64> {
        let most = self.points.iter().map(|(_, level)| *level).max()?;
        let full = self.points.iter().rposition(|(_, level)| *level == most)?;
        let after = Course { points: self.points[full..].to_vec(), ..*self };
        let changes = after.changes(|_, _| true);
        let is_drained = changes.len() >= LEAST_CHANGES * 2 && changes.iter().all(|by| *by < 0);
        self.tensor(&changes).filter(|_| is_drained)
    }
}
