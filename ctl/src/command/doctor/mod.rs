//! `gpumemctl doctor [PID]`: what the daemon finds, and what only its client sees.
//!
//! ```text
//! here        this side: sockets, libraries
//! process     one process, as far as /proc lets us look
//! ```
//!
//! It answers without a daemon too; that is when people call it.

mod here;
mod process;

use crate::args::Doctor as Args;
use crate::client::Daemon;
use crate::exit::NotFound;
use crate::output::{print, width};
use anyhow::Result;
use gpumem_runs::report::text::{clean, wrapped};
use gpumem_wire::control::{Doctor, Finding, Level};
use std::path::Path;

/// Looks and prints, the worst first.
pub fn run(args: &Args) -> Result<()> {
    if let Some(pid) = args.pid.filter(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
        return Err(NotFound(format!("pid {pid}: no such process in this pid namespace")).into());
    }
    let mut findings = Vec::new();
    let daemon = ask(args, &mut findings);
    findings.extend(here::libraries());
    let is_up = |finding: &Finding| finding.subject == "nvml" && finding.level == Level::Good;
    if !daemon.as_ref().is_some_and(|(_, doctor)| doctor.findings.iter().any(is_up)) {
        findings.push(here::driver());
    }
    if let Some(pid) = args.pid {
        findings.extend(process::look(pid));
    }
    if let Some((_, doctor)) = &daemon {
        findings.extend(doctor.findings.iter().cloned());
    }
    findings.sort_by_key(|finding| finding.level);
    print(&if args.json {
        json(daemon.as_ref(), &findings)?
    } else {
        text(daemon.as_ref(), &findings, width())
    })
}

fn ask(args: &Args, findings: &mut Vec<Finding>) -> Option<(Daemon, Doctor)> {
    let daemon = match Daemon::find(args.socket.as_deref()) {
        Ok(daemon) => daemon,
        Err(unreachable) => {
            let tried: Vec<String> =
                unreachable.tried.iter().map(|(path, why)| format!("{} {why}", path.display())).collect();
            findings.push(Finding {
                level: Level::Bad,
                subject: "daemon".into(),
                text: format!("none answers; looked at: {}", tried.join("; ")),
                remedy: Some(
                    "gpumemctl run -- COMMAND starts a private one; systemctl start gpumemd the system's"
                        .into(),
                ),
            });
            return None;
        }
    };
    findings.push(here::sockets(&daemon));
    let mut told = daemon.doctor(args.pid);
    if let (Some(pid), Err(error)) = (args.pid, &told)
        && error.is::<NotFound>()
    {
        // It has something to say of itself all the same.
        findings.push(here::finding(Level::Degraded, &format!("pid {pid}"), error.to_string(), None));
        told = daemon.doctor(None);
    }
    match told {
        Ok(doctor) => Some((daemon, doctor)),
        Err(error) => {
            findings.push(Finding {
                level: Level::Bad,
                subject: "daemon".into(),
                text: format!("{error:#}"),
                remedy: Some(
                    "look at its log (journalctl -u gpumemd, or gpumemd.log beside its sockets)".into(),
                ),
            });
            None
        }
    }
}

fn text(daemon: Option<&(Daemon, Doctor)>, findings: &[Finding], terminal: Option<usize>) -> String {
    let mut lines = Vec::new();
    if let Some((daemon, doctor)) = daemon {
        lines.push(format!(
            "gpumemd {} pid {}, up {}, at {}",
            clean(&doctor.version),
            doctor.pid,
            duration(doctor.uptime_s),
            daemon.control.display()
        ));
        let widest = doctor.facts.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        lines.extend(
            doctor.facts.iter().map(|(name, value)| format!("  {:<widest$}  {}", clean(name), clean(value))),
        );
        lines.push(String::new());
    }
    const INDENT: &str = "         ";
    let mut told = |first: &str, text: &str| {
        let width = terminal.map(|width| width.saturating_sub(INDENT.len()));
        for (index, line) in wrapped(text, width).iter().enumerate() {
            lines.push(format!("{}{line}", if index == 0 { first } else { INDENT }));
        }
    };
    for finding in findings {
        let level = match finding.level {
            Level::Bad => "BAD      ",
            Level::Degraded => "degraded ",
            Level::Good => "ok       ",
        };
        told(level, &format!("{}: {}", finding.subject, finding.text));
        if let Some(remedy) = &finding.remedy {
            told(INDENT, &format!("-> {remedy}"));
        }
    }
    let count = |level: Level| findings.iter().filter(|finding| finding.level == level).count();
    let (bad, degraded, good) = (count(Level::Bad), count(Level::Degraded), count(Level::Good));
    lines.push(format!("{bad} bad, {degraded} degraded, {good} ok"));
    lines.join("\n") + "\n"
}

fn json(daemon: Option<&(Daemon, Doctor)>, findings: &[Finding]) -> Result<String> {
    let document = serde_json::json!({
        "schema": "gpumem.doctor",
        "version": 1,
        "control": daemon.map(|(daemon, _)| daemon.control.display().to_string()),
        "daemon": daemon.map(|(_, doctor)| serde_json::json!({
            "version": doctor.version,
            "pid": doctor.pid,
            "uptime_s": doctor.uptime_s,
            "facts": doctor.facts,
        })),
        "findings": findings,
    });
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

fn duration(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} days", seconds / 86_400),
    }
}
