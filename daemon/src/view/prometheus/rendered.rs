//! Keeps the series of each process between scrapes. A process that has not changed since the last scrape is not rendered again,
//! unless the limit of series leaves no room for it.
//! Of a changed one, two parts that take as long as all its numbers are kept: the labels of its identity, which are made from facts
//! that seldom change, and the categories of its cells, for which many rules are tried.

use super::families::{Labels, Series};
use super::names::Names;
use crate::config::Tenants;
use crate::run_writer::ProcessFindings;
use gpumem_ledger::{CellView, Facts, ProcessKey, ProcessView};
use gpumem_report::rules::Groupings;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, TryLockError, Weak};

/// What series of processes depend on besides the process.
#[derive(Debug)]
pub(super) struct Scope {
    /// Whether this machine has the device, for each device of the snapshot.
    pub is_present: Vec<bool>,
    /// Labels of each device of the snapshot.
    pub device_labels: Vec<Labels>,
    pub rules: Arc<Groupings>,
    /// Number of tags that have series.
    pub tags: usize,
    pub tenants: Tenants,
}

impl Scope {
    fn equals(&self, other: &Scope) -> bool {
        (&self.is_present, &self.device_labels, self.tags, self.tenants)
            == (&other.is_present, &other.device_labels, other.tags, other.tenants)
            && Arc::ptr_eq(&self.rules, &other.rules)
    }
}

/// Series of the processes of the last scrape.
#[derive(Debug, Default)]
pub struct RenderedProcesses(Mutex<Rendered>);

impl RenderedProcesses {
    /// Passes the kept series to a scrape. A scrape during another one does not wait: it renders all processes.
    pub(super) fn with<T>(&self, write: impl FnOnce(&mut Rendered) -> T) -> T {
        match self.0.try_lock() {
            Ok(mut kept) => write(&mut kept),
            Err(TryLockError::Poisoned(kept)) => write(&mut kept.into_inner()),
            Err(TryLockError::WouldBlock) => write(&mut Rendered::default()),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Rendered {
    scope: Option<Arc<Scope>>,
    processes: HashMap<ProcessKey, Process>,
}

#[derive(Debug, Default)]
struct Process {
    /// State from which the series were made. A weak pointer keeps the address of a view, but none of its lists.
    view: Weak<ProcessView>,
    findings: Option<ProcessFindings>,
    series: Arc<Series>,
    parts: Parts,
}

/// Categories of a process's cells, with the data from which they were made.
#[derive(Debug)]
struct Categories {
    cells: Arc<[CellView]>,
    is_covered: bool,
    /// `None` for a process without an agent.
    names: Option<Names<'static>>,
}

/// Parts of series, each with the data from which it was made.
#[derive(Debug, Default)]
pub(super) struct Parts {
    identity: Option<(Arc<Facts>, Labels)>,
    categories: Option<Categories>,
}

impl Parts {
    /// Returns the labels of a process's identity. `make` makes them if its facts have changed.
    pub(super) fn identity(&mut self, process: &ProcessView, make: impl FnOnce(&Facts) -> Labels) -> &Labels {
        let facts = &process.facts;
        let known = self.identity.take().filter(|(known, _)| Arc::ptr_eq(known, facts));
        &self.identity.insert(known.unwrap_or_else(|| (Arc::clone(facts), make(facts)))).1
    }

    /// Returns the categories of a process's cells. `make` makes them if the cells have changed.
    pub(super) fn categories<'n>(
        &mut self,
        process: &ProcessView,
        make: impl FnOnce() -> Option<Names<'n>>,
    ) -> Option<&Names<'static>> {
        let (cells, is_covered) = (&process.cells, process.coverage.covered);
        let is_same = |known: &Categories| known.is_covered == is_covered && Arc::ptr_eq(&known.cells, cells);
        let known = self.categories.take().filter(is_same);
        let made =
            || Categories { cells: Arc::clone(cells), is_covered, names: make().map(Names::into_owned) };
        self.categories.insert(known.unwrap_or_else(made)).names.as_ref()
    }
}

impl Rendered {
    /// Drops all series if they would differ in this scope.
    pub(super) fn set_scope(&mut self, scope: &Arc<Scope>) {
        if !self.scope.as_ref().is_some_and(|known| known.equals(scope)) {
            self.processes.clear();
        }
        self.scope = Some(Arc::clone(scope));
    }

    /// Returns the series of a process. `render` makes them if the process is new or has changed.
    pub(super) fn series(
        &mut self,
        view: &Arc<ProcessView>,
        findings: &Option<ProcessFindings>,
        render: impl FnOnce(&mut Parts) -> Series,
    ) -> &Arc<Series> {
        let process = self.processes.entry(view.key).or_default();
        let same_findings = match (&process.findings, findings) {
            (Some(known), Some(findings)) => Arc::ptr_eq(known, findings),
            (None, None) => true,
            _ => false,
        };
        if !same_findings || process.view.as_ptr() != Arc::as_ptr(view) {
            let mut series = render(&mut process.parts);
            series.shrink();
            (process.view, process.findings) = (Arc::downgrade(view), findings.clone());
            process.series = Arc::new(series);
        }
        &process.series
    }

    pub(super) fn forget(&mut self, key: ProcessKey) {
        self.processes.remove(&key);
    }

