//! Processes: the identity `used = predates + tracked + untrackable` at the last sample where all of it was known,
//! and tracked by category. The wide labels are on one series per process, to be joined by pid and start.

use super::devices;
use super::families::{Families, Family, Labels};
use crate::core::Published;
use crate::view::Shown;
use gpumem_ledger::category::{OTHERS, Rules};
use gpumem_ledger::{AccountView, CellView, Class, Parts, ProcessView};
use gpumem_runs::layers::{layer_name, state_name};
use gpumem_runs::run::absence_name;
use gpumem_runs::who::{CLAIMED, Said, Who};
use gpumem_wire::LayerState;
use std::borrow::Cow;
use std::collections::BTreeMap;

static INFO: Family = Family::gauge("gpumem_process_info", "A process that uses a GPU; always 1.");
static USED: Family = Family::gauge("gpumem_process_used_bytes", "What NVML charges to the process.");
static TRACKED: Family = Family::gauge(
    "gpumem_process_tracked_bytes",
    "Live driver allocations, at the time of the sample of used.",
);
static CATEGORY: Family =
    Family::gauge("gpumem_process_category_bytes", "Tracked by category; the categories add up to tracked.");
static PREDATES: Family =
    Family::gauge("gpumem_process_predates_bytes", "Used that is older than the agent.");
static UNTRACKABLE: Family = Family::gauge(
    "gpumem_process_untrackable_bytes",
    "Used minus tracked minus what predates the agent: context, modules, rounding and the unexplained.",
);
static UNTRACKABLE_PART: Family = Family::gauge(
    "gpumem_process_untrackable_part_bytes",
    "Untrackable by its causes, which add up to it: context is measured, modules an upper bound, local_memory, heaps and rounding are models, unexplained is what they leave.",
);
static TRACKED_PEAK: Family = Family::gauge("gpumem_process_tracked_peak_bytes", "Highest tracked so far.");
static USED_PEAK: Family =
    Family::gauge("gpumem_process_used_peak_bytes", "Highest used that was read so far.");
static BESIDE: Family =
    Family::gauge("gpumem_process_beside_bytes", "Memory outside the sum, by kind: host and foreign memory.");
static FLAG: Family =
    Family::gauge("gpumem_process_flag", "1 for each thing to know about the numbers of the process.");
static LAYER: Family = Family::gauge(
    "gpumem_process_names_layer",
    "1 for each way of naming memory that the agent has something for, with its state.",
);
static UNAVAILABLE: Family =
    Family::gauge("gpumem_process_used_unavailable", "1 while NVML does not tell used, with the reason.");
static AGE: Family = Family::gauge("gpumem_process_sample_age_seconds", "Age of the sample of used.");
static EVENTS: Family =
    Family::counter("gpumem_process_events_total", "Ordered records of the agent that were applied.");
static LOST: Family = Family::counter("gpumem_process_events_lost_total", "Ordered records that were lost.");
static FAILED: Family =
    Family::counter("gpumem_process_allocation_failures_total", "Driver allocations that failed.");

pub(super) fn collect(published: &Published, shown: &Shown, out: &mut Families) {
    for process in &published.snapshot.processes {
        if process.ended.is_some() || process.accounts.is_empty() {
            continue;
        }
        let ids = |labels: Labels| {
            let labels = labels.with("pid", &process.key.pid.to_string());
            labels.with("start", &process.key.start_ticks.to_string())
        };
        let own = ids(Labels::new());
        info(process, &own, out);
        if process.coverage.covered {
            out.add(&EVENTS, &own, process.coverage.events);
            out.add(&LOST, &own, process.coverage.lost);
            out.add(&FAILED, &own, process.coverage.failed_allocations);
            for said in process.layers.iter().filter(|said| said.state != LayerState::Absent) {
                let labels = own.clone().with("layer", layer_name(said.layer));
                out.add_with(&LAYER, &labels, Some(("state", state_name(said.state))), 1_u64);
            }
        }
        let categories = Categories::of(process, &shown.rules.structure);
        for account in &process.accounts {
            let Some(device) = account.device.and_then(|index| published.snapshot.devices.get(index)) else {
                continue;
            };
            let labels = ids(devices::labels(device.ordinal.into(), device.name));
            one(published, process, account, &categories, &labels, out);
        }
    }
}

fn info(process: &ProcessView, own: &Labels, out: &mut Families) {
    let facts = &process.facts;
    let who = Who::of(&facts.seen, &facts.claims, facts.uid);
    let mut labels = who.iter().fold(own.clone(), |labels, said| labels.with(said.label(), &said.value));
    if let Some(cgroup) = facts.seen.get("cgroup") {
        labels = labels.with("cgroup", cgroup);
    }
    let claimed: Vec<&str> = who.iter().filter(|said| said.is_claim).map(Said::label).collect();
    if !claimed.is_empty() {
        labels = labels.with(CLAIMED, &claimed.join(" "));
    }
    out.add(&INFO, &labels, 1_u64);
}

