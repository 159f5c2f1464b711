//! How the sources are, as views tell it.

use gpumem_ledger::DeviceName;

/// All sources.
#[derive(Debug, Clone, Default)]
pub struct Health {
    /// NVML answers.
    pub nvml_up: bool,
    /// Why not, or which library and driver.
    pub nvml_reason: String,
    /// It is closed on request until then.
    pub released_until_ns: Option<u64>,
    /// Devices that NVML has shown since the start, in its order.
    pub devices: Vec<Device>,
    /// Agents that are connected.
    pub agents: usize,
    /// Peers that have not said hello.
    pub agents_waiting: usize,
    /// What else the sources measure about themselves.
    pub numbers: Vec<Number>,
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
