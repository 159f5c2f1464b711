//! Health of the sources as views show it.

use crate::nvml_status::NvmlStatus;
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
