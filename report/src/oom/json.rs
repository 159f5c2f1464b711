//! `gpumemctl oom --json` (docs/oom.md), and the entries of `report --json`.

use super::holders::composition;
use super::verdict::verdict;
use crate::Report;
use gpumem_model::ending::Ending;
use gpumem_model::run::{Clock, Device, Oom};
use gpumem_model::units::Unit;
use serde::Serialize;

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    version: u32,
    run: Option<&'a str>,
    pid: u32,
    clock: &'a Clock,
    /// Whether the process had an agent. Without one no OOM is reported, so an empty list means nothing.
    covered: bool,
    /// What else ended the process; null if unknown, or if it has not ended.
    ending: Option<Ending>,
    dropped: u64,
    ooms: Vec<OomJson<'a>>,
}

#[derive(Serialize)]
pub(crate) struct OomJson<'a> {
    /// UUID of the GPU.
    gpu: &'a str,
    /// `oom`, `suspected` or `pressure`.
    what: &'static str,
    verdict: String,
    /// Without amounts; `held` has them by name.
    #[serde(flatten)]
    oom: Oom,
    /// Bytes that the process held, by name; empty without an agent.
    held: Vec<Held>,
    /// Sum of `held`.
    held_bytes: Option<i64>,
}

#[derive(Serialize)]
struct Held {
    name: String,
    bytes: i64,
}

/// Returns an entry of the JSON document: the stored OOM record, with the process's memory by name.
pub(crate) fn entry<'a>(report: &Report<'_>, device: &'a Device, oom: &'a Oom) -> OomJson<'a> {
    let bytes = Unit::for_largest(0);
    let own = (!oom.is_suspected()).then(|| composition(report, oom));
    let ending = Ending::of(report.run);
    OomJson {
        gpu: &device.name,
        what: match (oom.is_true(), oom.is_suspected()) {
            (true, _) => "oom",
            (_, true) => "suspected",
            _ => "pressure",
        },
        verdict: verdict(report, oom, ending.as_ref(), bytes) + " (bytes)",
        oom: Oom { amounts: Default::default(), ..oom.clone() },
        held_bytes: own.as_ref().map(|own| own.total),
        held: own
            .map(|own| own.parts.into_iter().map(|(name, bytes)| Held { name, bytes }).collect())
            .unwrap_or_default(),
    }
}

/// Returns all entries as one JSON document.
pub fn json(report: &Report<'_>) -> String {
    let run = report.run;
    let entries = run
        .devices
        .iter()
        .flat_map(|device| device.details.ooms.iter().map(move |oom| entry(report, device, oom)));
    let document = Document {
        schema: "gpumem.oom",
        version: 1,
        run: report.id.as_deref(),
        pid: run.process.pid,
        clock: &run.clock,
        covered: run.coverage.covered,
        ending: Ending::of(run),
        dropped: run.coverage.ooms_dropped,
        ooms: entries.collect(),
    };
    gpumem_model::harmless::json(&document)
}
