//! How the daemon is, and what to do about it.

mod gpus;

use super::{Refused, coverage, number, only};
use crate::access::Viewer;
use crate::clock;
use crate::stats::Count;
use crate::view::Sight;
use crate::view::health::Health;
use gpumem_ledger::{ProcessView, Snapshot};
use gpumem_wire::Absence;
use gpumem_wire::control::{Doctor, Finding, Level};
use hyper::StatusCode;

pub(super) fn finding(
    level: Level,
    subject: impl Into<String>,
    text: impl Into<String>,
    remedy: Option<&str>,
) -> Finding {
    Finding { level, subject: subject.into(), text: text.into(), remedy: remedy.map(str::to_owned) }
}

pub(super) fn doctor(sight: &Sight, viewer: Viewer, query: &str) -> Result<Doctor, Refused> {
    only(query, &["pid"])?;
    let pid = number(query, "pid")?;
    let published = sight.board.read();
    let health = sight.sources.health();
    let now_ns = clock::now_ns();
    let mut findings = Vec::new();
    let mut facts = Vec::new();
    if let Some(pid) = pid {
        let mut process =
            published.snapshot.processes.iter().filter(|process| u64::from(process.key.pid) == pid);
        let process = process.rfind(|process| viewer.sees(process.facts.uid)).ok_or_else(|| {
            let text = format!(
                "process {pid} uses no GPU that is seen here, has said nothing, or belongs to another user"
            );
            Refused::new(StatusCode::NOT_FOUND, text)
        })?;
        of_bytes(process, &published.snapshot, &health, &mut findings);
        findings.extend(coverage::of_process(process, now_ns));
    }
    match (health.nvml_up, health.released_until_ns) {
        (_, Some(until_ns)) => {
            let left = until_ns.saturating_sub(now_ns) / 1_000_000_000;
            let text = format!("closed on request for {left} more seconds: no used bytes meanwhile");
            findings.push(finding(Level::Degraded, "nvml", text, None));
        }
        (true, None) => findings.push(finding(Level::Good, "nvml", &health.nvml_reason, None)),
        (false, None) => {
            let usual = "check nvidia-smi; without NVML only what agents say is known";
            let remedy = health.nvml_remedy.unwrap_or(usual);
            findings.push(finding(Level::Bad, "nvml", &health.nvml_reason, Some(remedy)));
        }
    }
    gpus::of_driver(&health, &mut findings);
    let asked = gpus::Asked {
        snapshot: &published.snapshot,
        health: &health,
        viewer,
        tenants: sight.shown().tenants,
        sees: gpus::Sees::now(),
    };
    health.devices.iter().for_each(|device| asked.of_device(device, &mut findings));
    findings.extend(of_kernel(&health));
    let store = sight.keeper.status();
    findings.push(match store.reason {
        Some(reason) => {
            let text = format!("{reason}; {} runs wait in memory", store.waiting);
            finding(Level::Bad, "store", text, store.remedy)
        }
        None => finding(Level::Good, "store", store.path.display().to_string(), None),
    });
    if let Some(aside) = &store.set_aside {
        let text = format!("it was damaged, is now {}, and a new one was begun", aside.display());
        findings.push(finding(Level::Degraded, "store", text, Some("look into the file system's log")));
    }
    if store.is_too_large {
        let text = "it is larger than runs.max_size_mib, and all that is in it is of living processes or was imported";
        findings.push(finding(Level::Degraded, "store", text, Some("raise runs.max_size_mib")));
    }
    findings.extend(of_agents(sight));
    findings.sort_by_key(|finding| finding.level);
    facts.push(("devices".to_owned(), published.snapshot.devices.len().to_string()));
    let running = published.snapshot.processes.iter().filter(|process| process.ended.is_none());
    facts.push(("processes".to_owned(), running.count().to_string()));
    facts.push(("agents".to_owned(), health.agents.to_string()));
    facts.push(("store".to_owned(), store.path.display().to_string()));
    Ok(Doctor {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime_s: now_ns.saturating_sub(sight.stats.started_ns) / 1_000_000_000,
        facts,
        findings,
    })
}

/// Whether ends by the kernel and the driver can be told from ends for want of GPU memory.
fn of_kernel(health: &Health) -> Option<Finding> {
    let log = health.kernel_log.as_ref()?.display();
    Some(match &health.kernel_problem {
        None => finding(Level::Good, "kernel log", format!("{log}"), None),
        Some(why) => {
            let text = format!(
                "{log}: {why}; who was killed for host memory is known only from control groups, and whose a fault (Xid) was \
                 is not"
            );
            let remedy =
                "let the daemon read it (CAP_SYSLOG), or name a copy: [kernel] log = \"/var/log/kern.log\"";
            finding(Level::Degraded, "kernel log", text, Some(remedy))
        }
    })
}

/// Peers that were turned away, by the counts that a person can do something about.
fn of_agents(sight: &Sight) -> Vec<Finding> {
    let notable = [
        (Count::RefusedFull, "agents found all connections taken", "raise agent.connections"),
        (Count::RefusedUid, "agents found their user's connections taken", "raise agent.connections_per_uid"),
        (
            Count::RefusedVersion,
            "agents speak another version of the protocol",
            "install gpumemd and libgpumem.so of one version",
        ),
        (
            Count::RefusedIdentity,
            "agents could not be told who they are",
            "run the daemon in the host's PID namespace",
        ),
        (Count::DroppedFraming, "agents were dropped for broken packets", "see the daemon's log"),
    ];
    let seen = notable.iter().map(|&(count, text, remedy)| (sight.stats.get(count), text, remedy));
    seen.filter(|(count, ..)| *count > 0)
        .map(|(count, text, remedy)| {
            finding(Level::Degraded, "agents", format!("{count} {text} since the start"), Some(remedy))
        })
        .collect()
}

/// Why NVML tells no bytes of a process.
fn of_bytes(process: &ProcessView, snapshot: &Snapshot, health: &Health, findings: &mut Vec<Finding>) {
    for account in &process.accounts {
        let Some(device) = account.device.and_then(|device| snapshot.devices.get(device)) else { continue };
        let absence = account.latest.as_ref().and_then(|sample| sample.used_bytes.err());
        let is_idle = account.tracked_bytes == 0 && absence == Some(Absence::NotListed);
        let Some(absence) = absence.filter(|_| !is_idle) else { continue };
        let known = health.devices.iter().find(|known| known.name == device.name);
        let (why, remedy) = gpus::why_absent(absence, health, known);
        let text = format!("its used bytes on {} are not known: {why}", device.name);
        findings.push(finding(Level::Degraded, format!("process {}", process.key.pid), text, remedy));
    }
}
