//! Requests and replies of the daemon's control API, which gpumemctl uses: HTTP/1.1 and JSON over a Unix socket.
//!
//! ```text
//! GET  /v1/ps                  Ps
//! GET  /v1/runs?...            array of runs (gpumem-runs' Run as JSON), newest first. Filters:
//!                              pid=N: runs of that process
//!                              tree=N: runs of that process and its descendants
//!                              job=ID: runs of that job
//!                              around=NS&within=NS: runs that ended or ran out of memory at most `within` from `around`,
//!                              which is a time since 1970
//!                              no filter: all live runs
//! GET  /v1/doctor[?pid=N]      Doctor
//! GET  /v1/metrics             string: the text of a metrics scrape, also where no metrics port is open
//! POST /v1/nvml/release?for_s=N   Released: NVML stays closed for that time, so that a GPU can be reset
//! POST /v1/record?pid=N&do=start|stop|pause|resume|dump[&output=FILE]   Recorded: the process's agent has done so; FILE is
//!                              an absolute path in the process's mount namespace, %-escaped; only for the process's own
//!                              user and root. start also takes steps=FIRST:LAST, for=SECONDS and max_size=BYTES
//! POST /v1/mark?name=NAME[&pid=N|&tree=N|&job=ID]   Marked: adds a mark of that name, at the present time, to the runs of
//!                              those processes (see /v1/runs) or to all live runs; NAME is %-escaped
//! anything else                status 4xx or 5xx with Refusal
//! ```
//!
//! A caller sees the processes of their own user; root and the group `gpumemd` see all. Of other users' processes `Ps` shows
//! only user, pid and bytes. Absent values are `null`, never 0. Times are CLOCK_MONOTONIC ns, ages are ms.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The processes that hold device memory now.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Ps {
    /// Devices in NVML's order.
    pub devices: Vec<DeviceRow>,
    /// Processes by device, those with the most memory first.
    pub processes: Vec<ProcessRow>,
    /// Processes that report memory on devices that NVML, although it answers, does not list.
    #[serde(default)]
    pub claims: Vec<ClaimRow>,
    /// Findings on the processes whose memory the caller may see, the most important first. They are at most a few seconds old.
    #[serde(default)]
    pub findings: Vec<ProcessFinding>,
    /// Processes that ended since the daemon started and whose memory the caller may see: the last 32, the latest first.
    #[serde(default)]
    pub ended: Vec<EndedRow>,
}

/// A process that has ended, and its stored run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct EndedRow {
    /// Pid in the daemon's PID namespace.
    pub pid: u32,
    /// Start time of the process in clock ticks since boot.
    pub start_ticks: u64,
    pub uid: Option<u64>,
    /// Id of the run in the daemon's store, such as `r7`.
    pub run: String,
    /// Time since the run was stored, in ms.
    pub age_ms: u64,
    pub command: Option<String>,
    /// Known names of the process's owner, as in [`ProcessRow::who`].
    pub who: BTreeMap<String, String>,
    /// How the process ended: `out of memory`, `perhaps out of memory`, or its status if that is not 0, such as `exit 1`.
    #[serde(default)]
    pub outcome: Option<String>,
}

/// A conclusion about the memory of a live process. The report's JSON has the same ones in `findings`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ProcessFinding {
    pub pid: u32,
    /// Start time of the process in clock ticks since boot.
    pub start_ticks: u64,
    /// Index in [`Ps::devices`]; absent if the finding is about the whole process.
    pub device: Option<usize>,
    /// Such as `growth`; docs/report-json.md lists the kinds.
    pub kind: String,
    /// `critical`, `warning` or `note`.
    pub severity: String,
    pub bytes: i64,
    /// Fraction (0 to 1) that `bytes` are of the process's used bytes.
    pub share: f64,
    pub confidence: Option<f64>,
    /// Seconds until growth has used up the free bytes of the device.
    pub full_in_s: Option<u64>,
    /// The finding as a sentence.
    pub text: String,
}

/// Memory that a process reports on devices that the machine does not have.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ClaimRow {
    /// Pid in the daemon's PID namespace; 0 if it is hidden from the caller.
    pub pid: u32,
    pub uid: Option<u64>,
    pub user: Option<String>,
    /// Number of devices on which the process reports memory and that the machine does not have.
    pub devices: usize,
    /// Sum of the bytes that the process reports on these devices; absent for other users' processes.
    pub tracked_bytes: Option<i64>,
    /// Command line; absent for other users' processes.
    pub command: Option<String>,
}

