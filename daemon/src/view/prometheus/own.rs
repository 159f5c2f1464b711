//! What the daemon says about itself, through the `prometheus` crate: a collector that reads the counts when it is
//! asked, so that nothing is kept twice.

use crate::stats::Count;
use crate::view::Sight;
use crate::view::health::Health;
use crate::view::text::clean;
use prometheus::core::{Collector, Desc};
use prometheus::proto::{Counter, Gauge, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{Encoder, Registry, TextEncoder};

/// One scrape's view of ourselves.
struct Own(Vec<MetricFamily>);

impl Collector for Own {
    fn desc(&self) -> Vec<&Desc> {
        Vec::new() // the registry checks names by it; ours are checked by promtool in a test
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.0.clone()
    }
}

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
        pair.set_value(clean(value).into_owned());
        pair
    });
    metric.set_label(pairs.collect());
    metric
}

/// Appends the families about ourselves.
pub(super) fn write(sight: &Sight, health: &Health, published_ns: u64, text: &mut String) {
    let mut families: Vec<MetricFamily> = Vec::new();
    for &(count, name, help, reason) in Count::ALL {
        if families.last().is_none_or(|last| last.name() != name) {
            families.push(family(name, help, true));
        }
        let label = reason.map(|reason| ("reason", reason));
        if let Some(last) = families.last_mut() {
            last.mut_metric().push(metric(true, sight.stats.get(count) as f64, label.as_slice()));
        }
    }
    let mut gauge = |name: &str, help: &str, value: f64, labels: &[(&str, &str)]| {
        let mut family = family(name, help, false);
        family.mut_metric().push(metric(false, value, labels));
        families.push(family);
    };
    let now_ns = crate::clock::now_ns();
    let age = now_ns.saturating_sub(published_ns) as f64 / 1e9;
    gauge("gpumemd_build_info", "Version; always 1.", 1.0, &[("version", env!("CARGO_PKG_VERSION"))]);
    gauge("gpumemd_snapshot_age_seconds", "Age of the state that this scrape shows.", age, &[]);
    gauge("gpumemd_agents", "Agents that are connected.", health.agents as f64, &[]);
    let waiting = health.agents_waiting as f64;
    gauge("gpumemd_agents_waiting", "Peers that have not said hello.", waiting, &[]);
    let mut up = family("gpumemd_source_up", "1 while a source works.", false);
    up.mut_metric().push(metric(false, f64::from(u8::from(health.nvml_up)), &[("source", "nvml")]));
    let store = sight.keeper.status();
    up.mut_metric().push(metric(false, f64::from(u8::from(store.up)), &[("source", "store")]));
    families.push(up);
    let mut waiting = family("gpumemd_store_waiting", "Runs that wait for the store.", false);
    waiting.mut_metric().push(metric(false, store.waiting as f64, &[]));
    families.push(waiting);
    let mut bytes =
        family("gpumemd_store_bytes", "Size of the run store's file, looked at every half minute.", false);
    bytes.mut_metric().push(metric(false, store.bytes as f64, &[]));
    families.push(bytes);
    for number in &health.numbers {
        let mut family = family(number.name, number.help, number.counter);
        family.mut_metric().push(metric(number.counter, number.value, &[]));
        families.push(family);
    }
    if let Some(bytes) = resident_bytes() {
        let mut family = family("process_resident_memory_bytes", "Resident memory of the daemon.", false);
        family.mut_metric().push(metric(false, bytes, &[]));
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
