//! The report as data for the page's script. Amounts are bytes as integers. Times are ns since the process's `base_ns`. Unknown
//! values are null. Strings from processes have no control characters.
//!
//! The code of a category is its rank among all categories of the same grouping on the page; 0 is the largest. Code `-1` is
//! `Others`; code `-2` stands for categories that are too small to be named.

use super::blocks::{blocks, why_none};
use super::holdings::{Strings, holdings};
use crate::advice;
use crate::amounts::{largest_first, sum};
use crate::bridge::Bridge;
use crate::encode::object;
use crate::group::ProcessAmounts;
use crate::labels::label;
use crate::lines::clean_name;
use crate::oom::{beside_holders, kind, lines_by_record, memory_by_name, sentence};
use crate::own::{by_total, figures, lengths, name_of, remarks, title_of};
use crate::plot::palette;
use crate::steps::{description, grouped, split_largest};
use crate::text;
use crate::{GroupBy, Part, Report, iterations, largest_total};
use gpumem_model::ending::Ending;
use gpumem_model::escape::escape;
use gpumem_model::program_data::{Counter, LOST, Range};
use gpumem_model::run::{Clock, Device, Iteration, Oom, OomDevice, Run, State};
use gpumem_model::series::{Bucket, Extremes};
use gpumem_model::time::Times;
use gpumem_model::timeline::Point;
use gpumem_model::units::{Unit, plural, signed};
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;

/// Code, in place of a category's, for bytes that no rule matches.
pub(super) const OTHERS: i32 = -1;
/// Code, in place of a category's, for categories that are too small to be named.
pub(super) const SMALLER: i32 = -2;
/// Maximum number of categories that a grouping names.
const MOST_NAMES: usize = 64;
/// A picture of fewer single blocks is left out.
const LEAST_BLOCKS: usize = 250;
/// Maximum number of categories with a row in a statement and an area in the chart: one for each colour.
const ROWS: usize = 13;

#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Maximum number of single blocks.
    pub blocks: usize,
    pub holdings: usize,
    pub points: usize,
    pub buckets: usize,
    pub steps: usize,
    pub ooms: usize,
    /// Maximum number of devices with details; further devices have only a row.
    pub devices: usize,
    pub tags: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            blocks: 4000,
            holdings: 8192,
            points: 256,
            buckets: 1024,
            steps: 256,
            ooms: 64,
            devices: 512,
            tags: true,
        }
    }
}

impl Limits {
    /// Returns lower limits: first fewer single blocks, then half of the others, down to a minimum that still shows something;
    /// `None` if they are at the minimum.
    pub fn lowered(self) -> Option<Self> {
        if self.blocks > 0 {
            let blocks = if self.blocks > LEAST_BLOCKS { self.blocks / 4 } else { 0 };
            return Some(Limits { blocks, ..self });
        }
        (self.holdings > 8 || self.devices > 8).then(|| Limits {
            blocks: 0,
            holdings: (self.holdings / 2).max(8),
            points: (self.points / 2).max(8),
            buckets: (self.buckets / 2).max(16),
            steps: (self.steps / 2).max(16),
            ooms: (self.ooms / 2).max(4),
            devices: (self.devices / 2).max(8),
            tags: self.tags,
        })
    }
}

/// Categories of one grouping on all devices of the page, ranked by size.
pub(super) struct Ranks(Strings);

