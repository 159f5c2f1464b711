//! Series of devices.

use super::families::{Labels, Series, Since, families};
use crate::aggregator::Published;
use crate::stats::Family;
use crate::view::Health;
use gpumem_ledger::{DeviceView, OomKind};

const DEVICE: &[&str] = &["gpu", "uuid"];

families! {
    INFO: gauge "gpumem_device_info" &["gpu", "uuid", "model"],
        "A GPU or MIG instance: NVML's index (of an instance: that of its GPU), UUID and model; always 1.";
    TOTAL: gauge "gpumem_device_total_bytes" DEVICE,
        "Size of the device's memory.";
    UNIFIED: gauge "gpumem_device_unified" DEVICE,
        "1 for a GPU without its own memory: total, used and free (available) are the host's. Absent for others.";
    USED: gauge "gpumem_device_used_bytes" DEVICE,
        "Used bytes, without the driver's share if NVML reports it separately.";
    LOWEST: gauge "gpumem_device_used_lowest_bytes" DEVICE,
        "Lowest used bytes in the last minute, including readings between scrapes.";
    HIGHEST: gauge "gpumem_device_used_highest_bytes" DEVICE,
        "Highest used bytes in the last minute, including readings between scrapes.";
    FREE: gauge "gpumem_device_free_bytes" DEVICE,
        "Free bytes.";
    SYSTEM: gauge "gpumem_device_system_reserved_bytes" DEVICE,
        "The driver's share, if NVML reports it.";
    UNACCOUNTED: gauge "gpumem_device_unaccounted_bytes" DEVICE,
        "Used minus the sum over the device's processes, if used was the same before and after reading their list. With unified memory: memory of the rest of the host.";
    AGE: gauge "gpumem_device_sample_age_seconds" DEVICE,
        "Age of the last memory reading.";
    UNAVAILABLE: gauge "gpumem_device_unavailable" &["gpu", "uuid", "reason"],
        "1 while NVML gives no fresh reading, with the reason.";
    XIDS: counter "gpumem_device_xid_errors_total" &["gpu", "uuid", "xid"],
        "Faults reported by the driver, by Xid.";
    EVENTS: counter "gpumem_device_events_total" &["gpu", "uuid", "event"],
        "Health events reported by the driver since the daemon's start: DRAM retirement, poison, GPU unavailable, recovery action.";
    OOMS: counter "gpumem_device_ooms_total" &["gpu", "uuid", "kind"],
        "Out-of-memory errors by kind. device: a framework failed after the driver had refused. pool: a framework failed at its own limit. suspected: a process without an agent ended while the device was nearly full. Kept after the process has ended.";
}

/// Maximum number of series of one device: one for each of 14 families, and further ones for three kinds of OOM, six kinds of
/// events, and 17 values of Xid (sixteen numbers, and `other`).
pub const MAX_SERIES_PER_DEVICE: usize = 14 + 2 + 5 + 16;

/// Age (ns) from which on a reading of a device with a problem is not shown. Memory is normally read at least once a second.
const FRESH_NS: u64 = 2_000_000_000;

/// Returns NVML's index of a device and its UUID as labels.
pub(super) fn labels(device: &DeviceView, health: &Health) -> Labels {
    let index = health.nvml.device(device.name).map_or(device.ordinal, |status| status.index);
    Labels::new().with("gpu", &index.to_string()).with("uuid", &device.name.to_string())
}

pub(super) fn collect(published: &Published, health: &Health, out: &mut Series) {
    let now_ns = published.now_ns();
    for device in published.snapshot.devices.iter().filter(|device| health.nvml.may_have(device.name)) {
        let status = health.nvml.device(device.name);
        let labels = labels(device, health);
        out.add_with(&INFO, &labels, ("model", &*device.model), 1_u64);
        out.add(&TOTAL, &labels, device.total_bytes);
        let problem = status.and_then(|status| status.problem.as_deref()).or(health.nvml.problem());
        if let Some(reason) = problem {
            out.add_with(&UNAVAILABLE, &labels, ("reason", reason), 1_u64);
        }
        for (xid, count) in device.faults.counts() {
            let xid = xid.map_or("other".to_owned(), |xid| xid.to_string());
            out.add_with(&XIDS, &labels, ("xid", &*xid), count);
        }
        for event in status.map_or(&[][..], |status| &status.health_events) {
            out.add_with(&EVENTS, &labels, ("event", event.name), event.count);
        }
        // Written also while the count is 0, so that a scraper sees the first event as an increase.
        for (kind, word) in
            [(OomKind::Device, "device"), (OomKind::Pool, "pool"), (OomKind::Suspected, "suspected")]
        {
            let count = published.totals.ooms(device.name, kind);
            out.add_with(&OOMS, &labels, ("kind", word), count);
        }
        // An old reading does not count as current. If only lists fail, memory is still read.
        let is_fresh = |time_ns: u64| now_ns.saturating_sub(time_ns) < FRESH_NS;
        let reading = device.latest.filter(|reading| problem.is_none() || is_fresh(reading.time_ns));
        let Some(reading) = reading else { continue };
        out.add(&UNIFIED, &labels, reading.unified.then_some(1_u64));
        out.add(&USED, &labels, reading.used_bytes);
        let range = device.recent.range();
        out.add(&LOWEST, &labels, range.map(|(lowest, _)| lowest));
        out.add(&HIGHEST, &labels, range.map(|(_, highest)| highest));
        out.add(&FREE, &labels, reading.free_bytes);
        out.add(&SYSTEM, &labels, reading.system_reserved_bytes);
        out.add(&UNACCOUNTED, &labels, device.agreed.map(|agreed| agreed.unaccounted_bytes));
        out.add_age(&AGE, &labels, Since { time_ns: reading.time_ns, reading: None });
    }
}
