//! Runs: of live processes from the ledger, ended ones from the run writer.

use super::request::{Refused, SMALL, json, number, only, unescaped, value};
use crate::config::Tenants;
use crate::limits::user_share::CpuCharge;
use crate::view::ViewContext;
use crate::view::visibility::Viewer;
use gpumem_ledger::ProcessView;
use gpumem_model::control::HiddenRun;
use gpumem_model::owner::is_of_job;
use gpumem_model::run::Run;
use gpumem_report::oom::at::Around;
use hyper::StatusCode;
use std::cmp::Reverse;
use std::collections::BTreeMap;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Which {
    Live,
    Pid(u32),
    Tree(u32),
    Job(String),
    /// Runs that ended, or ran out of memory, around a time (ns since 1970), within a distance (ns).
    Around(Around),
}

impl Which {
    pub(super) fn of(query: &str) -> Result<Self, Refused> {
        only(query, &["pid", "tree", "job", "around", "within"])?;
        if let Some(at_ns) = number(query, "around")? {
            let within = number(query, "within")?.and_then(|within| i64::try_from(within).ok());
            return match (i64::try_from(at_ns), within) {
                (Ok(at_ns), Some(for_ns)) => Ok(Which::Around(Around { at_ns, for_ns })),
                _ => Err(Refused::new(StatusCode::BAD_REQUEST, "around=NS (since 1970) wants within=NS")),
            };
        }
        let pid = |key| -> Result<Option<u32>, Refused> {
            let pid = number(query, key)?;
            let no_pid = |_| Refused::new(StatusCode::BAD_REQUEST, format!("{key}: no pid is that large"));
            pid.map(|pid| u32::try_from(pid).map_err(no_pid)).transpose()
        };
        let job = value(query, "job").map(unescaped).transpose()?;
        match (pid("pid")?, pid("tree")?, job) {
            (None, None, None) => Ok(Which::Live),
            (Some(pid), None, None) => Ok(Which::Pid(pid)),
            (None, Some(pid), None) => Ok(Which::Tree(pid)),
            (None, None, Some(job)) => Ok(Which::Job(job)),
            _ => Err(Refused::new(StatusCode::BAD_REQUEST, "give one of pid, tree, job and around")),
        }
    }

    /// Returns whether the run passes the part of the filter that its process alone cannot answer.
    fn is_then(&self, run: &Run) -> bool {
        !matches!(self, Which::Around(around) if !around.concerns(run))
    }

    pub(super) fn takes(
        &self,
        pid: u32,
        facts: &BTreeMap<String, String>,
        claims: &BTreeMap<String, String>,
    ) -> bool {
        match self {
            Which::Live | Which::Around(_) => true,
            Which::Pid(wanted) => pid == *wanted,
            Which::Tree(root) => {
                let ancestors = facts.get("ancestors").map(String::as_str).unwrap_or_default();
                pid == *root || ancestors.split(',').any(|ancestor| ancestor.parse() == Ok(*root))
            }
            Which::Job(job) => is_of_job(facts, claims, job),
        }
    }
}

pub(super) async fn runs(
    context: &ViewContext,
    viewer: Viewer,
    query: &str,
    charge: &CpuCharge,
) -> Result<Vec<u8>, Refused> {
    let which = Which::of(query)?;
    let ended = || Refused::new(StatusCode::SERVICE_UNAVAILABLE, "the daemon is ending");
    let wanted = which.clone();
    let takes = move |process: &ProcessView| {
        let facts = &process.facts;
        viewer.sees(facts.uid) && wanted.takes(process.key.pid, &facts.seen, &facts.claims)
    };
    let runs = context.live_runs(takes, charge).await.ok_or_else(ended)?;
    let mut runs = context.keeper.whole(runs).await;
    if which != Which::Live {
        runs.retain(|run| which.is_then(run));
        let of = |run: &Run| run.devices.iter().map(|device| device.last.time_ns).max();
        let wanted = move |run: &Run| {
            let process = &run.process;
            viewer.sees(process.uid)
                && which.takes(process.pid, &process.facts, &process.claims)
                && which.is_then(run)
        };
        let over = context.keeper.find(Box::new(wanted), charge).await;
        runs.sort_by_key(|run| Reverse(of(run)));
        // Runs of live processes are in the store too, as of their last checkpoint.
        let is_live = |run: &Run, live: &[Run]| {
            let key = |run: &Run| (run.process.pid, run.process.start_ticks);
            live.iter().any(|other| key(other) == key(run))
        };
        let over: Vec<_> = over.into_iter().filter(|run| !is_live(run, &runs)).collect();
        runs.extend(over);
    }
    if !viewer.all && context.shown().tenants == Tenants::Anonymous {
        runs.iter_mut().for_each(crate::view::visibility::hide_others);
    }
    match runs.iter().map(Run::weight).sum::<usize>() {
        ..SMALL => Ok(json(&runs)),
        _ => context.shares.beside(charge, move || json(&runs)).await.ok_or_else(ended),
    }
}

