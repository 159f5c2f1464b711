//! The findings of `doctor`, as text and JSON.

use gpumem_model::checks::Check;
use gpumem_model::control::{Doctor, Finding, State};
use gpumem_model::units::plural;
use gpumem_report::table::{Align, Table, pad, width};
use gpumem_report::text::{escape, wrapped};
use std::path::PathBuf;

#[derive(Debug)]
pub(crate) struct DoctorReport {
    /// The daemon's control socket, and the daemon's report on itself, without its findings.
    pub daemon: Option<(PathBuf, Doctor)>,
    pub findings: Vec<Finding>,
}

impl DoctorReport {
    /// Returns a fact that the daemon reports on itself, such as `store`.
    pub(super) fn fact(&self, name: &str) -> Option<&str> {
        let (_, doctor) = self.daemon.as_ref()?;
        doctor.facts.iter().find(|(fact, _)| fact == name).map(|(_, value)| value.as_str())
    }

    /// Returns the numbers of findings that are bad, warnings, unknown and ok.
    fn counts(&self) -> [usize; 4] {
        [State::Bad, State::Warn, State::Unknown, State::Ok]
            .map(|state| self.findings.iter().filter(|finding| finding.state == state).count())
    }
}

/// Makes a finding. `subject` is the thing that was checked, `fix` a remedy; empty if none is needed.
pub(super) fn finding(
    check: Check,
    state: State,
    subject: &str,
    text: impl Into<String>,
    fix: &str,
) -> Finding {
    let fix = Some(fix.to_owned()).filter(|fix| !fix.is_empty());
    Finding { id: check.id().to_owned(), state, subject: subject.into(), text: text.into(), fix }
}

/// Returns the report as text. `terminal` is the width of the terminal; `None` for a pipe.
pub(super) fn text(report: &DoctorReport, terminal: Option<usize>) -> String {
    let mut lines = Vec::new();
    if let Some((control, doctor)) = &report.daemon {
        let (version, pid, up) = (escape(&doctor.version), doctor.pid, duration(doctor.uptime_s));
        lines.push(format!("gpumemd {version} pid {pid}, up {up}, at {}", control.display()));
        // Clock and namespaces are meant for programs, and are in the JSON.
        let facts = doctor.facts.iter();
        let facts = facts.filter(|(name, _)| name != "clock" && !name.ends_with("namespace"));
        let mut table = Table::of_numbers(1, 1);
        facts.for_each(|(name, value)| table.row_with_note([escape(name)], &escape(value)));
        lines.extend(table.lines().iter().map(|line| format!("  {line}")));
        lines.push(String::new());
    }
    lines.extend(findings(&report.findings, terminal));
    let [bad, warn, unknown, ok] = report.counts();
    let unknown = if unknown == 0 { String::new() } else { format!(", {unknown} unknown") };
    lines.push(format!("{bad} bad, {}{unknown}, {ok} ok", plural(warn as u64, "warning")));
    lines.join("\n") + "\n"
}

/// Returns for each finding lines with state, id and sentence, and the remedy below.
fn findings(findings: &[Finding], terminal: Option<usize>) -> Vec<String> {
    let widest = findings.iter().map(|finding| width(&escape(&finding.id))).max().unwrap_or(0);
    let indent = " ".repeat(9 + widest + 2);
    // On a narrow terminal the sentence starts on its own line.
    let is_narrow = terminal.is_some_and(|width| width < indent.len() + 40);
    let indent = if is_narrow { " ".repeat(9) } else { indent };
    let mut lines = Vec::new();
    for finding in findings {
        let state = match finding.state {
            State::Bad => "BAD      ",
            State::Warn => "warn     ",
            State::Unknown => "unknown  ",
            State::Ok => "ok       ",
        };
        // The subject is omitted if the id contains it.
        let subject = match finding.id.starts_with(finding.subject.as_str()) {
            true => String::new(),
            false => format!("{}: ", finding.subject),
        };
        let mut first = format!("{state}{}  ", pad(&escape(&finding.id), widest, Align::Left));
        if is_narrow {
            lines.push(first.trim_end().to_owned());
            first.clone_from(&indent);
        }
        let room = terminal.map(|width| width.saturating_sub(indent.len()));
        let fix = finding.fix.as_ref().map(|fix| format!("-> {fix}"));
        for text in [Some(format!("{subject}{}", finding.text)), fix].into_iter().flatten() {
            for line in wrapped(&text, room) {
                lines.push(format!("{first}{line}").trim_end().to_owned());
                first.clone_from(&indent);
            }
        }
    }
    lines
}

pub(super) fn json(report: &DoctorReport) -> String {
    let [bad, warn, unknown, ok] = report.counts();
    let document = serde_json::json!({
        "schema": "gpumem.doctor",
        "version": 2,
        "control": report.daemon.as_ref().map(|(control, _)| control.display().to_string()),
        "daemon": report.daemon.as_ref().map(|(_, doctor)| serde_json::json!({
            "version": doctor.version,
            "pid": doctor.pid,
            "uptime_s": doctor.uptime_s,
            "facts": doctor.facts,
        })),
        "counts": { "bad": bad, "warn": warn, "unknown": unknown, "ok": ok },
        "findings": report.findings,
    });
    gpumem_model::escape::json(&document)
}

fn duration(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} days", seconds / 86_400),
    }
}
