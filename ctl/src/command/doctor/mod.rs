//! `gpumemctl doctor [PID]`: findings of the daemon, and those that only its client can make.
//!
//! ```text
//! local_checks            checks of sockets, the agent's library, CUPTI, the shell's variables
//! driver                  checks of the kernel's driver, its files and its libraries
//! daemon_environment      checks of the daemon's systemd units, namespaces, and port for metrics
//! process                 checks of one process by its files in /proc
//! elf                     headers of programs and libraries
//! findings                the findings, as text and JSON
//! bundle                  an archive for support
//! ```
//!
//! All checks also work without a daemon, because users need them most when no daemon answers.

mod bundle;
mod daemon_environment;
mod driver;
mod elf;
mod findings;
mod local_checks;
mod process;

use crate::args::Doctor as Args;
use crate::client::{Daemon, agent_socket};
use crate::exit::{self, Kind};
use crate::output::{print, width};
use anyhow::Result;
use findings::{DoctorReport, finding};
use gpumem_model::checks::Check;
use gpumem_model::control::{Doctor, Finding, State};
use std::path::{Path, PathBuf};

/// Runs the checks and prints the findings. Returns the exit code.
pub(crate) fn run(args: &Args) -> Result<u8> {
    if let Some(pid) = args.pid.filter(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
        return Err(Kind::NotFound.error(format!("pid {pid}: no such process in this pid namespace")));
    }
    let report = check(args);
    if args.bundle.is_some() {
        bundle::write(args, &report)?;
        return Ok(exit::OK);
    }
    print(&if args.json { findings::json(&report) } else { findings::text(&report, width()) })?;
    let is_bad = report.findings.iter().any(|finding| finding.state == State::Bad);
    Ok(if is_bad { exit::CHECK_FAILED } else { exit::OK })
}

/// Runs all checks and returns the findings, the worst first.
fn check(args: &Args) -> DoctorReport {
    let mut findings = Vec::new();
    let mut daemon = daemon_reply(args, &mut findings);
    let its_findings = daemon.as_mut().map(|(_, doctor)| std::mem::take(&mut doctor.findings));
    let its_findings = its_findings.unwrap_or_default();
    let report = DoctorReport { daemon, findings: Vec::new() };
    findings.extend(local_checks::paths());
    findings.push(local_checks::library());
    findings.extend(local_checks::versions());
    findings.extend(local_checks::environment());
    let root = Path::new("/");
    let first = findings.len();
    let driver = driver::check(root, &mut findings);
    let is_nvml_ok = |finding: &Finding| finding.id == Check::Nvml.id() && finding.state == State::Ok;
    if driver.is_none() && its_findings.iter().any(is_nvml_ok) {
        // The daemon can use the driver, so only this shell's container hides the driver's files. Findings on them are dropped.
        findings.truncate(first);
    }
    findings.push(local_checks::cupti(driver.as_ref()));
    findings.extend(driver::mps(root));
    daemon_environment::check(&report, &mut findings);
    if let Some(pid) = args.pid {
        let is_covered = |finding: &Finding| {
            finding.id == Check::Process.id() && finding.state == State::Ok
                || finding.id == Check::ProcessBlocked.id()
        };
        let covered = its_findings.iter().any(is_covered);
        process::check(pid, covered, &report, &mut findings);
    }
    findings.extend(its_findings);
    findings.sort_by_key(|finding| finding.state);
    DoctorReport { findings, ..report }
}

/// Finds a daemon and requests its report. Returns its control socket and the report; `None` if it does not reply.
fn daemon_reply(args: &Args, findings: &mut Vec<Finding>) -> Option<(PathBuf, Doctor)> {
    const START: &str = "gpumemctl run -- COMMAND starts a private one; systemctl start gpumemd the system's";
    let daemon = match Daemon::find(args.socket.as_deref()) {
        Ok(daemon) => daemon,
        Err(unreachable) => {
            let tried: Vec<String> =
                unreachable.tried.iter().map(|(path, why)| format!("{} {why}", path.display())).collect();
            let tried = tried.join("; ");
            let (state, text, fix) = match agent_socket() {
                // A container may get only the agent socket, without the control socket.
                Some(agent) => (
                    State::Warn,
                    format!(
                        "processes can report at {}, but no daemon answers here: {tried}",
                        agent.display()
                    ),
                    "run gpumemctl on the node, where the daemon's control socket is",
                ),
                None => (State::Bad, format!("no daemon answers; tried: {tried}"), START),
            };
            findings.push(finding(Check::Daemon, state, "daemon", text, fix));
            return None;
        }
    };
    findings.push(local_checks::sockets(&daemon));
    let mut reply = daemon.doctor(args.pid);
    if let (Some(pid), Err(error)) = (args.pid, &reply)
        && Kind::NotFound.matches(error)
    {
        // The daemon does not know the process; its report on itself is still useful.
        findings.push(finding(Check::Process, State::Unknown, &format!("pid {pid}"), error.to_string(), ""));
        reply = daemon.doctor(None);
    }
    let mut add = |check, state, text: String, fix| findings.push(finding(check, state, "daemon", text, fix));
    match reply {
        Ok(doctor) => {
            let (version, own) = (&doctor.version, env!("CARGO_PKG_VERSION"));
            if version != own {
                let fix = "restart gpumemd after an update (systemctl restart gpumemd), or run the gpumemctl that \
                     is installed with it";
                let text = format!("gpumemd is {version}, gpumemctl is {own}");
                add(Check::DaemonVersion, State::Warn, text, fix);
            }
            let text = format!("gpumemd {version} pid {} at {}", doctor.pid, daemon.socket.path.display());
            add(Check::Daemon, State::Ok, text, "");
            Some((daemon.socket.path, doctor))
        }
        Err(error) => {
            let (check, fix) = match Kind::OtherVersion.matches(&error) {
                true => (
                    Check::DaemonVersion,
                    "restart gpumemd after an update, or run the gpumemctl that is installed \
                         with it",
                ),
                false => {
                    (Check::Daemon, "see its log (journalctl -u gpumemd, or gpumemd.log beside its sockets)")
                }
            };
            add(check, State::Bad, format!("{error:#}"), fix);
            None
        }
    }
}
