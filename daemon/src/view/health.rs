//! How the sources are, as views tell it.

use gpumem_ledger::DeviceName;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// All sources.
#[derive(Debug, Clone, Default)]
pub struct Health {
    /// NVML answers.
    pub nvml_up: bool,
    /// It has not been heard yet, since the daemon's start.
    pub nvml_starting: bool,
    /// Why not, or which library and driver.
    pub nvml_reason: String,
    /// Since when no GPU has been read although NVML is up: a call does not return, CLOCK_MONOTONIC.
    pub nvml_stalled_since_ns: Option<u64>,
    /// What a person can do about it.
    pub nvml_remedy: Option<&'static str>,
    /// What is known of the driver: `driver`, `pids`, and where it is so `confidential`, `protected`, `wsl`, `long_records`.
    pub nvml_facts: BTreeMap<String, String>,
    /// GPUs that are there and cannot be named: NVML's index, why, and what can be done.
    pub unnamed: Vec<(u16, String, Option<&'static str>)>,
    /// Faults are not heard of: a call for events did not return.
    pub no_events: bool,
    /// It is closed until then: on request, or because the driver is being unbound from a GPU.
    pub released_until_ns: Option<u64>,
    /// Devices that NVML has shown since the start, in its order.
    pub devices: Vec<Device>,
    /// The kernel's log; absent where it was switched off.
    pub kernel_log: Option<PathBuf>,
    /// Why it cannot be read.
    pub kernel_problem: Option<String>,
    /// Agents that are connected.
    pub agents: usize,
    /// Peers that have not said hello.
    pub agents_waiting: usize,
    /// What else the sources measure about themselves.
    pub numbers: Vec<Number>,
}

impl Health {
    /// Why no device can be read now, if that is so.
    pub(crate) fn nvml_problem(&self) -> Option<&str> {
        if self.nvml_up {
            self.nvml_stalled_since_ns.map(|_| "a call has not returned so far")
        } else {
            Some(&self.nvml_reason)
        }
    }

    /// Whether a device may be one of this machine. While NVML answers, its devices are the only ones: any user's process can name others.
    /// Not where NVML says itself that it does not show all: a GPU without a name, MIG instances that this daemon may not see.
    pub(crate) fn may_have(&self, name: DeviceName) -> bool {
        !self.nvml_up
            || !self.unnamed.is_empty()
            || self
                .devices
                .iter()
                .any(|device| device.name == name || device.details.facts.contains_key("hidden_instances"))
    }
}

/// One device, as NVML shows it.
#[derive(Debug, Clone)]
pub struct Device {
    /// Identity.
    pub name: DeviceName,
    /// NVML's index.
    pub index: u32,
    /// Why there is no fresh reading.
    pub problem: Option<String>,
    /// What else is known of it.
    pub details: Details,
}

/// What helps to understand the numbers of a device.
#[derive(Debug, Clone, Default)]
pub struct Details {
    /// NVML's code for the problem.
    pub code: Option<u32>,
    /// What a person can do about it.
    pub remedy: Option<&'static str>,
    /// Where it is so: `accounting`, `display`, `instance`, `hidden_instances`, `windows`; `addressing` (hmm, ats) and
    /// `numa_node`; `memory_limits`: by tabs, used, soft and hard bytes and path of each control group.
    pub facts: BTreeMap<String, String>,
    /// Events of its health since the daemon's start.
    pub events: Vec<HealthEvent>,
    /// Pids that draw, and pids that MPS names.
    pub drawing: Vec<u32>,
    /// See there.
    pub mps: Vec<u32>,
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
    /// How often, since the daemon's start.
    pub count: u64,
}

/// A metric of a source.
#[derive(Debug, Clone)]
pub struct Number {
    /// Its whole name.
    pub name: &'static str,
    /// What it says.
    pub help: &'static str,
    /// It only grows.
    pub counter: bool,
    /// Now.
    pub value: f64,
}
