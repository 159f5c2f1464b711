//! Reads further data of a session: properties of devices, the driver's accounting, events, and memory limits of control groups.

use super::super::answer::{Code, Happened, MemoryLimit};
use super::super::call_state::Call;
use super::super::library::Facts;
use super::super::protocol::FrameWriter;
use super::{Next, Session, at};
use crate::clock::now_ns;
use crate::nvml_status::NvmlCalls;
use crate::source::process;
use gpumem_wire::{Body, Reading, Stamp};
use std::collections::BTreeSet;
use std::path::Path;

/// Interval for reading the memory limits of control groups (ns).
const LIMITS_NS: u64 = 5_000_000_000;
/// Maximum number of control groups whose limits are read for one device.
const MOST_GROUPS: usize = 32;
/// Name of the fact that contains the driver's memory limits of control groups.
const LIMITS_FACT: &str = "memory_limits";

#[derive(Debug, Default)]
pub(super) struct Limits {
    asked_ns: Option<u64>,
    /// Whether the driver has no memory limits for control groups.
    is_unknown: bool,
}

/// Formats a limit for the parent, which parses it: used, soft and hard bytes, and the path of the control group.
fn entry(limit: MemoryLimit, group: &str) -> String {
    format!("{} {} {} {group}", limit.used_bytes, limit.soft_bytes, limit.hard_bytes)
}

impl Session {
    /// Writes facts (properties) of a device, or of the driver. The parent keeps them and does not pass them to the ledger.
    pub(super) fn write_facts(&self, index: Option<usize>, facts: &Facts, out: &mut FrameWriter) {
        let lines: String = facts.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
        let stamp =
            index.map_or(Stamp { time_ns: now_ns(), ..Stamp::default() }, |index| at(index, now_ns()));
        let body = Body::ProcessFacts { start_ticks: 0, uid: Reading::ABSENT, parent_pid: 0, facts: &lines };
        out.write(stamp, body);
    }

    pub(super) fn read_accounting(&mut self, index: usize, out: &mut FrameWriter) {
        let is_accounting = self.gpus.is_accounting(index);
        let mut facts = self.gpus.facts(Some(index));
        if is_accounting {
            facts.push(("accounting", "1".to_owned()));
        }
        facts.extend(self.limits_fact(index));
        if self.seen[index].facts != facts || self.opened_ns == self.checked_ns {
            self.write_facts(Some(index), &facts, out);
        }
        let seen = &mut self.seen[index];
        (seen.is_accounting, seen.facts) = (is_accounting, facts);
    }

    /// Writes new events. Returns the required action, if any: reopen because the partition changed, or release because a GPU is
    /// being unbound from the driver.
    pub(super) fn events(&mut self, now: u64, out: &mut FrameWriter) -> Option<Next> {
        self.looked_ns = now;
        out.doing(Call::Events);
        self.gpus.events(&mut self.happened);
        let unbinding = self.gpus.unbinding();
        let mut is_partitioned = false;
        for (gpu, event) in std::mem::take(&mut self.happened) {
            let (tag, body) = match event.kind {
                Happened::Xid(xid) => (0, Body::DeviceFault { xid }),
                // A health event: the parent counts it in the device's status and passes no record on.
                Happened::Health(place) => (place as u32 + 1, Body::Counter { value: 1 }),
                Happened::Partitioned => {
                    is_partitioned = true;
                    continue;
                }
                Happened::Other => continue,
            };
            // An event that names no instance may concern any instance of the GPU.
            for (index, device) in self.gpus.devices().iter().enumerate().take(self.seen.len()) {
                let is_it = device.index == gpu
                    && (event.instance.is_none()
                        || device.instance.is_none()
                        || event.instance == device.instance);
                if is_it {
                    out.write(Stamp { tag, ..at(index, now) }, body);
                }
            }
        }
        out.doing(Call::Nothing);
        unbinding.map(Next::Release).or_else(|| is_partitioned.then_some(Next::Reopen(None)))
    }

