//! Draws memory over time: areas stacked by category, untrackable memory on top, and the bytes that NVML charged as a line.

use super::axis::{Axis, GREY, LARGE, SMALL, decimals, round_step, words};
use super::bar::{Bar, Kind, Segment, fill, folded, largest, merged, rank};
use super::bars::{LIST, MARGIN, ROW, list, stacked};
use super::drawing::{Anchor, Data, Drawing, Item, Rect, Text};
use super::helvetica::{fitted, width};
use super::palette::{BLACK, Color, RANKS, WHITE};
use crate::amounts::sum;
use crate::labels::device_title;
use crate::lines::clean_name;
use crate::{GroupBy, Report};
use gpumem_model::cell::{self, SUM};
use gpumem_model::run::{Clock, Device, Moment};
use gpumem_model::series::Extremes;
use gpumem_model::units::thousands;

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 300.0;
/// Width of the scale's labels, in points.
const SCALE: f64 = 44.0;

/// Memory at a time, as a stacked bar.
struct At {
    time_ns: u64,
    bar: Bar,
}

/// Returns the first and last time for which a device has data over time.
pub(super) fn span(device: &Device) -> Option<(u64, u64)> {
    let points = &device.details.timeline.points;
    let peak = (!points.is_empty() && device.peak.tracked_bytes.is_some()).then_some(device.peak.time_ns);
    let readings = readings(device);
    let seen = || {
        let points = points.iter().map(|point| point.time_ns).chain(peak);
        points.chain(readings.iter().map(|reading| reading.0))
    };
    // The amounts of the last point are valid for the width of one slot of the timeline.
    let width_ns = device.details.timeline.width_ns.max(1);
    let held = points.last().map_or(0, |point| point.time_ns.saturating_add(width_ns));
    Some((seen().min()?, seen().max()?.max(held)))
}

/// The picture of one device, with the position of its plot and its scales.
struct Chart<'c> {
    report: &'c Report<'c>,
    device: &'c Device,
    axis: Axis,
    plot: Rect,
    /// First and last time of the plot, in ns of the run's clock.
    first: u64,
    last: u64,
    /// Names of the categories with their own colours.
    ranks: Vec<String>,
    out: Drawing,
}

/// Draws one device; `None` if it has no data over time. `hidden` are categories that are summed because they are small.
pub(super) fn timeline(
    report: &Report<'_>,
    device: &Device,
    by: GroupBy,
    hidden: &[String],
    (first, last): (u64, u64),
) -> Option<Drawing> {
    let mut points = points(report, device, by);
    let bars: Vec<Bar> = points.iter().map(|at| at.bar.clone()).collect();
    let mut ranks = largest(&bars, RANKS);
    ranks.retain(|name| !hidden.contains(name));
    for at in &mut points {
        at.bar = merged(folded(&at.bar, &ranks));
    }
    let readings = readings(device);
    if points.is_empty() && readings.is_empty() {
        return None;
    }
    let low = points.iter().map(|at| at.bar.span().0).min().unwrap_or(0);
    let stacked = points.iter().map(|at| at.bar.span().1).max().unwrap_or(0);
    let high = readings.iter().map(|(_, used)| used.max).max().unwrap_or(0).max(stacked);
    let axis = Axis::new(low, high);
    let plot = Rect { x: MARGIN + SCALE, y: MARGIN + 32.0, width: WIDTH, height: HEIGHT };
    let width = plot.x + WIDTH + 24.0 + LIST + MARGIN;
    let title = device_title(device);
    let out = Drawing::new(title.as_str(), width, plot.y + HEIGHT + 3.0 * MARGIN);
    let mut chart = Chart { report, device, axis, plot, first, last, ranks, out };
    chart.out.text(Text { bold: true, ..words(&title, plot.x, MARGIN + LARGE, LARGE) });
    axis.grid(plot, &mut chart.out);
    axis.scale(plot, &mut chart.out);
    let peak = points.iter().position(|at| at.time_ns == device.peak.time_ns).unwrap_or(0);
    chart.areas(&points, peak);
    for piece in pieces(device, &readings) {
        let points: Vec<(f64, f64)> =
            piece.iter().map(|(time, bytes)| (chart.x(*time), axis.y(plot, *bytes as f64))).collect();
        // The line is black with a white border, so that it is visible on any background.
        chart.out.line(points.clone(), WHITE, 3.4);
        chart.out.line(points, BLACK, 1.5);
    }
    axis.zero(plot, &mut chart.out);
    chart.times();
    chart.events();
    if let Some(at) = points.get(peak) {
        chart.key(at);
    }
    if !readings.is_empty() {
        let (x, y) = (plot.x + WIDTH + 24.0, plot.y + ROW + SMALL);
        chart.out.line(vec![(x, y - 3.0), (x + 11.0, y - 3.0)], BLACK, 1.5);
        chart.out.text(words("used, as NVML read it", x + 16.0, y, SMALL));
    }
    Some(chart.out)
}

