//! Values about the daemon itself that are read at each scrape; its counters and histograms are written as events happen.

use super::families::{Families, Labels, Series};
use super::processes::Folded;
use crate::aggregator::Published;
use crate::stats::Value;
use crate::view::{Health, ViewContext};
use std::sync::atomic::Ordering;

/// Reads the values and appends all metrics about the daemon itself.
pub(super) fn write(
    context: &ViewContext,
    health: &Health,
    published: &Published,
    folded: Folded,
    text: &mut String,
) {
    let store = context.run_writer.status();
    let age = crate::clock::now_ns().saturating_sub(published.at_ns) as f64 / 1e9;
    let yes = |up: bool| f64::from(u8::from(up));
    let nvml = &health.nvml.counters;
    let heap_bytes = context.stats.heap_bytes.load(Ordering::Relaxed);
    let (calls, seconds) = (&nvml.calls, |ns: u64| ns as f64 / 1e9);
    let values = [
        (Value::Build, Some(1.0)),
        (Value::SnapshotAge, Some(age)),
        (Value::Agents, Some(health.agents as f64)),
        (Value::AgentsWaiting, Some(health.agents_waiting as f64)),
        (Value::LedgerBytes, Some(published.remembered_bytes as f64)),
        (Value::EventsLost, Some(published.totals.lost as f64)),
        (Value::FoldedYoung, Some(folded.young as f64)),
        (Value::FoldedRoom, Some(folded.room as f64)),
        (Value::NvmlUp, Some(yes(health.nvml.problem().is_none()))),
        (Value::StoreUp, Some(yes(store.up))),
        (Value::StoreWaiting, Some(store.waiting as f64)),
        (Value::StoreWaitingBytes, Some(store.waiting_bytes as f64)),
        (Value::StoreQueued, Some(store.queued as f64)),
        (Value::StoreUnwritten, Some(store.oldest.as_secs_f64())),
        (Value::StoreBytes, Some(store.bytes as f64)),
        (Value::CpuSeconds, Some(cpu_seconds())),
        (Value::StartTime, Some(started(context.stats.started_ns))),
        (Value::NvmlMemoryCalls, Some(calls.memory_calls as f64)),
        (Value::NvmlMemorySeconds, Some(seconds(calls.memory_ns))),
        (Value::NvmlListCalls, Some(calls.list_calls as f64)),
        (Value::NvmlListSeconds, Some(seconds(calls.list_ns))),
        (Value::NvmlListShare, Some(nvml.list_share)),
        (Value::NvmlListsDeferred, Some(calls.deferred as f64)),
        (Value::NvmlFailedCalls, Some(calls.failed_calls as f64)),
        (Value::NvmlRefusedValues, Some(calls.refused as f64)),
        (Value::NvmlRestarts, Some(nvml.restarts as f64)),
        (Value::NvmlHangs, Some(nvml.hangs as f64)),
        (Value::HeapBytes, (heap_bytes > 0).then_some(heap_bytes as f64)),
        (Value::ResidentBytes, resident_bytes()),
        (Value::OpenFds, open_fds()),
    ];
    let mut series = Series::default();
    for (value, number) in values {
        if let Some((family, label)) = value.series() {
            let label = family.labels.iter().zip(label);
            let labels = label.fold(Labels::default(), |labels, (name, value)| labels.with(name, value));
            series.add(family, &labels, number);
        }
    }
    let mut families = Families::new(usize::MAX);
    families.add(series);
    text.push_str(&families.text(0, &[], 0));
    match context.stats.text() {
        Ok(own) => text.push_str(&own),
        Err(error) => tracing::error!(%error, "metrics about the daemon itself are missing in this scrape"),
    }
}

/// Returns the resident memory in bytes.
fn resident_bytes() -> Option<f64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: f64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as f64)
}

fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Returns the number of open descriptors. Since Linux 6.2 it is the size of the folder /proc/self/fd. On older kernels the entries
/// are counted, without the descriptor that reads the folder.
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