fn one(
    published: &Published,
    process: &ProcessView,
    account: &AccountView,
    categories: &Categories<'_>,
    labels: &Labels,
    out: &mut Families,
) {
    let covered = process.coverage.covered;
    let newest_failed = account
        .latest
        .as_ref()
        .and_then(|sample| Some(absence_name(sample.used_bytes.err()?, sample.list_failed)));
    // With no word of NVML, or an old one, `used` is not known now.
    let sample = account.complete.as_ref().filter(|_| newest_failed.is_none());
    if let Some(reason) = newest_failed.or(account.latest.is_none().then_some("never sampled")) {
        out.add_with(&UNAVAILABLE, labels, Some(("reason", reason)), 1_u64);
    }
    if let Some(sample) = sample {
        if let Ok(used) = sample.used_bytes {
            out.add(&USED, labels, used);
        }
        out.add(&AGE, labels, published.at_ns.saturating_sub(sample.t1_ns) as f64 / 1e9);
        if let Some(untrackable) = sample.untrackable_bytes() {
            out.add(&UNTRACKABLE, labels, untrackable);
            out.add(&PREDATES, labels, sample.predates_bytes);
            for (part, bytes) in sample.parts.iter().flat_map(parts) {
                out.add_with(&UNTRACKABLE_PART, labels, Some(("part", part)), bytes);
            }
        }
    }
    if covered {
        let at_sample = sample.and_then(|sample| Some((sample.tracked_bytes?, &*sample.amounts)));
        let (tracked, amounts) = at_sample.unwrap_or((account.tracked_bytes, &account.amounts));
        out.add(&TRACKED, labels, tracked);
        for (category, bytes) in categories.sums(amounts) {
            out.add_with(&CATEGORY, labels, Some(("category", category)), bytes);
        }
        out.add(&TRACKED_PEAK, labels, account.peak.tracked_bytes);
        let beside = &account.beside;
        for (kind, bytes) in [
            ("managed", beside.managed),
            ("pinned", beside.pinned),
            ("registered", beside.registered),
            ("imported", beside.imported),
            ("host_vmm", beside.host_vmm),
        ] {
            if bytes != 0 {
                out.add_with(&BESIDE, labels, Some(("kind", kind)), bytes);
            }
        }
    }
    if let Some((used, _)) = account.peak_used {
        out.add(&USED_PEAK, labels, used);
    }
    for flag in flags(process, account) {
        out.add_with(&FLAG, labels, Some(("flag", flag)), 1_u64);
    }
}

fn parts(parts: &Parts) -> [(&'static str, i64); 6] {
    [
        ("context", parts.context),
        ("modules", parts.modules),
        ("local_memory", parts.local_memory),
        ("heaps", parts.heaps),
        ("rounding", parts.rounding),
        ("unexplained", parts.unexplained),
    ]
}

/// What is to be known about the numbers of a process.
pub fn flags(process: &ProcessView, account: &AccountView) -> Vec<&'static str> {
    let coverage = &process.coverage;
    let mut flags = vec![if coverage.covered { "covered" } else { "uncovered" }];
    let stale = account.latest.as_ref().is_some_and(|sample| sample.stale);
    for (holds, flag) in [
        (coverage.late, "late"),
        (coverage.blocked.is_some(), "blocked"),
        (coverage.paused, "paused"),
        (coverage.partial.is_some(), "partial"),
        (stale, "stale"),
    ] {
        if holds {
            flags.push(flag);
        }
    }
    flags
}

/// The category of each cell of a process.
struct Categories<'a>(Vec<Cow<'a, str>>);

impl<'a> Categories<'a> {
    fn of(process: &ProcessView, rules: &'a Rules) -> Self {
        let name = |cell: &CellView| match cell.class {
            _ if cell.is_idle() => Cow::Borrowed("pool idle"),
            Class::Opaque => Cow::Borrowed("opaque pools"),
            Class::Direct | Class::Block | Class::PoolIdle => rules.category(cell).unwrap_or(OTHERS).into(),
        };
        Categories(process.cells.iter().map(name).collect())
    }

    /// Bytes of each category; together they are the sum of the amounts.
    fn sums(&self, amounts: &[i64]) -> BTreeMap<&str, i64> {
        let mut sums = BTreeMap::new();
        for (name, &bytes) in self.0.iter().zip(amounts).filter(|(_, bytes)| **bytes != 0) {
            *sums.entry(&**name).or_insert(0) += bytes;
        }
        sums
    }
}
