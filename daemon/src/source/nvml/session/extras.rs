//! Reads further data of a session: properties of devices, the driver's accounting, events, and memory limits of control groups.

use super::super::answer::{Code, EventKind, MemoryLimit};
use super::super::call_state::Call;
use super::super::library::Facts;
use super::super::protocol::FrameWriter;
use super::{Next, Session, at, is_listed};
use crate::clock::now_ns;
use crate::nvml_status::UNREADABLE;
use crate::source::process;
use gpumem_wire::{Body, NONE_DEVICE, Reading, Stamp};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Interval for reading the memory limits of control groups (ns).
const LIMITS_NS: u64 = 5_000_000_000;
/// Maximum interval for reading the control group of a process again (ns); the first one is [`LIMITS_NS`].
const MAX_GROUP_NS: u64 = 60_000_000_000;
/// Maximum number of control groups whose limits are read for one device.
const MAX_GROUPS: usize = 32;
/// Name of the fact with the memory limits of control groups: for each used, soft and hard bytes and the path, between tabs. After a
/// failed call: [`UNREADABLE`], the path and the error.
const LIMITS_FACT: &str = "memory_limits";
/// Interval for reading utilisation and power (ns).
const LOAD_NS: u64 = 2_000_000_000;
/// Names of the facts with the utilisation (per cent) and the power (W) of a device.
const LOAD_FACTS: [&str; 2] = ["utilization", "power"];

/// Returns the entry of a control group in the fact [`LIMITS_FACT`], which the daemon parses; `None` if the group has no limit.
pub(super) fn limit_entry(limit: Result<MemoryLimit, Code>, group: &str) -> Option<String> {
    match limit {
        Ok(MemoryLimit { soft_bytes: u64::MAX, hard_bytes: u64::MAX, .. }) => None,
        Ok(MemoryLimit { soft_bytes, hard_bytes, used_bytes }) => {
            Some(format!("{used_bytes} {soft_bytes} {hard_bytes} {group}"))
        }
        Err(Code::NOT_SUPPORTED | Code::NOT_FOUND) => None,
        Err(code) => Some(format!("{UNREADABLE} {group}: {code}")),
    }
}

/// Control group of a process.
#[derive(Debug)]
struct KnownGroup {
    /// Path of the group; `None` if it could not be read.
    path: Option<String>,
    read_ns: u64,
    /// Interval (ns) after which the group is read again.
    wait_ns: u64,
}

/// Control groups of listed processes. A process moves to another group soon after its start, if at all. So its group is read again
/// after 5 s, then after intervals that double.
#[derive(Debug, Default)]
pub(super) struct ControlGroups(BTreeMap<u32, KnownGroup>);

impl ControlGroups {
    /// Returns the group of a process. `read` reads it.
    pub(super) fn of(
        &mut self,
        pid: u32,
        now_ns: u64,
        read: impl FnOnce(u32) -> Option<String>,
    ) -> Option<&str> {
        let is_due = |known: &KnownGroup| now_ns.saturating_sub(known.read_ns) >= known.wait_ns;
        let known = self.0.entry(pid).or_insert(KnownGroup { path: None, read_ns: 0, wait_ns: 0 });
        if is_due(known) {
            let wait_ns = (known.wait_ns * 2).clamp(LIMITS_NS, MAX_GROUP_NS);
            *known = KnownGroup { path: read(pid), read_ns: now_ns, wait_ns };
        }
        known.path.as_deref()
    }

    /// Forgets a process that is no longer listed, because another one may get its pid.
    pub(super) fn forget(&mut self, pid: u32) {
        self.0.remove(&pid);
    }
}

impl Session {
    /// Writes facts (properties) of a device, or of the driver. The parent keeps them and does not pass them to the ledger.
    pub(super) fn write_facts(&self, index: Option<usize>, facts: &Facts, out: &mut FrameWriter) {
        let lines: String = facts.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
        let stamp = at(index.unwrap_or(NONE_DEVICE.into()), now_ns());
        let body = Body::ProcessFacts { start_ticks: 0, uid: Reading::ABSENT, parent_pid: 0, facts: &lines };
        out.write(stamp, body);
    }

    /// Reads whether the driver's accounting is on, and writes the device's facts if they have changed, or if this is the first
    /// call for the device.
    pub(super) fn read_accounting(&mut self, index: usize, out: &mut FrameWriter) {
        let is_accounting = self.gpus.is_accounting(index);
        let mut facts = self.gpus.inventory().devices[index].facts.clone();
        if is_accounting {
            facts.push(("accounting", "1".to_owned()));
        }
        let known = &self.devices[index].facts;
        let is_kept = |(name, _): &&(&str, String)| *name == LIMITS_FACT || LOAD_FACTS.contains(name);
        facts.extend(known.iter().filter(is_kept).cloned());
        if *known != facts || self.opened_ns == self.checked_ns {
            self.write_facts(Some(index), &facts, out);
        }
        let device = &mut self.devices[index];
        (device.is_accounting, device.facts) = (is_accounting, facts);
    }