/// A run that matches a request but that the caller may not see.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HiddenRun {
    /// Pid in the daemon's PID namespace.
    pub pid: u32,
    /// Name of the user, or the user id if that has no name.
    pub user: Option<String>,
    /// Index and UUID of each device that the process uses.
    pub devices: Vec<(u32, String)>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceRow {
    pub index: u32,
    pub uuid: String,
    pub model: String,
    pub total_bytes: Option<u64>,
    /// Whether the device uses the host's memory, so that total, used and free bytes are the host's.
    #[serde(default)]
    pub unified: bool,
    /// Used bytes of the device, without the driver's share if NVML reports that share.
    pub used_bytes: Option<u64>,
    pub free_bytes: Option<u64>,
    /// Bytes that the driver reserves for itself.
    pub system_bytes: Option<u64>,
    /// `used_bytes` minus the bytes of all processes on the device; for unified memory, the memory that the rest of the host
    /// uses.
    pub unaccounted_bytes: Option<i64>,
    /// Share of NVML's last sample period (at most 1 s) in which a kernel ran on the device, in per cent; absent if the driver does
    /// not report it.
    #[serde(default)]
    pub utilization_percent: Option<u32>,
    /// Power that the device draws, in W; absent if the driver does not report it.
    #[serde(default)]
    pub power_w: Option<u32>,
    pub age_ms: Option<u64>,
    /// Why there is no fresh NVML reading; absent if there is one.
    pub why: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ProcessRow {
    /// Pid in the daemon's PID namespace.
    pub pid: u32,
    /// Index in [`Ps::devices`].
    pub device: usize,
    /// Start time of the process in clock ticks since boot; absent for other users' processes.
    #[serde(default)]
    pub start_ticks: Option<u64>,
    pub uid: Option<u64>,
    pub user: Option<String>,
    /// `covered` or `uncovered` (with or without an agent), then those that apply: `late` (the agent began after the first
    /// allocation), `blocked` (the agent cannot use CUPTI), `paused` (the agent sees no calls), `partial` (tracked bytes are
    /// incomplete), `restarted` (the daemon was restarted while the process ran), `stale` (the agent had not answered when the last
    /// sample was taken).
    pub flags: Vec<String>,
    /// Bytes that NVML charges to the process.
    pub used_bytes: Option<u64>,
    /// The part of `used_bytes` that confidential computing protects; absent without confidential computing.
    #[serde(default)]
    pub protected_bytes: Option<u64>,
    /// Bytes of live driver allocations.
    pub tracked_bytes: Option<i64>,
    /// Pool bytes in no block: cached by the allocator.
    pub idle_bytes: Option<i64>,
    /// `used_bytes` minus `tracked_bytes` minus the bytes allocated before the agent started.
    pub untrackable_bytes: Option<i64>,
    pub age_ms: Option<u64>,
    /// Why `used_bytes` is absent.
    pub why: Option<String>,
    /// Command, followed by the rank if the process reports one; absent for other users' processes.
    pub command: Option<String>,
    /// Known names of the process's owner: user, comm, job, rank, world_size, container, pod, namespace, pod_uid, container_name,
    /// slurm_job, slurm_step. `claimed` lists those that the process reports about itself. For other users' processes, only the
    /// user.
    #[serde(default)]
    pub who: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Doctor {
    pub version: String,
    pub pid: u32,
    pub uptime_s: u64,
    /// Facts about the daemon as name and value, in the order in which they are shown.
    pub facts: Vec<(String, String)>,
    /// Results of the checks, worst first.
    pub findings: Vec<Finding>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Id of the check: of a [`crate::checks::Check`], or unknown if a later version sent it.
    pub id: String,
    pub state: State,
    /// The object that was checked: `nvml`, `GPU 0 (GPU-51..)`, `process 4711`, `store`.
    pub subject: String,
    pub text: String,
    /// What to do about the finding; absent if nothing needs to be done.
    pub fix: Option<String>,
}

/// Severity of a [`Finding`], worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Something does not work, so numbers are missing.
    Bad,
    /// Something works less well than it could.
    Warn,
    /// The check could not be made.
    Unknown,
    /// Everything is as expected.
    Ok,
}

/// Reply to a release request: NVML is closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Released {
    /// Time until NVML is opened again, in seconds.
    pub for_s: u64,
}

/// Reply to a record request: the agent has carried out the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recorded {
    pub pid: u32,
    pub done: String,
    /// Path of the file that the agent writes or has written.
    pub file: Option<String>,
}

/// Reply to a mark request: the mark was added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marked {
    /// Pids of the processes whose runs have the mark.
    pub pids: Vec<u32>,
    /// Time of the mark: CLOCK_MONOTONIC ns.
    pub time_ns: u64,
}

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// What is wrong with the request, and what would be valid.
    pub error: String,
}
