//! What gpumemctl asks a daemon and what it is told: HTTP/1.1 and JSON over a Unix socket.
//!
//! ```text
//! GET  /v1/ps                  Ps
//! GET  /v1/runs?...            array of runs (gpumem-runs' Run as JSON), newest first; pid=N: of that process;
//!                              tree=N: of that process and its descendants; job=ID: of that job;
//!                              around=NS&within=NS: that ended, or ran out of memory, within that of a time since 1970;
//!                              none: all that are live
//! GET  /v1/doctor[?pid=N]      Doctor
//! GET  /v1/metrics             string: what a scrape would be told, also where nothing listens for one
//! POST /v1/nvml/release?for_s=N   Released: NVML is closed until then, so that a GPU can be reset
//! POST /v1/record?pid=N&do=start|stop|pause|resume|dump[&output=FILE]   Recorded: the process's agent has done so; FILE is
//!                              absolute and as the process sees it, %-escaped; only for its own user and root. start takes
//!                              steps=FIRST:LAST, for=SECONDS and max_size=BYTES, too
//! POST /v1/mark?name=NAME[&pid=N|&tree=N|&job=ID]   Marked: the runs of those processes (see /v1/runs), or all that are live have a mark of
//!                              that name now; NAME is %-escaped
//! anything else                status 4xx or 5xx with Refusal
//! ```
//!
//! A caller sees the processes of their own user; root and the group `gpumemd` see all. Of others' processes
//! `Ps` tells user, pid and bytes only. Absent is `null`, never 0. Bytes are bytes, times are
//! CLOCK_MONOTONIC ns, ages are ms.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What holds the devices now.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Ps {
    /// In NVML's order.
    pub devices: Vec<DeviceRow>,
    /// By device, the largest first.
    pub processes: Vec<ProcessRow>,
    /// Processes that say to hold memory on devices that NVML does not have, while it answers.
    #[serde(default)]
    pub claims: Vec<ClaimRow>,
}

/// What a process says to hold on devices that the machine does not have.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ClaimRow {
    /// In the daemon's PID namespace; 0 where it is hidden.
    pub pid: u32,
    /// User id.
    pub uid: Option<u64>,
    /// User's name.
    pub user: Option<String>,
    /// How many such devices it names.
    pub devices: usize,
    /// Sum of what it says to hold there; absent for other users' processes.
    pub tracked_bytes: Option<i64>,
    /// Command; absent for other users' processes.
    pub command: Option<String>,
}

/// A run that a question is about and the caller may not see.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HiddenRun {
    /// In the daemon's PID namespace.
    pub pid: u32,
    /// User's name, or their number.
    pub user: Option<String>,
    /// Index and UUID of each device that it was on.
    pub devices: Vec<(u32, String)>,
}

/// One device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceRow {
    /// NVML's index.
    pub index: u32,
    /// NVML's spelling.
    pub uuid: String,
    /// Product name.
    pub model: String,
    /// Size.
    pub total_bytes: Option<u64>,
    /// The device uses the host's memory and has none of its own: total, used and free (available) are the host's.
    #[serde(default)]
    pub unified: bool,
    /// Used, without the driver's share where that is known.
    pub used_bytes: Option<u64>,
    /// Free.
    pub free_bytes: Option<u64>,
    /// The driver's share.
    pub system_bytes: Option<u64>,
    /// used minus the sum over its processes; of unified memory what the rest of the host uses.
    pub unaccounted_bytes: Option<i64>,
    /// Age of the reading.
    pub age_ms: Option<u64>,
    /// Why there is no fresh reading.
    pub why: Option<String>,
}

/// One process on one device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ProcessRow {
    /// In the daemon's PID namespace.
    pub pid: u32,
    /// Index in [`Ps::devices`].
    pub device: usize,
    /// User id.
    pub uid: Option<u64>,
    /// User's name.
    pub user: Option<String>,
    /// covered, uncovered; then, where they apply: late, blocked, partial, stale, paused, restarted.
    pub flags: Vec<String>,
    /// What NVML charges to it.
    pub used_bytes: Option<u64>,
    /// Part of it that confidential computing protects; absent without it.
    #[serde(default)]
    pub protected_bytes: Option<u64>,
    /// Live driver allocations.
    pub tracked_bytes: Option<i64>,
    /// Pool bytes that no block covers.
    pub idle_bytes: Option<i64>,
    /// used minus tracked minus what predates the agent.
    pub untrackable_bytes: Option<i64>,
    /// Age of the sample.
    pub age_ms: Option<u64>,
    /// Why `used_bytes` is absent.
    pub why: Option<String>,
    /// Command, and rank where the process claims one; absent for other users' processes.
    pub command: Option<String>,
    /// Whose it is, as far as that is known: user, comm, job, rank, world_size, container, pod, namespace, pod_uid,
    /// container_name, slurm_job, slurm_step; `claimed` names those that the process says of itself. Of other users' processes
    /// the user.
    #[serde(default)]
    pub who: BTreeMap<String, String>,
}

/// How the daemon is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Doctor {
    /// Version of the daemon.
    pub version: String,
    /// Its pid.
    pub pid: u32,
    /// For how long it runs.
    pub uptime_s: u64,
    /// Facts, in the order in which they should be read: name and value.
    pub facts: Vec<(String, String)>,
    /// What was looked at, worst first.
    pub findings: Vec<Finding>,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Which check it is: an id of [`crate::checks::Check`], or of a later version.
    pub id: String,
    /// How it is.
    pub state: State,
    /// What was looked at: `nvml`, `GPU 0 (GPU-51..)`, `process 4711`, `store`.
    pub subject: String,
    /// What is the case.
    pub text: String,
    /// What to do, where something is to be done.
    pub fix: Option<String>,
}

/// How a [`Finding`] is, the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Something does not work: numbers are missing.
    Bad,
    /// Something works less well than it could.
    Warn,
    /// It could not be looked at.
    Unknown,
    /// As it should be.
    Ok,
}

/// NVML is closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Released {
    /// For how long.
    pub for_s: u64,
}

/// An agent has done what it was told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recorded {
    /// Of the process.
    pub pid: u32,
    /// What it has done.
    pub done: String,
    /// The file that it writes, or wrote.
    pub file: Option<String>,
}

/// A moment has a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marked {
    /// Of these processes.
    pub pids: Vec<u32>,
    /// When: CLOCK_MONOTONIC.
    pub time_ns: u64,
}

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// What, and what would be right.
    pub error: String,
}
