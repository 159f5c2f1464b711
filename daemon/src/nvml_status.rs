//! The status of NVML and of each device: written by the source, read by the views.

use gpumem_ledger::DeviceName;
use std::collections::BTreeMap;

/// The status of NVML. Times are CLOCK_MONOTONIC ns.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NvmlStatus {
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
    pub counters: NvmlCounters,
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
    /// Events of its health since the daemon's start, in the order of NVML's event types.
    pub health_events: Vec<HealthEvent>,
    /// Since when it is so.
    pub since_ns: u64,
    /// When device memory was last read.
    pub memory_read_ns: Option<u64>,
    /// When a process list last succeeded.
    pub list_read_ns: Option<u64>,
}

/// The reason before NVML has answered for the first time.
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
    /// Returns why not, or which library and driver, without the prefix.
    pub(crate) fn reason(&self) -> &str {
        self.reason.trim_start_matches("nvml: ")
    }

    /// Returns whether NVML has not answered since the daemon's start.
    pub(crate) fn is_starting(&self) -> bool {
        self.reason == STARTING
    }

    /// Returns why no device can be read now, if that is so.
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

    /// Returns whether a device may be one of this machine. While NVML answers, its devices are the only ones: any user's process can name
    /// others. Not where NVML says itself that it does not show all: a GPU without a name, MIG instances that this daemon may not see.
    pub(crate) fn may_have(&self, name: DeviceName) -> bool {
        !self.up
            || !self.unnamed.is_empty()
            || self
                .devices
                .iter()
                .any(|device| device.name == name || device.facts.contains_key("hidden_instances"))
    }
}

/// A kind of event that NVML sent about the health of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthEvent {
    /// Label in metrics.
    pub name: &'static str,
    /// What happened, for people.
    pub text: &'static str,
    /// The device or its memory cannot be relied on until it is reset.
    pub is_grave: bool,
    /// Number since the daemon's start.
    pub count: u64,
}

/// Running totals since the start, over all pollers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct NvmlCounters {
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
