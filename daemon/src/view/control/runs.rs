//! Returns runs: those of live processes come from the ledger, ended ones from the run writer.

use super::request::{SMALL, check_keys, json, query_number, query_value, unescape};
use crate::config::Tenants;
use crate::limits::user_share::CpuCharge;
use crate::view::{Refused, ViewContext, Viewer};
use gpumem_ledger::ProcessView;
use gpumem_model::control::HiddenRun;
use gpumem_model::owner::is_of_job;
use gpumem_model::run::Run;
use gpumem_report::oom::at::TimeWindow;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Which processes and runs a request is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ProcessFilter {
    /// The runs of all live processes.
    Live,
    Pid(u32),
    /// A process and its descendants.
    Tree(u32),
    Job(String),
    /// Processes whose run ended, or ran out of memory, near a time (ns since 1970).
    TimeWindow(TimeWindow),
}

impl ProcessFilter {
    pub(super) fn of(query: &str) -> Result<Self, Refused> {
        check_keys(query, &["pid", "tree", "job", "around", "within"])?;
        if let Some(at_ns) = query_number(query, "around")? {
            let within = query_number(query, "within")?.and_then(|within| i64::try_from(within).ok());
            return match (i64::try_from(at_ns), within) {
                (Ok(at_ns), Some(for_ns)) => Ok(ProcessFilter::TimeWindow(TimeWindow { at_ns, for_ns })),
                _ => Err(Refused::bad_request("around=NS (since 1970) needs within=NS")),
            };
        }
        let pid = |key| -> Result<Option<u32>, Refused> {
            let no_pid = |_| Refused::bad_request(format!("{key}: too large for a pid"));
            query_number(query, key)?.map(|pid| u32::try_from(pid).map_err(no_pid)).transpose()
        };
        let job = query_value(query, "job").map(unescape).transpose()?;
        match (pid("pid")?, pid("tree")?, job) {
            (None, None, None) => Ok(ProcessFilter::Live),
            (Some(pid), None, None) => Ok(ProcessFilter::Pid(pid)),
            (None, Some(pid), None) => Ok(ProcessFilter::Tree(pid)),
            (None, None, Some(job)) => Ok(ProcessFilter::Job(job)),
            _ => Err(Refused::bad_request("pid, tree and job exclude each other: give at most one")),
        }
    }

    pub(super) fn has_process(&self, process: &ProcessView) -> bool {
        self.has(process.key.pid, &process.facts.seen, &process.facts.claims)
    }

    fn has_run(&self, run: &Run) -> bool {
        self.has(run.process.pid, &run.process.facts, &run.process.claims) && self.has_time(run)
    }

    /// Returns whether the run ended, or ran out of memory, at the wanted time; true for filters without a time.
    fn has_time(&self, run: &Run) -> bool {
        !matches!(self, ProcessFilter::TimeWindow(around) if !around.concerns(run))
    }

    fn has(&self, pid: u32, facts: &BTreeMap<String, String>, claims: &BTreeMap<String, String>) -> bool {
        match self {
            ProcessFilter::Live | ProcessFilter::TimeWindow(_) => true,
            ProcessFilter::Pid(wanted) => pid == *wanted,
            ProcessFilter::Tree(root) => {
                let ancestors = facts.get("ancestors").map(String::as_str).unwrap_or_default();
                pid == *root || ancestors.split(',').any(|ancestor| ancestor.parse() == Ok(*root))
            }
            ProcessFilter::Job(job) => is_of_job(facts, claims, job),
        }
    }
}

pub(super) async fn runs(
    context: &ViewContext,
    viewer: Viewer,
    query: &str,
    charge: &CpuCharge,
) -> Result<Vec<u8>, Refused> {
    let filter = ProcessFilter::of(query)?;
    let live = filter.clone();
    let takes = move |process: &ProcessView| viewer.sees(process.facts.uid) && live.has_process(process);
    let runs = context.live_runs(takes, charge).await?;
    let mut runs = context.run_writer.join_earlier(runs).await;
    if filter != ProcessFilter::Live {
        runs.retain(|run| filter.has_time(run));
        let takes = move |run: &Run| viewer.sees(run.process.uid) && filter.has_run(run);
        let ended = context.run_writer.find(Box::new(takes), charge).await;
        runs.sort_by_key(|run| Reverse(run.devices.iter().map(|device| device.last.time_ns).max()));
        // The store has an older state of a live process's run, so it is left out.
        let live: Vec<(u32, u64)> = runs.iter().map(key).collect();
        runs.extend(ended.into_iter().filter(|run| !live.contains(&key(run))));
    }
    if !viewer.all && context.shown().tenants == Tenants::Anonymous {
        runs.iter_mut().for_each(crate::view::hide_others);
    }
    match runs.iter().map(Run::weight).sum::<usize>() {
        ..SMALL => Ok(json(runs)),
        _ => context.shares.run_beside(charge, move || json(runs)).await.ok_or_else(Refused::ending),
    }
}

