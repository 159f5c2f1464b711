//! Members of a job: each is a process on a device, from any source. Computes the sums over them.

use gpumem_model::control::{DeviceRow, ProcessRow};
use gpumem_model::owner::Owner;
use gpumem_model::run::{Device, Run, State};
use gpumem_report::group::ProcessAmounts;
use gpumem_report::text::length_ns;
use gpumem_runs::store::state_name;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// A process on a device. Unknown values are null.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Member {
    pub rank: Option<u32>,
    /// Prometheus' name of the node (label `instance`); null on this node.
    pub node: Option<String>,
    pub pid: u32,
    /// Start time of the process in clock ticks since its node's boot.
    pub start_ticks: u64,
    pub gpu: Option<String>,
    pub uuid: Option<String>,
    /// Command line; null if unknown, or for processes of a Prometheus.
    pub command: Option<String>,
    /// Time from the first to the last moment of the run in ns; null if unknown, or for processes of a Prometheus.
    pub length_ns: Option<u64>,
    /// `running`, `ended`, ...
    pub state: &'static str,
    /// Exit status, as from waitpid(2).
    pub status: Option<u64>,
    /// Flags such as `covered`, as in `gpumemctl ps`.
    pub flags: Vec<String>,
    /// Bytes that NVML charges to the process: the sum of the three amounts predates (from before the agent was loaded), tracked
    /// and untrackable.
    pub used_bytes: Option<i64>,
    pub predates_bytes: Option<i64>,
    pub tracked_bytes: Option<i64>,
    /// The part of `tracked_bytes` that pools keep but do not use.
    pub idle_bytes: Option<i64>,
    pub untrackable_bytes: Option<i64>,
    pub peak_used_bytes: Option<i64>,
    pub failed_allocations: Option<u64>,
    pub ooms: Option<u64>,
    /// The owner of the process: names by their kind, such as user, pod or job.
    pub who: BTreeMap<String, String>,
}

/// Metric that has one series for a process, not one for each of its devices.
pub(crate) const FAILED_ALLOCATIONS: &str = "gpumem_process_allocation_failures_total";

impl Member {
    /// Returns a member for each device of a run.
    pub(crate) fn of_run(run: &Run) -> Vec<Member> {
        let (process, coverage) = (&run.process, &run.coverage);
        let who = Owner::of(&process.facts, &process.claims, process.uid).map();
        let flags = [
            (coverage.covered, "covered"),
            (!coverage.covered, "uncovered"),
            (coverage.late, "late"),
            (coverage.blocked_by.is_some(), "blocked"),
            (coverage.partial_state, "partial"),
        ];
        let flags: Vec<String> =
            flags.iter().filter(|(is, _)| *is).map(|(_, flag)| (*flag).to_owned()).collect();
        let member = |device: &Device| {
            let amounts = ProcessAmounts::of(run, device);
            let ooms = device.details.ooms.iter().filter(|oom| oom.is_out_of_memory()).count();
            Member {
                rank: rank(&who),
                pid: process.pid,
                start_ticks: process.start_ticks,
                gpu: Some(device.ordinal.to_string()),
                uuid: Some(device.name.clone()),
                command: process.facts.get("command").cloned(),
                length_ns: length_ns(run),
                state: state_name(run.state),
                status: if let State::Closed { status, .. } = run.state { status } else { None },
                flags: flags.clone(),
                used_bytes: amounts.used_bytes,
                predates_bytes: amounts.predates_bytes,
                tracked_bytes: amounts.tracked_bytes,
                idle_bytes: amounts.idle_bytes,
                untrackable_bytes: amounts.gap_bytes,
                peak_used_bytes: device.peak_used.and_then(|(bytes, _)| i64::try_from(bytes).ok()),
                failed_allocations: coverage.covered.then_some(coverage.failed_allocations),
                ooms: coverage.covered.then_some(ooms as u64),
                who: who.clone(),
                ..Member::default()
            }
        };
        run.devices.iter().map(member).collect()
    }

