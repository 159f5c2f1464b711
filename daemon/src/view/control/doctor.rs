//! Makes the findings of `gpumemctl doctor` that the daemon knows, each with its remedy.
//!
//! ```text
//! coverage   how complete the data of one process is
//! gpus       the driver, each device, processes without bytes
//! processes  number of processes whose data is incomplete
//! own        the daemon itself: limits that were reached, lost data, paths
//! ```

mod coverage;
mod finding;
mod gpus;
mod own;
mod processes;

use super::request::{check_keys, other_owner, query_number};
use crate::clock;
use crate::os::is_in_host_pid_namespace;
use crate::view::{Health, Refused, ViewContext, Viewer};
use finding::{Findings, finding, mib, why_absent};
use gpumem_ledger::{ClosedSample, ProcessView, Snapshot};
use gpumem_model::checks::Check;
use gpumem_model::control::{Doctor, Finding, State};
use gpumem_report::findings::{Kind, Severity};
use gpumem_wire::Absence;
use hyper::StatusCode;

/// Time (ns) that the driver may need for loading, on a machine with many GPUs or without persistence mode.
const STARTING_NS: u64 = 15_000_000_000;

pub(super) fn doctor(context: &ViewContext, viewer: Viewer, query: &str) -> Result<Doctor, Refused> {
    check_keys(query, &["pid"])?;
    let pid = query_number(query, "pid")?;
    let published = context.reader.read();
    let snapshot = &published.snapshot;
    let health = context.sources.health();
    let now_ns = clock::now_ns();
    let mut findings = Vec::new();
    if let Some(pid) = pid {
        let mut process = snapshot.processes.iter().filter(|process| u64::from(process.key.pid) == pid);
        let process = process.rfind(|process| viewer.sees(process.facts.uid)).ok_or_else(|| {
            let other = u32::try_from(pid).ok().and_then(|pid| other_owner(context, viewer, pid));
            let text = other.unwrap_or_else(|| {
                format!("process {pid} uses no GPU here, has no agent, or belongs to another user")
            });
            Refused::new(StatusCode::NOT_FOUND, text)
        })?;
        check_bytes(process, snapshot, &health, &mut findings);
        coverage::check_process(process, now_ns, &mut findings);
        check_memory(context, process, &mut findings);
    }
    findings.push(nvml_finding(&health, context.stats.started_ns, now_ns));
    gpus::check_driver(&health, &mut findings);
    let tenants = context.shown().tenants;
    let checks = gpus::DeviceChecks {
        snapshot,
        health: &health,
        viewer,
        tenants,
        is_in_host_pid_namespace: is_in_host_pid_namespace(),
    };
    health.nvml.devices.iter().for_each(|device| checks.check(device, &mut findings));
    findings.extend(gpus::accounting_finding(&health));
    findings.extend(kernel_log_finding(&health));
    processes::add_findings(snapshot, viewer, tenants, now_ns, &mut findings);
    own::add_findings(context, &health, &mut findings);
    findings.sort_by_key(|finding| finding.state);
    Ok(Doctor {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime_s: now_ns.saturating_sub(context.stats.started_ns) / 1_000_000_000,
        facts: own::facts(context, snapshot, &health, now_ns),
        findings,
    })
}

fn nvml_finding(health: &Health, started_ns: u64, now_ns: u64) -> Finding {
    let nvml = &health.nvml;
    let reason = nvml.reason().to_owned();
    let (state, text, fix) = match (nvml.released_until_ns, nvml.stalled_since_ns) {
        (Some(until_ns), _) => {
            let left = until_ns.saturating_sub(now_ns) / 1_000_000_000;
            (State::Warn, format!("{reason}: {left} s left, used bytes are unknown meanwhile"), None)
        }
        (None, Some(since_ns)) if nvml.up => {
            let since = now_ns.saturating_sub(since_ns) / 1_000_000_000;
            let text = format!("a call has not returned for {since} s: no GPU is read meanwhile");
            let fix = "check the kernel log for Xid messages (dmesg | grep -e NVRM -e Xid); after nvml.call_timeout_s the process for NVML is replaced, and later the GPU is tried again";
            (State::Bad, text, Some(fix))
        }
        (None, _) if nvml.up => (State::Ok, reason, None),
        // Shortly after the daemon's start, the driver may still be loading.
        (None, _) if nvml.is_starting() && now_ns.saturating_sub(started_ns) < STARTING_NS => {
            (State::Warn, "starting: the driver has not answered yet".to_owned(), None)
        }
        (None, _) => {
            let usual = "check nvidia-smi; without NVML, only values of agents are known";
            (State::Bad, reason, Some(nvml.remedy.unwrap_or(usual)))
        }
    };
    finding(Check::Nvml, state, "nvml", text, fix)
}