    /// Writes new events. Returns the required action, if any: reopen because the partition changed, or release because a GPU is
    /// being unbound from the driver.
    pub(super) fn read_events(&mut self, now: u64, out: &mut FrameWriter) -> Option<Next> {
        self.events_ns = now;
        out.set_call(Call::Events);
        self.gpus.events(&mut self.events);
        let unbinding = self.gpus.unbinding();
        let mut is_partitioned = false;
        for (gpu, event) in std::mem::take(&mut self.events) {
            let (tag, body) = match event.kind {
                EventKind::Xid(xid) => (0, Body::DeviceFault { xid }),
                // A health event: the parent counts it in the device's status and passes no record on.
                EventKind::Health(place) => (place as u32 + 1, Body::Counter { value: 1 }),
                EventKind::Partitioned => {
                    is_partitioned = true;
                    continue;
                }
                EventKind::Other => continue,
            };
            // An event that names no instance may concern any instance of the GPU.
            for (index, device) in self.gpus.inventory().devices.iter().enumerate().take(self.devices.len()) {
                let names_other =
                    event.instance.is_some_and(|named| device.instance.is_some_and(|of| of != named));
                if device.index == gpu && !names_other {
                    out.write(Stamp { tag, ..at(index, now) }, body);
                }
            }
        }
        out.set_call(Call::Nothing);
        unbinding.map(Next::Release).or_else(|| is_partitioned.then_some(Next::Reopen(None)))
    }

    /// Writes the driver's accounted peaks of processes: of a listed process when its peak has changed, and of a process of the
    /// previous list once after its end. Peaks above the size of the device are refused.
    pub(super) fn write_accounted_peaks(&mut self, index: usize, out: &mut FrameWriter) {
        let (now, mut refused) = (now_ns(), None);
        let mut peaks = std::mem::take(&mut self.devices[index].peaks);
        let (rows, device) = (&self.rows, &self.devices[index]);
        let ended = device.listed.iter().map(|row| row.pid).filter(|&pid| !is_listed(rows, pid));
        let pids: Vec<u32> = rows.iter().map(|row| row.pid).chain(ended).collect();
        for pid in pids {
            let Ok(peak) = self.gpus.accounted_peak(index, pid) else { continue };
            if let Some(total) = device.total_bytes.filter(|total| peak > *total) {
                out.totals.refused += 1;
                refused.get_or_insert_with(|| format!("pid {pid}: {peak} of {total} bytes"));
                continue;
            }
            match peaks.iter_mut().find(|(known, _)| *known == pid) {
                Some((_, written)) if *written == peak && is_listed(rows, pid) => continue,
                Some((_, written)) => *written = peak,
                None => peaks.push((pid, peak)),
            }
            let stamp = Stamp { thread: pid, ..at(index, now) };
            out.write(stamp, Body::AccountedPeak { start_ticks: 0, peak_bytes: peak });
        }
        peaks.retain(|&(pid, _)| is_listed(rows, pid));
        let device = &mut self.devices[index];
        device.peaks = peaks;
        // Keep the first text until no peak is refused, so that the problem does not change with every reading.
        device.peak.set(refused.as_ref().map(|_| Code::IMPOSSIBLE), refused);
    }

    /// Reads the GPU memory limits that NVML has for the control groups whose processes are in the last list, at most every
    /// [`LIMITS_NS`]. Writes changed limits as a fact of the device.
    pub(super) fn read_limits(&mut self, index: usize, out: &mut FrameWriter) {
        let now = now_ns();
        let device = &mut self.devices[index];
        let is_recent = device.limits_read_ns.is_some_and(|read| now.saturating_sub(read) < LIMITS_NS);
        if device.has_no_limits || is_recent {
            return;
        }
        device.limits_read_ns = Some(now);
        let mut groups = BTreeSet::new();
        for row in &self.devices[index].listed {
            let group = self.groups.of(row.pid, now, |pid| process::cgroup(Path::new("/proc"), pid));
            if let Some(group) = group.filter(|group| !groups.contains(*group)) {
                groups.insert(group.to_owned());
            }
        }
        let mut entries = Vec::new();
        for group in groups.iter().take(MAX_GROUPS) {
            let limit = self.gpus.memory_limit(index, group);
            if matches!(limit, Err(Code::FUNCTION_NOT_FOUND)) {
                self.devices[index].has_no_limits = true;
                return;
            }
            entries.extend(limit_entry(limit, group));
        }
        let value = entries.join("\t");
        let facts = &mut self.devices[index].facts;
        let written = facts.iter().find(|(name, _)| *name == LIMITS_FACT);
        if written.map_or("", |(_, written)| written.as_str()) != value {
            facts.retain(|(name, _)| *name != LIMITS_FACT);
            if !value.is_empty() {
                facts.push((LIMITS_FACT, value));
            }
            self.write_facts(Some(index), &self.devices[index].facts, out);
        }
    }

    /// Reads utilisation and power of a device, at most every [`LOAD_NS`]. Writes changed values as facts of the device.
    pub(super) fn read_load(&mut self, index: usize, out: &mut FrameWriter) {
        let now = now_ns();
        let device = &mut self.devices[index];
        if device.has_no_load || device.load_read_ns.is_some_and(|read| now.saturating_sub(read) < LOAD_NS) {
            return;
        }
        device.load_read_ns = Some(now);
        let load = self.gpus.load(index);
        let device = &mut self.devices[index];
        device.has_no_load = load == [None; 2];
        let mut facts = device.facts.clone();
        facts.retain(|(name, _)| !LOAD_FACTS.contains(name));
        let known = LOAD_FACTS.into_iter().zip(load);
        facts.extend(known.filter_map(|(name, value)| Some((name, value?.to_string()))));
        if facts != device.facts {
            device.facts = facts;
            self.write_facts(Some(index), &self.devices[index].facts, out);
        }
    }
}
