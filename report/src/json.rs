//! The report as JSON, documented in docs/report-json.md. All amounts are bytes as integers, and all times are ns of the run's
//! clock. Unknown values are null, never 0. New fields may be added at any time; any other change increments `version`.

use super::bridge::Bridge;
use super::findings::Findings;
use super::growth::growth_report;
use super::{Composition, GroupBy, Report, largest_first, named, oom, own};
use crate::category::OTHERS;
use crate::encode::object;
use gpumem_model::layers;
use gpumem_model::owner::Owner;
use gpumem_model::run::{Device, Moment, UntrackableChange, UntrackableParts};
use serde::Serialize;
use std::collections::BTreeSet;

/// Returns the report as one JSON document.
pub fn json(report: &Report<'_>) -> String {
    let run = report.run;
    gpumem_model::escape::json(&object! {
        schema: "gpumem.report",
        version: 1,
        run: report.id.as_deref(),
        rules: &report.groupings.name,
        source: &run.source,
        clock: &run.clock,
        process: &run.process,
        // Owner of the process, from the facts (read by the daemon) and claims (by the process itself) in `process`.
        who: Owner::of(&run.process.facts, &run.process.claims, run.process.uid),
        state: &run.state,
        // Conclusions from the numbers, in the fields `outcome` and `findings`.
        #[serde(flatten)]
        findings: Findings::of(report),
        coverage: &run.coverage,
        // The reported part of the run; null if the whole run is reported.
        window: report.window,
        // The working source of tags with the most precise names, such as `module path`; null if the agent reported no sources.
        names: layers::level(&run.coverage.layers),
        // Counters and ranges that the program reported itself.
        #[serde(flatten)]
        own: own::fields(&run.own),
        caveats: &run.caveats,
        devices: run.devices.iter().map(|device| device_json(report, device)).collect::<Vec<_>>(),
    })
}

fn device_json(report: &Report<'_>, device: &Device) -> impl Serialize {
    let (count, used_bytes) = device.other_tenants;
    let details = &device.details;
    object! {
        name: &device.name,
        ordinal: device.ordinal,
        model: &device.model,
        total_bytes: device.total_bytes,
        reading: &device.reading,
        unaccounted_bytes: device.unaccounted_bytes,
        tenants: device.tenants.iter().map(|&(pid, used_bytes)| object! { pid, used_bytes }).collect::<Vec<_>>(),
        other_tenants: object! { count, used_bytes },
        peak_used_bytes: device.peak_used.map(|(bytes, _)| bytes),
        peak_used_time_ns: device.peak_used.map(|(_, time_ns)| time_ns),
        // Null if the driver's accounting mode is off.
        driver_accounting: device.accounting(),
        beside: &device.beside,
        last: moment_json(report, &device.last),
        peak: moment_json(report, &device.peak),
        // Changes of untrackable memory, with their causes.
        steps: details.steps.iter().map(step_json).collect::<Vec<_>>(),
        series: &device.series,
        // Memory over time by category.
        timeline: timeline(report, device),
        growth: growth_report(report, device),
        pools: &details.pools,
        iterations: &details.iterations,
        ooms: details.ooms.iter().map(|oom| oom::entry(report, device, oom)).collect::<Vec<_>>(),
    }
}

fn moment_json(report: &Report<'_>, moment: &Moment) -> impl Serialize {
    let by_layer = report.composition(moment, GroupBy::Layer);
    let (named_bytes, nameable_bytes) = named(report.run, moment);
    let cells = moment.amounts.iter().filter_map(|&(index, bytes)| {
        let cell = report.cell(index)?;
        Some(object! { #[serde(flatten)] cell, bytes })
    });
    object! {
        time_ns: moment.time_ns,
        used_bytes: moment.used_bytes(),
        used_absence: &moment.used_absence,
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
        structures: categories(report.composition(moment, GroupBy::Structure)),
        // Direct and block bytes that have a tag; `nameable_bytes` is all direct and block bytes.
        named_bytes,
        nameable_bytes,
        // How PyTorch's own numbers and other memory add up to `used`; null if PyTorch has no memory.
        bridge: Bridge::of(report.run, moment),
        cells: cells.collect::<Vec<_>>(),
    }
}

fn step_json(step: &UntrackableChange) -> impl Serialize {
    object! {
        from_ns: step.from_ns,
        time_ns: step.time_ns,
        bytes: step.bytes,
        parts: causes(step.parts),
        cause: &step.cause,
        also: &step.also,
        events: step.events,
        kind: &step.kind,
        tag: &step.tag,
        library: &step.library,
        expected_bytes: step.expected_bytes,
        note: &step.note,
    }
}

/// Returns the parts of untrackable memory that are not zero, and always `unexplained`.
fn causes(parts: UntrackableParts) -> Vec<impl Serialize> {
    let shown = parts.each().into_iter().filter(|(cause, _, bytes)| *bytes != 0 || *cause == "unexplained");
    shown.map(|(cause, kind, bytes)| object! { cause, kind, bytes }).collect()
}

/// Returns the categories, the largest first and `Others` last. With idle and opaque bytes, they add up to `tracked`.
fn categories(composition: Composition) -> Vec<impl Serialize> {
    let mut list = largest_first(composition.categories);
    list.push((OTHERS.into(), composition.others));
    list.into_iter().map(|(name, bytes)| object! { name, bytes }).collect()
}

/// Returns the timeline of a device. In each point, `layers` plus idle and opaque bytes add up to `tracked_bytes`, and so do
/// `structures` plus idle and opaque bytes.
fn timeline(report: &Report<'_>, device: &Device) -> impl Serialize {
    let timeline = &device.details.timeline;
    let by = |by: GroupBy| -> Vec<Composition> {
        timeline.points.iter().map(|point| report.composition_at(point, by)).collect()
    };
    let (by_layer, by_structure) = (by(GroupBy::Layer), by(GroupBy::Structure));
    let (layers, structures) = (names(&by_layer), names(&by_structure));
    let points = timeline.points.iter().zip(by_layer.iter().zip(&by_structure));
    let points = points.map(|(point, (by_layer, by_structure))| {
        object! {
            time_ns: point.time_ns,
            tracked_bytes: point.tracked_bytes(),
            pool_idle_bytes: by_layer.pool_idle,
            opaque_bytes: by_layer.opaque,
            layers: column(&layers, by_layer),
            structures: column(&structures, by_structure),
        }
    });
    let points: Vec<_> = points.collect();
    // The amounts of a point are in the order of `layers` (and of `structures`), with `Others` last.
    object! { width_ns: timeline.width_ns, layers, structures, points }
}

fn names(compositions: &[Composition]) -> Vec<String> {
    let names: BTreeSet<&String> =
        compositions.iter().flat_map(|composition| composition.categories.keys()).collect();
    names.into_iter().cloned().chain([OTHERS.to_owned()]).collect()
}

fn column(names: &[String], composition: &Composition) -> Vec<i64> {
    let named = names.iter().take(names.len().saturating_sub(1));
    named
        .map(|name| composition.categories.get(name).copied().unwrap_or(0))
        .chain([composition.others])
        .collect()
}
