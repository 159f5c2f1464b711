//! Limits of GPU memory that the driver keeps for control groups, of the groups whose processes are on a device.

use super::super::answer::{Code, MemoryLimit};
use super::super::protocol::FrameWriter;
use super::Session;
use crate::clock::now_ns;
use crate::source::process;
use std::collections::BTreeSet;
use std::path::Path;

/// How often they are asked for.
const PERIOD_NS: u64 = 5_000_000_000;
/// Groups of one device that are asked for.
const MOST_GROUPS: usize = 32;
/// The fact's name.
const FACT: &str = "memory_limits";

/// Of one device.
#[derive(Debug, Default)]
pub(super) struct Limits {
    asked_ns: Option<u64>,
    /// The driver has no such thing.
    is_unknown: bool,
}

/// As the parent reads it: used, soft and hard bytes and the path of the group.
fn entry(limit: MemoryLimit, group: &str) -> String {
    format!("{} {} {} {group}", limit.used_bytes, limit.soft_bytes, limit.hard_bytes)
}

impl Session {
    /// Asks for the limits of the groups of the last list, if it is time, and says them as a fact of the device if they have changed.
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
                Err(_) => {} // no limit of its own
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

    /// What is known of them, among the facts of a device.
    pub(super) fn limits_fact(&self, index: usize) -> Option<(&'static str, String)> {
        self.seen[index].facts.iter().find(|(name, _)| *name == FACT).cloned()
    }
}