/// Returns the owners of runs that pass the filter and are hidden from the caller; nothing if users are anonymous.
pub(super) async fn hidden(
    context: &ViewContext,
    viewer: Viewer,
    query: &str,
    charge: &CpuCharge,
) -> Result<Vec<HiddenRun>, Refused> {
    let which = Which::of(query)?;
    if viewer.all || context.shown().tenants == Tenants::Anonymous {
        return Ok(Vec::new());
    }
    let ended = || Refused::new(StatusCode::SERVICE_UNAVAILABLE, "the daemon is ending");
    let wanted = which.clone();
    let takes = move |process: &ProcessView| {
        let facts = &process.facts;
        !viewer.sees(facts.uid) && wanted.takes(process.key.pid, &facts.seen, &facts.claims)
    };
    let mut runs = context.live_runs(takes, charge).await.ok_or_else(ended)?;
    runs.retain(|run| which.is_then(run));
    let known: Vec<(u32, u64)> = runs.iter().map(|run| (run.process.pid, run.process.start_ticks)).collect();
    let wanted = move |run: &Run| {
        let process = &run.process;
        !viewer.sees(process.uid)
            && !known.contains(&(process.pid, process.start_ticks))
            && which.takes(process.pid, &process.facts, &process.claims)
            && which.is_then(run)
    };
    runs.extend(context.keeper.find(Box::new(wanted), charge).await);
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
        assert_eq!(Which::of("").ok(), Some(Which::Live));
        assert_eq!(Which::of("pid=7").ok(), Some(Which::Pid(7)));
        assert_eq!(Which::of("tree=7").ok(), Some(Which::Tree(7)));
        assert_eq!(Which::of("job=8812.0").ok(), Some(Which::Job("8812.0".into())));
        // GPUMEM_JOB may be any text; characters that a query cannot hold are escaped with %.
        assert_eq!(Which::of("job=bert%20large%251").ok(), Some(Which::Job("bert large%1".into())));
        let around = Around { at_ns: 70, for_ns: 5 };
        assert_eq!(Which::of("around=70&within=5").ok(), Some(Which::Around(around)));
        for bad in
            ["around=70", "around=70&within=x", "pid=x", "pid=4294967296", "pid=1&tree=2", "pdi=1", "pid"]
        {
            assert!(Which::of(bad).is_err() || bad == "pid", "{bad}");
        }
    }

    #[test]
    fn trees_and_jobs() {
        let map = |key: &str, value: &str| BTreeMap::from([(key.to_owned(), value.to_owned())]);
        let none = BTreeMap::new();
        assert!(Which::Tree(5).takes(9, &map("ancestors", "7,5,1"), &none));
        assert!(Which::Tree(9).takes(9, &none, &none));
        assert!(!Which::Tree(50).takes(9, &map("ancestors", "7,5,1"), &none));
        assert!(Which::Job("a".into()).takes(9, &none, &map("job", "a")));
        assert!(Which::Job("a".into()).takes(9, &none, &map("job", "a.12ab-3c")), "by the name it was given");
        assert!(!Which::Job("a".into()).takes(9, &none, &map("job", "ab.12ab-3c")));
        assert!(!Which::Job("a".into()).takes(9, &none, &map("rank", "a")));
    }
}