/// Returns the points of the timeline. Runs of older versions lack a point for the peak, so it is inserted.
fn points(report: &Report<'_>, device: &Device, by: GroupBy) -> Vec<At> {
    let kept = &device.details.timeline.points;
    let peak = &device.peak;
    let mut points: Vec<At> = Vec::with_capacity(kept.len() + 1);
    for point in kept {
        let (small, amounts): (Vec<_>, Vec<_>) =
            point.amounts.iter().copied().partition(|(cell, _)| is_sum(report, *cell, by));
        let small = sum(small.iter().map(|(_, bytes)| *bytes).chain([point.rest_bytes]));
        let is_peak = point.time_ns == peak.time_ns;
        let moment = Moment {
            time_ns: point.time_ns,
            tracked_bytes: Some(point.tracked_bytes()),
            amounts: amounts.into(),
            untrackable_bytes: match is_peak {
                true => peak.untrackable_bytes,
                false => untrackable_at(device, point.time_ns),
            },
            predates_bytes: peak.predates_bytes,
            ..Moment::default()
        };
        let mut bar = super::of_report::bar(report, &moment, by, "");
        bar.total_bytes = bar.total_bytes.saturating_add(small);
        bar.segments.push(Segment { name: "(smaller)".into(), bytes: small, kind: Kind::Smaller });
        points.push(At { time_ns: point.time_ns, bar });
    }
    let has_peak = points.iter().any(|point| point.time_ns == peak.time_ns);
    if points.is_empty() || has_peak || peak.tracked_bytes.is_none() {
        return points;
    }
    let at = points.partition_point(|point| point.time_ns < peak.time_ns);
    let bar = super::of_report::bar(report, peak, by, "");
    points.insert(at, At { time_ns: peak.time_ns, bar });
    points
}

/// Returns whether a cell is a sum of small cells, which the point does not record individually, and has no category of its own.
fn is_sum(report: &Report<'_>, index: u32, by: GroupBy) -> bool {
    let tag = report.cell(index).and_then(|cell| cell.tag.as_deref());
    tag.is_some_and(cell::is_sum) && report.category(index, by).is_none_or(|name| name == SUM)
}

/// Returns the untrackable bytes in the last NVML reading at or before a time.
fn untrackable_at(device: &Device, time_ns: u64) -> Option<i64> {
    let buckets = &device.series.buckets;
    let until = buckets.partition_point(|bucket| bucket.time_ns <= time_ns);
    Some(buckets[..until].iter().rev().find_map(|bucket| bucket.untrackable)?.last)
}

const ALARM: Color = Color(0xb8, 0x1f, 0x1f);
const LONGEST: f64 = 90.0;
const GAP: f64 = 4.0;