/// Returns a finding on whether the kernel's log can be read. Without it, ends caused by the kernel or the driver cannot be
/// distinguished from ends for lack of GPU memory.
fn kernel_log_finding(health: &Health) -> Option<Finding> {
    let log = health.kernel_log.as_ref()?.display();
    let (state, text, fix) = match &health.kernel_problem {
        None => (State::Ok, log.to_string(), None),
        Some(why) => (
            State::Warn,
            format!(
                "{log}: {why}; processes killed for lack of host memory are known only from control groups, and the process of a \
                 fault (Xid) is unknown"
            ),
            Some(
                "allow the daemon to read it (CAP_SYSLOG), or configure a copy: [kernel] log = \"/var/log/kern.log\"",
            ),
        ),
    };
    Some(finding(Check::KernelLog, state, "kernel log", text, fix))
}

/// Returns the used and the lowest tracked bytes of a sample if NVML certainly charges less than the agent tracks.
fn charged_too_little(sample: &ClosedSample) -> Option<(u64, u64)> {
    let (used, (lowest, _)) = (sample.used_bytes.ok()?, sample.tracked_range?);
    let lowest = u64::try_from(lowest).ok()?;
    let is_certain = !sample.torn && !sample.stale && !sample.partial;
    (is_certain && used < lowest).then_some((used, lowest))
}

/// Adds the findings on the memory of a process that `report` has, each with its recommended change.
fn check_memory(context: &ViewContext, process: &ProcessView, findings: &mut Vec<Finding>) {
    let mut out = Findings { subject: format!("process {}", process.key.pid), out: findings };
    // Missing records have checks of their own.
    let live = context.run_writer.findings().of(process.key);
    for (_, found) in live.iter().flat_map(|live| live.iter()).filter(|(_, found)| found.kind != Kind::Losses)
    {
        let state = if found.severity == Severity::Note { State::Ok } else { State::Warn };
        out.add(Check::ProcessMemory, state, found.what.as_str(), found.advice.as_deref());
    }
}

/// Adds findings on why NVML reports no bytes of a process, or fewer than it tracks.
fn check_bytes(process: &ProcessView, snapshot: &Snapshot, health: &Health, findings: &mut Vec<Finding>) {
    let mut out = Findings { subject: format!("process {}", process.key.pid), out: findings };
    for account in &process.accounts {
        let Some(device) = account.device.and_then(|device| snapshot.devices.get(device)) else { continue };
        if let Some((used, tracked)) = account.latest.as_deref().and_then(charged_too_little) {
            let text = format!(
                "NVML charges {} to it on {}, less than its {} tracked bytes: a checkpoint (cuda-checkpoint) moved its memory to \
                 the host, or the driver's value is wrong",
                mib(used),
                device.name,
                mib(tracked)
            );
            out.add(Check::ProcessBytes, State::Warn, text, None);
        }
        let absence = account.latest.as_ref().and_then(|sample| sample.used_bytes.err());
        let is_idle = account.tracked_bytes == 0 && absence == Some(Absence::NotListed);
        let Some(absence) = absence.filter(|_| !is_idle) else { continue };
        let (why, fix) = why_absent(absence, health, health.nvml.device(device.name));
        let text = format!("its used bytes on {} are unknown: {why}", device.name);
        out.add(Check::ProcessBytes, State::Warn, text, fix);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvml_status::{NvmlStatus, STARTING};

    #[test]
    fn nvml_that_is_starting_is_a_fault_after_a_while() {
        let starting = NvmlStatus { reason: STARTING.into(), ..NvmlStatus::default() };
        let of = |nvml: &NvmlStatus| Health { nvml: nvml.clone(), ..Health::default() };
        let state = |nvml: &NvmlStatus, now_ns| nvml_finding(&of(nvml), 5, now_ns).state;
        assert_eq!(state(&starting, 6), State::Warn);
        assert_eq!(state(&starting, 5 + STARTING_NS), State::Bad);
        let broken = NvmlStatus { reason: "nvml: no library".into(), ..NvmlStatus::default() };
        assert_eq!(state(&broken, 6), State::Bad);
    }
}
