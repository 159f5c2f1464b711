//! Keeps the series of each process between scrapes. A process that has not changed since the last scrape is not rendered again.
//! One for which the limit of series left no room is not rendered until there is room for as many series as it had.
//! Of a changed one, parts that take as long as all its numbers are kept: its labels, with those of its identity, which are made from
//! facts that seldom change, and the categories of its cells, for which many rules are tried.

use super::families::{Labels, Series};
use super::names::Names;
use crate::config::Tenants;
use crate::run_writer::ProcessFindings;
use gpumem_ledger::{CellView, Facts, ProcessKey, ProcessView};
use gpumem_report::rules::Groupings;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, TryLockError, Weak};
use std::time::{Duration, Instant};

/// Time without a scrape of one kind after which its series are dropped.
const UNUSED: Duration = Duration::from_secs(300);

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

/// Series of the processes of the last scrapes. Scrapes that name processes and those that hide them have series of their own.
#[derive(Debug, Default)]
pub struct RenderedProcesses([Mutex<Rendered>; 2]);

impl RenderedProcesses {
    /// Passes the kept series to a scrape. A scrape during another one does not wait: it renders all processes.
    pub(super) fn with<T>(&self, tenants: Tenants, write: impl FnOnce(&mut Rendered) -> T) -> T {
        let [named, hidden] = &self.0;
        let (kept, other) = if tenants == Tenants::Named { (named, hidden) } else { (hidden, named) };
        if let Ok(mut other) = other.try_lock() {
            other.drop_unused(UNUSED);
        }
        match kept.try_lock() {
            Ok(mut kept) => write(&mut kept),
            Err(TryLockError::Poisoned(kept)) => write(&mut kept.into_inner()),
            Err(TryLockError::WouldBlock) => write(&mut Rendered::default()),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Rendered {
    scope: Option<Arc<Scope>>,
    /// Time of the last scrape.
    used: Option<Instant>,
    processes: HashMap<ProcessKey, Process>,
}

#[derive(Debug, Default)]
struct Process {
    /// State from which the series were made. A weak pointer keeps the address of a view, but none of its lists.
    view: Weak<ProcessView>,
    findings: Option<ProcessFindings>,
    series: Arc<Series>,
    /// Number of the process's series when the limit last left no room for them.
    needed: usize,
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

/// Labels that name a process. They are constant in a scope.
#[derive(Debug, Default)]
pub(super) struct ProcessLabels {
    /// Labels without a device; empty before the first use.
    own: Labels,
    /// Index of each device that the process uses, and labels with the device.
    of_devices: Vec<(usize, Labels)>,
}

impl ProcessLabels {
    /// Returns the labels without a device. `make` makes them at the first use.
    pub(super) fn own(&mut self, make: impl FnOnce() -> Labels) -> &Labels {
        if self.own == Labels::default() {
            self.own = make().shrunk();
        }
        &self.own
    }

    /// Returns the labels with a device. `make` makes them at the first use.
    pub(super) fn of_device(&mut self, device: usize, make: impl FnOnce() -> Labels) -> &Labels {
        let known = self.of_devices.iter().position(|(known, _)| *known == device);
        let at = known.unwrap_or_else(|| {
            self.of_devices.push((device, make().shrunk()));
            self.of_devices.len() - 1
        });
        &self.of_devices[at].1
    }
}

/// Parts of series, each with the data from which it was made.
#[derive(Debug, Default)]
pub(super) struct Parts {
    pub labels: ProcessLabels,
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
        (self.scope, self.used) = (Some(Arc::clone(scope)), Some(Instant::now()));
    }

    /// Drops all series if they have not been used for this time.
    fn drop_unused(&mut self, time: Duration) {
        if self.used.is_some_and(|used| used.elapsed() >= time) {
            *self = Rendered::default();
        }
    }

    /// Returns the series of a process if there is `room` for them. `render` adds them to an empty list if the process is new or has
    /// changed.
    pub(super) fn series(
        &mut self,
        view: &Arc<ProcessView>,
        findings: &Option<ProcessFindings>,
        room: usize,
        render: impl FnOnce(&mut Parts, Series) -> Series,
    ) -> Option<&Arc<Series>> {
        let process = self.processes.entry(view.key).or_default();
        let same_findings = match (&process.findings, findings) {
            (Some(known), Some(findings)) => Arc::ptr_eq(known, findings),
            (None, None) => true,
            _ => false,
        };
        if process.needed > room {
            return None;
        }
        if !same_findings || process.view.as_ptr() != Arc::as_ptr(view) {
            let mut series = render(&mut process.parts, Series::with_room_of(&process.series));
            series.shrink();
            (process.view, process.findings) = (Arc::downgrade(view), findings.clone());
            process.series = Arc::new(series);
        }
        process.needed = 0;
        if process.series.len() > room {
            let (needed, parts) = (process.series.len(), std::mem::take(&mut process.parts));
            *process = Process { needed, parts, ..Process::default() };
            return None;
        }
        Some(&process.series)
    }

    /// Makes the categories of a process's cells if the cells have changed; see [`Rendered::categories`].
    pub(super) fn make_categories<'n>(
        &mut self,
        view: &ProcessView,
        make: impl FnOnce() -> Option<Names<'n>>,
    ) {
        self.processes.entry(view.key).or_default().parts.categories(view, make);
    }

    /// Returns the categories of a process's cells, as made last.
    pub(super) fn categories(&self, key: ProcessKey) -> Option<&Names<'static>> {
        self.processes.get(&key)?.parts.categories.as_ref()?.names.as_ref()
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
            let series = rendered.series(process, findings, usize::MAX, |parts, mut series| {
                count(0);
                let make = |facts: &Facts| {
                    count(1);
                    let job = facts.seen.get("slurm_job").map_or("none", |job| &**job);
                    Labels::new().with("comm", &facts.seen["comm"]).with("slurm_job", job)
                };
                series.add(&INFO, parts.identity(process, make), 1_u64);
                series
            });
            out += &format!("{:?}", series.expect("room"));
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
        rendered.with(Tenants::Named, |kept| {
            kept.set_scope(&scope(0, &rules));
            rendered.with(Tenants::Named, |other| assert!(other.scope.is_none()));
        });
        rendered.with(Tenants::Named, |kept| assert!(kept.scope.is_some()));
    }

    #[test]
    fn named_and_hidden_scrapes_do_not_drop_each_others_series() {
        let (mut ledger, rendered, rules) = (Ledger::new(), RenderedProcesses::default(), Arc::default());
        facts(&mut ledger, 1, "comm=python");
        let scrape = |tenants: Tenants| {
            rendered.with(tenants, |kept| {
                let of_named = Arc::into_inner(scope(0, &rules)).expect("no other owner");
                kept.set_scope(&Arc::new(Scope { tenants, ..of_named }));
                written(&ledger, kept, &None).1[0]
            })
        };
        let both = [Tenants::Named, Tenants::Anonymous];
        assert_eq!((both.map(scrape), both.map(scrape)), ([1, 1], [0, 0]));
        let [_, hidden] = &rendered.0;
        hidden.lock().expect("free").drop_unused(Duration::ZERO);
        assert_eq!(both.map(scrape), [0, 1], "unused series are dropped");
    }

    #[test]
    fn process_beyond_the_limit_is_not_rendered_until_it_may_fit() {
        let (mut ledger, mut rendered) = (Ledger::new(), Rendered::default());
        facts(&mut ledger, 1, "comm=python");
        let mut scrape = |ledger: &Ledger, room: usize, count: u64| {
            let (view, mut is_made) = (ledger.snapshot().processes[0].clone(), false);
            let series = rendered.series(&view, &None, room, |_, mut series| {
                is_made = true;
                (0..count).for_each(|number| series.add(&INFO, &Labels::new(), number));
                series
            });
            (series.map(|series| series.len()), is_made)
        };
        assert_eq!(scrape(&ledger, 2, 3), (None, true));
        assert_eq!(scrape(&ledger, 2, 3), (None, false));
        facts(&mut ledger, 1, "slurm_job=42");
        assert_eq!(scrape(&ledger, 2, 3), (None, false), "also if it has changed");
        assert_eq!(scrape(&ledger, 3, 2), (Some(2), true));
        assert_eq!(scrape(&ledger, 2, 2), (Some(2), false));
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
