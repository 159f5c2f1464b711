//! `gpumemctl` without a command: who holds the GPUs, the findings, and the next commands, in at most 25 lines.

use super::ps::{self, DeviceAmounts};
use super::top::{DEVICE_HEADS, device_cells};
use crate::client::Daemon;
use crate::exit::Unreachable;
use crate::output::{print, width};
use anyhow::Result;
use gpumem_model::control::{ProcessFinding, ProcessRow, Ps};
use gpumem_model::units::{Unit, thousands};
use gpumem_report::table::{Align, Table, cut};
use gpumem_report::text::{command_line, escape, wrapped_to};

/// Maximum number of devices, findings, and processes of one device that are listed.
const DEVICES: usize = 12;
const FINDINGS: usize = 3;
const HOLDERS: usize = 3;
/// Maximum width of a process's command.
const COMMAND: usize = 40;
/// Minimum width of a command beside a finding.
const LEAST_COMMAND: usize = 16;
/// Maximum number of lines of one finding.
const FINDING_LINES: usize = 2;

/// Prints the overview. Without a daemon, prints how to start one.
pub(crate) fn run() -> Result<()> {
    match Daemon::find(None) {
        Ok(daemon) => print(&text(&daemon.ps()?, width())),
        Err(unreachable) => print(&without_daemon(&unreachable)),
    }
}

fn without_daemon(unreachable: &Unreachable) -> String {
    let why = unreachable.tried.first().map(|(path, why)| format!(" ({}: {why})", path.display()));
    let commands = [
        ("gpumemctl run -- python train.py", "run a program and report on it at the end"),
        ("gpumemctl report", "your latest run"),
        ("gpumemctl doctor", "check the installation"),
        ("gpumemctl --help", "all commands"),
    ];
    let lines = commands.iter().map(|(command, purpose)| format!("  {command:34}{purpose}\n"));
    format!("no daemon answers{}\n{}", escape(&why.unwrap_or_default()), lines.collect::<String>())
}

/// Returns a finding as a line that begins with its GPU and process.
pub(super) fn finding_line(ps: &Ps, finding: &ProcessFinding, width: Option<usize>) -> String {
    let is_its = |row: &&ProcessRow| {
        row.pid == finding.pid && finding.device.is_none_or(|device| row.device == device)
    };
    let row = ps.processes.iter().find(is_its);
    // In a narrow terminal the finding needs the columns.
    let room = width.map_or(COMMAND, |width| (width * 3 / 10).min(COMMAND));
    let command = row
        .and_then(|row| row.command.as_deref())
        .filter(|_| room >= LEAST_COMMAND)
        .map(|command| command_line(command, room));
    let command = command.map(|command| format!(" {command}")).unwrap_or_default();
    let device = finding.device.and_then(|device| ps.devices.get(device));
    let device = device.map(|device| format!("GPU {} ", device.index)).unwrap_or_default();
    let text = escape(&finding.text);
    format!("{device}pid {}{command}: {text}", finding.pid)
}

/// Returns whether a finding needs action.
pub(super) fn is_problem(finding: &ProcessFinding) -> bool {
    finding.severity != "note"
}

fn text(ps: &Ps, terminal: Option<usize>) -> String {
    let mut lines = Vec::new();
    if ps.devices.is_empty() {
        lines.push(ps::NO_DEVICE.to_owned());
    }
    lines.extend(devices(ps, terminal));
    lines.extend(ps::claims_line(&ps.claims));
    lines.push(String::new());
    for finding in ps.findings.iter().take(FINDINGS) {
        lines.extend(wrapped_to(&finding_line(ps, finding, terminal), terminal, FINDING_LINES));
    }
    if ps.findings.len() > FINDINGS {
        let more = ps.findings.len() - FINDINGS;
        lines.push(format!("{} more findings: gpumemctl ps --json", thousands(more as u64)));
    }
    lines.extend(verdict(ps));
    lines.push(next(ps));
    lines.join("\n") + "\n"
}

/// Returns a row for each device with its largest processes.
fn devices(ps: &Ps, terminal: Option<usize>) -> Vec<String> {
    if ps.devices.is_empty() {
        return Vec::new();
    }
    let unit = ps::unit(ps);
    let rows: Vec<[String; 7]> =
        (0..ps.devices.len().min(DEVICES)).map(|index| device_cells(ps, index, unit)).collect();
    // Figures that NVML has for no device get no column.
    let filled: Vec<usize> =
        (0..7).filter(|column| rows.iter().any(|cells| !cells[*column].is_empty())).collect();
    let align = |column: &usize| if *column < 2 { Align::Left } else { Align::Right };
    let mut table = Table::new(filled.iter().map(align).collect::<Vec<_>>());
    let heads = filled.iter().map(|column| DEVICE_HEADS[*column]);
    table.row_with_note(heads, &format!("{}, largest processes", unit.name));
    for (index, cells) in rows.iter().enumerate() {
        table.row_with_note(filled.iter().map(|column| cells[*column].clone()), &holders(ps, index, unit));
    }
    let columns = terminal.map_or(usize::MAX, |terminal| table.width().max(terminal));
    let mut lines: Vec<String> = table.lines().iter().map(|line| cut(line, columns).to_owned()).collect();
    if ps.devices.len() > DEVICES {
        lines.push(format!("{} more GPUs: gpumemctl ps", ps.devices.len() - DEVICES));
    }
    lines
}

