//! Table of the numbers of a run that entries of words.toml refer to, as `here = "NAME ARGUMENT"`.

use super::here::ExplainedRun;
use crate::Part;
use crate::diff::gate::PARTS;
use gpumem_model::layers;
use gpumem_model::run::{Class, OomKind};
use gpumem_model::units::plural;

/// Returns a number of a run as text; `None` if the run does not have it. The second parameter is the ARGUMENT in words.toml.
type Number = fn(&ExplainedRun<'_>, &str) -> Option<String>;

pub(super) const NUMBERS: &[(&str, Number)] = &[
    ("absence", |here, _| here.device.last.used_absence.clone().or(Some("everything is known".to_owned()))),
    ("accounted_peak", |here, _| here.unsigned(here.device.details.accounted_peak_bytes)),
    ("beside", |here, _| Some(here.amount(beside(here)))),
    ("blind_intervals", |here, _| count(here.coverage().blind_count, "time")),
    ("blocked", |here, _| flag(here.coverage().blocked_by.is_some())),
    ("buckets", |here, _| count(here.device.series.buckets.len() as u64, "bucket")),
    ("category", |here, name| here.category(&|other| other == name).map(|(.., numbers)| numbers)),
    ("caveats", |here, _| count(here.run.caveats.len() as u64, "caveat")),
    ("cell_count", |here, _| count(here.run.cells.len() as u64, "cell")),
    ("cells", cells),
    ("counters", |here, _| count(here.run.own.counters.len() as u64, "counter")),
    ("covered", |here, _| flag(here.coverage().covered)),
    ("events", |here, _| count(here.coverage().events, "event")),
    ("free", |here, _| here.unsigned(here.device.reading.map(|reading| reading.free_bytes))),
    ("gap_distance", |here, _| {
        let distance = here.device.peak.gap_distance_ns.unsigned_abs();
        Some(format!("{} from the peak", here.run.clock.distance(distance)))
    }),
    ("gap_steps", |here, _| count(here.device.details.steps.len() as u64, "step")),
    ("last_time", |here, _| Some(format!("at {}", here.run.clock.time(here.device.last.time_ns)))),
    ("late", |here, _| flag(here.coverage().late)),
    ("layer", |here, name| here.layer(name)),
    ("lost", |here, _| count(here.coverage().lost, "record")),
    ("naming_level", |here, _| layers::level(&here.coverage().layers).map(str::to_owned)),
    ("odd", |here, _| count(here.coverage().odd, "record")),
    ("ooms", ooms),
    ("part", |here, name| here.part(name)),
    ("partial", |here, _| {
        let coverage = here.coverage();
        Some(format!(
            "state {}, history {}",
            yes_no(coverage.partial_state),
            yes_no(coverage.partial_history)
        ))
    }),
    ("peak_time", |here, _| Some(format!("at {}", here.run.clock.time(here.device.peak.time_ns)))),
    ("phase", |here, name| here.named("phases", |cell| cell.phase.as_deref(), name)),
    ("pid", |here, _| Some(here.run.process.pid.to_string()).filter(|pid| pid != "0")),
    ("ranges", |here, _| count(here.run.own.ranges.len() as u64, "name")),
    ("rejected", |here, _| {
        let text = count(here.coverage().rejected, "line or record")?;
        Some(text.replace("records", "records (or lines)"))
    }),
    ("role", |here, name| here.named("roles", |cell| cell.role.as_deref(), name)),
    ("row", |here, name| here.row(row(name)?)),
    ("rules", |here, _| Some(format!("rules {}", here.report.groupings.name))),
    ("run_id", |here, _| here.report.id.clone()),
    ("samples", |here, _| count(here.coverage().samples, "sample")),
    ("source", |here, _| Some(format!("{} {}", here.run.source.kind, here.run.source.origin))),
    ("stale_samples", |here, _| count(here.coverage().stale_samples, "sample")),
    ("steps", |here, cause| here.steps(cause)),
    ("system_reserved", |here, _| {
        here.unsigned(here.device.reading.and_then(|reading| reading.system_reserved_bytes))
    }),
    ("tenants", |here, _| {
        let others = here.device.tenants.len() as u64 + u64::from(here.device.other_tenants.0);
        let text = count(others, "other process on the device")?;
        let text = text.replace("processs", "processes");
        Some(text.replace("process on the devices", "processes on the device"))
    }),
    ("torn_samples", |here, _| count(here.coverage().torn_samples, "sample")),
    ("total", |here, _| here.unsigned(here.device.total_bytes)),
    ("training_steps", |here, _| count(here.coverage().steps, "step")),
    ("unaccounted", |here, _| {
        Some(here.device.unaccounted_bytes.map_or("not known".to_owned(), |bytes| here.amount(bytes)))
    }),
    ("uncovered", |here, _| flag(!here.coverage().covered)),
];

/// Returns the number for `named`, the value of `here` in words.toml.
pub(super) fn number(here: &ExplainedRun<'_>, named: &str) -> Option<String> {
    let (name, argument) = named.split_once(' ').unwrap_or((named, ""));
    let (_, number) = NUMBERS.iter().find(|(other, _)| *other == name)?;
    number(here, argument)
}

fn count(number: u64, what: &str) -> Option<String> {
    Some(plural(number, what))
}

fn flag(is: bool) -> Option<String> {
    Some(yes_no(is).to_owned())
}

fn yes_no(is: bool) -> &'static str {
    if is { "yes" } else { "no" }
}

/// Returns the row of a statement that is named by ARGUMENT of words.toml.
pub(super) fn row(name: &str) -> Option<Part> {
    PARTS.iter().find(|(other, _)| *other == name).map(|(_, part)| *part)
}

fn cells(here: &ExplainedRun<'_>, which: &str) -> Option<String> {
    here.cells(|cell| match which {
        "block" => cell.class == Class::Block,
        "direct" => cell.class == Class::Direct,
        "inherited" => cell.inherited,
        "pending" => cell.pending,
        "torch" => cell.pool.as_deref() == Some("torch") && cell.class == Class::Block,
        _ => false,
    })
}

fn ooms(here: &ExplainedRun<'_>, which: &str) -> Option<String> {
    here.ooms(|oom| match which {
        "confirmed" => oom.is_out_of_memory(),
        "pressure" => oom.kind == OomKind::Pressure && !oom.is_out_of_memory(),
        "suspected" => oom.is_suspected(),
        _ => false,
    })
}

/// Returns the sum of all memory outside `tracked` that the report lists separately: managed, page-locked and imported memory.
fn beside(here: &ExplainedRun<'_>) -> i64 {
    let beside = &here.device.beside;
    let host = [beside.managed_bytes, beside.pinned_bytes, beside.registered_bytes, beside.host_vmm_bytes];
    crate::amounts::sum(host.into_iter().chain([beside.imported_bytes]))
}
