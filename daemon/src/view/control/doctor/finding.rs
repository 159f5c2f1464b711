//! Creates findings of `doctor`, and the texts that several checks share.

use crate::nvml_status::DeviceStatus;
use crate::view::Health;
use gpumem_ledger::QuotaExceeded;
use gpumem_model::checks::Check;
use gpumem_model::control::{Finding, State};
use gpumem_wire::Absence;

pub(super) fn finding(
    check: Check,
    state: State,
    subject: impl Into<String>,
    text: impl Into<String>,
    fix: Option<&str>,
) -> Finding {
    let id = check.id().to_owned();
    Finding { id, state, subject: subject.into(), text: text.into(), fix: fix.map(str::to_owned) }
}

pub(super) struct Findings<'a> {
    pub subject: String,
    pub out: &'a mut Vec<Finding>,
}

impl Findings<'_> {
    pub(super) fn add(&mut self, check: Check, state: State, text: impl Into<String>, fix: Option<&str>) {
        self.out.push(finding(check, state, self.subject.as_str(), text, fix));
    }
}

pub(super) fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

/// Returns a text on the limit that a process has reached, and the configuration key of the limit.
pub(super) fn limit(full: QuotaExceeded) -> (&'static str, &'static str) {
    match full {
        QuotaExceeded::Rows => {
            ("it has reached its limit of live allocations and blocks", "agent.rows_per_process")
        }
        QuotaExceeded::User => (
            "its user's processes have used up their share of the daemon's memory",
            "agent.memory_mib_per_uid",
        ),
        QuotaExceeded::All => ("the daemon's memory for records is used up", "agent.memory_mib"),
    }
}

const SEE_GPU: &str = "see the finding about the GPU";

pub(super) fn has(device: &DeviceStatus, fact: &str) -> bool {
    device.facts.contains_key(fact)
}

pub(super) fn is_windows(health: &Health, device: Option<&DeviceStatus>) -> bool {
    let of = |device: &DeviceStatus| has(device, "windows");
    health.nvml.facts.contains_key("wsl") || device.map_or_else(|| health.nvml.devices.iter().any(of), of)
}

/// Returns why NVML reports no bytes of a process, and the remedy.
pub(super) fn why_absent(
    absence: Absence,
    health: &Health,
    device: Option<&DeviceStatus>,
) -> (&'static str, Option<&'static str>) {
    match absence {
        Absence::NotAvailable if is_windows(health, device) => {
            ("this is WSL, and Windows does not report bytes of processes", None)
        }
        Absence::NotAvailable => (
            "the driver reports them as not available (WSL, some vGPU and MIG set-ups)",
            Some("start processes with `gpumemctl run -- ...`: tracked bytes are known"),
        ),
        Absence::NotListed => (
            "NVML's lists do not have it: it has no context on the GPU (any more), its memory was moved to the host \
                 by a checkpoint \
             (cuda-checkpoint), or it is an MPS client of a GPU before Volta, whose memory counts as the server's",
            None,
        ),
        Absence::NoPermission => (
            "gpumemd may not list the processes of its GPU",
            Some("see the finding about the GPU: device files, or MIG's monitor capability"),
        ),
        Absence::WrongNamespace => (
            "the driver confuses PID namespaces: its value may be another process's",
            Some("run gpumemd in the host's PID namespace, or update the driver to 565.57.01 or later"),
        ),
        Absence::GpuLost => ("its GPU is lost, or waits for a reset", Some(SEE_GPU)),
        Absence::Timeout => ("the driver does not answer for its GPU", Some(SEE_GPU)),
        Absence::Impossible => {
            ("the driver's value was refused because it exceeds the size of the GPU", Some(SEE_GPU))
        }
        Absence::NotSupported => ("its GPU or driver has no process lists", None),
        _ => ("NVML's last list failed", Some(SEE_GPU)),
    }
}
