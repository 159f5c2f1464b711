//! One process on one device, whoever told of it.

use gpumem_model::control::{DeviceRow, ProcessRow};
use gpumem_model::run::{Device, Run, State};
use gpumem_model::who::Who;
use gpumem_report::group::Identity;
use gpumem_runs::store::state_name;
use serde::Serialize;
use std::collections::BTreeMap;

/// One process on one device. What is not known is null.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Member {
    /// As the process claims.
    pub rank: Option<u32>,
    /// As Prometheus calls the target; null on this node.
    pub node: Option<String>,
    /// On that node.
    pub pid: u32,
    /// Its start time there.
    pub start_ticks: u64,
    /// NVML's index of the device.
    pub gpu: Option<String>,
    /// Its UUID.
    pub uuid: Option<String>,
    /// `running`, `ended`, ...
    pub state: &'static str,
    /// With which status it ended, as waitpid gives it.
    pub status: Option<u64>,
    /// As in `ps`.
    pub flags: Vec<String>,
    /// used = predates + tracked + untrackable.
    pub used_bytes: Option<i64>,
    pub predates_bytes: Option<i64>,
    pub tracked_bytes: Option<i64>,
    /// A part of tracked.
    pub idle_bytes: Option<i64>,
    pub untrackable_bytes: Option<i64>,
    /// Highest used.
    pub peak_used_bytes: Option<i64>,
    /// Driver allocations that failed.
    pub failed_allocations: Option<u64>,
    /// Times at which memory ran out.
    pub ooms: Option<u64>,
    /// Whose it is.
    pub who: BTreeMap<String, String>,
}

impl Member {
    /// Of a run; one without a device has no memory to speak of.
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

    /// Of a row of `ps`.
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

    /// It goes on.
    pub(crate) fn is_running(&self) -> bool {
        self.state == "running"
    }

    /// As amounts of a table.
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

    /// How many ranks its job has, as it claims.
    pub(crate) fn world_size(&self) -> Option<u32> {
        self.who.get("world_size").and_then(|size| size.parse().ok())
    }

    /// Which process it is, of all nodes.
    pub(crate) fn process(&self) -> (Option<&str>, u32, u64) {
        (self.node.as_deref(), self.pid, self.start_ticks)
    }
}

/// The rank in the names of a process.
pub(crate) fn rank(who: &BTreeMap<String, String>) -> Option<u32> {
    who.get("rank").and_then(|rank| rank.parse().ok())
}

/// By rank, those without one last.
pub(crate) fn order(members: &mut [Member]) {
    let key = |member: &Member| {
        let gpu = member.gpu.as_deref().and_then(|gpu| gpu.parse::<u32>().ok());
        (member.rank.is_none(), member.rank, member.node.clone(), member.pid, member.start_ticks, gpu)
    };
    members.sort_by_key(key);
}