/// Returns the processes that hold most of a device, with their amounts; or why that is unknown.
fn holders(ps: &Ps, index: usize, unit: Unit) -> String {
    if let Some(warning) = ps::reading_warning(&ps.devices[index]) {
        return warning;
    }
    let processes = DeviceAmounts::of(ps, index, unit).processes;
    let name = |(row, used): &(usize, Option<i64>)| {
        let process = &ps.processes[*row];
        let command = process.command.as_deref().map(|command| command_line(command, COMMAND));
        let name = command.or_else(|| process.user.as_deref().map(escape)).unwrap_or_else(|| "-".to_owned());
        let used = used.map_or("-".to_owned(), |steps| unit.print(steps));
        if process.pid == 0 {
            format!("{name}: {used}")
        } else {
            format!("{name} (pid {}): {used}", process.pid)
        }
    };
    let mut names: Vec<String> = processes.iter().take(HOLDERS).map(name).collect();
    if processes.len() > HOLDERS {
        names.push(format!("{} more", processes.len() - HOLDERS));
    }
    if names.is_empty() { "no process".to_owned() } else { names.join(", ") }
}

/// Returns a line on the processes about which there are no findings: whether they were examined.
fn verdict(ps: &Ps) -> Option<String> {
    let mut pids: Vec<(u32, bool)> = ps
        .processes
        .iter()
        .map(|row| (row.pid, row.tracked_bytes.is_some()))
        .filter(|(pid, _)| *pid != 0)
        .collect();
    pids.sort_unstable();
    pids.dedup();
    let unknown = pids.iter().filter(|(_, is_known)| !is_known).count();
    let known = pids.len() - unknown;
    let count = |count: usize| super::report::processes(count);
    let mut parts = Vec::new();
    if ps.findings.is_empty() && known > 0 {
        parts.push(format!("no problem found in {}", count(known)));
    }
    if unknown > 0 {
        let verb = if unknown == 1 { "has" } else { "have" };
        parts.push(format!(
            "{} {verb} no agent, so only the sum is known (why: gpumemctl doctor)",
            count(unknown)
        ));
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// Returns the next commands: the report on the process with the most important finding, else on the largest process.
fn next(ps: &Ps) -> String {
    let of_finding = ps.findings.iter().find(|finding| is_problem(finding)).map(|finding| finding.pid);
    let known = ps.processes.iter().filter(|row| row.tracked_bytes.is_some() && row.pid != 0);
    let largest = known.max_by_key(|row| row.used_bytes).map(|row| row.pid);
    let report = of_finding.or(largest).map_or_else(|| "report".to_owned(), |pid| format!("report {pid}"));
    format!("next: gpumemctl {report} | top | runs | run -- COMMAND | --help")
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_model::control::DeviceRow;

    const MIB: u64 = 1 << 20;

    fn machine(devices: usize, of_each: usize) -> Ps {
        let device = |index| DeviceRow {
            index,
            total_bytes: Some(80_000 * MIB),
            used_bytes: Some(70_000 * MIB),
            free_bytes: Some(10_000 * MIB),
            ..DeviceRow::default()
        };
        let process = |number: usize| ProcessRow {
            pid: 100 + number as u32,
            device: number / of_each,
            used_bytes: Some((5_000 - number as u64) * MIB),
            tracked_bytes: Some(1),
            command: Some("/usr/bin/python /home/a/train.py --lr 1".into()),
            ..ProcessRow::default()
        };
        Ps {
            devices: (0..devices as u32).map(device).collect(),
            processes: (0..devices * of_each).map(process).collect(),
            ..Ps::default()
        }
    }

    fn leak(pid: u32) -> ProcessFinding {
        let text = "the GPU is full in 41 min: activations of decoder: +64.0 MiB per step".to_owned();
        ProcessFinding { pid, device: Some(0), severity: "warning".into(), text, ..ProcessFinding::default() }
    }

    #[test]
    fn holders_findings_and_next_commands_are_listed() {
        let mut ps = machine(1, 1);
        let healthy = text(&ps, None);
        assert!(healthy.contains("train.py --lr 1 (pid 100): 5,000"), "{healthy}");
        assert!(healthy.contains("\nno problem found in 1 process\n"), "{healthy}");
        ps.findings.push(leak(100));
        let leaking = text(&ps, None);
        assert!(
            leaking.contains("\nGPU 0 pid 100 python train.py --lr 1: the GPU is full in 41 min: "),
            "{leaking}"
        );
        assert!(leaking.ends_with("\nnext: gpumemctl report 100 | top | runs | run -- COMMAND | --help\n"));
        assert!(!leaking.contains("no problem"), "{leaking}");
        ps.processes[0].tracked_bytes = None;
        ps.findings.clear();
        assert!(text(&ps, None).contains("\n1 process has no agent, "));
    }

    #[test]
    fn a_narrow_terminal_has_the_finding_and_no_piece_of_the_command() {
        let mut ps = machine(1, 1);
        ps.processes[0].command = Some("/usr/bin/python train.py ".to_owned() + &"--flag ".repeat(20));
        let line = |width| finding_line(&ps, &leak(100), width);
        assert!(
            line(Some(43)).starts_with("GPU 0 pid 100: the GPU is full in 41 min: "),
            "{}",
            line(Some(43))
        );
        assert!(line(Some(80)).starts_with("GPU 0 pid 100 python t"), "{}", line(Some(80)));
        assert!(line(Some(80)).len() + 16 <= line(None).len(), "{}", line(Some(80)));
    }

    #[test]
    fn large_nodes_fit_on_25_lines() {
        let mut ps = machine(64, 8);
        ps.findings = (100..150).map(leak).collect();
        for terminal in [None, Some(40), Some(200)] {
            let text = text(&ps, terminal);
            assert!(text.lines().count() <= 25, "{text}");
        }
        assert!(text(&Ps::default(), None).starts_with("no device: "));
    }
}
