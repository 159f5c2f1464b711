//! The agent's own report of this process's live memory, used if no daemon answers. The report has no data of NVML, so no memory
//! outside of recorded allocations, and no history. Not for callbacks: its functions allocate.
//!
//! A line of the report is the sum of the rows with the same device, class, kind, tag and role. Classes overlap: the same memory
//! may be part of a block, a segment and an allocation.

use crate::base::row::{self, RowCopy, kind, kind_of, memory_of};
use crate::driver::core::Core;
use crate::sources::api::counters::{self, Counter};
use crate::sources::api::snapshot::{list, object, path, word};
use gpumem_wire::{AskKind, MemoryKind, NONE_DEVICE, PoolOwner, Role};
use std::collections::BTreeMap;
use std::fmt::{Display, Write};

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    device: u8,
    class: &'static str,
    kind: &'static str,
    tag: String,
    /// Role of the memory, such as `parameter`; empty if unknown.
    role: String,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Sum {
    count: u64,
    total: u64,
    least: u64,
    greatest: u64,
}

impl Sum {
    fn average(&self) -> u64 {
        self.total / self.count.max(1)
    }
}

/// Returns the function whose value sorts the lines in the order `name`, by default the total; `None` for an unknown name.
pub(crate) fn order_of(name: &str) -> Option<fn(&Sum) -> u64> {
    Some(match name {
        "" | "total" => |sum| sum.total,
        "avg" => Sum::average,
        "min" => |sum| sum.least,
        "max" => |sum| sum.greatest,
        "count" => |sum| sum.count,
        "name" => |_| 0, // lines with equal values are sorted by name
        _ => return None,
    })
}

/// Returns the daemon's report, or if there is none, the agent's own: text, or JSON as described in docs/c-api.md. `order` and
/// `ascending` sort the agent's own only. With `reset`, the statistics of counters restart afterwards.
pub(crate) fn dumps(
    core: &'static Core,
    what: AskKind,
    order: fn(&Sum) -> u64,
    ascending: bool,
    reset: bool,
) -> String {
    let report =
        crate::entry::ask::report(core, what, "").unwrap_or_else(|| summary(core, what, order, ascending));
    if reset {
        counters::all(core, true);
    }
    report
}

fn summary(core: &Core, what: AskKind, order: fn(&Sum) -> u64, ascending: bool) -> String {
    let mut lines: BTreeMap<Key, Sum> = BTreeMap::new();
    for taken in core.recorder.live.scan() {
        let Some((key, bytes)) = line_of(core, &taken) else { continue };
        let sum = lines.entry(key).or_insert(Sum { count: 0, total: 0, least: u64::MAX, greatest: 0 });
        sum.count += 1;
        sum.total += bytes;
        sum.least = sum.least.min(bytes);
        sum.greatest = sum.greatest.max(bytes);
    }
    let mut lines: Vec<(Key, Sum)> = lines.into_iter().collect();
    // Sorts by device and class first, and within a class by the requested order.
    lines.sort_by(|(a, of_a), (b, of_b)| {
        let sums = order(of_a).cmp(&order(of_b)).then_with(|| b.tag.cmp(&a.tag));
        let sums = if ascending { sums } else { sums.reverse() };
        (a.device, a.class).cmp(&(b.device, b.class)).then(sums)
    });
    if what == AskKind::ReportJson { json(core, &lines) } else { text(core, &lines) }
}

fn line_of(core: &Core, taken: &RowCopy) -> Option<(Key, u64)> {
    let row = &taken.row;
    let (class, kind) = match kind_of(row) {
        kind::ALLOC_END => match memory_of(row) {
            MemoryKind::Device => ("allocations", "device"),
            MemoryKind::Pitched => ("allocations", "pitched"),
            MemoryKind::Array => ("allocations", "array"),
            MemoryKind::StreamOrdered => ("allocations of driver pools", "stream ordered"),
            MemoryKind::Managed => ("host", "managed"),
            MemoryKind::Pinned => ("host", "pinned"),
            MemoryKind::Registered => ("host", "registered"),
            MemoryKind::HostVmm => ("host", "vmm"),
            _ => ("allocations", "other"),
        },
        kind::IMPORT => ("imports", "imported"),
        kind::VMM_CREATE if memory_of(row) == MemoryKind::HostVmm => ("host", "vmm"),
        kind::VMM_CREATE => ("allocations", "vmm"),
        kind::POOL_CREATE if row::pool_owner(row) == PoolOwner::Framework => return None,
        kind::POOL_CREATE => ("driver pools", "reserved"),
        kind::SEGMENT_ADD => ("segments", "segment"),
        kind::BLOCK_ALLOC => ("blocks", "block"),
        _ => return None,
    };
    let bytes = match kind_of(row) {
        kind::POOL_CREATE => core.driver_pools.state(row[2]).map_or(0, |(reserved, _)| reserved),
        _ => row[3],
    };
    let (tag, (role, _)) = (path(core, row[5] as u32), taken.use_as());
    let role = if role == Role::Unknown { String::new() } else { word(role) };
    Some((Key { device: row::device_of(row), class, kind, tag, role }, bytes))
}

