//! Metrics of the daemon itself, through the `prometheus` crate. The collector reads the counters at each scrape, so that no
//! value is stored twice.

use super::families::Family;
use super::processes::Folded;
use crate::aggregator::Published;
use crate::stats::Count;
use crate::view::ViewContext;
use crate::view::health::{Health, nvml_numbers};
use crate::view::text::Label;
use prometheus::core::{Collector, Desc};
use prometheus::proto::{Counter, Gauge, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{Encoder, Registry, TextEncoder};

/// The daemon's metrics at one scrape.
struct Own(Vec<MetricFamily>);

impl Collector for Own {
    fn desc(&self) -> Vec<&Desc> {
        Vec::new() // the registry checks names with it; a test checks ours with promtool
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.0.clone()
    }
}

static BUILD: Family = Family::gauge("gpumemd_build_info", &["version"], "Version; always 1.");
static SNAPSHOT: Family =
    Family::gauge("gpumemd_snapshot_age_seconds", &[], "Age of the state that this scrape shows.");
static AGENTS: Family = Family::gauge("gpumemd_agents", &[], "Agents that are connected.");
static WAITING: Family = Family::gauge("gpumemd_agents_waiting", &[], "Peers that have not said hello.");
static REMEMBERED: Family = Family::gauge(
    "gpumemd_ledger_bytes",
    &[],
    "Bytes, about, that the daemon remembers of what agents said; agent.memory_mib bounds it.",
);
static LOST: Family = Family::counter(
    "gpumemd_events_lost_total",
    &[],
    "Ordered records of agents that were lost, of processes that are gone too.",
);
static FOLDED: Family = Family::gauge(
    "gpumemd_processes_folded",
    &["reason"],
    "Processes that are one process (other) in this scrape, because they have just begun (young), or for metrics.max_series (room).",
);
static UP: Family = Family::gauge(
    "gpumemd_source_up",
    &["source"],
    "1 while a source works; 0 for nvml also while a call does not return and no GPU is read.",
);
static STORE_WAITING: Family = Family::gauge("gpumemd_store_waiting", &[], "Runs that wait for the store.");
static STORE_WAITING_BYTES: Family = Family::gauge(
    "gpumemd_store_waiting_bytes",
    &[],
    "Bytes, about, that runs take that wait for the store; runs.waiting_mib bounds it.",
);
static STORE_QUEUED: Family = Family::gauge(
    "gpumemd_store_queued",
    &[],
    "Processes with news that are not among the waiting runs, because too many are.",
);
static STORE_OLDEST: Family = Family::gauge(
    "gpumemd_store_unwritten_seconds",
    &[],
    "Age of the oldest news of a run that is not in the store: what a kill would cost, beside runs.checkpoint_every_s.",
);
static STORE_BYTES: Family =
    Family::gauge("gpumemd_store_bytes", &[], "Size of the run store's file, looked at every half minute.");
static CPU: Family = Family::counter("process_cpu_seconds_total", &[], "CPU time of the daemon.");
static RESIDENT: Family =
    Family::gauge("process_resident_memory_bytes", &[], "Resident memory of the daemon.");
static HEAP: Family = Family::gauge(
    "gpumemd_heap_bytes",
    &[],
    "Bytes that the daemon uses of its heap; what is free goes back to the system each minute.",
);
static OPEN_FDS: Family = Family::gauge("process_open_fds", &[], "Open file descriptors of the daemon.");
static STARTED: Family =
    Family::gauge("process_start_time_seconds", &[], "When the daemon started, in seconds since 1970.");

/// Families of this file.
pub(super) static FAMILIES: &[&Family] = &[
    &BUILD,
    &SNAPSHOT,
    &AGENTS,
    &WAITING,
    &REMEMBERED,
    &LOST,
    &FOLDED,
    &UP,
    &STORE_WAITING,
    &STORE_WAITING_BYTES,
    &STORE_QUEUED,
    &STORE_OLDEST,
    &STORE_BYTES,
    &CPU,
    &HEAP,
    &RESIDENT,
    &OPEN_FDS,
    &STARTED,
];

fn family(name: &str, help: &str, counter: bool) -> MetricFamily {
    let mut family = MetricFamily::default();
    family.set_name(name.to_owned());
    family.set_help(help.to_owned());
    family.set_field_type(if counter { MetricType::COUNTER } else { MetricType::GAUGE });
    family
}

fn metric(counter: bool, value: f64, labels: &[(&str, &str)]) -> Metric {
    let mut metric = Metric::default();
    if counter {
        let mut counter = Counter::default();
        counter.set_value(value);
        metric.set_counter(counter);
    } else {
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        metric.set_gauge(gauge);
    }
    let pairs = labels.iter().map(|(name, value)| {
        let mut pair = LabelPair::default();
        pair.set_name((*name).to_owned());
        pair.set_value(Label::from(*value).as_str().to_owned());
        pair
    });
    metric.set_label(pairs.collect());
    metric
}

/// Appends the daemon's own families.
pub(super) fn write(
    context: &ViewContext,
    health: &Health,
    published: &Published,
    folded: Folded,
    text: &mut String,
) {
    let mut families: Vec<MetricFamily> = Vec::new();
    for &(count, name, help, reason) in Count::ALL {
        if families.last().is_none_or(|last| last.name() != name) {
            families.push(family(name, help, true));
        }
        let label = reason.map(|reason| ("reason", reason));
        if let Some(last) = families.last_mut() {
            last.mut_metric().push(metric(true, context.stats.get(count) as f64, label.as_slice()));
        }
    }
    let store = context.keeper.status();
    let age = crate::clock::now_ns().saturating_sub(published.at_ns) as f64 / 1e9;
    let yes = |up: bool| f64::from(u8::from(up));
    for (of, value, label) in [
        (&BUILD, Some(1.0), Some(("version", env!("CARGO_PKG_VERSION")))),
        (&SNAPSHOT, Some(age), None),
        (&AGENTS, Some(health.agents as f64), None),
        (&WAITING, Some(health.agents_waiting as f64), None),
        (&REMEMBERED, Some(published.remembered_bytes as f64), None),
        (&LOST, Some(published.totals.lost() as f64), None),
        (&FOLDED, Some(folded.young as f64), Some(("reason", "young"))),
        (&FOLDED, Some(folded.room as f64), Some(("reason", "room"))),
        (&UP, Some(yes(health.nvml.problem().is_none())), Some(("source", "nvml"))),
        (&UP, Some(yes(store.up)), Some(("source", "store"))),
        (&STORE_WAITING, Some(store.waiting as f64), None),
        (&STORE_WAITING_BYTES, Some(store.waiting_bytes as f64), None),
        (&STORE_QUEUED, Some(store.queued as f64), None),
        (&STORE_OLDEST, Some(store.oldest.as_secs_f64()), None),
        (&STORE_BYTES, Some(store.bytes as f64), None),
        (&CPU, Some(cpu_seconds()), None),
        (&HEAP, crate::memory::in_use().map(|bytes| bytes as f64), None),
        (&RESIDENT, resident_bytes(), None),
        (&OPEN_FDS, open_fds(), None),
        (&STARTED, Some(started(context.stats.started_ns)), None),
    ] {
        let Some(value) = value else { continue };
        let counter = of.kind == "counter";
        if families.last().is_none_or(|last| last.name() != of.name) {
            families.push(family(of.name, of.help, counter));
        }
        if let Some(last) = families.last_mut() {
            last.mut_metric().push(metric(counter, value, label.as_slice()));
        }
    }
    for number in nvml_numbers(&health.nvml.counters) {
        let mut family = family(number.name, number.help, number.counter);
        family.mut_metric().push(metric(number.counter, number.value, &[]));
        families.push(family);
    }
    let registry = Registry::new();
    let mut out = Vec::new();
    let encoded = registry
        .register(Box::new(Own(families)))
        .and_then(|()| TextEncoder::new().encode(&registry.gather(), &mut out));
    match encoded {
        Ok(()) => text.push_str(&String::from_utf8_lossy(&out)),
        Err(error) => tracing::error!(%error, "the daemon's own metrics are missing"),
    }
}

fn resident_bytes() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: f64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024.0)
}

fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Returns the number of open descriptors. Since Linux 6.2 the folder's size has it; before, listing it counts one more, which
/// reads the list.
fn open_fds() -> Option<f64> {
    const FDS: &str = "/proc/self/fd";
    match std::fs::metadata(FDS).ok()?.len() {
        0 => Some(std::fs::read_dir(FDS).ok()?.count().saturating_sub(1) as f64),
        count => Some(count as f64),
    }
}

fn started(started_ns: u64) -> f64 {
    (i128::from(started_ns) + crate::clock::wall_offset_ns()) as f64 / 1e9
}
