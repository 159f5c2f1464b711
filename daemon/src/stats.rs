//! Metrics about the daemon itself. Counters and histograms are in a registry of the `prometheus` crate. Tables list all metrics,
//! so each scrape has every metric and sources cannot use unknown names.

use crate::os::heap_bytes_in_use;
use prometheus::core::Collector;
use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts, Registry, TextEncoder,
    exponential_buckets,
};
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// A metric with its name, help text and type; its series differ in labels.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    pub name: &'static str,
    pub help: &'static str,
    /// Type of the metric: `gauge`, `counter` or `histogram`.
    pub kind: &'static str,
    /// Labels that its series may have.
    pub labels: &'static [&'static str],
}

/// Makes an enum of metrics, and the table of their families. A metric that shares its family has its own label value.
macro_rules! metrics {
    ($(#[$doc:meta])* $table:ident {
        $( $kind:ident $family:literal $([$label:literal])?, $help:literal { $( $metric:ident $(= $value:expr)? ),* $(,)? } )*
    }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $table { $( $( $metric, )* )* }

        impl $table {
            const FAMILIES: &'static [(Family, &'static [Option<&'static str>])] = &[$(
                (
                    Family { name: $family, help: $help, kind: stringify!($kind), labels: &[$($label)?] },
                    &[$( metrics!(@value $($value)?) ),*],
                ),
            )*];
        }
    };
    (@value) => { None };
    (@value $value:expr) => { Some($value) };
}

metrics! {
    /// A counter, increased as events happen.
    Count {
        counter "gpumemd_agent_packets_total", "Packets received from agents." { Packets }
        counter "gpumemd_agent_bytes_total", "Bytes received from agents." { Bytes }
        counter "gpumemd_records_total", "Records handed to the ledger." { Records }
        counter "gpumemd_agent_connections_total", "Accepted agents." { Welcomed }
        counter "gpumemd_agent_resumed_total", "Accepted agents whose connection was taken over from an earlier daemon process." { Resumed }
        counter "gpumemd_agent_questions_total", "Answered requests of programs for a report about themselves." { Asked }
        counter "gpumemd_agent_refused_total" ["reason"], "Refused peers on the agent socket, by reason." {
            RefusedFull = "connections",
            RefusedUid = "connections_of_uid",
            RefusedWaiting = "connections_without_hello",
            RefusedSilent = "timeout",
            RefusedEarlyEnd = "ended",
            RefusedGone = "gone",
            RefusedHello = "no_hello",
            RefusedVersion = "version",
            RefusedIdentity = "identity",
            RefusedMemory = "memory",
            RefusedSize = "memory_size",
            RefusedDescriptors = "descriptors",
        }
        counter "gpumemd_agent_waited_total", "Times that reading an agent was delayed because it exceeded agent.mib_per_s." { AgentWaited }
        counter "gpumemd_agent_dropped_total" ["reason"], "Agent connections closed because of invalid data, by reason." {
            DroppedFraming = "framing",
            DroppedOversize = "oversize",
            DroppedPayload = "payload",
            DroppedTime = "time",
            DroppedDescriptors = "descriptors",
        }
        counter "gpumemd_agent_records_skipped_total" ["reason"], "Records of agents that were skipped, by reason." {
            SkippedUnknown = "unknown_kind",
            SkippedForbidden = "not_for_agents",
            SkippedDevices = "too_many_devices",
            SkippedOver = "run_over",
        }
        counter "gpumemd_ledger_refused_records_total" ["reason"], "Records of agents that the ledger refused \
             because of a limit, by limit." {
            RefusedRows = "rows_per_process",
            RefusedOfUser = "memory_mib_per_uid",
            RefusedOfAll = "memory_mib",
        }
        counter "gpumemd_agent_recovered_records_total", "Records read from the shared memory of agents that ended without sending them." { Recovered }
        counter "gpumemd_accept_failures_total", "Connections that could not be accepted, for example for lack of file descriptors." { AcceptFailures }
        counter "gpumemd_records_late_total", "Records of processes whose run had been closed." { Late }
        counter "gpumemd_runs_finished_total", "Runs that ended." { RunsFinished }
        counter "gpumemd_runs_rolled_total", "Parts of runs closed after runs.roll_every_s; their processes continued." { RunsRolled }
        counter "gpumemd_store_writes_total", "Runs written to the store." { StoreWrites }
        counter "gpumemd_store_errors_total", "Failed writes to the store; each is retried." { StoreErrors }
        counter "gpumemd_store_dropped_total", "Runs that were never stored: too many or too large ones waited while the store was not writable." { StoreDropped }
        counter "gpumemd_store_late_total", "Runs written later than runs.checkpoint_every_s after a change: the store is too slow for the number of processes." { StoreLate }
        counter "gpumemd_store_not_shown_total", "Answers without all stored runs, because they would have been too large." { StoreNotShown }
        counter "gpumemd_store_deleted_total" ["reason"], "Runs deleted from the store, by reason." { DeletedAge = "age", DeletedSize = "size" }
        counter "gpumemd_store_set_aside_total", "Damaged stores that were renamed and replaced by new ones." { StoreSetAside }
        counter "gpumemd_recording_records_total", "Records written to the recording." { Recorded }
        counter "gpumemd_recording_lost_total", "Records missing in the recording because the disk was too slow or a write failed." { RecordingLost }
        counter "gpumemd_http_requests_total", "HTTP requests for metrics and the page." { HttpRequests }
        counter "gpumemd_http_refused_total" ["reason"], "Closed HTTP connections, by reason." {
            HttpFull = "connections",
            HttpBad = "request",
        }
        counter "gpumemd_control_requests_total", "Requests on the control socket." { ControlRequests }
        counter "gpumemd_control_refused_total" ["reason"], "Closed connections to the control socket, by limit." {
            ControlFull = "connections",
            ControlOfUid = "connections_per_uid",
        }
        counter "gpumemd_control_waited_total", "Answers delayed because their user had exceeded control.share_per_uid." { ControlWaited }
        counter "gpumemd_series_folded_total", "Series omitted from scrapes because of metrics.max_series." { SeriesFolded }
        counter "gpumemd_reloads_total", "Successful reloads of the configuration." { Reloads }
        counter "gpumemd_reload_errors_total", "Reloads refused because the configuration was invalid; the old one stayed in effect." { ReloadErrors }
    }
}

