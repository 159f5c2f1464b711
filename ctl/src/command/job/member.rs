//! A process on a device, from any source.

use gpumem_model::control::{DeviceRow, ProcessRow};
use gpumem_model::run::{Device, Run, State};
use gpumem_model::who::Who;
use gpumem_report::group::Identity;
use gpumem_runs::store::state_name;
use serde::Serialize;
use std::collections::BTreeMap;

/// A process on a device. Unknown values are null.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Member {
    /// Rank, as claimed by the process.
    pub rank: Option<u32>,
    /// Prometheus' name of the target; null on this node.
    pub node: Option<String>,
    /// Pid on that node.
    pub pid: u32,
    /// Its start time on that node, in clock ticks since boot.
    pub start_ticks: u64,
    /// NVML's index of the device.
    pub gpu: Option<String>,
    /// UUID of the device.
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
    /// Highest used value.
    pub peak_used_bytes: Option<i64>,
    /// Number of failed driver allocations.
    pub failed_allocations: Option<u64>,
    /// Number of times that memory ran out.
    pub ooms: Option<u64>,
    /// Owner of the process, by kind of name.
    pub who: BTreeMap<String, String>,
}

/// Counters of a whole process: metric, and the field of its members.
pub(crate) const COUNTERS: [(&str, fn(&mut Member) -> &mut Option<u64>); 1] =
    [("gpumem_process_allocation_failures_total", |member| &mut member.failed_allocations)];

impl Member {
    /// Returns a member for each device of a run; none if it has no devices.
    pub(crate) fn of_run(run: &Run) -> Vec<Member> {
        let (process, coverage) = (&run.process, &run.coverage);
        let who = Who::of(&process.facts, &process.claims, process.uid).map();
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
                status: match run.state {
                    State::Closed { status, .. } => status,
                    _ => None,
                },
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

    /// Returns the member for a row of `ps`.
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

    /// Returns whether the process is running.
    pub(crate) fn is_running(&self) -> bool {
        self.state == "running"
    }

    /// Returns its amounts for a table.
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

    /// Returns the number of ranks of its job, as claimed by the process.
    pub(crate) fn world_size(&self) -> Option<u32> {
        self.who.get("world_size").and_then(|size| size.parse().ok())
    }

    /// Identifies the process across all nodes: node, pid and start time.
    pub(crate) fn process(&self) -> (Option<&str>, u32, u64) {
        (self.node.as_deref(), self.pid, self.start_ticks)
    }
}

/// Returns the rank claimed by a process.
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