    /// Makes a member of the job from a row of `gpumemctl ps`.
    pub(crate) fn of_row(row: &ProcessRow, device: &DeviceRow) -> Member {
        let used = row.used_bytes.and_then(|bytes| i64::try_from(bytes).ok());
        let parts = used.zip(row.tracked_bytes).zip(row.untrackable_bytes);
        Member {
            rank: rank(&row.who),
            pid: row.pid,
            start_ticks: row.start_ticks.unwrap_or(0),
            command: row.command.clone(),
            gpu: Some(device.index.to_string()),
            uuid: Some(device.uuid.clone()),
            state: "running",
            flags: row.flags.clone(),
            used_bytes: used,
            predates_bytes: parts.and_then(|((used, tracked), untrackable)| {
                used.checked_sub(tracked)?.checked_sub(untrackable)
            }),
            tracked_bytes: row.tracked_bytes,
            idle_bytes: row.idle_bytes,
            untrackable_bytes: row.untrackable_bytes,
            who: row.who.clone(),
            ..Member::default()
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.state == "running"
    }

    pub(crate) fn amounts(&self) -> ProcessAmounts {
        ProcessAmounts {
            used_bytes: self.used_bytes,
            predates_bytes: self.predates_bytes,
            tracked_bytes: self.tracked_bytes,
            idle_bytes: self.idle_bytes,
            gap_bytes: self.untrackable_bytes,
            peak_bytes: self.peak_used_bytes,
        }
    }

    /// Returns the sum of each amount over those members that know it. Peaks have no sum, because they are of different times.
    pub(crate) fn summed(members: &[&Member]) -> ProcessAmounts {
        let amounts: Vec<ProcessAmounts> = members.iter().map(|member| member.amounts()).collect();
        ProcessAmounts::sum(amounts.iter())
    }

    /// Returns what identifies the process across all nodes: node, pid and start time.
    pub(crate) fn process(&self) -> (Option<&str>, u32, u64) {
        (self.node.as_deref(), self.pid, self.start_ticks)
    }
}

/// Returns the sum of amounts; `None` if there are none, because unknown is never zero.
pub(crate) fn total(amounts: impl Iterator<Item = i64>) -> Option<i64> {
    amounts.fold(None, |sum: Option<i64>, amount| Some(sum.unwrap_or(0).saturating_add(amount)))
}

pub(crate) fn rank(who: &BTreeMap<String, String>) -> Option<u32> {
    who.get("rank").and_then(|rank| rank.parse().ok())
}

/// Sorts by rank; members without a rank are last.
pub(crate) fn order(members: &mut [Member]) {
    let key = |member: &Member| {
        let gpu = member.gpu.as_deref().and_then(|gpu| gpu.parse::<u32>().ok());
        (member.rank.is_none(), member.rank, member.node.clone(), member.pid, member.start_ticks, gpu)
    };
    members.sort_by_key(key);
}

/// Higher ranks are not searched for missing ones, because a process may claim any world size (number of ranks).
const RANKS: u32 = 1 << 20;
/// Maximum number of missing ranks that are listed.
const MISSING: usize = 1024;

/// Sums of the running members, or of all if none is running.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Sum {
    pub processes: usize,
    /// Number of nodes; 0 if the members are from this node's daemon or store.
    pub nodes: usize,
    pub devices: usize,
    /// Whether all processes of the job have ended. Then the sums are of the last amounts of each process.
    pub is_over: bool,
    /// Largest world size claimed by a process.
    pub world_size: Option<u32>,
    pub missing_ranks: Vec<u32>,
    /// Sum of the known used values.
    pub used_bytes: Option<i64>,
    /// Number of members whose used value is unknown.
    pub used_unknown: usize,
    /// Sum of the tracked bytes of members with an agent.
    pub tracked_bytes: Option<i64>,
    pub untrackable_bytes: Option<i64>,
    pub uncovered: usize,
    /// Mean of the known used values.
    pub mean_used_bytes: Option<f64>,
    /// Highest used value divided by the mean; 1 is balanced.
    pub imbalance: Option<f64>,
    /// Index in `members` of the member with the highest used value.
    pub worst: Option<usize>,
    /// Index in `members` of the member with the highest peak.
    pub highest_peak: Option<usize>,
    /// Number of known OOMs, also of ended members.
    pub ooms: Option<u64>,
}

