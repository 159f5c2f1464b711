//! Series of devices.

use super::families::{Families, Family, Labels};
use crate::aggregator::Published;
use crate::view::health::Health;
use gpumem_ledger::{DeviceView, OomKind};

const DEVICE: &[&str] = &["gpu", "uuid"];

static INFO: Family = Family::gauge(
    "gpumem_device_info",
    &["gpu", "uuid", "model"],
    "A GPU or MIG instance, by NVML's index (that of its GPU for an instance) and UUID; always 1.",
);
static TOTAL: Family = Family::gauge("gpumem_device_total_bytes", DEVICE, "Size of its memory.");
static UNIFIED: Family = Family::gauge(
    "gpumem_device_unified",
    DEVICE,
    "1 for a GPU that uses the host's memory and has none of its own: total, used and free (available) are the host's. Absent for others.",
);
static USED: Family = Family::gauge(
    "gpumem_device_used_bytes",
    DEVICE,
    "Used, without the driver's share where NVML tells that apart.",
);
static LOWEST: Family = Family::gauge(
    "gpumem_device_used_lowest_bytes",
    DEVICE,
    "Lowest used of the last minute, between scrapes too.",
);
static HIGHEST: Family = Family::gauge(
    "gpumem_device_used_highest_bytes",
    DEVICE,
    "Highest used of the last minute, between scrapes too.",
);
static FREE: Family = Family::gauge("gpumem_device_free_bytes", DEVICE, "Free.");
static SYSTEM: Family =
    Family::gauge("gpumem_device_system_reserved_bytes", DEVICE, "The driver's share, where NVML tells it.");
static UNACCOUNTED: Family = Family::gauge(
    "gpumem_device_unaccounted_bytes",
    DEVICE,
    "Used minus the sum over its processes, where the device read the same before and after their list. With unified memory: what the rest of the host uses.",
);
static AGE: Family =
    Family::gauge("gpumem_device_sample_age_seconds", DEVICE, "Age of the last reading of its memory.");
static UNAVAILABLE: Family = Family::gauge(
    "gpumem_device_unavailable",
    &["gpu", "uuid", "reason"],
    "1 while NVML gives no fresh reading, with the reason.",
);
static XIDS: Family = Family::counter(
    "gpumem_device_xid_errors_total",
    &["gpu", "uuid", "xid"],
    "Faults that the driver has told of, by NVIDIA's number for them.",
);
static EVENTS: Family = Family::counter(
    "gpumem_device_events_total",
    &["gpu", "uuid", "event"],
    "Events of the device's health that the driver has told of since the daemon's start: DRAM retirement, poison, GPU unavailable, recovery action.",
);
static OOMS: Family = Family::counter(
    "gpumem_device_ooms_total",
    &["gpu", "uuid", "kind"],
    "Times that a framework gave up for want of memory after the driver had refused (device) or by a limit of its own (pool), or that a process without an agent ended while the device was nearly full (suspected). Kept when the process is gone.",
);

/// Families of this file.
pub(super) static FAMILIES: &[&Family] = &[
    &INFO,
    &TOTAL,
    &UNIFIED,
    &USED,
    &LOWEST,
    &HIGHEST,
    &FREE,
    &SYSTEM,
    &UNACCOUNTED,
    &AGE,
    &UNAVAILABLE,
    &XIDS,
    &EVENTS,
    &OOMS,
];

/// Most series of one device: one for each family, three kinds of OOM, six of events, and a seventeenth number for all Xids
/// beyond sixteen.
pub const MOST_PER_DEVICE: usize = 14 + 2 + 5 + 16;

/// Age from which on a reading of a device with a problem is outdated. Memory is read at least once a second.
const FRESH_NS: u64 = 2_000_000_000;

/// Returns NVML's index of a device and its UUID as labels.
pub(super) fn labels(device: &DeviceView, health: &Health) -> Labels {
    let of = health.nvml.device(device.name);
    let index = of.map_or(device.ordinal, |of| of.index);
    Labels::new().with("gpu", &index.to_string()).with("uuid", &device.name.to_string())
}

pub(super) fn collect(published: &Published, health: &Health, out: &mut Families) {
    let now_ns = published.now_ns();
    for device in published.snapshot.devices.iter().filter(|device| health.nvml.may_have(device.name)) {
        let of = health.nvml.device(device.name);
        let labels = labels(device, health);
        out.add_with(&INFO, &labels, ("model", &*device.model), 1_u64);
        if let Some(total) = device.total_bytes {
            out.add(&TOTAL, &labels, total);
        }
        let problem = of.and_then(|of| of.problem.as_deref());
        let problem = problem.or(health.nvml.problem());
        if let Some(reason) = problem {
            out.add_with(&UNAVAILABLE, &labels, ("reason", reason), 1_u64);
        }
        for (xid, count) in device.faults.counts() {
            let xid = xid.map_or("other".to_owned(), |xid| xid.to_string());
            out.add_with(&XIDS, &labels, ("xid", &*xid), count);
        }
        for event in of.map_or(&[][..], |of| &of.health_events) {
            out.add_with(&EVENTS, &labels, ("event", event.name), event.count);
        }
        // Written from the start, so that the first event is an increase.
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
        if reading.unified {
            out.add(&UNIFIED, &labels, 1_u64);
        }
        out.add(&USED, &labels, reading.used_bytes);
        if let Some((lowest, highest)) = device.recent.range() {
            out.add(&LOWEST, &labels, lowest);
            out.add(&HIGHEST, &labels, highest);
        }
        out.add(&FREE, &labels, reading.free_bytes);
        if let Some(system) = reading.system_reserved_bytes {
            out.add(&SYSTEM, &labels, system);
        }
        if let Some(agreed) = device.agreed {
            out.add(&UNACCOUNTED, &labels, agreed.unaccounted_bytes);
        }
        let age = now_ns.saturating_sub(reading.time_ns) as f64 / 1e9;
        out.add(&AGE, &labels, age);
    }
}
