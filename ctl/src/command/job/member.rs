//! A process on a device, from any source, and the sums of a job's members.

use gpumem_model::control::{DeviceRow, ProcessRow};
use gpumem_model::owner::Owner;
use gpumem_model::run::{Device, Run, State};
use gpumem_report::group::Identity;
use gpumem_runs::store::state_name;
use serde::Serialize;
use std::collections::BTreeMap;
use std::collections::BTreeSet;

/// A process on a device. Unknown values are null.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Member {
    pub rank: Option<u32>,
    /// Prometheus' name of the target; null on this node.
    pub node: Option<String>,
    pub pid: u32,
    /// Its start time on that node, in clock ticks since boot.
    pub start_ticks: u64,
    pub gpu: Option<String>,
    pub uuid: Option<String>,
    /// `running`, `ended`, ...
    pub state: &'static str,
    /// Exit status, as from waitpid.
    pub status: Option<u64>,
    /// Flags, as in `ps`.
    pub flags: Vec<String>,
    /// Bytes charged by NVML; used = predates + tracked + untrackable.
    pub used_bytes: Option<i64>,
    pub predates_bytes: Option<i64>,
    pub tracked_bytes: Option<i64>,
    /// The part of `tracked_bytes` that is idle in pools.
    pub idle_bytes: Option<i64>,
    pub untrackable_bytes: Option<i64>,
    pub peak_used_bytes: Option<i64>,
    pub failed_allocations: Option<u64>,
    pub ooms: Option<u64>,
    /// Owner of the process, by kind of name.
    pub who: BTreeMap<String, String>,
}

