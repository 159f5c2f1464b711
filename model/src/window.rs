//! Cuts a run to a window of its life: one time, all since a time, or all between two times.
//!
//! The result is reported like any other run. Its moments are points of the timeline. Their tracked bytes by cell are exact at
//! the point's own time, which may differ from the requested one. Untrackable bytes come from the nearest sample in the series.
//! Caveats name everything that is less exact than requested.

pub use crate::fields::{Window, WindowKind};

use crate::cell::SUM;
use crate::fields::Field;
use crate::run::{Amounts, Caveat, Cell, Class, Device, Moment, Run, State};
use crate::series::{Bucket, Series};
use crate::time::{Times, apart};
use crate::timeline::{Point, PointAt};
use crate::units::Unit;
use std::cmp::Reverse;

/// Returns the first and last time that a run covers; `None` if it covers none.
pub fn span(run: &Run) -> Option<(u64, u64)> {
    let (mut first, mut last) = (Vec::new(), Vec::new());
    for device in &run.devices {
        let points = &device.details.timeline.points;
        first.extend(device.series.buckets.first().map(|bucket| bucket.time_ns));
        last.extend(device.series.buckets.last().map(|bucket| bucket.time_ns));
        first.extend(points.first().map(|point| point.time_ns));
        last.extend(points.last().map(|point| point.time_ns));
        last.push(device.last.time_ns);
    }
    if let State::Closed { time_ns, .. } = run.state {
        last.push(time_ns);
    }
    Some((first.into_iter().min()?, last.into_iter().max()?))
}

/// Returns the run cut to a window, which must lie in the run's [`span`].
pub fn of(run: &Run, window: &Window) -> Run {
    let mut run = run.clone();
    let times = Times::of(&run);
    let several = run.devices.len() > 1;
    let mut notes = Vec::new();
    let rest = run.cells.len() as u32;
    let idle = |cells: &[Cell], point: &Point| {
        let is_idle = |id: u32| {
            cells.get(id as usize).is_some_and(|cell| matches!(cell.class, Class::PoolIdle | Class::Opaque))
        };
        let amounts = point.amounts.iter().filter(|(id, _)| is_idle(*id));
        amounts.fold(0_i64, |sum, (_, bytes)| sum.saturating_add(*bytes))
    };
    let mut devices = std::mem::take(&mut run.devices);
    for device in &mut devices {
        let old = device.clone();
        let builder = MomentBuilder {
            device: &old,
            covered: run.coverage.covered,
            partial: run.coverage.partial_history,
            rest,
        };
        let mut add_note = |text: String| {
            notes.push(if several { format!("GPU {}: {text}", old.ordinal) } else { text });
        };
        match window.part {
            WindowKind::At => device.peak = builder.at(window.from_ns, times, &mut add_note),
            WindowKind::Since | WindowKind::Between => {
                device.peak = builder.highest(window, |point| idle(&run.cells, point), times, &mut add_note);
            }
        }
        if window.part == WindowKind::Between {
            device.last = builder.at(window.to_ns, times, &mut add_note);
            (device.reading, device.unaccounted_bytes) = (None, None);
            (device.tenants, device.other_tenants) = (Vec::new(), (0, 0));
            device.details.pools.clear();
        }
        if window.part != WindowKind::At {
            clip(device, window);
        }
    }
    if window.part != WindowKind::At {
        run.own.clip(window);
    }
    run.devices = devices;
    let moments = run.devices.iter().flat_map(|device| [&device.last, &device.peak]);
    if moments.flat_map(|moment| &moment.amounts).any(|(cell, _)| *cell == rest) {
        run.cells.push(Cell { tag: Some(SUM.into()), ..Cell::default() });
    }
    let notes = notes.into_iter().map(|text| Caveat { code: "window".into(), text });
    run.caveats.splice(0..0, notes);
    run
}

fn clip(device: &mut Device, window: &Window) {
    device.series.clip(window);
    let highest = device.series.buckets.iter().filter_map(|bucket| Some((bucket.used?.max, bucket.time_ns)));
    let highest = highest.max_by_key(|&(used, time_ns)| (used, Reverse(time_ns)));
    device.peak_used = highest.and_then(|(used, time_ns)| Some((u64::try_from(used).ok()?, time_ns)));
    device.details.clip(window);
}

/// Joins the parts of a life, in order of time, into one run, for a window that spans several parts; `None` without parts.
pub fn join_parts(parts: Vec<Run>) -> Option<Run> {
    let mut parts = parts.into_iter();
    let mut whole = parts.next()?;
    for part in parts {
        join(&mut whole, part);
    }
    Some(whole)
}