    /// Writes the accounted peaks of the processes in this list and the previous one. The peak of a living process is written
    /// when it has grown. Peaks above the size of the device are refused.
    pub(super) fn write_accounted_peaks(
        &mut self,
        index: usize,
        totals: &mut NvmlCalls,
        out: &mut FrameWriter,
    ) {
        let (now, mut refused) = (now_ns(), None);
        let mut peaks = std::mem::take(&mut self.seen[index].peaks);
        let (rows, seen) = (&self.rows, &self.seen[index]);
        let is_listed = |pid: u32| rows.binary_search_by_key(&pid, |row| row.pid).is_ok();
        peaks.retain(|&(pid, _)| seen.pids.contains(&pid) || is_listed(pid));
        let gone = seen.pids.iter().copied().filter(|&pid| !is_listed(pid));
        let all: Vec<(u32, bool)> =
            rows.iter().map(|row| (row.pid, true)).chain(gone.map(|pid| (pid, false))).collect();
        for (pid, lives) in all {
            let Ok(peak) = self.gpus.accounted_peak(index, pid) else { continue };
            if let Some(total) = seen.total_bytes.filter(|total| peak > *total) {
                totals.refused += 1;
                refused.get_or_insert_with(|| format!("pid {pid}: {peak} of {total} bytes"));
                continue;
            }
            let known = peaks.iter_mut().find(|(of, _)| *of == pid);
            if lives && known.as_ref().is_some_and(|(_, known)| *known == peak) {
                continue;
            }
            match known {
                Some(known) => known.1 = peak,
                None => peaks.push((pid, peak)),
            }
            let stamp = Stamp { thread: pid, ..at(index, now) };
            out.write(stamp, Body::AccountedPeak { start_ticks: 0, peak_bytes: peak });
        }
        peaks.retain(|&(pid, _)| self.rows.binary_search_by_key(&pid, |row| row.pid).is_ok());
        self.seen[index].peaks = peaks;
        // Keep the first text until no peak is refused, so that the problem does not change with every reading.
        let known = self.seen[index].peak_refused.take();
        self.seen[index].peak_refused = refused.map(|refused| known.unwrap_or(refused));
    }

    /// Reads the memory limits of the control groups whose processes are in the last list, at most every [`LIMITS_NS`]. Writes
    /// changed limits as a fact of the device.
    pub(super) fn read_limits(&mut self, index: usize, out: &mut FrameWriter) {
        let now = now_ns();
        let limits = &mut self.seen[index].limits;
        if limits.is_unknown || limits.asked_ns.is_some_and(|asked| now.saturating_sub(asked) < LIMITS_NS) {
            return;
        }
        limits.asked_ns = Some(now);
        let group = |&pid: &u32| process::cgroup(Path::new("/proc"), pid);
        let groups: BTreeSet<String> = self.seen[index].pids.iter().filter_map(group).collect();
        let mut entries = Vec::new();
        for group in groups.iter().take(MOST_GROUPS) {
            match self.gpus.memory_limit(index, group) {
                Ok(MemoryLimit { soft_bytes: u64::MAX, hard_bytes: u64::MAX, .. }) => {}
                Ok(limit) => entries.push(entry(limit, group)),
                Err(Code::FUNCTION_NOT_FOUND) => {
                    self.seen[index].limits.is_unknown = true;
                    return;
                }
                Err(_) => {} // the group has no limit
            }
        }
        let value = entries.join("\t");
        let facts = &mut self.seen[index].facts;
        let known =
            facts.iter().find(|(name, _)| *name == LIMITS_FACT).map_or("", |(_, value)| value.as_str());
        if known != value {
            facts.retain(|(name, _)| *name != LIMITS_FACT);
            if !value.is_empty() {
                facts.push((LIMITS_FACT, value));
            }
            self.write_facts(Some(index), &self.seen[index].facts, out);
        }
    }

    pub(super) fn limits_fact(&self, index: usize) -> Option<(&'static str, String)> {
        self.seen[index].facts.iter().find(|(name, _)| *name == LIMITS_FACT).cloned()
    }
}