impl Ranks {
    fn of(reports: &[Report<'_>], by: GroupBy) -> Self {
        let mut weights: BTreeMap<String, i128> = BTreeMap::new();
        for report in reports {
            for device in &report.run.devices {
                let moments = [&device.last, &device.peak].map(|moment| report.composition(moment, by));
                let mut most: BTreeMap<&str, i64> = BTreeMap::new();
                for (name, bytes) in moments.iter().flat_map(|composition| &composition.categories) {
                    let most = most.entry(name).or_default();
                    *most = (*most).max(bytes.saturating_abs());
                }
                for (name, bytes) in most {
                    *weights.entry(name.to_owned()).or_default() += i128::from(bytes);
                }
            }
        }
        let mut names = Strings::default();
        for (name, _) in largest_first(weights).iter().take(MOST_NAMES) {
            names.code(name);
        }
        Ranks(names)
    }

    /// Returns the code of a category for its unescaped name.
    pub fn code(&self, name: Option<&str>) -> i32 {
        name.map_or(OTHERS, |name| self.0.codes.get(name).copied().unwrap_or(SMALLER))
    }
}

/// Returns the data of a page that shows these reports.
pub(super) fn page(title: &str, reports: &[Report<'_>], limits: Limits) -> impl Serialize {
    let ranks = GroupBy::ALL.map(|by| Ranks::of(reports, by));
    let largest = reports.iter().flat_map(|report| &report.run.devices).map(largest_total).max();
    let unit = Unit::for_largest(largest.unwrap_or(0));
    let mut room = limits.devices;
    let processes = reports.iter().map(|report| {
        process(Context { report, ranks: &ranks, unit, limits, origin: TimeOrigin::of(report) }, &mut room)
    });
    let processes: Vec<_> = processes.collect();
    let rules = |by: GroupBy| match by {
        GroupBy::Tag => String::new(),
        _ => reports.first().map(|report| escape(&report.groupings.name)).unwrap_or_default(),
    };
    let groupings = GroupBy::ALL.into_iter().zip(ranks);
    object! {
        version: 1,
        program: env!("CARGO_PKG_VERSION"),
        title,
        // Size in bytes of one unit of the last printed digit, as numerator and denominator.
        unit: object! { name: unit.name, step: unit.step() },
        // Names of the categories, ordered by rank, and the numbers of their colours.
        groupings: groupings
            .map(|(by, ranks)| object! { name: by.name(), rules: rules(by), colors: palette::numbers(&ranks.0.all), names: ranks.0.all })
            .collect::<Vec<_>>(),
        // Index of the grouping that the page shows first.
        by: reports.first().map_or(0, |report| report.by as usize),
        // Whether data was left out or thinned because of the size limit.
        thinned: limits.blocks < Limits::default().blocks || room == 0,
        // Whether tags are shown. Otherwise the page contains nothing that is derived from tags.
        tags: limits.tags,
        processes,
    }
}

/// The time from which the page counts a process's times, in ns of the run's clock.
#[derive(Debug, Clone, Copy)]
pub(super) struct TimeOrigin(u64);

impl TimeOrigin {
    fn of(report: &Report<'_>) -> Self {
        let first = |device: &Device| {
            let steps = device.details.steps.iter().filter(|step| step.from_ns > 0).map(|step| step.from_ns);
            let bucket = device.series.buckets.first().map(|bucket| bucket.time_ns);
            let point = device.details.timeline.points.first().map(|point| point.time_ns);
            let times = [Some(device.last.time_ns), Some(device.peak.time_ns), bucket, point];
            times.into_iter().flatten().chain(steps).min()
        };
        TimeOrigin(report.run.devices.iter().filter_map(first).min().unwrap_or(0))
    }

    /// Returns a time as ns since this origin; negative for earlier times.
    pub fn offset_ns(self, time_ns: u64) -> i64 {
        let distance = i128::from(time_ns) - i128::from(self.0);
        distance.clamp(i64::MIN.into(), i64::MAX.into()) as i64
    }

    /// Returns the kind of clock, and this origin as two numbers. These are seconds (since 1970 or since the clock's zero) and the
    /// remaining ns, or a line number and 0.
    fn clock(self, clock: Clock) -> (&'static str, i64, i64) {
        const S: i128 = 1_000_000_000;
        let (kind, base) = match clock {
            Clock::Lines => return ("lines", self.0 as i64, 0),
            Clock::Monotonic { wall_offset_ns: Some(offset) } => ("wall", i128::from(offset)),
            Clock::Monotonic { wall_offset_ns: None } => ("seconds", 0),
        };
        let base = i128::from(self.0) + base;
        (kind, base.div_euclid(S) as i64, base.rem_euclid(S) as i64)
    }
}

/// A report and the properties of the page that shows it.
#[derive(Clone, Copy)]
pub(super) struct Context<'p> {
    pub report: &'p Report<'p>,
    pub ranks: &'p [Ranks; 3],
    pub unit: Unit,
    pub limits: Limits,
    pub origin: TimeOrigin,
}

fn process(context: Context<'_>, room: &mut usize) -> impl Serialize + use<> {
    let Context { report, limits, origin, .. } = context;
    let run = report.run;
    let panel = text::panel_without_rows(report);
    let devices = run.devices.iter().zip(panel.devices).map(|(device, table)| {
        let has_room = *room > 0;
        *room = room.saturating_sub(1);
        let detail = has_room.then(|| detail(context, device, table.facts));
        object! {
            title: escape(&table.title),
            name: escape(&device.name),
            total: device.total_bytes,
            amounts: ProcessAmounts::of(run, device),
            last_t: origin.offset_ns(device.last.time_ns),
            peak_t: origin.offset_ns(device.peak.time_ns),
            peak_tracked: device.peak.tracked_bytes,
            // Highest NVML reading of the used bytes, and its time.
            peak_used: device.peak_used.map(|(bytes, time_ns)| (bytes, origin.offset_ns(time_ns))),
            #[serde(flatten)]
            detail: detail.map(|detail| object! { detail }),
        }
    });
    let devices: Vec<_> = devices.collect();
    let (kind, base, base_ns) = origin.clock(run.clock);
    object! {
        label: label(run),
        pid: run.process.pid,
        rank: run.process.claims.get("rank").map(|rank| escape(rank)),
        heading: panel.heading,
        verdict: panel.verdict,
        // The change that saves most, as one line; null if there is none. It may contain tags.
        advice: limits.tags.then(|| advice::first_line(report)).flatten().map(|line| escape(&line)),
        warnings: panel.warnings,
        coverage: panel.coverage,
        // `complete`, or why the numbers are not.
        data: escape(&text::quality(report)),
        covered: run.coverage.covered,
        open: run.state == State::Open,
        tail: panel.tail,
        // `dated`: whether times span several days.
        clock: object! { kind, base, base_ns, dated: Times::of(run).is_dated() },
        ooms_dropped: run.coverage.ooms_dropped,
        // Counters and ranges that the program reported itself; null if there are none.
        own: own(run, limits),
        // Cause of the process's end other than GPU memory, if known.
        ending: Ending::of(run).map(|ending| escape(&sentence(&ending))),
        devices,
    }
}

fn detail(context: Context<'_>, device: &Device, facts: Vec<String>) -> impl Serialize + use<> {
    let Context { report, limits, origin, .. } = context;
    let points = thinned(&device.details.timeline.points, limits.points);
    let (tags, libraries, holdings) = holdings(context, device, &points);
    let (steps, other_steps) = steps(context, device);
    let entries = lines_by_record(report, device);
    let earlier_ooms = entries.len().saturating_sub(limits.ooms);
    let ooms = entries.into_iter().skip(earlier_ooms);
    object! {
        facts,
        // Memory of the whole device, divided by its holders (processes and free memory).
        device: text::device_parts(device),
        // For each grouping, rows with the amounts at the end and at the peak.
        statements: GroupBy::ALL.map(|by| rows(context, device, by)),
        course: course(context, device, &points),
        // Single blocks of the last steps; null if the run has none.
        blocks: blocks(context, device),
        // A sentence that says how to get single blocks, if the run has none and could have had some.
        no_blocks: why_none(context, device),
        tags,
        libraries,
        holdings,
        // How PyTorch's own numbers and other memory add up to `used`: at the end, and at the peak.
        bridges: [&device.last, &device.peak].map(|moment| Bridge::of(report.run, moment)),
        steps,
        // Changes of untrackable memory (the gap) that are not in `steps`: their sum in bytes, and their number.
        other_steps,
        iterations: iterations_of(device),
        ooms: ooms.map(|(entry, lines)| oom(report, entry, lines, origin)).collect::<Vec<_>>(),
        // Number of earlier OOMs that are not in the list.
        earlier_ooms,
        marks: marks(report, origin),
    }
}

/// Returns the times and sums of the timeline's points, and the series of a device. The holdings have the bytes at each point.
fn course(context: Context<'_>, device: &Device, points: &[&Point]) -> impl Serialize + use<> {
    let Context { limits, origin, .. } = context;
    let merge = device.series.buckets.len().div_ceil(limits.buckets.max(1)).max(1);
    let buckets = device.series.buckets.chunks(merge);
    object! {
        t: points.iter().map(|point| origin.offset_ns(point.time_ns)).collect::<Vec<_>>(),
        tracked: points.iter().map(|point| point.tracked_bytes()).collect::<Vec<_>>(),
        // Width of one bucket of the series, in ns.
        width: signed(device.series.width_ns).saturating_mul(merge as i64),
        buckets: buckets.map(|buckets| bucket(buckets, origin)).collect::<Vec<_>>(),
    }
}

/// Keeps every n-th point, and always the highest and the last point.
fn thinned(points: &[Point], limit: usize) -> Vec<&Point> {
    let every = points.len().div_ceil(limit.max(1)).max(1);
    let highest = (0..points.len()).max_by_key(|&at| points[at].tracked_bytes());
    let is_kept = |at: usize| at.is_multiple_of(every) || Some(at) == highest || at + 1 == points.len();
    points.iter().enumerate().filter(|(at, _)| is_kept(*at)).map(|(_, point)| point).collect()
}

/// Merges adjacent buckets of the series into one. Returns its time, then its used, tracked and untrackable bytes, each as
/// (lowest, highest, last) value.
fn bucket(buckets: &[Bucket], origin: TimeOrigin) -> impl Serialize + use<> {
    let merged = |of: fn(&Bucket) -> Option<Extremes>| {
        let all = buckets.iter().filter_map(of);
        all.map(|one| [one.min, one.max, one.last])
            .reduce(|sum, one| [sum[0].min(one[0]), sum[1].max(one[1]), one[2]])
    };
    let first = buckets.first().map_or(0, |bucket| origin.offset_ns(bucket.time_ns));
    let untrackable = merged(|bucket| bucket.untrackable);
    (first, merged(|bucket| bucket.used), merged(|bucket| bucket.tracked), untrackable)
}

/// Returns the times that the user or the program marked with a name.
fn marks(report: &Report<'_>, origin: TimeOrigin) -> Vec<impl Serialize + use<>> {
    let name = |name: Option<&str>| name.map_or_else(|| LOST.to_owned(), clean_name);
    let marks = report.run.coverage.marks.iter();
    marks
        .map(|mark| object! { t: origin.offset_ns(mark.time_ns), name: name(mark.name.as_deref()) })
        .collect()
}

fn rows(context: Context<'_>, device: &Device, by: GroupBy) -> Vec<impl Serialize + use<>> {
    let Context { report, ranks, unit, .. } = context;
    let moments = [&device.last, &device.peak];
    let statement = report.statement_of(by, moments, ROWS, unit.smallest());
    let compositions = moments.map(|moment| report.composition(moment, by));
    let is_category = |name: &str| compositions.iter().any(|of| of.categories.contains_key(name));
    let rows = statement.rows.iter().map(|row| {
        let code = (row.part == Part::Category).then(|| match is_category(&row.name) {
            true => ranks[by as usize].code(Some(&row.name)),
            false => SMALLER,
        });
        // Code of the category, for rows of categories.
        let code = if row.part == Part::Others { Some(OTHERS) } else { code };
        let note = Some(text::note(row, device)).filter(|note| !note.is_empty());
        let is_smaller = code == Some(SMALLER) && !is_category(&row.name);
        object! {
            name: clean_name(&row.name),
            part: if is_smaller { json!("smaller") } else { json!(row.part) },
            parent: row.parent,
            bytes: row.bytes,
            #[serde(flatten)]
            code: code.map(|code| object! { code }),
            #[serde(flatten)]
            note: note.map(|note| object! { note }),
            // For each column: whether the row's amount was computed from untrackable memory that was measured at another time.
            carried: [0, 1].map(|column| text::has_older_reading(device, row, column)),
        }
    });
    rows.collect()
}

/// Returns the largest changes of untrackable memory (the gap) in the order of time, and the sum and number of the other changes.
fn steps(context: Context<'_>, device: &Device) -> (Vec<impl Serialize + use<>>, (i64, usize)) {
    let Context { unit, limits, origin, .. } = context;
    let (steps, rest) = split_largest(grouped(&device.details.steps), limits.steps);
    let shown = steps.iter().map(|step| {
        object! {
            t: origin.offset_ns(step.time_ns),
            bytes: step.bytes,
            what: escape(&description(step, unit)),
            #[serde(flatten)]
            note: step.note.as_deref().map(|note| object! { note: escape(note) }),
        }
    });
    (shown.collect(), (sum(rest.iter().map(|step| step.bytes)), rest.len()))
}

fn iterations_of(device: &Device) -> Option<impl Serialize + use<>> {
    let table = &device.details.iterations;
    let (shown, columns) = iterations::folded(table);
    // The training step's number, its amounts, and whether records were lost during it.
    let row = |row: &Iteration| {
        let amounts: Vec<i64> = columns.iter().map(|(_, of)| of(row)).collect();
        (iterations::number(row), amounts, row.partial)
    };
    (!shown.is_empty()).then(|| {
        object! {
            columns: columns.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
            rows: shown.iter().map(row).collect::<Vec<_>>(),
            // Whether the last row of the table is a training step that has not ended.
            open: table.open.is_some(),
        }
    })
}

fn oom(report: &Report<'_>, oom: &Oom, lines: Vec<String>, origin: TimeOrigin) -> impl Serialize + use<> {
    let held = memory_by_name(report, oom).into_iter();
    object! {
        // Times of the first and the last failure that the record counts.
        t: origin.offset_ns(oom.time_ns),
        last_t: origin.offset_ns(oom.last_ns),
        // The script uses the word `refused` for memory pressure: the driver refused a request, but no allocation failed.
        kind: kind(oom).replace("pressure", "refused"),
        lines,
        // Memory of the process, as (name, bytes).
        held: held.map(|(name, bytes)| (clean_name(&name), bytes)).collect::<Vec<_>>(),
        // Memory of the device, as (holder, bytes, recent growth); the bytes add up to the device's size.
        holders: oom.device.as_ref().map(|device| holders(oom, device)).unwrap_or_default(),
    }
}

/// Returns the holders of the device's memory: processes, memory of no process, the driver's share, and free memory.
fn holders(oom: &Oom, device: &OomDevice) -> Vec<(String, i64, Option<i64>)> {
    let holders = device.holders.iter().map(|holder| {
        let user = holder.user.as_deref().map_or("another process".to_owned(), clean_name);
        let who = if holder.pid == 0 { user } else { format!("{user} {}", holder.pid) };
        (who, holder.used_bytes, holder.growth_bytes)
    });
    let [others @ .., free] = beside_holders(oom, device, device.others);
    let others = others.into_iter().filter(|(_, bytes)| *bytes != 0).chain([free]);
    holders.chain(others.map(|(name, bytes)| (name, bytes, None))).collect()
}

/// Returns the counters and ranges that the program reported; `None` if it reported none.
fn own(run: &Run, limits: Limits) -> Option<impl Serialize + use<>> {
    let own = &run.own;
    let points = (limits.points / 4).max(1);
    let counter = |counter: &Counter| {
        let course = counter.points.iter().step_by(counter.points.len().div_ceil(points).max(1));
        // Values are limited to 2^52, because JavaScript cannot represent integers above 2^53 exactly.
        let course: Vec<u64> = course.map(|&(_, value)| value.abs_diff(counter.min).min(1 << 52)).collect();
        object! {
            name: name_of(counter),
            // Texts: current value, number of changes, lowest, highest and mean value.
            told: figures(counter),
            // Values over time minus the lowest value, for a sparkline.
            course,
        }
    };
    // Name, count, printed lengths (total, shortest, longest, mean), and the number of ranges that have not ended.
    let range = |range: &Range| (title_of(range), range.count, lengths(range, run.clock), range.open);
    let ranges = by_total(own);
    let (most_counters, most_ranges) = (2 * limits.ooms, limits.steps + 1);
    let left_out =
        own.counters.len().saturating_sub(most_counters) + ranges.len().saturating_sub(most_ranges);
    let mut remarks = remarks(own);
    remarks.extend(
        (left_out > 0).then(|| plural(left_out as u64, "name") + " more: gpumemctl report --counters"),
    );
    (!own.is_empty()).then(|| {
        object! {
            counters: own.counters.iter().take(most_counters).map(counter).collect::<Vec<_>>(),
            ranges: ranges.into_iter().take(most_ranges).map(range).collect::<Vec<_>>(),
            remarks,
        }
    })
}