    /// Drops series of other processes than `live`, which is sorted by start and pid.
    pub(super) fn keep(&mut self, live: &[&Arc<ProcessView>]) {
        let order = |key: &ProcessKey| (key.start_ticks, key.pid);
        self.processes
            .retain(|key, _| live.binary_search_by_key(&order(key), |process| order(&process.key)).is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Family;
    use gpumem_ledger::{Ledger, Origin};
    use gpumem_wire::{Body, Reading, Record, Stamp};
    use std::cell::Cell;

    static INFO: Family = Family { name: "info", help: "", kind: "gauge", labels: &[] };

    fn observe(ledger: &mut Ledger, pid: u32, body: Body<'_>) {
        ledger.observe(Origin::Host, &Record { stamp: Stamp { thread: pid, ..Stamp::default() }, body });
    }

    fn facts(ledger: &mut Ledger, pid: u32, facts: &str) {
        let uid = Reading::of(1000);
        observe(ledger, pid, Body::ProcessFacts { start_ticks: 7, uid, parent_pid: 1, facts });
    }

    fn scope(tags: usize, rules: &Arc<Groupings>) -> Arc<Scope> {
        let rules = Arc::clone(rules);
        Scope { is_present: vec![], device_labels: vec![], rules, tags, tenants: Tenants::Named }.into()
    }

    /// Returns the series of all processes, and how many series and identities were made for them.
    fn written(
        ledger: &Ledger,
        rendered: &mut Rendered,
        findings: &Option<ProcessFindings>,
    ) -> (String, [u32; 2]) {
        let (snapshot, made, mut out) = (ledger.snapshot(), Cell::new([0, 0]), String::new());
        let count = |index: usize| {
            let mut counts = made.get();
            counts[index] += 1;
            made.set(counts);
        };
        let live: Vec<&Arc<ProcessView>> = snapshot.processes.iter().collect();
        for process in &live {
            let series = rendered.series(process, findings, |parts| {
                count(0);
                let mut series = Series::default();
                let make = |facts: &Facts| {
                    count(1);
                    let job = facts.seen.get("slurm_job").map_or("none", |job| &**job);
                    Labels::new().with("comm", &facts.seen["comm"]).with("slurm_job", job)
                };
                series.add(&INFO, parts.identity(process, make), 1_u64);
                series
            });
            out += &format!("{series:?}");
        }
        rendered.keep(&live);
        (out, made.get())
    }

    #[test]
    fn categories_follow_the_cells_and_the_agent() {
        let (mut ledger, mut parts) = (Ledger::new(), Parts::default());
        facts(&mut ledger, 1, "comm=python");
        let view = ledger.snapshot().processes[0].as_ref().clone();
        assert!(parts.categories(&view, || None).is_none());
        let rules = Default::default();
        let named = || Some(Names::categories(&view, &rules));
        assert!(parts.categories(&view, named).is_none(), "kept");
        let mut covered = view.clone();
        Arc::make_mut(&mut covered.coverage).covered = true;
        assert!(Arc::ptr_eq(&view.cells, &covered.cells) && parts.categories(&covered, named).is_some());
        covered.cells = Arc::from([]);
        assert!(parts.categories(&covered, || None).is_none(), "made again");
    }

    #[test]
    fn a_scrape_during_another_one_does_not_wait() {
        let rendered = RenderedProcesses::default();
        let rules = Arc::default();
        rendered.with(|kept| {
            kept.set_scope(&scope(0, &rules));
            rendered.with(|other| assert!(other.scope.is_none()));
        });
        rendered.with(|kept| assert!(kept.scope.is_some()));
    }

    #[test]
    fn a_process_is_rendered_again_when_it_changes() {
        let (mut ledger, mut rendered, rules) = (Ledger::new(), Rendered::default(), Arc::default());
        rendered.set_scope(&scope(0, &rules));
        facts(&mut ledger, 1, "comm=python");
        facts(&mut ledger, 2, "comm=other");
        let (first, made) = written(&ledger, &mut rendered, &None);
        assert_eq!(made, [2, 2]);
        assert_eq!(written(&ledger, &mut rendered, &None), (first.clone(), [0, 0]));

        facts(&mut ledger, 1, "slurm_job=42");
        let (changed, made) = written(&ledger, &mut rendered, &None);
        assert!(made == [1, 1] && changed.contains("42") && !first.contains("42"), "{changed}");
        observe(&mut ledger, 1, Body::AccountedPeak { start_ticks: 7, peak_bytes: 1 });
        assert_eq!(written(&ledger, &mut rendered, &None).1, [1, 0], "facts are the same");

        let findings = Some(ProcessFindings::default());
        assert_eq!(written(&ledger, &mut rendered, &findings).1, [2, 0]);
        assert_eq!(written(&ledger, &mut rendered, &findings.clone()).1, [0, 0]);

        rendered.set_scope(&scope(0, &rules));
        assert_eq!(written(&ledger, &mut rendered, &findings).1, [0, 0]);
        for other in [scope(1, &rules), scope(1, &Arc::default())] {
            rendered.set_scope(&other);
            assert_eq!(written(&ledger, &mut rendered, &findings).1, [2, 2]);
        }

        ledger.remove_process(ProcessKey { pid: 2, start_ticks: 7 });
        assert!(!written(&ledger, &mut rendered, &findings).0.contains("other"));
        assert_eq!(rendered.processes.len(), 1);
    }
}
