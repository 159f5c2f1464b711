//! The status of NVML and of each device: written by the source, read by the views.

use gpumem_ledger::DeviceName;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The status of NVML. Times are CLOCK_MONOTONIC ns.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NvmlStatus {
    /// Whether NVML answers.
    pub up: bool,
    /// Library and driver, or the problem; begins with `nvml: `.
    pub reason: String,
    /// Remedy for the problem.
    pub remedy: Option<&'static str>,
    /// Constant facts while a library is open: `library`, `driver`, `pids` (Trusted, ForeignBytes, Foreign), and if they apply
    /// `confidential`, `protected`, `wsl`, `long_records`.
    pub facts: BTreeMap<String, String>,
    /// GPUs that exist but cannot be identified: NVML's index, reason and remedy.
    pub unnamed: Vec<(u16, String, Option<&'static str>)>,
    /// Whether events are no longer read, because such a call did not return.
    pub no_events: bool,
    /// When `up` or `reason` last changed.
    pub since_ns: u64,
    /// Since when no GPU is read, because calls have not returned.
    pub stalled_since_ns: Option<u64>,
    /// Time until which NVML is closed, on request or because the driver is being unbound from a GPU.
    pub released_until_ns: Option<u64>,
    /// Totals of calls and their costs.
    pub counters: NvmlCounters,
    /// Pid of the process that holds NVML open.
    pub poller_pid: Option<u32>,
    /// All devices, in NVML's order.
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
    /// Reason why there are no fresh readings, if so.
    pub problem: Option<String>,
    /// NVML's code of the problem, if it has one.
    pub code: Option<u32>,
    /// Remedy for the problem.
    pub remedy: Option<&'static str>,
    /// Facts that apply: `accounting`, `display`, `instance`, `hidden_instances`, `windows`; `addressing` (hmm, ats) and
    /// `numa_node`; `memory_limits` (separated by tabs: used, soft and hard bytes and path of each control group).
    pub facts: BTreeMap<String, String>,
    /// Pids in the graphics list of the last successful reading.
    pub drawing: Vec<u32>,
    /// Pids of MPS clients and servers in that reading.
    pub mps: Vec<u32>,
    /// Health events since the daemon's start, in the order of NVML's event types.
    pub health_events: Vec<HealthEvent>,
    /// When `problem` last changed.
    pub since_ns: u64,
    /// When device memory was last read.
    pub memory_read_ns: Option<u64>,
    /// When a process list last succeeded.
    pub list_read_ns: Option<u64>,
}

/// Reason until NVML has answered for the first time.
pub(crate) const STARTING: &str = "nvml: starting";

impl DeviceStatus {
    /// Returns the status of a device that has just been seen, by its name, slot and NVML's index.
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
    /// Returns the reason without its prefix.
    pub(crate) fn reason(&self) -> &str {
        self.reason.trim_start_matches("nvml: ")
    }

    /// Returns whether NVML has not answered since the daemon's start.
    pub(crate) fn is_starting(&self) -> bool {
        self.reason == STARTING
    }

    /// Returns the problem if no device can be read now.
    pub(crate) fn problem(&self) -> Option<&str> {
        if self.up {
            self.stalled_since_ns.map(|_| "a call has not returned so far")
        } else {
            Some(self.reason())
        }
    }

    /// Returns the status of a device.
    pub(crate) fn device(&self, name: DeviceName) -> Option<&DeviceStatus> {
        self.devices.iter().find(|device| device.name == name)
    }

    /// Returns whether a device may belong to this machine. While NVML answers, only its devices do, because any user's process
    /// can report others. Exceptions: NVML reports a GPU that cannot be identified, or MIG instances that are not visible to this
    /// daemon.
    pub(crate) fn may_have(&self, name: DeviceName) -> bool {
        !self.up
            || !self.unnamed.is_empty()
            || self
                .devices
                .iter()
                .any(|device| device.name == name || device.facts.contains_key("hidden_instances"))
    }
}

/// A kind of health event of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthEvent {
    /// Name for labels of metrics.
    pub name: &'static str,
    /// Text for the user.
    pub text: &'static str,
    /// Whether the device or its memory is unreliable until it is reset.
    pub is_grave: bool,
    /// Number since the daemon's start.
    pub count: u64,
}

/// Totals since the start, over all pollers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct NvmlCounters {
    /// Calls and their costs.
    pub calls: NvmlCalls,
    /// Share of wall time in list calls over the last seconds, 0 to 1.
    pub list_share: f64,
    /// Pollers started after the first one.
    pub restarts: u64,
    /// Pollers abandoned because a call did not return.
    pub hangs: u64,
    /// Pollers that wrote data that is not a frame.
    pub malformed: u64,
}

/// Totals of NVML calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct NvmlCalls {
    /// Readings of device memory.
    pub memory_calls: u64,
    /// Time in them.
    pub memory_ns: u64,
    /// Calls for process lists.
    pub list_calls: u64,
    /// Time in them, during which the driver was locked.
    pub list_ns: u64,
    /// Calls that failed.
    pub failed_calls: u64,
    /// Lists deferred because the lock-time budget was used up.
    pub deferred: u64,
    /// Values refused as impossible for the device's size.
    pub refused: u64,
}

impl NvmlCalls {
    /// Returns all totals in a fixed order, by which the poller and its parent number them.
    pub(crate) fn fields_mut(&mut self) -> [&mut u64; 7] {
        let NvmlCalls { memory_calls, memory_ns, list_calls, list_ns, failed_calls, deferred, refused } =
            self;
        [memory_calls, memory_ns, list_calls, list_ns, failed_calls, deferred, refused]
    }
}