fn join(whole: &mut Run, mut part: Run) {
    let cells = std::mem::take(&mut part.cells);
    let places = whole.merge_cells(&cells);
    part.remap(&|cell| Some(places.get(cell as usize).copied().unwrap_or(u32::MAX)));
    for device in part.devices {
        match whole.devices.iter_mut().find(|other| other.name == device.name) {
            Some(other) => other.join(device),
            None => whole.devices.push(device),
        }
    }
    whole.own.append(part.own);
    // The peak may lie in any part, so a loss in one part makes it a lower bound.
    whole.coverage.partial_history |= whole.coverage.partial_state;
    whole.coverage.join(part.coverage);
    // The caveat `part` stays only from the first joined part. Any other caveat replaces an earlier one of the same code.
    // `accounting_disagrees` covers the whole life, so only the last part's stays.
    part.caveats.retain(|caveat| caveat.code != "part");
    let mut earlier = std::mem::replace(&mut whole.caveats, part.caveats);
    earlier.retain(|caveat| {
        caveat.code != "accounting_disagrees" && whole.caveats.iter().all(|other| other.code != caveat.code)
    });
    whole.caveats.splice(0..0, earlier);
    (whole.state, whole.process, whole.clock) = (part.state, part.process, part.clock);
}

/// Makes the moments of a window from a device's timeline and series.
struct MomentBuilder<'d> {
    device: &'d Device,
    covered: bool,
    partial: bool,
    /// Index of the cell that receives all bytes that are in no cell of a timeline point.
    rest: u32,
}

