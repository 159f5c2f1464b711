//! Summary of a job that ended, with its verdict, in at most eight lines, for the terminal in which it ran.

use super::{Report, ooms};
use crate::amounts::{apportioned, folded_parts, ranked_parts, sum_of};
use crate::findings::{Findings, text};
use crate::labels::{COMMAND, command_line_of, device_title};
use crate::lines::{count_processes, flags, in_brackets};
use crate::rules::Groupings;
use gpumem_model::escape::escape;
use gpumem_model::run::{Device, Moment, Run, State};
use gpumem_model::time::Times;
use gpumem_model::units::{Unit, plural, signed, thousands};
use std::cmp::Reverse;

/// A run (record of one process on its GPUs) of the ended job.
#[derive(Debug, Clone, Copy)]
pub struct EndedRun<'r> {
    pub id: Option<&'r str>,
    pub run: &'r Run,
}

/// Maximum number of categories shown for each device: (if there is one device, if there are several).
const NAMED: (usize, usize) = (3, 2);
/// Maximum number of devices shown.
const DEVICES: usize = 3;

/// Maximum number of lines of the verdict.
const VERDICTS: usize = 3;

/// Returns at most eight lines; the last one suggests the next command. `job` is the argument of `gpumemctl report` that selects
/// the job.
pub fn brief(ended: &[EndedRun<'_>], job: &str) -> Vec<String> {
    let reports = ended.iter().map(|ended| Report::new(ended.run, Groupings::of_run(ended.run), None));
    let reports: Vec<Report<'_>> = reports.collect();
    let devices =
        reports.iter().flat_map(|report| report.run.devices.iter().map(move |device| (report, device)));
    let mut devices: Vec<(&Report<'_>, &Device)> = devices.collect();
    devices.sort_by_key(|(report, device)| (Reverse(weight(device)), report.run.process.pid, device.ordinal));
    let mut lines = match devices[..] {
        [] => vec!["no GPU memory: CUDA was initialised, but nothing was allocated".to_owned()],
        [(report, device)] => one_device(report, device),
        _ => several_devices(ended.len(), &devices),
    };
    lines.splice(1..1, verdict(&reports));
    let next = match ended {
        [] => return lines,
        [one] => one.id.map_or_else(|| one.run.process.pid.to_string(), escape),
        _ => job.to_owned(),
    };
    let has_oom = ended.iter().any(|ended| ooms(ended.run).any(|(_, oom)| oom.is_out_of_memory()));
    let what = if has_oom { "oom" } else { "report" };
    lines.push(format!("next: gpumemctl {what} {next}"));
    lines
}

/// Returns how memory ran out and the findings, or that there is no problem. In a job with several processes, those with a problem
/// are named.
fn verdict(reports: &[Report<'_>]) -> Vec<String> {
    if let [report] = reports {
        let mut lines = text::lines(report);
        lines.truncate(VERDICTS);
        return lines;
    }
    let found: Vec<(&Report<'_>, Findings)> =
        reports.iter().map(|report| (report, Findings::of(report))).collect();
    let mut lines = Vec::new();
    for (report, conclusions) in found.iter().filter(|(_, found)| text::has_problem(found)) {
        let outcome = text::outcome(report, conclusions);
        let line = outcome.into_iter().chain(text::list(report, conclusions)).next();
        lines.extend(line.map(|line| format!("pid {}: {line}", report.run.process.pid)));
    }
    let more = lines.len().saturating_sub(VERDICTS);
    lines.truncate(VERDICTS);
    if let (Some(last), 1..) = (lines.last_mut(), more) {
        *last += &format!("; {} more with a problem", count_processes(more));
    }
    if lines.is_empty()
        && !found.is_empty()
        && found.iter().all(|(report, found)| !text::list(report, found).is_empty())
    {
        lines.push("no problem found".to_owned());
    }
    lines
}

fn weight(device: &Device) -> i64 {
    device.peak.tracked_bytes.or(device.peak.used_bytes()).unwrap_or(0)
}

fn one_device(report: &Report<'_>, device: &Device) -> Vec<String> {
    let run = report.run;
    let times = Times::of(run);
    let peak = &device.peak;
    let unit = Unit::for_largest(peak.used_bytes().unwrap_or(0).max(weight(device)));
    let (pid, title) = (run.process.pid, device_title(device));
    let command = command_line_of(run, COMMAND);
    let head = format!("{command}  pid {pid}  {title}{}{}", end(run), inexact(run));
    let Some(tracked) = peak.tracked_bytes else {
        let used = device.peak_used.map(|(bytes, _)| signed(bytes)).or(device.last.used_bytes());
        let used = used.map_or("not known".to_owned(), |bytes| unit.amount_with_name(bytes));
        return vec![head, format!("{}; highest value of NVML: {used}", why_untracked(run))];
    };
    let at = times.time(peak.time_ns);
    let parts = composition(report, peak, unit, NAMED.0);
    let gap = match (peak.untrackable_bytes, peak.used_bytes()) {
        (Some(gap), Some(used)) => {
            let near = if peak.gap_distance_ns == 0 { "" } else { "~" };
            let [gap, used] = [gap, used].map(|bytes| unit.amount_with_name(bytes));
            format!("Untrackable {near}{gap}; used (= nvidia-smi) {near}{used}")
        }
        _ => match &device.last.used_absence {
            Some(absence) => format!("Untrackable is unknown: NVML reports {}", escape(absence)),
            None => "Untrackable is unknown: NVML was not read in time".to_owned(),
        },
    };
    if tracked == 0 && peak.amounts.is_empty() {
        return vec![head, "nothing was tracked".to_owned(), gap];
    }
    vec![head, format!("peak of tracked {} at {at}: {parts}", unit.amount_with_name(tracked)), gap]
}

/// Returns the reason why no memory of the process is tracked.
fn why_untracked(run: &Run) -> &'static str {
    match run.coverage.blocked_by {
        Some(_) => "its agent could not attach to CUPTI",
        None => "the process has no agent",
    }
}

fn several_devices(processes: usize, devices: &[(&Report<'_>, &Device)]) -> Vec<String> {
    let mut names: Vec<&str> = devices.iter().map(|(_, device)| device.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let unit = Unit::for_largest(devices.iter().map(|(_, device)| weight(device)).max().unwrap_or(0));
    let more = match devices.len().saturating_sub(DEVICES) {
        0 => String::new(),
        more => format!("; {} smaller are not shown", thousands(more as u64)),
    };
    let (processes, gpus) = (count_processes(processes), plural(names.len() as u64, "GPU"));
    let mut lines = vec![format!("{processes} on {gpus}, peaks of tracked in {}{more}", unit.name)];
    lines.extend(devices.iter().take(DEVICES).map(|(report, device)| {
        let run = report.run;
        let rank =
            run.process.claims.get("rank").map(|rank| format!(" rank {}", escape(rank))).unwrap_or_default();
        let peak = &device.peak;
        let what = match peak.tracked_bytes {
            None => why_untracked(run).to_owned(),
            Some(tracked) => {
                let parts = composition(report, peak, unit, NAMED.1);
                let gap = peak.untrackable_bytes.map_or("not known".to_owned(), |bytes| unit.amount(bytes));
                format!("{}: {parts}; Untrackable {gap}", unit.amount(tracked))
            }
        };
        format!("GPU {} pid {}{rank}{}  {what}", device.ordinal, run.process.pid, inexact(run))
    }));
    lines
}

/// Returns the largest categories, the sum of the others, and idle memory, as text that adds up to `tracked` as printed.
fn composition(report: &Report<'_>, moment: &Moment, unit: Unit, named: usize) -> String {
    let pool_idle = report.composition(moment, report.by).pool_idle;
    let parts = ranked_parts(report.busy_parts(moment));
    let mut parts = folded_parts(parts, named + 1, |number| format!("{number} smaller"));
    if pool_idle != 0 {
        parts.push(("idle".to_owned(), pool_idle));
    }
    let parts = apportioned(unit, unit.round(sum_of(&parts)), &parts);
    let parts: Vec<String> =
        parts.iter().map(|(name, amount)| format!("{} {amount}", escape(name))).collect();
    parts.join(" + ")
}

fn end(run: &Run) -> String {
    match run.state {
        State::Closed { status: Some(status), .. } => format!("  {}", crate::labels::exit(status)),
        State::Closed { status: None, .. } => String::new(),
        State::Open => "  still running".to_owned(),
        State::Interrupted => "  not watched to its end".to_owned(),
        State::Rolled { .. } => "  continues in the next part".to_owned(),
    }
}

/// Returns the flags (such as lost records) that explain why the numbers are too low.
fn inexact(run: &Run) -> String {
    let coverage = &run.coverage;
    let flags = flags([
        (coverage.late, "late"),
        (coverage.blocked_by.is_some(), "blocked"),
        (coverage.partial_state || coverage.partial_history, "partial"),
    ]);
    if flags.is_empty() { flags } else { format!(" {}", in_brackets(&flags)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_import::read_file;
    use gpumem_model::run::{Cell, Class};
    use std::path::Path;

    fn run() -> Run {
        let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        read_file(&log, None).expect("a log").remove(0)
    }

    fn told(runs: &[&Run]) -> Vec<String> {
        let ended: Vec<EndedRun<'_>> = runs.iter().map(|run| EndedRun { id: None, run }).collect();
        brief(&ended, "--job j1")
    }

    /// Checks that the amounts in a line add up to the total before the colon.
    fn adds_up(line: &str, total: &str) {
        let parts = line.split(": ").nth(1).expect("parts").split(';').next().expect("parts");
        let tenths = |word: &str| word.replace(['.', ','], "").parse::<i64>().ok();
        let parts = parts.split(" + ").filter_map(|part| tenths(part.rsplit(' ').next()?));
        assert_eq!(Some(parts.sum::<i64>()), tenths(total), "{line}");
    }

    #[test]
    fn one_device_has_lines_that_add_up() {
        let mut run = run();
        let lines = told(&[&run]);
        assert_eq!(lines.len(), 4, "an imported run has no verdict: {lines:#?}");
        adds_up(&lines[1], "298.5");
        let idle = Cell { class: Class::PoolIdle, tag: None, ..run.cells[0].clone() };
        run.devices[0].peak.amounts.push((run.cells.len() as u32, 100 << 20));
        run.cells.push(idle);
        let tracked = &mut run.devices[0].peak.tracked_bytes;
        *tracked = tracked.map(|bytes| bytes + (100 << 20));
        let lines = told(&[&run]);
        adds_up(&lines[1], "398.5");
        assert!(lines[1].ends_with(" + idle 100.0"), "{lines:#?}");
        assert_eq!(lines[3], format!("next: gpumemctl report {}", run.process.pid));
        run.devices[0]
            .details
            .ooms
            .push(gpumem_model::run::Oom { kind: gpumem_model::run::OomKind::Pool, ..Default::default() });
        let lines = told(&[&run]);
        assert!(lines[1].starts_with("memory ran out at "), "the verdict comes first: {lines:#?}");
        assert_eq!(lines[lines.len() - 1], format!("next: gpumemctl oom {}", run.process.pid));
        run.coverage.late = true;
        run.coverage.partial_history = true;
        assert!(told(&[&run])[0].ends_with("  (late, partial)"));
    }

    #[test]
    fn what_is_not_known_is_not_zero() {
        let mut run = run();
        run.devices[0].peak.untrackable_bytes = None;
        run.devices[0].last.used_absence = Some("no permission".into());
        assert_eq!(told(&[&run])[2], "Untrackable is unknown: NVML reports no permission");
        run.devices[0].peak.tracked_bytes = None;
        run.devices[0].peak_used = Some((5 << 20, 7));
        let lines = told(&[&run]);
        assert!(lines[1].starts_with("the process has no agent; highest value of NVML: "), "{lines:#?}");
        run.devices.clear();
        assert!(told(&[&run])[0].starts_with("no GPU memory: "));
        assert!(brief(&[], "").len() == 1);
    }

    #[test]
    fn many_devices_are_five_lines_too() {
        let mut runs: Vec<Run> = (0..9).map(|_| run()).collect();
        for (rank, run) in runs.iter_mut().enumerate() {
            run.process.pid = 100 + rank as u32;
            run.process.claims.insert("rank".into(), rank.to_string());
        }
        let lines = told(&runs.iter().collect::<Vec<_>>());
        assert_eq!(lines.len(), 5, "{lines:#?}");
        assert_eq!(lines[0], "9 processes on 1 GPU, peaks of tracked in MiB; 6 smaller are not shown");
        assert!(lines[1].starts_with("GPU 0 pid 100 rank 0  298.5: Logit 78.1 + Optimizer State 63.9 + "));
        lines[1..4].iter().for_each(|line| adds_up(line, "298.5"));
        assert_eq!(lines[4], "next: gpumemctl report --job j1");
    }
}
