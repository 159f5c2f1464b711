//! `gpumemctl doctor [PID]`: findings of the daemon, and those that only its client can make.
//!
//! ```text
//! local_checks            client side: sockets, the agent's library, CUPTI, the shell's variables
//! driver                  the kernel's driver, its files and its libraries
//! daemon_environment      the daemon's surroundings: systemd, namespaces, the port for metrics
//! process                 a process, as far as /proc permits
//! elf                     headers of programs and libraries
//! findings                the findings, as text and JSON
//! bundle                  an archive for support
//! ```
//!
//! It works without a daemon too, because that is when users need it.

mod bundle;
mod daemon_environment;
mod driver;
mod elf;
mod findings;
mod local_checks;
mod process;

use crate::args::Doctor as Args;
use crate::client::{Daemon, agent_alone};
use crate::exit::{self, NotFound, TooOld};
use crate::output::{print, width};
use anyhow::Result;
use findings::{DoctorReport, finding};
use gpumem_model::checks::Check;
use gpumem_model::control::{Doctor, Finding, State};
use std::path::Path;

/// Runs the checks and prints the findings. Returns the exit code.
///
/// # Errors
/// If there is no such process, or standard output fails.
pub(crate) fn run(args: &Args) -> Result<u8> {
    if let Some(pid) = args.pid.filter(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
        return Err(NotFound(format!("pid {pid}: no such process in this pid namespace")).into());
    }
    let told = look(args);
    if args.bundle.is_some() {
        bundle::write(args, &told)?;
        return Ok(exit::OK);
    }
    print(&if args.json { findings::json(&told)? } else { findings::text(&told, width()) })?;
    let is_bad = told.findings.iter().any(|finding| finding.state == State::Bad);
    Ok(if is_bad { exit::SICK } else { exit::OK })
}

fn look(args: &Args) -> DoctorReport {
    let mut findings = Vec::new();
    let found = ask(args, &mut findings);
    let control = found.as_ref().map(|(daemon, _)| daemon.control.clone());
    let (daemon, its_findings) = match found {
        Some((daemon, mut doctor)) => {
            let findings = std::mem::take(&mut doctor.findings);
            (Some((daemon.control, doctor)), findings)
        }
        None => (None, Vec::new()),
    };
    let told = DoctorReport { daemon, findings: Vec::new() };
    findings.extend(local_checks::paths());
    findings.push(local_checks::library());
    findings.extend(local_checks::versions());
    findings.extend(local_checks::environment());
    let root = Path::new("/");
    let first = findings.len();
    let driver = driver::look(root, &mut findings);
    let nvml_answers = its_findings.iter().any(|of| of.id == Check::Nvml.id() && of.state == State::Ok);
    if driver.is_none() && nvml_answers {
        // The driver exists where the daemon runs, but is not visible in this shell's container.
        findings.truncate(first);
    }
    findings.push(local_checks::cupti(driver.as_ref()));
    findings.extend(driver::mps(root));
    daemon_environment::look(&told, &mut findings);
    if let Some(pid) = args.pid {
        let covered = its_findings.iter().any(|finding| {
            finding.id == Check::Process.id() && finding.state == State::Ok
                || finding.id == Check::ProcessBlocked.id()
        });
        process::look(pid, control.as_deref(), covered, &told, &mut findings);
    }
    findings.extend(its_findings);
    findings.sort_by_key(|finding| finding.state);
    DoctorReport { findings, ..told }
}

fn ask(args: &Args, findings: &mut Vec<Finding>) -> Option<(Daemon, Doctor)> {
    const STARTS: &str =
        "gpumemctl run -- COMMAND starts a private one; systemctl start gpumemd the system's";
    let daemon = match Daemon::find(args.socket.as_deref()) {
        Ok(daemon) => daemon,
        Err(unreachable) => {
            let tried: Vec<String> =
                unreachable.tried.iter().map(|(path, why)| format!("{} {why}", path.display())).collect();
            let tried = tried.join("; ");
            findings.push(match agent_alone() {
                // This happens in a container that gets only the agent socket.
                Some(agent) => {
                    let text = format!(
                        "processes can report at {}, but nobody can be asked here: {tried}",
                        agent.display()
                    );
                    let fix = "ask on the node, where its control socket is";
                    finding(Check::Daemon, State::Warn, "daemon", text, Some(fix))
                }
                None => {
                    let text = format!("none answers; looked at: {tried}");
                    finding(Check::Daemon, State::Bad, "daemon", text, Some(STARTS))
                }
            });
            return None;
        }
    };
    findings.push(local_checks::sockets(&daemon));
    let mut told = daemon.doctor(args.pid);
    if let (Some(pid), Err(error)) = (args.pid, &told)
        && error.is::<NotFound>()
    {
        // The daemon's report on itself is still useful.
        let subject = format!("pid {pid}");
        findings.push(finding(Check::Process, State::Unknown, &subject, error.to_string(), None));
        told = daemon.doctor(None);
    }
    let log = "look at its log (journalctl -u gpumemd, or gpumemd.log beside its sockets)";
    match told {
        Ok(doctor) => {
            let own = env!("CARGO_PKG_VERSION");
            if doctor.version != own {
                let text = format!("gpumemd is {}, gpumemctl is {own}", doctor.version);
                let fix = "restart gpumemd after an update (systemctl restart gpumemd), or call the gpumemctl beside it";
                findings.push(finding(Check::DaemonVersion, State::Warn, "daemon", text, Some(fix)));
            }
            let text =
                format!("gpumemd {} pid {} at {}", doctor.version, doctor.pid, daemon.control.display());
            findings.push(finding(Check::Daemon, State::Ok, "daemon", text, None));
            Some((daemon, doctor))
        }
        Err(error) => {
            let (check, fix) = match error.is::<TooOld>() {
                true => {
                    (Check::DaemonVersion, "restart gpumemd after an update, or call the gpumemctl beside it")
                }
                false => (Check::Daemon, log),
            };
            findings.push(finding(check, State::Bad, "daemon", format!("{error:#}"), Some(fix)));
            None
        }
    }
}