impl Chart<'_> {
    fn x(&self, time_ns: u64) -> f64 {
        let span = self.last.saturating_sub(self.first).max(1);
        let share = time_ns.saturating_sub(self.first) as f64 / span as f64;
        self.plot.x + WIDTH * share.min(1.0)
    }

    /// Draws a stacked area for each part, from below. Its edges are steps, because an amount is valid until the next point.
    fn areas(&mut self, points: &[At], peak: usize) {
        if points.is_empty() {
            return;
        }
        let mut layers = super::rows::rows_of(&points.iter().map(|at| at.bar.clone()).collect::<Vec<_>>());
        layers.sort_by_key(|part| (part.kind, rank(part, &self.ranks)));
        let ends = points.iter().skip(1).map(|at| at.time_ns).chain([self.last]);
        let spans = points.iter().map(|at| self.x(at.time_ns)).zip(ends.map(|end| self.x(end)));
        let spans: Vec<(f64, f64)> = spans.collect();
        // Returns the corners of a stepped line. `levels` has the amount at each point.
        let (axis, plot) = (self.axis, self.plot);
        let stair = |levels: &[i64]| -> Vec<(f64, f64)> {
            thinned(spans.iter().zip(levels).flat_map(|((from, to), bytes)| {
                let y = axis.y(plot, *bytes as f64);
                [(*from, y), (*to, y)]
            }))
        };
        let container = device_title(self.device);
        let mut floor: Vec<i64> = vec![0; points.len()];
        for layer in layers {
            let amount = |at: &At| {
                sum(at.bar.segments.iter().filter(|part| part.is_like(&layer)).map(|part| part.bytes))
            };
            let amounts: Vec<i64> = points.iter().map(amount).collect();
            let top = floor.iter().zip(&amounts).map(|(floor, bytes)| floor.saturating_add(*bytes));
            let top: Vec<i64> = top.collect();
            let outline = stair(&top).into_iter().chain(stair(&floor).into_iter().rev()).collect();
            let bytes = amounts.get(peak).copied().unwrap_or(0);
            let fill = fill(&layer, &self.ranks);
            let data = Some(Data { container: container.clone(), name: layer.name, bytes });
            self.out.items.push(Item::Shape { points: outline, fill, stroke: Some((WHITE, 0.25)), data });
            floor = top;
        }
        self.out.line(stair(&floor), GREY, 0.5);
    }

    /// Draws the time axis with round steps below the plot.
    fn times(&mut self) {
        const STEPS: f64 = 8.0;
        let (plot, first, clock) = (self.plot, self.first, self.report.run.clock);
        let span = self.last.saturating_sub(first) as f64;
        let (unit, name, rounds): (f64, &str, &[f64]) = match clock {
            Clock::Lines => (1.0, "line of the log", &[1.0, 2.0, 5.0]),
            Clock::Monotonic { .. } => match span / 1e9 {
                seconds if seconds < 0.5 => (1e6, "ms", &[1.0, 2.0, 5.0]),
                seconds if seconds < 180.0 => (1e9, "seconds", &[1.0, 2.0, 5.0]),
                seconds if seconds < 10_800.0 => (60e9, "minutes", &[1.0, 2.0, 5.0]),
                seconds if seconds < 259_200.0 => (3600e9, "hours", &[1.0, 2.0, 3.0, 4.0, 6.0]),
                _ => (86_400e9, "days", &[1.0, 2.0, 5.0]),
            },
        };
        let span = span / unit;
        let step = round_step(span, STEPS, rounds).unwrap_or(span.max(1.0));
        // The clock of an imported log counts lines, which keep their numbers; times start at 0 with the run.
        let origin = if clock == Clock::Lines { first as f64 } else { 0.0 };
        let mut mark = (origin / step).ceil() * step;
        let decimals = decimals(step);
        let bottom = plot.y + plot.height;
        while mark - origin <= span * 1.0001 {
            let x = plot.x + plot.width * (mark - origin) / span.max(f64::MIN_POSITIVE);
            self.out.line(vec![(x, bottom), (x, bottom + 4.0)], GREY, 0.8);
            let label = if decimals == 0 { thousands(mark as i64) } else { format!("{mark:.decimals$}") };
            self.out.text(Text { anchor: Anchor::Middle, ..words(&label, x, bottom + 14.0, SMALL) });
            mark += step;
        }
        let since = match clock {
            Clock::Lines => String::new(),
            clock => format!(" since {}", clock.time(first)),
        };
        let middle = plot.x + plot.width / 2.0;
        let name = words(&format!("{name}{since}"), middle, bottom + 28.0, SMALL);
        self.out.text(Text { anchor: Anchor::Middle, color: GREY, ..name });
    }

    /// Draws the legend: the parts with their colours and their amounts at the peak.
    fn key(&mut self, at: &At) {
        let Rect { y, height, .. } = self.plot;
        let x = self.plot.x + WIDTH + 24.0;
        let heading = format!("at the peak of tracked, {}", self.report.run.clock.time(at.time_ns));
        self.out.text(Text { color: GREY, ..words(&heading, x, y + SMALL, SMALL) });
        let beside = Rect { x, y: y + ROW, width: LIST, height: height - ROW };
        list(&at.bar, &stacked(&at.bar, &self.ranks), self.axis.unit, beside, &mut self.out);
    }

    /// Draws a line through the plot for each out-of-memory record and each mark, with its name above it if there is room.
    fn events(&mut self) {
        let plot = self.plot;
        let is_seen = |time_ns: u64| (self.first..=self.last).contains(&time_ns);
        let ooms = self.device.details.ooms.iter().filter(|oom| oom.is_out_of_memory());
        let ooms = ooms.map(|oom| (oom.time_ns, "OOM".to_owned(), true));
        let marks = self.report.run.coverage.marks.iter().map(|mark| {
            let name = clean_name(mark.name.as_deref().unwrap_or("(unnamed)"));
            (mark.time_ns, fitted(&name, SMALL, false, LONGEST), false)
        });
        // OOMs come first, so that their names have priority over those of marks.
        let events = ooms.chain(marks).filter(|(time_ns, ..)| is_seen(*time_ns));
        let mut taken: Vec<(f64, f64)> = Vec::new();
        for (time_ns, name, is_alarm) in events.collect::<Vec<_>>() {
            let x = self.x(time_ns);
            let (color, stroke) = if is_alarm { (ALARM, 1.2) } else { (GREY, 0.8) };
            let points = vec![(x, plot.y), (x, plot.y + plot.height)];
            self.out.items.push(Item::Line { points, color, width: stroke, dashed: true });
            let half = width(&name, SMALL, is_alarm) / 2.0 + GAP;
            let middle = x.clamp(plot.x + half, (plot.x + plot.width - half).max(plot.x + half));
            let place = (middle - half, middle + half);
            if taken.iter().all(|other| place.1 <= other.0 || place.0 >= other.1) {
                taken.push(place);
                let label = words(&name, middle, plot.y - 4.0, SMALL);
                self.out.text(Text { anchor: Anchor::Middle, color, bold: is_alarm, ..label });
            }
        }
    }
}

