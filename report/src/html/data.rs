//! The report as data for the page's script. Amounts are bytes as integers. Times are ns since the process's `base_ns`. Unknown
//! values are null. Strings from processes are cleaned of control characters.
//!
//! A category is a number: its rank among all categories of its grouping on the page, the largest first. The rank also selects
//! the colour. `-1` is `Others`, `-2` means too small to be named.

use super::course::Course;
use super::holdings::{Holding, holdings};
use super::own::{OwnJson, own_of};
use crate::bridge::Bridge;
use crate::group::Identity;
use crate::labels::{free_name, rest_name};
use crate::lines::clean_name;
use crate::oom::{held, sentence, told};
use crate::steps::{grouped, weight, what};
use crate::text;
use crate::{By, Part, Report, iterations};
use gpumem_model::ending::Ending;
use gpumem_model::harmless::clean;
use gpumem_model::program_data::LOST;
use gpumem_model::run::{Clock, Device, Iteration, Oom, OomDevice, State};
use gpumem_model::time::Times;
use gpumem_model::units::Unit;
use serde::Serialize;
use std::collections::BTreeMap;

/// Groupings of the page, in the order of `By`.
pub(super) const GROUPINGS: [By; 3] = [By::Layer, By::Structure, By::Tag];
/// Code of bytes that no rule matches.
pub(super) const OTHERS: i32 = -1;
/// Code of categories that are too small to be named.
pub(super) const SMALLER: i32 = -2;
/// Most categories of a grouping with a name.
const MOST_NAMES: usize = 64;
/// Most categories with a row in a statement and its stack: one for each colour.
const ROWS: usize = 13;

/// Largest sizes of the parts of a page.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Named holdings of each device.
    pub holdings: usize,
    /// Points of a timeline.
    pub points: usize,
    /// Buckets of a series.
    pub buckets: usize,
    /// Steps of the gap.
    pub steps: usize,
    /// OOM entries of each device.
    pub ooms: usize,
    /// Devices with details; others have only a row.
    pub devices: usize,
    /// Whether tags are shown.
    pub tags: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { holdings: 8192, points: 256, buckets: 1024, steps: 256, ooms: 64, devices: 512, tags: true }
    }
}

