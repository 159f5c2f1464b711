//! The report as JSON, documented in docs/report-json.md. All amounts are bytes as integers, and all times are ns of the run's
//! clock. Unknown values are null, never 0. New fields may be added at any time; any other change increments `version`.

use super::bridge::Bridge;
use super::growth::{GrowthReport, growth_report};
use super::oom::{self, OomJson};
use super::over_time::TimelineJson;
use super::own::OwnJson;
use super::{By, Composition, Report, named};
use crate::category::OTHERS;
use gpumem_model::layers;
use gpumem_model::run::{
    Accounting, Beside, Caveat, Cell, Clock, Coverage, DeviceReading, Iterations, Moment, Parts, Pool,
    Process, Source, State, Step,
};
use gpumem_model::series::Series;
use gpumem_model::who::Who;
use gpumem_model::window::Window;
use serde::Serialize;

/// Value of `schema`.
pub const SCHEMA: &str = "gpumem.report";
/// Value of `version`.
pub const VERSION: u32 = 1;

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    version: u32,
    run: Option<&'a str>,
    rules: &'a str,
    source: &'a Source,
    clock: &'a Clock,
    process: &'a Process,
    /// Owner of the process, from the facts and claims in `process`.
    who: Who<'a>,
    state: &'a State,
    coverage: &'a Coverage,
    /// The reported part of the run's life; null for all of it.
    window: Option<Window>,
    /// How memory was named; null if the agent did not report it.
    names: Option<&'static str>,
    /// The program's counters and ranges.
    #[serde(flatten)]
    own: OwnJson<'a>,
    caveats: &'a [Caveat],
    devices: Vec<DeviceJson<'a>>,
}

#[derive(Serialize)]
struct DeviceJson<'a> {
    name: &'a str,
    ordinal: u16,
    model: &'a str,
    total_bytes: Option<u64>,
    reading: Option<&'a DeviceReading>,
    unaccounted_bytes: Option<i64>,
    tenants: Vec<Tenant>,
    other_tenants: OtherTenants,
    peak_used_bytes: Option<u64>,
    peak_used_time_ns: Option<u64>,
    /// Null if accounting mode is off.
    driver_accounting: Option<Accounting>,
    beside: &'a Beside,
    last: MomentJson<'a>,
    peak: MomentJson<'a>,
    /// Steps of the gap, with their causes.
    steps: Vec<StepJson<'a>>,
    series: &'a Series,
    /// Memory over time by category.
    timeline: TimelineJson,
    growth: Option<GrowthReport>,
    pools: &'a [Pool],
    iterations: &'a Iterations,
    ooms: Vec<OomJson<'a>>,
}

#[derive(Serialize)]
struct Tenant {
    pid: u32,
    used_bytes: Option<u64>,
}

#[derive(Serialize)]
struct OtherTenants {
    count: u32,
    used_bytes: u64,
}

#[derive(Serialize)]
struct MomentJson<'a> {
    time_ns: u64,
    used_bytes: Option<i64>,
    used_absence: Option<String>,
    predates_bytes: Option<i64>,
    tracked_bytes: Option<i64>,
    pool_idle_bytes: i64,
    opaque_bytes: i64,
    untrackable_bytes: Option<i64>,
    untrackable: Vec<Cause>,
    gap_distance_ns: i64,
    tracked_min_bytes: Option<i64>,
    tracked_max_bytes: Option<i64>,
    torn: bool,
    stale: bool,
    partial: bool,
    layers: Vec<Category>,
    structures: Vec<Category>,
    /// Direct and block bytes that have a tag; `nameable_bytes` has all of them.
    named_bytes: i64,
    nameable_bytes: i64,
    /// From the framework's own numbers to `used`; null if PyTorch has no memory.
    bridge: Option<Bridge>,
    cells: Vec<CellJson<'a>>,
}

#[derive(Serialize)]
struct Cause {
    cause: &'static str,
    kind: &'static str,
    bytes: i64,
}

#[derive(Serialize)]
struct StepJson<'a> {
    from_ns: u64,
    time_ns: u64,
    bytes: i64,
    parts: Vec<Cause>,
    cause: &'a str,
    also: &'a [String],
    events: u64,
    kind: &'a str,
    tag: Option<&'a str>,
    library: Option<&'a str>,
    expected_bytes: Option<i64>,
    note: Option<&'a str>,
}

#[derive(Serialize)]
struct Category {
    name: String,
    bytes: i64,
}

#[derive(Serialize)]
struct CellJson<'a> {
    #[serde(flatten)]
    cell: &'a Cell,
    bytes: i64,
}