/// Drops points in the middle of a horizontal line, which do not change its shape.
fn thinned(points: impl Iterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let mut out: Vec<(f64, f64)> = Vec::new();
    for point in points {
        if let [.., before, last] = out.as_mut_slice()
            && before.1 == last.1
            && last.1 == point.1
        {
            *last = point;
            continue;
        }
        out.push(point);
    }
    out
}

/// Returns the time and the `used` bytes of each bucket (interval of the series) in which NVML was read.
fn readings(device: &Device) -> Vec<(u64, Extremes)> {
    device.series.buckets.iter().filter_map(|bucket| Some((bucket.time_ns, bucket.used?))).collect()
}

/// Returns the line of NVML's values in pieces, with gaps where NVML was not read for a long time.
fn pieces(device: &Device, readings: &[(u64, Extremes)]) -> Vec<Vec<(u64, i64)>> {
    let mut distances: Vec<u64> =
        readings.iter().zip(readings.iter().skip(1)).map(|(a, b)| b.0.saturating_sub(a.0)).collect();
    distances.sort_unstable();
    let usual = distances.get(distances.len() / 2).copied().unwrap_or(0).max(device.series.width_ns);
    let mut pieces: Vec<Vec<(u64, i64)>> = Vec::new();
    let mut before = None;
    for &(time, Extremes { min, max, last }) in readings {
        if before.is_none_or(|before: u64| time.saturating_sub(before) > usual.saturating_mul(20)) {
            pieces.push(Vec::new());
        }
        before = Some(time);
        if let Some(piece) = pieces.last_mut() {
            // A change within a bucket is drawn as a vertical line.
            let moved = [(time, max), (time, min)];
            piece.extend(moved.into_iter().filter(|_| min != max));
            piece.push((time, last));
        }
    }
    pieces
}