impl Sum {
    /// Computes the sums. `members` must be sorted by rank.
    pub(crate) fn of(members: &[Member]) -> Self {
        let is_over = !members.iter().any(Member::is_running);
        let counted: Vec<&Member> = members.iter().filter(|member| is_over || member.is_running()).collect();
        let sums = Member::summed(&counted);
        let highest = |amount: fn(&Member) -> Option<i64>| {
            let indexed = members.iter().enumerate().filter(|(_, member)| is_over || member.is_running());
            let known = indexed.filter_map(|(index, member)| Some((amount(member)?, Reverse(index))));
            // Of several members with the same value, this is the first, which has the lowest rank.
            known.max().map(|(_, Reverse(index))| index)
        };
        let known = counted.iter().filter(|member| member.used_bytes.is_some()).count();
        let mean = sums.used_bytes.map(|sum| sum as f64 / known as f64);
        let worst = highest(|member| member.used_bytes);
        let highest_used = worst.and_then(|index| members.get(index)?.used_bytes);
        let is_comparable = |(mean, _): &(f64, i64)| known > 1 && *mean > 0.0;
        let world_sizes = members.iter().filter_map(|member| member.who.get("world_size")?.parse().ok());
        let world_size: Option<u32> = world_sizes.max();
        let ranks: BTreeSet<u32> = counted.iter().filter_map(|member| member.rank).collect();
        let missing = (0..world_size.unwrap_or(0).min(RANKS)).filter(|rank| !ranks.contains(rank));
        let devices = counted.iter().map(|member| (&member.node, &member.uuid));
        Sum {
            processes: counted.iter().map(|member| member.process()).collect::<BTreeSet<_>>().len(),
            nodes: counted.iter().filter_map(|member| member.node.as_ref()).collect::<BTreeSet<_>>().len(),
            devices: devices.collect::<BTreeSet<_>>().len(),
            is_over,
            world_size,
            missing_ranks: missing.take(MISSING).collect(),
            used_bytes: sums.used_bytes,
            used_unknown: counted.len() - known,
            tracked_bytes: sums.tracked_bytes,
            untrackable_bytes: sums.gap_bytes,
            uncovered: counted.iter().filter(|member| member.tracked_bytes.is_none()).count(),
            mean_used_bytes: mean,
            imbalance: mean.zip(highest_used).filter(is_comparable).map(|(mean, used)| used as f64 / mean),
            worst,
            highest_peak: highest(|member| member.peak_used_bytes),
            ooms: total(members.iter().filter_map(|member| i64::try_from(member.ooms?).ok()))
                .map(i64::cast_unsigned),
        }
    }

    /// Returns whether the sums include `member`.
    pub(crate) fn counts(&self, member: &Member) -> bool {
        self.is_over || member.is_running()
    }
}

/// Formats numbers as ranges such as `0-3, 5, 9-11`.
pub(crate) fn ranges(numbers: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match parts.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => parts.push((number, number)),
        }
    }
    let part = |(first, last): &(u32, u32)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    parts.iter().map(part).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(rank: u32, used: Option<i64>) -> Member {
        let who = [("world_size".to_owned(), "4".to_owned())].into();
        Member { rank: Some(rank), pid: rank, used_bytes: used, state: "running", who, ..Member::default() }
    }

    #[test]
    fn the_worst_is_the_largest_that_is_known() {
        let members = [member(0, Some(10)), member(1, None), member(3, Some(30))];
        let sum = Sum::of(&members);
        assert_eq!((sum.used_bytes, sum.used_unknown, sum.worst), (Some(40), 1, Some(2)));
        assert_eq!((sum.imbalance, sum.missing_ranks, sum.is_over), (Some(1.5), vec![2], false));
        assert_eq!((sum.tracked_bytes, sum.uncovered, sum.ooms), (None, 3, None), "unknown is never zero");
        assert_eq!(Sum::of(&members[..1]).imbalance, None, "one alone is not out of balance");
        assert_eq!(Sum::of(&[]), Sum { is_over: true, ..Sum::default() });
    }

    #[test]
    fn what_has_ended_is_in_no_sum_with_what_runs() {
        let ended = Member { state: "ended", ..member(1, Some(100)) };
        let sum = Sum::of(&[member(0, Some(10)), ended.clone()]);
        assert_eq!((sum.used_bytes, sum.processes, sum.worst), (Some(10), 1, Some(0)));
        let sum = Sum::of(&[ended]);
        assert_eq!((sum.used_bytes, sum.is_over), (Some(100), true));
    }

    #[test]
    fn a_world_may_be_as_large_as_somebody_says() {
        let mut liar = member(0, Some(1));
        liar.who.insert("world_size".into(), u32::MAX.to_string());
        assert_eq!(Sum::of(&[liar]).missing_ranks.len(), MISSING);
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        assert_eq!(ranges(&[u32::MAX]), u32::MAX.to_string());
        assert_eq!(ranges(&[]), "");
    }
}
