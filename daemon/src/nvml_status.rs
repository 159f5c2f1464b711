//! The status of NVML and of each device. The NVML source writes it, and the views read it.

use gpumem_ledger::DeviceName;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// First word of an entry of the fact `memory_limits` whose limit could not be read; the control group and the error follow.
pub(crate) const UNREADABLE: &str = "unreadable";

/// The status of NVML. Times are in ns of CLOCK_MONOTONIC.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NvmlStatus {
    pub up: bool,
    /// Versions of library and driver, or the problem if NVML does not answer; begins with `nvml: `.
    pub reason: String,
    pub remedy: Option<&'static str>,
    /// Facts that are constant while a library is open: `library`, `driver`, `pids` (Trusted, ForeignBytes, Foreign). If they
    /// apply, also `confidential`, `protected`, `wsl`, `long_records`.
    pub facts: BTreeMap<String, String>,
    /// GPUs that exist but cannot be identified: each with NVML's index, the reason and the remedy.
    pub unnamed: Vec<(u16, String, Option<&'static str>)>,
    /// Whether events are no longer read, because a call that waits for events did not return.
    pub no_events: bool,
    /// Time at which `up` or `reason` last changed.
    pub since_ns: u64,
    /// Time since which no GPU is read, because calls have not returned.
    pub stalled_since_ns: Option<u64>,
    /// Time until which NVML is closed, on request or because the driver is being unbound from a GPU.
    pub released_until_ns: Option<u64>,
    pub counters: NvmlCounters,
    /// Pid of the process that holds NVML open.
    pub poller_pid: Option<u32>,
    /// All devices found since the daemon's start, in NVML's order.
    pub devices: Vec<DeviceStatus>,
}

/// One device (a GPU, or a MIG instance) found since the daemon's start.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceStatus {
    /// UUID of the device.
    pub name: DeviceName,
    /// Number by which records of [`gpumem_ledger::Origin::Host`] name the device.
    pub slot: u8,
    /// NVML's index of the GPU. A MIG instance has the index of its GPU.
    pub index: u16,
    pub model: String,
    pub total_bytes: Option<u64>,
    /// Reason why the device has no fresh readings; `None` if it has.
    pub problem: Option<String>,
    /// NVML's error code of `problem`, if it has one.
    pub code: Option<u32>,
    pub remedy: Option<&'static str>,
    /// Facts that apply: `accounting`, `display`, `instance`, `hidden_instances` and `windows`; `utilization` (per cent) and
    /// `power` (W); `addressing` (hmm, ats) and `numa_node`; `memory_limits` (separated by tabs: used, soft and hard bytes and path
    /// of each control group, or [`UNREADABLE`]).
    pub facts: BTreeMap<String, String>,
    /// Pids in the list of graphics processes of the last successful reading.
    pub drawing: Vec<u32>,
    /// Pids of MPS clients and servers in the last successful reading.
    pub mps: Vec<u32>,
    /// Health events since the daemon's start, in the order of NVML's event types.
    pub health_events: Vec<HealthEvent>,
    /// Time at which `problem` last changed.
    pub since_ns: u64,
    /// Time at which the amount of used memory was last read.
    pub memory_read_ns: Option<u64>,
    /// Time at which a list of the device's processes was last read.
    pub list_read_ns: Option<u64>,
}

/// Text of [`NvmlStatus::reason`] until NVML has answered for the first time.
pub(crate) const STARTING: &str = "nvml: starting";

impl DeviceStatus {
    /// Returns the status of a device that was seen for the first time. `index` is NVML's.
    pub fn new(name: DeviceName, slot: u8, index: u16) -> Self {
        DeviceStatus {
            name,
            slot,
            index,
            model: String::new(),
            total_bytes: None,
            problem: None,
            code: None,
            remedy: None,
            facts: BTreeMap::new(),
            drawing: Vec::new(),
            mps: Vec::new(),
            health_events: Vec::new(),
            since_ns: 0,
            memory_read_ns: None,
            list_read_ns: None,
        }
    }
}

impl NvmlStatus {
    /// Returns `reason` without its prefix `nvml: `.
    pub(crate) fn reason(&self) -> &str {
        self.reason.trim_start_matches("nvml: ")
    }

    /// Returns whether NVML has not answered since the daemon's start.
    pub(crate) fn is_starting(&self) -> bool {
        self.reason == STARTING
    }

    /// Returns the problem if NVML cannot read any device now.
    pub(crate) fn problem(&self) -> Option<&str> {
        if self.up {
            self.stalled_since_ns.map(|_| "an NVML call has not returned so far")
        } else {
            Some(self.reason())
        }
    }

    /// Returns the status of a device by its UUID; `None` if it was never seen.
    pub(crate) fn device(&self, name: DeviceName) -> Option<&DeviceStatus> {
        self.devices.iter().find(|device| device.name == name)
    }

    /// Returns whether a device may belong to this machine. While NVML answers, only devices that it reports belong to the machine,
    /// because a process of any user can report devices that do not exist. Exceptions: NVML reports a GPU that cannot be
    /// identified, or MIG instances that this daemon cannot see.
    pub(crate) fn may_have(&self, name: DeviceName) -> bool {
        !self.up
            || !self.unnamed.is_empty()
            || self
                .devices
                .iter()
                .any(|device| device.name == name || device.facts.contains_key("hidden_instances"))
    }
}

/// A kind of health event of a device, and how often it occurred.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthEvent {
    /// Name of the event for labels of metrics.
    pub name: &'static str,
    /// Description of the event for the user.
    pub text: &'static str,
    /// Whether the device or its memory is unreliable after the event until the device is reset.
    pub is_grave: bool,
    /// Number of events of this kind since the daemon's start.
    pub count: u64,
}

/// Totals since the daemon's start. A poller is a child process that calls NVML; the totals include all pollers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct NvmlCounters {
    /// Numbers of NVML calls and time in them.
    pub calls: NvmlCalls,
    /// Share of wall time over the last seconds in calls that list processes, 0 to 1.
    pub list_share: f64,
    /// Number of pollers started after the first one.
    pub restarts: u64,
    /// Number of pollers abandoned because a call did not return.
    pub hangs: u64,
    /// Number of pollers that wrote data that is not a frame.
    pub malformed: u64,
}

/// Totals of NVML calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct NvmlCalls {
    /// Number of calls that read a device's memory.
    pub memory_calls: u64,
    /// Time in calls that read a device's memory, in ns.
    pub memory_ns: u64,
    /// Number of calls that list processes.
    pub list_calls: u64,
    /// Time in calls that list processes, in ns; each such call locks the driver.
    pub list_ns: u64,
    /// Number of calls that failed.
    pub failed_calls: u64,
    /// Number of process lists deferred because the limit of time for listing (`list_budget`) was reached.
    pub deferred: u64,
    /// Number of values refused because they are impossible for the device's size.
    pub refused: u64,
}

impl NvmlCalls {
    /// Returns all totals in the order in which the poller process sends them and the daemon reads them.
    pub(crate) fn fields_mut(&mut self) -> [&mut u64; 7] {
        let NvmlCalls { memory_calls, memory_ns, list_calls, list_ns, failed_calls, deferred, refused } =
            self;
        [memory_calls, memory_ns, list_calls, list_ns, failed_calls, deferred, refused]
    }
}