fn key(run: &Run) -> (u32, u64) {
    (run.process.pid, run.process.start_ticks)
}

/// Returns the owners of the runs that match the filter and that the viewer may not see. Returns none if users are anonymous.
pub(super) async fn hidden(
    context: &ViewContext,
    viewer: Viewer,
    query: &str,
    charge: &CpuCharge,
) -> Result<Vec<HiddenRun>, Refused> {
    let filter = ProcessFilter::of(query)?;
    if viewer.all || context.shown().tenants == Tenants::Anonymous {
        return Ok(Vec::new());
    }
    let live = filter.clone();
    let takes = move |process: &ProcessView| !viewer.sees(process.facts.uid) && live.has_process(process);
    let mut runs = context.live_runs(takes, charge).await?;
    runs.retain(|run| filter.has_time(run));
    let live: Vec<(u32, u64)> = runs.iter().map(key).collect();
    let takes =
        move |run: &Run| !viewer.sees(run.process.uid) && !live.contains(&key(run)) && filter.has_run(run);
    runs.extend(context.run_writer.find(Box::new(takes), charge).await);
    let row = |run: &Run| HiddenRun {
        pid: run.process.pid,
        user: run.process.facts.get("user").cloned().or(run.process.uid.map(|uid| format!("user {uid}"))),
        devices: run.devices.iter().map(|device| (device.ordinal.into(), device.name.clone())).collect(),
    };
    Ok(runs.iter().map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_filter_at_a_time() {
        assert_eq!(ProcessFilter::of("").ok(), Some(ProcessFilter::Live));
        assert_eq!(ProcessFilter::of("pid=7").ok(), Some(ProcessFilter::Pid(7)));
        assert_eq!(ProcessFilter::of("tree=7").ok(), Some(ProcessFilter::Tree(7)));
        assert_eq!(ProcessFilter::of("job=8812.0").ok(), Some(ProcessFilter::Job("8812.0".into())));
        // GPUMEM_JOB may be any text; characters that a query cannot hold are escaped with %.
        assert_eq!(
            ProcessFilter::of("job=bert%20large%251").ok(),
            Some(ProcessFilter::Job("bert large%1".into()))
        );
        let around = TimeWindow { at_ns: 70, for_ns: 5 };
        assert_eq!(ProcessFilter::of("around=70&within=5").ok(), Some(ProcessFilter::TimeWindow(around)));
        for bad in
            ["around=70", "around=70&within=x", "pid=x", "pid=4294967296", "pid=1&tree=2", "pdi=1", "pid"]
        {
            assert!(ProcessFilter::of(bad).is_err() || bad == "pid", "{bad}");
        }
    }

    #[test]
    fn trees_and_jobs() {
        let map = |key: &str, value: &str| BTreeMap::from([(key.to_owned(), value.to_owned())]);
        let none = BTreeMap::new();
        assert!(ProcessFilter::Tree(5).has(9, &map("ancestors", "7,5,1"), &none));
        assert!(ProcessFilter::Tree(9).has(9, &none, &none));
        assert!(!ProcessFilter::Tree(50).has(9, &map("ancestors", "7,5,1"), &none));
        assert!(ProcessFilter::Job("a".into()).has(9, &none, &map("job", "a")));
        assert!(
            ProcessFilter::Job("a".into()).has(9, &none, &map("job", "a.12ab-3c")),
            "by the name it was given"
        );
        assert!(!ProcessFilter::Job("a".into()).has(9, &none, &map("job", "ab.12ab-3c")));
        assert!(!ProcessFilter::Job("a".into()).has(9, &none, &map("rank", "a")));
    }
}