fn mib(bytes: u64) -> String {
    format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Writes a row of a table: five figures and a name.
fn row(out: &mut String, [a, b, c, d, e]: [&dyn Display; 5], name: &str) {
    let _ = writeln!(out, "{a:>14} {b:>9} {c:>14} {d:>14} {e:>14}  {name}");
}

fn text(core: &Core, lines: &[(Key, Sum)]) -> String {
    let mut out = format!("pid {}: live memory, reported by its own agent (no daemon answers)\n", core.pid);
    let mut group = None;
    for (key, sum) in lines {
        if group != Some((key.device, key.class)) {
            group = Some((key.device, key.class));
            let same =
                lines.iter().filter(|(other, _)| (other.device, other.class) == (key.device, key.class));
            let total: u64 = same.map(|(_, sum)| sum.total).sum();
            let device = match key.device {
                NONE_DEVICE => "no device".to_owned(),
                device => format!("device {device}"),
            };
            let _ = writeln!(out, "\n{device}, {}: {}", key.class, mib(total));
            row(&mut out, [&"total", &"count", &"min", &"max", &"avg"], "name");
        }
        let name = if key.tag.is_empty() { "(no tag)" } else { &key.tag };
        let mut name = name.replace(char::is_control, "?");
        if !key.role.is_empty() {
            name += &format!(" ({})", key.role);
        }
        if !["device", "block", "segment"].contains(&key.kind) {
            name += &format!(" [{}]", key.kind);
        }
        let average = mib(sum.average());
        let (total, least, greatest) = (mib(sum.total), mib(sum.least), mib(sum.greatest));
        row(&mut out, [&total, &sum.count, &least, &greatest, &average], &name);
    }
    let counters = counters::all(core, false);
    if !counters.is_empty() {
        out += "\ncounters\n";
        row(&mut out, [&"now", &"changes", &"min", &"max", &"mean"], "name");
    }
    let now = core.recorder.clock.now();
    for counter in counters {
        let (Counter { value, changes, least, greatest, .. }, mean) = (&counter, counter.mean(now));
        row(&mut out, [value, changes, least, greatest, &format!("{mean:.2}")], &path(core, counter.tag));
    }
    out
}

fn json(core: &Core, lines: &[(Key, Sum)]) -> String {
    let now = core.recorder.clock.now();
    let lines = lines.iter().map(|(key, sum)| {
        let device = Some(key.device).filter(|&device| device != NONE_DEVICE);
        let named = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        object! {
            device: device, class: key.class, kind: key.kind, tag: named(&key.tag), role: named(&key.role),
            count: sum.count, bytes: sum.total, min_bytes: sum.least, max_bytes: sum.greatest,
        }
    });
    let counters = counters::all(core, false).into_iter().map(|counter| {
        object! {
            name: path(core, counter.tag), value: counter.value, changes: counter.changes, min: counter.least,
            max: counter.greatest, mean: counter.mean(now),
        }
    });
    let report = object! {
        source: "process", pid: core.pid, time_ns: now, lines: list(lines), counters: list(counters),
    };
    report.0 + "\n"
}

/// Returns free and total bytes of a device from the driver; `None` if neither the current context nor an active primary context
/// is on the device.
pub(crate) fn memory_info(core: &Core, ordinal: i32) -> Option<(u64, u64)> {
    let devices = &core.devices;
    if devices.current() == Some(ordinal) {
        return devices.memory_info();
    }
    if devices.is_primary_active(ordinal) != Some(true) {
        return None;
    }
    let (driver, context) = (devices.driver()?, devices.primary(ordinal)?);
    let (push, pop) = (driver.ctx_push_current?, driver.ctx_pop_current?);
    // SAFETY: functions of the loaded driver, with room for their answers. The pushed context is the primary one of its device,
    // which exists as long as the program keeps it. It is popped again.
    unsafe {
        if push(context) != 0 {
            return None;
        }
        let info = devices.memory_info();
        let mut popped = std::ptr::null_mut();
        pop(&mut popped);
        info
    }
}