/// A counter of a whole process: metric, and the field of its members.
type Counter = (&'static str, fn(&mut Member) -> &mut Option<u64>);
pub(crate) const COUNTERS: [Counter; 1] =
    [("gpumem_process_allocation_failures_total", |member| &mut member.failed_allocations)];

impl Member {
    /// Returns a member for each device of a run; none if it has no devices.
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
        let of = |device: &Device| {
            let amounts = Identity::of(run, device);
            let ooms = device.details.ooms.iter().filter(|oom| oom.is_true()).count();
            Member {
                rank: rank(&who),
                pid: process.pid,
                start_ticks: process.start_ticks,
                gpu: Some(device.ordinal.to_string()),
                uuid: Some(device.name.clone()),
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
        run.devices.iter().map(of).collect()
    }

    pub(crate) fn of_row(row: &ProcessRow, device: &DeviceRow) -> Member {
        let used = row.used_bytes.and_then(|bytes| i64::try_from(bytes).ok());
        let parts = used.zip(row.tracked_bytes).zip(row.untrackable_bytes);
        Member {
            rank: rank(&row.who),
            pid: row.pid,
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

    pub(crate) fn amounts(&self) -> Identity {
        Identity {
            used_bytes: self.used_bytes,
            predates_bytes: self.predates_bytes,
            tracked_bytes: self.tracked_bytes,
            idle_bytes: self.idle_bytes,
            gap_bytes: self.untrackable_bytes,
            peak_bytes: self.peak_used_bytes,
        }
    }

    /// Returns the sums of the known amounts. Peaks have no sum, because they are of different times.
    pub(crate) fn summed(members: &[&Member]) -> Identity {
        let all = |of: fn(&Member) -> Option<i64>| total(members.iter().filter_map(|member| of(member)));
        Identity {
            used_bytes: all(|member| member.used_bytes),
            predates_bytes: all(|member| member.predates_bytes),
            tracked_bytes: all(|member| member.tracked_bytes),
            idle_bytes: all(|member| member.idle_bytes),
            gap_bytes: all(|member| member.untrackable_bytes),
            peak_bytes: None,
        }
    }

    /// Returns the number of ranks of its job, as claimed by the process.
    pub(crate) fn world_size(&self) -> Option<u32> {
        self.who.get("world_size").and_then(|size| size.parse().ok())
    }

    /// Identifies the process across all nodes: node, pid and start time.
    pub(crate) fn process(&self) -> (Option<&str>, u32, u64) {
        (self.node.as_deref(), self.pid, self.start_ticks)
    }
}

/// Returns the sum, or `None` of no amounts: unknown is never zero.
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

/// Ranks beyond this are not checked individually, because claimed sizes may be arbitrarily large.
const RANKS: u32 = 1 << 20;
const MISSING: usize = 1024;

/// Sums of the running members, or of all if none is running.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Sum {
    pub processes: usize,
    /// Number of nodes; 0 for this node.
    pub nodes: usize,
    pub devices: usize,
    /// All processes have ended; amounts are the last ones of each.
    pub is_over: bool,
    /// Largest world size claimed by a process.
    pub world_size: Option<u32>,
    pub missing_ranks: Vec<u32>,
    /// Sum of the known values.
    pub used_bytes: Option<i64>,
    pub used_unknown: usize,
    /// Sum over the members with an agent.
    pub tracked_bytes: Option<i64>,
    pub untrackable_bytes: Option<i64>,
    pub uncovered: usize,
    /// Used memory divided by the number of members.
    pub mean_used_bytes: Option<f64>,
    /// Highest used value divided by the mean; 1 is balanced.
    pub imbalance: Option<f64>,
    /// Index in `members` of the one with the highest used value.
    pub worst: Option<usize>,
    pub highest_peak: Option<usize>,
    /// Number of times that memory ran out, as far as known.
    pub ooms: Option<u64>,
}

impl Sum {
    /// Computes the sums; `members` must be sorted.
    pub(crate) fn of(members: &[Member]) -> Self {
        let is_over = !members.iter().any(Member::is_running);
        let counted = || members.iter().enumerate().filter(move |(_, member)| is_over || member.is_running());
        let all = |of: fn(&Member) -> Option<i64>| total(counted().filter_map(|(_, member)| of(member)));
        let highest = |of: fn(&Member) -> Option<i64>| {
            let known = counted().filter_map(|(place, member)| Some((of(member)?, place)));
            // Of several equal members the first is chosen, which has the lowest rank.
            known.max_by_key(|(bytes, place)| (*bytes, std::cmp::Reverse(*place))).map(|(_, place)| place)
        };
        let used = |member: &Member| member.used_bytes;
        let known = counted().filter(|(_, member)| member.used_bytes.is_some()).count();
        let used_bytes = all(used);
        let mean = used_bytes.filter(|_| known > 0).map(|sum| sum as f64 / known as f64);
        let worst = highest(used);
        let most = worst.and_then(|place| members.get(place)?.used_bytes);
        let is_comparable = |(mean, _): &(f64, i64)| known > 1 && *mean > 0.0;
        let world_size = members.iter().filter_map(Member::world_size).max();
        let there: BTreeSet<u32> = counted().filter_map(|(_, member)| member.rank).collect();
        let missing = (0..world_size.unwrap_or(0).min(RANKS)).filter(|rank| !there.contains(rank));
        Sum {
            processes: counted().map(|(_, member)| member.process()).collect::<BTreeSet<_>>().len(),
            nodes: counted().filter_map(|(_, member)| member.node.as_ref()).collect::<BTreeSet<_>>().len(),
            devices: counted().map(|(_, member)| (&member.node, &member.uuid)).collect::<BTreeSet<_>>().len(),
            is_over,
            world_size,
            missing_ranks: missing.take(MISSING).collect(),
            used_bytes,
            used_unknown: counted().count() - known,
            tracked_bytes: all(|member| member.tracked_bytes),
            untrackable_bytes: all(|member| member.untrackable_bytes),
            uncovered: counted().filter(|(_, member)| member.tracked_bytes.is_none()).count(),
            mean_used_bytes: mean,
            imbalance: mean.zip(most).filter(is_comparable).map(|(mean, most)| most as f64 / mean),
            worst,
            highest_peak: highest(|member| member.peak_used_bytes),
            ooms: total(members.iter().filter_map(|member| i64::try_from(member.ooms?).ok()))
                .map(i64::cast_unsigned),
        }
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