metrics! {
    /// A value that is read at each scrape.
    Value {
        gauge "gpumemd_build_info" ["version"], "Version; always 1." { Build = env!("CARGO_PKG_VERSION") }
        gauge "gpumemd_snapshot_age_seconds", "Age of the state that this scrape shows." { SnapshotAge }
        gauge "gpumemd_agents", "Connected agents." { Agents }
        gauge "gpumemd_agents_waiting", "Peers that have not sent a hello yet." { AgentsWaiting }
        gauge "gpumemd_ledger_bytes", "Estimated bytes of the ledger's data from agents; limited by agent.memory_mib." { LedgerBytes }
        counter "gpumemd_events_lost_total", "Lost ordered records of agents, including those of ended processes." { EventsLost }
        gauge "gpumemd_processes_folded" ["reason"], "Processes combined into one (other) in this scrape, because they are young or because of metrics.max_series (room)." {
            FoldedYoung = "young",
            FoldedRoom = "room",
        }
        gauge "gpumemd_source_up" ["source"], "1 while a source works; 0 for nvml also while a call has not returned and no GPU is read." {
            NvmlUp = "nvml",
            StoreUp = "store",
        }
        gauge "gpumemd_store_waiting", "Runs that wait to be written to the store." { StoreWaiting }
        gauge "gpumemd_store_waiting_bytes", "Estimated bytes of the runs that wait for the store; limited by runs.waiting_mib." { StoreWaitingBytes }
        gauge "gpumemd_store_queued", "Changed processes whose runs are not made yet, because too many wait for the store." { StoreQueued }
        gauge "gpumemd_store_unwritten_seconds", "Age of the oldest change that is not in the store: what a killed daemon would lose, in addition to runs.checkpoint_every_s." { StoreUnwritten }
        gauge "gpumemd_store_bytes", "Size of the run store's file, read every 30 s." { StoreBytes }
        counter "process_cpu_seconds_total", "CPU time of the daemon." { CpuSeconds }
        gauge "gpumemd_heap_bytes", "Bytes in use on the daemon's heap, read every 10 s; free memory is returned to the system each minute." { HeapBytes }
        gauge "process_resident_memory_bytes", "Resident memory of the daemon." { ResidentBytes }
        gauge "process_open_fds", "Open file descriptors of the daemon." { OpenFds }
        gauge "process_start_time_seconds", "Start time of the daemon, in seconds since 1970." { StartTime }
        counter "gpumemd_nvml_memory_calls_total", "Readings of device memory." { NvmlMemoryCalls }
        counter "gpumemd_nvml_memory_seconds_total", "Time in calls that read device memory." { NvmlMemorySeconds }
        counter "gpumemd_nvml_list_calls_total", "Calls for process lists." { NvmlListCalls }
        counter "gpumemd_nvml_list_seconds_total", "Time in calls for process lists, during which the driver is locked." { NvmlListSeconds }
        gauge "gpumemd_nvml_list_share_ratio", "Share of time in calls for process lists over the last 10 s." { NvmlListShare }
        counter "gpumemd_nvml_lists_deferred_total", "Process lists deferred because nvml.list_budget was used up." { NvmlListsDeferred }
        counter "gpumemd_nvml_failed_calls_total", "Failed NVML calls." { NvmlFailedCalls }
        counter "gpumemd_nvml_refused_values_total", "Impossible values of the driver that were refused: more bytes than the GPU has, or an invalid pid." { NvmlRefusedValues }
        counter "gpumemd_nvml_restarts_total", "Starts of the process that reads NVML, after the first start." { NvmlRestarts }
        counter "gpumemd_nvml_hangs_total", "Replacements of the process that reads NVML, because a call did not \
             return." { NvmlHangs }
    }
}

