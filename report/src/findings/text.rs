//! Writes the conclusions as lines for the top of a report.

use super::{Finding, Findings, Kind, Outcome, decisive, mib};
use crate::category::{CACHED, OF_CUDA, UNTRACKABLE};
use crate::labels::exit;
use crate::place::{self, OF_PASSES};
use crate::{Report, held, oom, used_or_tracked};
use gpumem_model::escape::escape;
use gpumem_model::run::{Class, Fate, OomKind, State};
use gpumem_model::time::Times;
use gpumem_model::units::{Unit, signed};

/// Returns a line on how memory ran out, if it did, and then the lines of the findings.
pub fn lines(report: &Report<'_>) -> Vec<String> {
    let conclusions = Findings::of(report);
    outcome(report, &conclusions).into_iter().chain(list(report, &conclusions)).collect()
}

/// Returns one line for each finding. Without findings, the line is `no problem found` with the largest part of the memory, if
/// gpumemd itself observed the run without losses, memory did not run out, and the process runs or ended with status 0.
pub(crate) fn list(report: &Report<'_>, conclusions: &Findings) -> Vec<String> {
    // Missing records are left out here, because separate lines of the report list them.
    let findings = conclusions.findings.iter().filter(|finding| finding.kind != Kind::Losses);
    let line = |(number, finding): (usize, &Finding)| {
        let device = finding.device.filter(|_| report.run.devices.len() > 1);
        let device = device.map(|ordinal| format!("GPU {ordinal}: ")).unwrap_or_default();
        format!("{number}. {device}{}", finding.sentence())
    };
    let mut lines: Vec<String> = (1..).zip(findings).map(line).collect();
    if lines.is_empty() && matches!(conclusions.outcome, Outcome::Ended | Outcome::Running) {
        lines.extend(no_problem(report));
    }
    lines
}

/// Returns whether memory ran out or there is a finding beside missing records.
pub(crate) fn has_problem(conclusions: &Findings) -> bool {
    let has_finding = conclusions.findings.iter().any(|finding| finding.kind != Kind::Losses);
    has_finding || !matches!(conclusions.outcome, Outcome::Ended | Outcome::Running)
}

/// Returns the sentence that memory ran out; `None` if it did not.
pub(crate) fn outcome(report: &Report<'_>, conclusions: &Findings) -> Option<String> {
    let (_, oom, _) = decisive(report)?;
    let times = Times::of(report.run);
    let when = times.time(oom.time_ns);
    match conclusions.outcome {
        Outcome::OutOfMemory => {
            let status = match oom.fate {
                Fate::Fatal { status: Some(status), .. } => format!(", {}", exit(status)),
                _ => String::new(),
            };
            let free = oom.free_bytes().map(|free| format!("; {} MiB were free", mib(free)));
            let limit = if oom.kind == OomKind::Pool
                && conclusions.findings.iter().any(|finding| finding.kind == Kind::PoolLimit)
            {
                " by the program's own limit"
            } else {
                ""
            };
            Some(format!(
                "OUT OF MEMORY{limit} at {when}{status}: {} were requested{}{}",
                asked(oom.asked_bytes),
                escape(&oom::place(oom)),
                free.unwrap_or_default()
            ))
        }
        Outcome::Suspected => Some(format!("it may have run out of memory at {when}")),
        Outcome::Survived if oom.fate == Fate::Open => {
            Some(format!("memory ran out at {when}; it is unknown whether that ends the program"))
        }
        Outcome::Survived => Some(format!("memory ran out at {when}, and the program went on")),
        Outcome::Ended | Outcome::Running => None,
    }
}

/// Returns the size of a request. Requests of less than 1 MiB can fail, too.
fn asked(bytes: u64) -> String {
    match bytes >> 20 {
        0 => format!("{} KiB", bytes.div_ceil(1024)),
        _ => format!("{} MiB", mib(signed(bytes))),
    }
}

/// Returns the line for a run without a problem; `None` if the data cannot prove that there is none.
fn no_problem(report: &Report<'_>) -> Option<String> {
    let run = report.run;
    let coverage = &run.coverage;
    let is_whole = !coverage.partial_state && !coverage.partial_history && coverage.blocked_by.is_none();
    let is_known = coverage.covered && run.source.is_own() && !coverage.late && is_whole;
    let ended_well = match run.state {
        State::Closed { status, .. } => status == Some(0),
        State::Open | State::Rolled { .. } => true,
        State::Interrupted => false,
    };
    let device = run.devices.iter().max_by_key(|device| device.peak.tracked_bytes)?;
    let total = used_or_tracked(&device.peak).filter(|total| *total > 0)?;
    let mut parts = report.composition(&device.peak, report.by).ranked();
    parts.push((CACHED.to_owned(), held(run, &device.peak.amounts, |cell| cell.class == Class::PoolIdle)));
    parts.extend(device.peak.untrackable_bytes.map(|bytes| (UNTRACKABLE.to_owned(), bytes)));
    let (name, bytes) = parts.into_iter().max_by_key(|(_, bytes)| *bytes)?;
    (is_known && ended_well).then(|| {
        let share = 100.0 * bytes as f64 / total as f64;
        // In the unit of the table below the line.
        let unit = Unit::for_largest(total);
        let is_of_passes = OF_PASSES.contains(&name.as_str());
        let place = is_of_passes.then(|| place::of_category(report, &device.peak.amounts, &name)).flatten();
        let place = place.map(|(tag, most)| format!(" ({} of {})", unit.amount(most), escape(&tag)));
        let is_explained =
            device.peak.parts.is_some_and(|parts| parts.unexplained_bytes.abs() < unit.smallest());
        let of_cuda = (name == UNTRACKABLE && is_explained).then(|| format!(" ({OF_CUDA})"));
        let place = place.or(of_cuda);
        let amount = unit.amount_with_name(bytes);
        let what = format!("{} {amount}{}", escape(&name), place.unwrap_or_default());
        format!("no problem found; largest part at the peak: {what}, {share:.0} %")
    })
}
