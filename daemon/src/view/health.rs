//! Health of the sources as views show it, and metrics of the NVML source.

use crate::nvml_status::{NvmlCounters, NvmlStatus};
use std::path::PathBuf;

/// Health of all sources.
#[derive(Debug, Clone, Default)]
pub struct Health {
    /// State of NVML and its devices.
    pub nvml: NvmlStatus,
    /// Path of the kernel's log; `None` if disabled.
    pub kernel_log: Option<PathBuf>,
    /// Reason why it cannot be read.
    pub kernel_problem: Option<String>,
    /// Connected agents.
    pub agents: usize,
    /// Connections without a hello so far.
    pub agents_waiting: usize,
}

/// A metric of a source.
#[derive(Debug, Clone)]
pub struct Number {
    /// Full name.
    pub name: &'static str,
    /// HELP text.
    pub help: &'static str,
    /// Whether it only increases.
    pub counter: bool,
    /// Current value.
    pub value: f64,
}

/// Returns metrics about the cost of NVML calls.
pub fn nvml_numbers(counters: &NvmlCounters) -> Vec<Number> {
    let number = |name, help, counter, value| Number { name, help, counter, value };
    vec![
        number(
            "gpumemd_nvml_memory_calls_total",
            "Readings of device memory.",
            true,
            counters.memory_calls as f64,
        ),
        number("gpumemd_nvml_memory_seconds_total", "Time in them.", true, counters.memory_seconds),
        number("gpumemd_nvml_list_calls_total", "Process list calls.", true, counters.list_calls as f64),
        number(
            "gpumemd_nvml_list_seconds_total",
            "Time in them, in which the driver stood still.",
            true,
            counters.list_seconds,
        ),
        number(
            "gpumemd_nvml_list_share_ratio",
            "Share of time in list calls lately.",
            false,
            counters.list_share,
        ),
        number(
            "gpumemd_nvml_lists_deferred_total",
            "Lists put off for the budget.",
            true,
            counters.lists_deferred as f64,
        ),
        number(
            "gpumemd_nvml_failed_calls_total",
            "NVML calls that failed.",
            true,
            counters.failed_calls as f64,
        ),
        number(
            "gpumemd_nvml_refused_values_total",
            "Values of the driver that were not taken, because they are more than the size of the GPU, or of a pid that cannot be.",
            true,
            counters.refused as f64,
        ),
        number(
            "gpumemd_nvml_restarts_total",
            "Pollers started after the first.",
            true,
            counters.restarts as f64,
        ),
        number(
            "gpumemd_nvml_hangs_total",
            "Pollers given up for a call that hung.",
            true,
            counters.hangs as f64,
        ),
    ]
}