metrics! {
    /// A duration, whose values are counted in a histogram.
    Timing {
        histogram "gpumemd_nvml_call_seconds" ["call"], "Duration of NVML calls: one reading of a device's memory, or all process lists of a device." {
            NvmlMemory = "memory",
            NvmlLists = "lists",
        }
        histogram "gpumemd_scrape_seconds", "Duration of making a scrape." { Scrape }
        histogram "gpumemd_event_batch_seconds", "Duration of applying a batch of records to the ledger." { Batch }
        histogram "gpumemd_store_write_seconds", "Duration of writing a run to the store." { StoreWrite }
    }
}

/// Returns the families of the metrics about the daemon itself.
pub fn families() -> impl Iterator<Item = Family> {
    [Value::FAMILIES, Count::FAMILIES, Timing::FAMILIES].into_iter().flatten().map(|(family, _)| *family)
}

fn registered<V: Collector + Clone + 'static>(registry: &Registry, vec: V) -> Result<V, prometheus::Error> {
    registry.register(Box::new(vec.clone()))?;
    Ok(vec)
}

impl Value {
    /// Returns the family of the value, and the value of its label if the family has a label.
    pub(crate) fn series(self) -> Option<(&'static Family, Option<&'static str>)> {
        let families = Value::FAMILIES.iter();
        families
            .flat_map(|(family, labels)| labels.iter().map(move |label| (family, *label)))
            .nth(self as usize)
    }
}

/// Counters and histograms about the daemon itself since its start. Sources write them, and the metrics view reads them.
#[derive(Debug)]
pub struct Stats {
    registry: Registry,
    counts: Vec<IntCounter>,
    timings: Vec<Histogram>,
    /// Time of the daemon's start, in ns of CLOCK_MONOTONIC.
    pub started_ns: u64,
    /// Bytes in use on the daemon's heap, as last read by the aggregator; 0 if unknown. glibc visits all free memory to count them.
    pub heap_bytes: AtomicU64,
}

impl Stats {
    /// Registers all counters and histograms. They begin with 0.
    pub fn new() -> Result<Stats, prometheus::Error> {
        let registry = Registry::new();
        let (mut counts, mut timings) = (Vec::new(), Vec::new());
        for (family, labels) in Count::FAMILIES {
            let vec = registered(
                &registry,
                IntCounterVec::new(Opts::new(family.name, family.help), family.labels)?,
            )?;
            for label in *labels {
                counts.push(vec.get_metric_with_label_values(label.as_slice())?);
            }
        }
        for (family, labels) in Timing::FAMILIES {
            let buckets = exponential_buckets(20e-6, 4.0, 10)?; // 20 us to 5.2 s
            let opts = HistogramOpts::new(family.name, family.help).buckets(buckets);
            let vec = registered(&registry, HistogramVec::new(opts, family.labels)?)?;
            for label in *labels {
                timings.push(vec.get_metric_with_label_values(label.as_slice())?);
            }
        }
        let started_ns = crate::clock::now_ns();
        let heap_bytes = AtomicU64::new(heap_bytes_in_use().unwrap_or(0));
        Ok(Stats { registry, counts, timings, started_ns, heap_bytes })
    }

    pub(crate) fn add(&self, count: Count, more: u64) {
        self.counts[count as usize].inc_by(more);
    }

    pub fn get(&self, count: Count) -> u64 {
        self.counts[count as usize].get()
    }

    pub(crate) fn observe(&self, timing: Timing, duration: Duration) {
        self.timings[timing as usize].observe(duration.as_secs_f64());
    }

    /// Returns all counters and histograms in Prometheus' text format.
    pub(crate) fn text(&self) -> Result<String, prometheus::Error> {
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

#[cfg(test)]
impl Default for Stats {
    fn default() -> Self {
        Stats::new().expect("valid names")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_metric_has_its_own_place() {
        let stats = Stats::default();
        stats.add(Count::Packets, 5);
        stats.add(Count::ReloadErrors, 7);
        stats.observe(Timing::Scrape, Duration::from_millis(1));
        let text = stats.text().expect("a text");
        let has = |line: &str| text.lines().any(|other| other == line);
        for line in [
            "gpumemd_agent_packets_total 5",
            "gpumemd_reload_errors_total 7",
            "gpumemd_agent_refused_total{reason=\"gone\"} 0",
            "gpumemd_scrape_seconds_bucket{le=\"0.00128\"} 1",
            "gpumemd_scrape_seconds_count 1",
            "gpumemd_nvml_call_seconds_count{call=\"lists\"} 0",
        ] {
            assert!(has(line), "{line}: {text}");
        }
        let series = |value: Value| value.series().map(|(family, label)| (family.name, label));
        assert_eq!(series(Value::StoreUp), Some(("gpumemd_source_up", Some("store"))));
        assert_eq!(series(Value::NvmlHangs), Some(("gpumemd_nvml_hangs_total", None)));
        let counts = [stats.get(Count::Packets), stats.get(Count::ReloadErrors), stats.get(Count::Bytes)];
        assert_eq!(counts, [5, 7, 0]);
    }
}
