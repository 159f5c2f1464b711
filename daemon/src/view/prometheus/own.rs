//! Values about the daemon itself that are read at each scrape; its counters and histograms are written as events happen.

use super::processes::Folded;
use crate::aggregator::Published;
use crate::stats::Value;
use crate::view::Health;
use crate::view::ViewContext;

/// Reads the values and appends all metrics about the daemon itself.
pub(super) fn write(
    context: &ViewContext,
    health: &Health,
    published: &Published,
    folded: Folded,
    text: &mut String,
) {
    let store = context.keeper.status();
    let age = crate::clock::now_ns().saturating_sub(published.at_ns) as f64 / 1e9;
    let yes = |up: bool| f64::from(u8::from(up));
    let nvml = &health.nvml.counters;
    let (calls, seconds) = (&nvml.calls, |ns: u64| ns as f64 / 1e9);
    for (value, number) in [
        (Value::Build, 1.0),
        (Value::SnapshotAge, age),
        (Value::Agents, health.agents as f64),
        (Value::AgentsWaiting, health.agents_waiting as f64),
        (Value::LedgerBytes, published.remembered_bytes as f64),
        (Value::EventsLost, published.totals.lost() as f64),
        (Value::FoldedYoung, folded.young as f64),
        (Value::FoldedRoom, folded.room as f64),
        (Value::NvmlUp, yes(health.nvml.problem().is_none())),
        (Value::StoreUp, yes(store.up)),
        (Value::StoreWaiting, store.waiting as f64),
        (Value::StoreWaitingBytes, store.waiting_bytes as f64),
        (Value::StoreQueued, store.queued as f64),
        (Value::StoreUnwritten, store.oldest.as_secs_f64()),
        (Value::StoreBytes, store.bytes as f64),
        (Value::CpuSeconds, cpu_seconds()),
        (Value::StartTime, started(context.stats.started_ns)),
        (Value::NvmlMemoryCalls, calls.memory_calls as f64),
        (Value::NvmlMemorySeconds, seconds(calls.memory_ns)),
        (Value::NvmlListCalls, calls.list_calls as f64),
        (Value::NvmlListSeconds, seconds(calls.list_ns)),
        (Value::NvmlListShare, nvml.list_share),
        (Value::NvmlListsDeferred, calls.deferred as f64),
        (Value::NvmlFailedCalls, calls.failed_calls as f64),
        (Value::NvmlRefusedValues, calls.refused as f64),
        (Value::NvmlRestarts, nvml.restarts as f64),
        (Value::NvmlHangs, nvml.hangs as f64),
    ] {
        context.stats.set(value, Some(number));
    }
    context.stats.set(Value::HeapBytes, crate::memory::in_use().map(|bytes| bytes as f64));
    context.stats.set(Value::ResidentBytes, resident_bytes());
    context.stats.set(Value::OpenFds, open_fds());
    match context.stats.text() {
        Ok(own) => text.push_str(&own),
        Err(error) => tracing::error!(%error, "metrics about the daemon itself are missing in this scrape"),
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
