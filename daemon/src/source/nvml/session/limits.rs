//! GPU memory limits that the driver keeps for control groups, read for the groups whose processes are on a device.

use super::super::answer::{Code, MemoryLimit};
use super::super::protocol::FrameWriter;
use super::Session;
use crate::clock::now_ns;
use crate::source::process;
use std::collections::BTreeSet;
use std::path::Path;

const PERIOD_NS: u64 = 5_000_000_000;
/// Most groups of one device whose limits are read.
const MOST_GROUPS: usize = 32;
const FACT: &str = "memory_limits";

#[derive(Debug, Default)]
pub(super) struct Limits {
    asked_ns: Option<u64>,
    /// Whether the driver has no such limits.
    is_unknown: bool,
}

/// Returns the entry that the parent parses: used, soft and hard bytes, and the path of the group.
fn entry(limit: MemoryLimit, group: &str) -> String {
    format!("{} {} {} {group}", limit.used_bytes, limit.soft_bytes, limit.hard_bytes)
}

impl Session {
    /// Reads the limits of the groups of the last list at most every [`PERIOD_NS`], and writes them as a fact of the device if
    /// changed.
    pub(super) fn look_at_limits(&mut self, index: usize, out: &mut FrameWriter) {
        let now = now_ns();
        let limits = &mut self.seen[index].limits;
        if limits.is_unknown || limits.asked_ns.is_some_and(|asked| now.saturating_sub(asked) < PERIOD_NS) {
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
        let known = facts.iter().find(|(name, _)| *name == FACT).map_or("", |(_, value)| value.as_str());
        if known != value {
            facts.retain(|(name, _)| *name != FACT);
            if !value.is_empty() {
                facts.push((FACT, value));
            }
            self.say_facts(Some(index), &self.seen[index].facts, out);
        }
    }

    /// Returns the fact with the limits of a device.
    pub(super) fn limits_fact(&self, index: usize) -> Option<(&'static str, String)> {
        self.seen[index].facts.iter().find(|(name, _)| *name == FACT).cloned()
    }
}
