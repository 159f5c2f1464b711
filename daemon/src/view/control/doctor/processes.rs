//! Makes the findings that count processes with incomplete data, and name those with the most memory.

use super::coverage::seconds;
use super::finding::{finding, limit, mib};
use crate::config::Tenants;
use crate::view::Viewer;
use gpumem_ledger::{Blocked, ProcessView, Snapshot};
use gpumem_model::checks::Check;
use gpumem_model::control::{Finding, State};
use gpumem_model::run::SUBSCRIPTION_HELD;
use gpumem_model::units::plural;

/// Maximum number of processes in a text. Further ones are only counted.
const NAMED: usize = 4;

pub(super) fn add_findings(
    snapshot: &Snapshot,
    viewer: Viewer,
    tenants: Tenants,
    now_ns: u64,
    findings: &mut Vec<Finding>,
) {
    let living = || snapshot.running();
    // Processes of other users are counted. They are not named if users are anonymous.
    let may_name = |process: &ProcessView| viewer.sees(process.facts.uid) || tenants == Tenants::Named;
    let mut uncovered: Vec<(u64, &ProcessView)> = living()
        .filter(|process| !process.coverage.covered && process.coverage.blocked.is_none())
        .map(|process| (used(process), process))
        .filter(|(used, _)| *used > 0)
        .collect();
    uncovered.sort_by_key(|(used, process)| (std::cmp::Reverse(*used), process.key));
    let covered = living().filter(|process| process.coverage.covered).count();
    if uncovered.is_empty() {
        let text = match covered {
            0 => "no process uses a GPU now".to_owned(),
            covered => format!("{} with an agent, none without", count(covered)),
        };
        findings.push(finding(Check::Uncovered, State::Ok, "processes", text, None));
    } else {
        let total = mib(uncovered.iter().map(|(used, _)| used).sum());
        let named = uncovered.iter().filter(|(_, process)| may_name(process)).take(NAMED);
        let named: Vec<String> =
            named.map(|(used, process)| format!("pid {} {}", process.key.pid, mib(*used))).collect();
        let of = if named.is_empty() { String::new() } else { format!(": {}", named.join(", ")) };
        let more = match uncovered.len().saturating_sub(named.len()) {
            more if more > 0 && !named.is_empty() => format!(" and {more} more"),
            _ => String::new(),
        };
        let text = format!(
            "{} without an agent ({covered} covered) {} {total}, of which only the sum is known{of}{more}",
            count(uncovered.len()),
            if uncovered.len() == 1 { "holds" } else { "hold" }
        );
        let fix = match uncovered.iter().find(|(_, process)| viewer.sees(process.facts.uid)) {
            Some((_, process)) => format!("gpumemctl doctor {} explains why", process.key.pid),
            None => "their owners can run gpumemctl doctor PID".to_owned(),
        };
        findings.push(finding(Check::Uncovered, State::Warn, "processes", text, Some(&fix)));
    }
    let own = || living().filter(|process| viewer.sees(process.facts.uid));
    for process in own() {
        if let Some(blocked) = &process.coverage.blocked {
            let text = format!("pid {}: {}", process.key.pid, blocked_text(blocked, now_ns));
            let fix = format!("gpumemctl doctor {} has the remedy", process.key.pid);
            findings.push(finding(Check::Blocked, State::Warn, "processes", text, Some(&fix)));
        }
    }
    for process in own() {
        if let Some(full) = process.coverage.full {
            let (what, key) = limit(full);
            let text =
                format!("pid {}: {what}; its further records are lost, its sums are bounds", process.key.pid);
            let fix = format!("raise {key} if the process really uses that much");
            findings.push(finding(Check::Partial, State::Warn, "processes", text, Some(&fix)));
        }
    }
    let partial = own().filter(|process| process.coverage.partial_state);
    let partial: Vec<String> = partial.map(|process| process.key.pid.to_string()).collect();
    if !partial.is_empty() {
        let first = partial[..partial.len().min(NAMED)].join(", ");
        let text = format!("{} lost records; sums of them are bounds: pid {first}", count(partial.len()));
        let fix = "for programs that report in bursts, set GPUMEM_RING_SLOTS=262144; for many live allocations, raise agent.rows_per_process";
        findings.push(finding(Check::Partial, State::Warn, "processes", text, Some(fix)));
    }
}

fn count(processes: usize) -> String {
    plural(processes as u64, "process")
}

fn used(process: &ProcessView) -> u64 {
    let latest = process.accounts.iter().filter_map(|account| account.latest.as_ref());
    latest.filter_map(|sample| sample.used_bytes.ok()).sum()
}

fn blocked_text(blocked: &Blocked, now_ns: u64) -> String {
    let since = seconds(now_ns.saturating_sub(blocked.since_ns));
    let by = match (blocked.by.as_str(), blocked.result) {
        ("", SUBSCRIPTION_HELD) => "another CUPTI client".to_owned(),
        ("", result) => format!("CUPTI answers {result}"),
        (by, _) => by.to_owned(),
    };
    format!("its allocations have not been seen for {since}: {by}")
}