impl Limits {
    /// Halves the limits, down to a minimum that still shows something; `None` if they are at the minimum.
    pub fn halved(self) -> Option<Self> {
        (self.holdings > 8 || self.devices > 8).then(|| Limits {
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

#[derive(Debug, Serialize)]
pub(super) struct Page {
    version: u32,
    program: &'static str,
    title: String,
    unit: UnitJson,
    groupings: Vec<Grouping>,
    /// Index of the initially selected grouping.
    by: usize,
    /// Something was left out or thinned, because of the size limit.
    thinned: bool,
    /// Tags are shown; otherwise nothing derived from them is in the page.
    tags: bool,
    processes: Vec<Process>,
}

#[derive(Debug, Serialize)]
struct UnitJson {
    name: &'static str,
    /// Bytes of one step of the last printed digit, as numerator and denominator.
    step: (i64, i64),
}

#[derive(Debug, Serialize)]
struct Grouping {
    name: &'static str,
    rules: String,
    /// Names by rank.
    names: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Process {
    label: String,
    pid: u32,
    rank: Option<String>,
    heading: String,
    warnings: Vec<String>,
    coverage: Vec<String>,
    covered: bool,
    open: bool,
    tail: Vec<String>,
    clock: ClockJson,
    ooms_dropped: u64,
    /// The program's counters and ranges; null if there are none.
    own: Option<OwnJson>,
    /// External cause of the process's end, if known.
    ending: Option<String>,
    devices: Vec<DeviceJson>,
}

#[derive(Debug, Serialize)]
struct ClockJson {
    /// `wall`, `seconds` or `lines`.
    kind: &'static str,
    /// Time zero of the page: seconds since 1970 or since the clock's zero, or a line number.
    base: i64,
    /// Nanoseconds to add to `base`.
    base_ns: i64,
    /// Times span several days.
    dated: bool,
}

#[derive(Debug, Serialize)]
struct DeviceJson {
    title: String,
    name: String,
    total: Option<u64>,
    amounts: Identity,
    last_t: i64,
    peak_t: i64,
    peak_tracked: Option<i64>,
    /// Highest used value that was read, and its time.
    peak_used: Option<(u64, i64)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<Detail>,
}

#[derive(Debug, Serialize)]
struct Detail {
    facts: Vec<String>,
    /// Device memory by holder.
    device: Option<Vec<(String, i64)>>,
    /// For each grouping, rows with the amounts at the end and at the peak.
    statements: Vec<Vec<RowJson>>,
    course: Course,
    tags: Vec<String>,
    libraries: Vec<String>,
    holdings: Vec<Holding>,
    /// At the end, and at the peak.
    bridges: Vec<Option<Bridge>>,
    steps: Vec<StepJson>,
    /// Bytes and number of the steps that are not in the list.
    other_steps: (i64, usize),
    iterations: Option<IterationsJson>,
    ooms: Vec<OomJson>,
    /// Number of earlier OOMs that are not in the list.
    earlier_ooms: usize,
    marks: Vec<MarkJson>,
}

/// A moment that the user or the program named.
#[derive(Debug, Serialize)]
struct MarkJson {
    t: i64,
    name: String,
}

#[derive(Debug, Serialize)]
struct RowJson {
    name: String,
    part: &'static str,
    parent: Option<usize>,
    bytes: Vec<Option<i64>>,
    /// Its category's code, for rows of categories.
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<i32>,
    #[serde(skip_serializing_if = "String::is_empty")]
    note: String,
    /// By column: whether the amount uses a gap value of another time.
    carried: [bool; 2],
}

#[derive(Debug, Serialize)]
struct StepJson {
    t: i64,
    bytes: i64,
    what: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

#[derive(Debug, Serialize)]
struct IterationsJson {
    columns: Vec<&'static str>,
    /// Number, amounts, and whether records were lost during the iteration.
    rows: Vec<(String, Vec<i64>, bool)>,
    /// The last row is still running.
    open: bool,
}

#[derive(Debug, Serialize)]
struct OomJson {
    t: i64,
    /// `oom`, `suspected`, or `refused` for mere memory pressure.
    kind: &'static str,
    lines: Vec<String>,
    /// Bytes of the process, by name.
    held: Vec<(String, i64)>,
    /// Holder, bytes, and recent growth; together they are the device's memory.
    holders: Vec<(String, i64, Option<i64>)>,
}

/// Categories of a grouping on all devices, ranked by size.
pub(super) struct Ranks {
    /// Ranks by raw name.
    codes: BTreeMap<String, i32>,
    names: Vec<String>,
}

impl Ranks {
    fn of(reports: &[Report<'_>], by: By) -> Self {
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
        let mut ranked: Vec<(String, i128)> = weights.into_iter().collect();
        ranked.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        ranked.truncate(MOST_NAMES);
        let names = ranked.iter().map(|(name, _)| clean_name(name)).collect();
        let ranked = ranked.into_iter().zip(0_i32..);
        Ranks { codes: ranked.map(|((name, _), rank)| (name, rank)).collect(), names }
    }

    /// Returns the code of a category by its raw name.
    pub fn code(&self, name: Option<&str>) -> i32 {
        name.map_or(OTHERS, |name| self.codes.get(name).copied().unwrap_or(SMALLER))
    }
}

impl Page {
    pub fn of(title: &str, reports: &[Report<'_>], limits: Limits) -> Self {
        let ranks = GROUPINGS.map(|by| Ranks::of(reports, by));
        let largest = reports.iter().flat_map(|report| &report.run.devices).map(weight_of).max();
        let unit = Unit::for_largest(largest.unwrap_or(0));
        let mut room = limits.devices;
        let processes = reports.iter().map(|report| process(report, &ranks, unit, limits, &mut room));
        let processes = processes.collect();
        let rules = |by: By| match by {
            By::Tag => String::new(),
            _ => reports.first().map(|report| clean(&report.groupings.name)).unwrap_or_default(),
        };
        let groupings = GROUPINGS.into_iter().zip(ranks).map(|(by, ranks)| Grouping {
            name: ["layer", "structure", "tag"][by as usize],
            rules: rules(by),
            names: ranks.names,
        });
        Page {
            version: 1,
            program: env!("CARGO_PKG_VERSION"),
            title: title.to_owned(),
            unit: UnitJson { name: unit.name, step: unit.step() },
            groupings: groupings.collect(),
            by: reports.first().map_or(0, |report| report.by as usize),
            thinned: limits.points < Limits::default().points || room == 0,
            tags: limits.tags,
            processes,
        }
    }
}

/// Returns the largest amount of a device.
fn weight_of(device: &Device) -> i64 {
    let moments = [&device.last, &device.peak];
    let amounts = moments.iter().flat_map(|moment| [moment.used_bytes(), moment.tracked_bytes]);
    amounts.flatten().map(i64::saturating_abs).max().unwrap_or(0)
}

/// Start of a process's times, and how they are shown.
#[derive(Debug, Clone, Copy)]
pub(super) struct Since(u64);

impl Since {
    fn of(report: &Report<'_>) -> Self {
        let first = |device: &Device| {
            let steps = device.details.steps.iter().filter(|step| step.from_ns > 0).map(|step| step.from_ns);
            let bucket = device.series.buckets.first().map(|bucket| bucket.time_ns);
            let point = device.details.timeline.points.first().map(|point| point.time_ns);
            let told = [Some(device.last.time_ns), Some(device.peak.time_ns), bucket, point];
            told.into_iter().flatten().chain(steps).min()
        };
        Since(report.run.devices.iter().filter_map(first).min().unwrap_or(0))
    }

    /// Returns ns since the start, negative for earlier times.
    pub fn t(self, time_ns: u64) -> i64 {
        let distance = i128::from(time_ns) - i128::from(self.0);
        distance.clamp(i64::MIN.into(), i64::MAX.into()) as i64
    }

    fn clock(self, clock: Clock, dated: bool) -> ClockJson {
        const S: i128 = 1_000_000_000;
        let (kind, base) = match clock {
            Clock::Lines => return ClockJson { kind: "lines", base: self.0 as i64, base_ns: 0, dated },
            Clock::Monotonic { wall_offset_ns: Some(offset) } => ("wall", i128::from(offset)),
            Clock::Monotonic { wall_offset_ns: None } => ("seconds", 0),
        };
        let base = i128::from(self.0) + base;
        ClockJson { kind, base: base.div_euclid(S) as i64, base_ns: base.rem_euclid(S) as i64, dated }
    }
}

fn process(report: &Report<'_>, ranks: &[Ranks; 3], unit: Unit, limits: Limits, room: &mut usize) -> Process {
    let run = report.run;
    let since = Since::of(report);
    let words = text::words(report);
    let mut devices = Vec::new();
    for (device, facts) in run.devices.iter().zip(words.facts) {
        let has_room = *room > 0;
        *room = room.saturating_sub(1);
        devices.push(DeviceJson {
            title: clean(&crate::labels::device_title(device)),
            name: clean(&device.name),
            total: device.total_bytes,
            amounts: Identity::of(run, device),
            last_t: since.t(device.last.time_ns),
            peak_t: since.t(device.peak.time_ns),
            peak_tracked: device.peak.tracked_bytes,
            peak_used: device.peak_used.map(|(bytes, time_ns)| (bytes, since.t(time_ns))),
            detail: has_room.then(|| detail(report, device, ranks, unit, limits, since, facts)),
        });
    }
    Process {
        label: crate::labels::label(run),
        pid: run.process.pid,
        rank: run.process.claims.get("rank").map(|rank| clean(rank)),
        heading: words.heading,
        warnings: words.warnings,
        coverage: words.coverage,
        covered: run.coverage.covered,
        open: run.state == State::Open,
        tail: words.tail,
        clock: since.clock(run.clock, Times::of(run).is_dated()),
        ooms_dropped: run.coverage.ooms_dropped,
        own: own_of(run, limits),
        ending: Ending::of(run).map(|ending| clean(&sentence(&ending))),
        devices,
    }
}

fn detail(
    report: &Report<'_>,
    device: &Device,
    ranks: &[Ranks; 3],
    unit: Unit,
    limits: Limits,
    since: Since,
    facts: Vec<String>,
) -> Detail {
    let statements = GROUPINGS.map(|by| rows(report, device, by, &ranks[by as usize], unit));
    let course = Course::of(
        report,
        device,
        ranks,
        &statements.each_ref().map(|(_, named)| named.as_slice()),
        limits,
        since,
    );
    let (tags, libraries, holdings) = holdings(report, device, ranks, limits.holdings);
    let (steps, other_steps) = steps(device, unit, limits.steps, since);
    let entries = told(report, device);
    let earlier = entries.len().saturating_sub(limits.ooms);
    Detail {
        facts,
        device: text::device_parts(device),
        statements: statements.map(|(rows, _)| rows).into(),
        course,
        tags,
        libraries,
        holdings,
        bridges: [&device.last, &device.peak].map(|moment| Bridge::of(report.run, moment)).into(),
        steps,
        other_steps,
        iterations: iterations_of(device),
        ooms: entries
            .into_iter()
            .skip(earlier)
            .map(|(entry, lines)| oom(report, entry, lines, since))
            .collect(),
        earlier_ooms: earlier,
        marks: marks(report, since),
    }
}

fn marks(report: &Report<'_>, since: Since) -> Vec<MarkJson> {
    let name = |name: Option<&str>| name.map_or_else(|| LOST.to_owned(), clean_name);
    let marks = report.run.coverage.marks.iter();
    marks.map(|mark| MarkJson { t: since.t(mark.time_ns), name: name(mark.name.as_deref()) }).collect()
}

/// Returns a statement's rows, and the raw names of the categories that have one.
fn rows(
    report: &Report<'_>,
    device: &Device,
    by: By,
    ranks: &Ranks,
    unit: Unit,
) -> (Vec<RowJson>, Vec<String>) {
    let statement = report.statement_by(by, device, ROWS, unit.smallest());
    let moments = [&device.last, &device.peak].map(|moment| report.composition(moment, by));
    let is_category = |name: &str| moments.iter().any(|moment| moment.categories.contains_key(name));
    let mut named = Vec::new();
    let rows = statement.rows.iter().map(|row| {
        let code = (row.part == Part::Category).then(|| match is_category(&row.name) {
            true => {
                named.push(row.name.clone());
                ranks.code(Some(&row.name))
            }
            false => SMALLER,
        });
        RowJson {
            name: clean_name(&row.name),
            part: if row.part == Part::Category && code == Some(SMALLER) && !is_category(&row.name) {
                "smaller"
            } else {
                part_name(row.part)
            },
            parent: row.parent,
            bytes: row.bytes.clone(),
            code: if row.part == Part::Others { Some(OTHERS) } else { code },
            note: text::note(row, device),
            carried: [0, 1].map(|column| text::is_carried(device, row, column)),
        }
    });
    (rows.collect(), named)
}

fn part_name(part: Part) -> &'static str {
    match part {
        Part::Used => "used",
        Part::Predates => "predates",
        Part::Tracked => "tracked",
        Part::Category => "category",
        Part::Others => "others",
        Part::PoolIdle => "idle",
        Part::Opaque => "opaque",
        Part::Untrackable => "untrackable",
        Part::Context => "context",
        Part::Modules => "modules",
        Part::LocalMemory => "local_memory",
        Part::Heaps => "heaps",
        Part::Unexplained => "unexplained",
    }
}

/// Returns the largest steps of the gap in the order of time, and the sum and number of the others.
fn steps(device: &Device, unit: Unit, limit: usize, since: Since) -> (Vec<StepJson>, (i64, usize)) {
    let mut steps = grouped(&device.details.steps);
    steps.sort_by_key(|step| std::cmp::Reverse(weight(step)));
    let rest = steps.split_off(steps.len().min(limit));
    steps.sort_by_key(|step| step.time_ns);
    let told = steps.iter().map(|step| StepJson {
        t: since.t(step.time_ns),
        bytes: step.bytes,
        what: clean(&what(step, unit)),
        note: step.note.as_deref().map(clean),
    });
    let sum = rest.iter().fold(0_i64, |sum, step| sum.saturating_add(step.bytes));
    (told.collect(), (sum, rest.len()))
}

fn iterations_of(device: &Device) -> Option<IterationsJson> {
    let table = &device.details.iterations;
    let all: Vec<Iteration> = table.rows.iter().chain(&table.open).copied().collect();
    let width = all.len().div_ceil(iterations::MOST_ROWS).max(1);
    let shown: Vec<Iteration> = all.chunks(width).map(iterations::merged).collect();
    let columns: Vec<&iterations::Column> =
        iterations::COLUMNS.iter().filter(|(_, of)| shown.iter().any(|row| of(row) != 0)).collect();
    let row = |row: &Iteration| {
        (iterations::number(row), columns.iter().map(|(_, of)| of(row)).collect(), row.partial)
    };
    (!shown.is_empty()).then(|| IterationsJson {
        rows: shown.iter().map(row).collect(),
        columns: columns.iter().map(|(name, _)| *name).collect(),
        open: table.open.is_some(),
    })
}

fn oom(report: &Report<'_>, oom: &Oom, lines: Vec<String>, since: Since) -> OomJson {
    OomJson {
        t: since.t(oom.time_ns),
        kind: match (oom.is_true(), oom.is_suspected()) {
            (true, _) => "oom",
            (_, true) => "suspected",
            _ => "refused",
        },
        lines,
        held: held(report, oom).into_iter().map(|(name, bytes)| (clean_name(&name), bytes)).collect(),
        holders: oom.device.as_ref().map(|device| holders(oom, device)).unwrap_or_default(),
    }
}

/// Returns the holders of the device: processes, unowned memory, the driver's share, and free memory.
fn holders(oom: &Oom, device: &OomDevice) -> Vec<(String, i64, Option<i64>)> {
    let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    let holders = device.holders.iter().map(|holder| {
        let user = holder.user.as_deref().map_or("another process".to_owned(), clean_name);
        let who = if holder.pid == 0 { user } else { format!("{user} {}", holder.pid) };
        (who, holder.used_bytes, holder.growth_bytes)
    });
    // The driver's value for free memory is newer than the reading: other processes have allocated or freed since.
    let free = oom.device_free_bytes.map_or(device.free_bytes, signed);
    let (more, more_bytes) = device.others;
    let beside = [
        (format!("{more} other processes"), more_bytes),
        ("allocated since".to_owned(), device.free_bytes.saturating_sub(free)),
        (rest_name(device.unified).to_owned(), device.unaccounted_bytes),
        ("system".to_owned(), device.system_bytes.map_or(0, signed)),
        (free_name(device.unified).to_owned(), free),
    ];
    let beside = beside.into_iter().filter(|(name, bytes)| *bytes != 0 || *name == free_name(device.unified));
    holders.chain(beside.map(|(name, bytes)| (name, bytes, None))).collect()
}