impl MomentBuilder<'_> {
    /// Returns the memory held at a time; `add_note` receives notes about what is not exact.
    fn at(&self, time_ns: u64, times: Times, add_note: &mut dyn FnMut(String)) -> Moment {
        let asked = times.time(time_ns);
        if !self.covered {
            let Some(bucket) = self.nearest(time_ns, |bucket| bucket.used.is_some()) else {
                add_note(format!("there is no reading of used near {asked}"));
                return Moment { time_ns, ..Moment::default() };
            };
            add_note(self.bucket_note(bucket, time_ns, times));
            let used = bucket.used.and_then(|used| u64::try_from(used.last).ok());
            return Moment { time_ns: bucket.time_ns, uncovered_used_bytes: used, ..Moment::default() };
        }
        if self.device.last.time_ns == time_ns {
            return self.device.last.clone();
        }
        if self.device.peak.time_ns == time_ns {
            return self.device.peak.clone();
        }
        let timeline = &self.device.details.timeline;
        match timeline.at(time_ns) {
            Some(PointAt { point, is_exact: true }) => self.moment(point, time_ns),
            Some(PointAt { point, .. }) => {
                let distance = apart(times.clock(), point.time_ns, time_ns);
                let width = times.clock().distance(timeline.width_ns);
                add_note(format!(
                    "the composition at {asked} was not stored: the nearest stored one is {distance} it (one is \
                         stored every {width})"
                ));
                self.moment(point, point.time_ns)
            }
            None => match self.nearest(time_ns, |bucket| bucket.tracked.is_some()) {
                Some(bucket) => {
                    add_note(format!(
                        "{}; its composition was not stored",
                        self.bucket_note(bucket, time_ns, times)
                    ));
                    let bytes = bucket.tracked.map_or(0, |tracked| tracked.last);
                    let point =
                        Point { time_ns: bucket.time_ns, amounts: Amounts::default(), rest_bytes: bytes };
                    self.moment(&point, bucket.time_ns)
                }
                None => {
                    add_note(format!("there are no data for {asked}"));
                    Moment { time_ns, ..Moment::default() }
                }
            },
        }
    }

    /// Returns the moment with the most memory in the window.
    fn highest(
        &self,
        window: &Window,
        idle: impl Fn(&Point) -> i64,
        times: Times,
        add_note: &mut dyn FnMut(String),
    ) -> Moment {
        let device = self.device;
        if !self.covered {
            let inside = self.inside(window).filter_map(|bucket| Some((bucket.used?.max, bucket.time_ns)));
            let highest = inside.max_by_key(|&(used, time_ns)| (used, Reverse(time_ns)));
            let Some((used, time_ns)) = highest else { return self.at(window.to_ns, times, add_note) };
            let uncovered_used_bytes = u64::try_from(used).ok();
            return Moment { time_ns, uncovered_used_bytes, ..Moment::default() };
        }
        let is_peak_inside = window.has(device.peak.time_ns) && device.peak.tracked_bytes.is_some();
        let timeline = &device.details.timeline;
        let inside = timeline.points.iter().filter(|point| window.has(point.time_ns));
        // The amounts at the window's begin may be the highest of the window, too.
        let first = timeline.at(window.from_ns).filter(|found| found.is_exact).map(|found| found.point);
        let order = |point: &&Point| (point.tracked_bytes(), Reverse(idle(point)), Reverse(point.time_ns));
        let highest = match inside.chain(first).max_by_key(order) {
            _ if is_peak_inside => device.peak.clone(),
            Some(point) => self.moment(point, point.time_ns.max(window.from_ns)),
            None => self.at(window.to_ns, times, add_note),
        };
        if is_peak_inside {
            return highest;
        }
        // The maximum of a bucket that is only partly in the window may lie outside.
        let in_series =
            self.inside(window).filter_map(|bucket| Some((bucket.tracked?.max, bucket.time_ns))).max();
        if let (Some((max, time_ns)), Some(tracked)) = (in_series, highest.tracked_bytes)
            && max > tracked
        {
            let unit = Unit::for_largest(max);
            add_note(format!(
                "tracked may have been up to {} {} (at about {}): the highest stored moment is shown",
                unit.amount(max),
                unit.name,
                times.time(time_ns)
            ));
        }
        highest
    }

    fn inside<'w>(&'w self, window: &'w Window) -> impl Iterator<Item = &'w Bucket> {
        let Series { width_ns, buckets } = &self.device.series;
        buckets.iter().filter(|bucket| bucket.is_in(*width_ns, window))
    }

    /// Returns, among the buckets that `has` selects, the one nearest to a time.
    fn nearest(&self, time_ns: u64, has: impl Fn(&Bucket) -> bool) -> Option<&Bucket> {
        let there = self.device.series.buckets.iter().filter(|bucket| has(bucket));
        there.min_by_key(|bucket| self.distance(bucket, time_ns).unsigned_abs())
    }

    /// Returns the distance from a time to a bucket: negative if the bucket is earlier, 0 if it contains the time.
    fn distance(&self, bucket: &Bucket, time_ns: u64) -> i64 {
        let end_ns = bucket.time_ns.saturating_add(self.device.series.width_ns.saturating_sub(1));
        let to = |at: u64| i64::try_from(i128::from(at) - i128::from(time_ns)).unwrap_or(i64::MAX);
        if time_ns > end_ns { to(end_ns) } else { to(bucket.time_ns).max(0) }
    }

    /// Describes the time to which the numbers of a bucket belong.
    fn bucket_note(&self, bucket: &Bucket, time_ns: u64, times: Times) -> String {
        let clock = times.clock();
        let width = clock.distance(self.device.series.width_ns);
        match self.distance(bucket, time_ns) {
            0 => format!("the numbers are those of the {width} around {}", times.time(time_ns)),
            _ => format!(
                "the nearest stored numbers are those of the {width} from {} on, {} {}",
                times.time(bucket.time_ns),
                apart(clock, bucket.time_ns, time_ns),
                times.time(time_ns)
            ),
        }
    }

    /// Converts a timeline point to a moment, with the untrackable bytes of the nearest sample.
    fn moment(&self, point: &Point, time_ns: u64) -> Moment {
        let last = &self.device.last;
        let mut amounts = point.amounts.clone();
        if point.rest_bytes != 0 {
            amounts.push((self.rest, point.rest_bytes));
        }
        let reading = self.nearest(time_ns, |bucket| bucket.untrackable.is_some());
        let gap = reading.and_then(|bucket| Some((bucket.untrackable?.last, self.distance(bucket, time_ns))));
        let width_ns = i64::try_from(self.device.series.width_ns).unwrap_or(i64::MAX);
        Moment {
            time_ns,
            tracked_bytes: Some(point.tracked_bytes()),
            amounts,
            predates_bytes: last.predates_bytes,
            untrackable_bytes: gap.map(|(bytes, _)| bytes),
            parts: gap.and_then(|(bytes, _)| last.parts.filter(|parts| parts.sum() == bytes)),
            // The sample may be anywhere in its bucket, so the distance is an upper bound.
            gap_distance_ns: gap.map_or(0, |(_, distance)| match distance < 0 {
                true => distance.saturating_sub(width_ns),
                false => distance.saturating_add(width_ns),
            }),
            partial: self.partial,
            ..Moment::default()
        }
    }
}
