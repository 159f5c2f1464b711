//! How the source is, as plain data for metrics and `doctor`.

use gpumem_ledger::DeviceName;
use std::collections::BTreeMap;

/// Everything there is to know about the source. Times are CLOCK_MONOTONIC ns.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Status {
    /// Whether NVML answers.
    pub up: bool,
    /// Why not, or which library and driver; begins with `nvml: `.
    pub reason: String,
    /// What a person can do about it.
    pub remedy: Option<&'static str>,
    /// What does not change while a library is open: `library`, `driver`, `pids` (Trusted, ForeignBytes, Foreign), and
    /// where it is so `confidential`, `protected`, `wsl`, `long_records`.
    pub facts: BTreeMap<String, String>,
    /// GPUs that are there and cannot be named: NVML's index, why, and what can be done.
    pub unnamed: Vec<(u16, String, Option<&'static str>)>,
    /// Events are not asked for any more: a call for them did not return.
    pub no_events: bool,
    /// Since when it is so.
    pub since_ns: u64,
    /// Since when the poller has done nothing, if that is longer than it should be: no GPU is read.
    pub stalled_since_ns: Option<u64>,
    /// Closed until then: on request, or because the driver is being unbound from a GPU.
    pub released_until_ns: Option<u64>,
    /// What has been called, and what it cost.
    pub counters: Counters,
    /// Pid of the process that holds NVML open.
    pub poller_pid: Option<u32>,
    /// In NVML's order.
    pub devices: Vec<DeviceStatus>,
}

/// One device (a GPU, or a MIG instance) that was seen since the start.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceStatus {
    /// UUID.
    pub name: DeviceName,
    /// The number of the device in the records of [`gpumem_ledger::Origin::Host`].
    pub slot: u8,
    /// NVML's index; of a MIG instance, that of its GPU.
    pub index: u16,
    /// Product name.
    pub model: String,
    /// Size.
    pub total_bytes: Option<u64>,
    /// Why there are no fresh readings, if there are none.
    pub problem: Option<String>,
    /// NVML's code for it, where it is NVML's.
    pub code: Option<u32>,
    /// What a person can do about it.
    pub remedy: Option<&'static str>,
    /// Where it is so: `accounting`, `display`, `instance`, `hidden_instances`, `windows`; `addressing` (hmm, ats) and
    /// `numa_node`; `memory_limits`: by tabs, used, soft and hard bytes and path of each control group.
    pub facts: BTreeMap<String, String>,
    /// Pids of the last list that succeeded that draw, and that are clients or servers of MPS.
    pub drawing: Vec<u32>,
    /// See there.
    pub mps: Vec<u32>,
    /// Events of its health since the daemon's start, by [`super::HealthEvent::name`].
    pub health_events: BTreeMap<&'static str, u64>,
    /// Since when it is so.
    pub since_ns: u64,
    /// When device memory was last read.
    pub memory_read_ns: Option<u64>,
    /// When a process list last succeeded.
    pub list_read_ns: Option<u64>,
}

/// Running totals since the start, over all pollers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Counters {
    /// Device memory calls.
    pub memory_calls: u64,
    /// Seconds inside them.
    pub memory_seconds: f64,
    /// Process list calls.
    pub list_calls: u64,
    /// Seconds inside them: time in which the driver was stopped.
    pub list_seconds: f64,
    /// Calls that failed.
    pub failed_calls: u64,
    /// Readings put off because the lock-time budget was spent.
    pub lists_deferred: u64,
    /// Values that were refused, because no device of that size can have them.
    pub refused: u64,
    /// Share of wall time in list calls, over the last seconds.
    pub list_share: f64,
    /// Pollers that were started after the first one.
    pub restarts: u64,
    /// Pollers abandoned because a call did not return.
    pub hangs: u64,
    /// Bytes from a poller that were no frames.
    pub malformed: u64,
}