/// Returns the report as one JSON document.
pub fn json(report: &Report<'_>) -> String {
    let run = report.run;
    let devices = run.devices.iter().map(|device| DeviceJson {
        name: &device.name,
        ordinal: device.ordinal,
        model: &device.model,
        total_bytes: device.total_bytes,
        reading: device.reading.as_ref(),
        unaccounted_bytes: device.unaccounted_bytes,
        tenants: device.tenants.iter().map(|&(pid, used_bytes)| Tenant { pid, used_bytes }).collect(),
        other_tenants: OtherTenants { count: device.other_tenants.0, used_bytes: device.other_tenants.1 },
        peak_used_bytes: device.peak_used.map(|(bytes, _)| bytes),
        peak_used_time_ns: device.peak_used.map(|(_, time_ns)| time_ns),
        driver_accounting: device.accounting(),
        beside: &device.beside,
        last: moment_json(report, &device.last),
        peak: moment_json(report, &device.peak),
        steps: device.details.steps.iter().map(step_json).collect(),
        series: &device.series,
        timeline: TimelineJson::of(report, device),
        growth: growth_report(report, device),
        pools: &device.details.pools,
        iterations: &device.details.iterations,
        ooms: device.details.ooms.iter().map(|oom| oom::entry(report, device, oom)).collect(),
    });
    let document = Document {
        schema: SCHEMA,
        version: VERSION,
        run: report.id.as_deref(),
        rules: &report.groupings.name,
        source: &run.source,
        clock: &run.clock,
        process: &run.process,
        who: Who::of(&run.process.facts, &run.process.claims, run.process.uid),
        state: &run.state,
        coverage: &run.coverage,
        window: report.window,
        names: layers::level(&run.coverage.layers),
        own: OwnJson::of(&run.own),
        caveats: &run.caveats,
        devices: devices.collect(),
    };
    gpumem_model::harmless::json(&document)
}

fn moment_json<'a>(report: &'a Report<'_>, moment: &Moment) -> MomentJson<'a> {
    let by_layer = report.composition(moment, By::Layer);
    let by_structure = report.composition(moment, By::Structure);
    let cells = moment.amounts.iter().filter_map(|&(index, bytes)| {
        let cell = report.run.cells.get(index as usize)?;
        Some(CellJson { cell, bytes })
    });
    let (named_bytes, nameable_bytes) = named(report.run, moment);
    MomentJson {
        time_ns: moment.time_ns,
        used_bytes: moment.used_bytes(),
        used_absence: moment.used_absence.clone(),
        predates_bytes: moment.predates_bytes,
        tracked_bytes: moment.tracked_bytes,
        pool_idle_bytes: by_layer.pool_idle,
        opaque_bytes: by_layer.opaque,
        untrackable_bytes: moment.untrackable_bytes,
        untrackable: moment.gap_parts().map(causes).unwrap_or_default(),
        gap_distance_ns: moment.gap_distance_ns,
        tracked_min_bytes: moment.torn.map(|(min, _)| min),
        tracked_max_bytes: moment.torn.map(|(_, max)| max),
        torn: moment.torn.is_some(),
        stale: moment.stale,
        partial: moment.partial,
        layers: categories(by_layer),
        structures: categories(by_structure),
        named_bytes,
        nameable_bytes,
        bridge: Bridge::of(report.run, moment),
        cells: cells.collect(),
    }
}

fn step_json(step: &Step) -> StepJson<'_> {
    StepJson {
        from_ns: step.from_ns,
        time_ns: step.time_ns,
        bytes: step.bytes,
        parts: causes(step.parts),
        cause: &step.cause,
        also: &step.also,
        events: step.events,
        kind: &step.kind,
        tag: step.tag.as_deref(),
        library: step.library.as_deref(),
        expected_bytes: step.expected_bytes,
        note: step.note.as_deref(),
    }
}

/// Returns the parts that are not zero, and always `unexplained`.
fn causes(parts: Parts) -> Vec<Cause> {
    let each = parts.each().into_iter().map(|(cause, kind, bytes)| Cause { cause, kind, bytes });
    each.filter(|part| part.bytes != 0 || part.cause == "unexplained").collect()
}

/// Returns the categories, the largest first and `Others` last. With idle and opaque bytes they add up to `tracked`.
fn categories(composition: Composition) -> Vec<Category> {
    let mut list: Vec<Category> =
        composition.categories.into_iter().map(|(name, bytes)| Category { name, bytes }).collect();
    list.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    list.push(Category { name: OTHERS.into(), bytes: composition.others });
    list
}
