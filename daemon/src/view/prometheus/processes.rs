//! Series of processes: `used = predates + tracked + untrackable` at the last complete sample, and tracked bytes by category.
//! One series for each process has the long labels, for joins by pid and start.
//!
//! A process has all of its series or none. Young processes, and those beyond the limit of series, are added up and written as
//! one process `(other)` (folded). The oldest processes keep their series, so that series do not come and go.

use super::amounts::{self, Amounts};
use super::devices;
use super::families::{Families, Labels, Series, Since, families};
use super::names::{EXTRA_CATEGORIES, EXTRA_TAGS, Names, REST};
use super::rendered::{Parts, Rendered, Scope};
use crate::aggregator::Published;
use crate::clock::{process_age, since_boot};
use crate::config::Tenants;
use crate::run_writer::LiveFindings;
use crate::stats::Family;
use crate::view::rows::{ConsistentSample, flags};
use crate::view::text::Label;
use crate::view::{Health, ViewSettings};
use gpumem_ledger::{AccountView, Facts, ProcessKey, ProcessView};
use gpumem_model::owner::{CLAIMED, Owner, OwnerField};
use gpumem_report::findings::Finding;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, OnceLock};

const PROCESS: &[&str] = &["pid", "start"];
const IDENTITY: &[&str] = &[
    "pid",
    "start",
    "user",
    "comm",
    "job_name",
    "rank",
    "world_size",
    "container",
    "pod",
    "namespace",
    "pod_uid",
    "container_name",
    "slurm_job",
    "slurm_step",
    "cgroup",
    "claimed",
];
const OF_DEVICE: &[&str] = &["gpu", "uuid", "pid", "start"];

families! {
    INFO: gauge "gpumem_process_info" IDENTITY,
        "Identity of a process that uses a GPU, to be joined by pid and start; always 1. claimed lists the labels that the process itself reports.";
    COUNT: gauge "gpumem_device_processes" &["gpu", "uuid", "coverage"],
        "Processes on the device, including folded ones, with an agent (covered) and without (uncovered).";
    TRACKED_PEAK: gauge "gpumem_process_tracked_peak_bytes" OF_DEVICE,
        "Highest tracked bytes.";
    USED_PEAK: gauge "gpumem_process_used_peak_bytes" OF_DEVICE,
        "Highest used bytes in a reading.";
    PROTECTED: gauge "gpumem_process_protected_bytes" OF_DEVICE,
        "Part of used bytes that confidential computing protects; absent without it.";
    OUTSIDE: gauge "gpumem_process_beside_bytes" &["gpu", "uuid", "pid", "start", "kind"],
        "Memory outside used = predates + tracked + untrackable, by kind: host memory and other processes' memory.";
    FLAG: gauge "gpumem_process_flag" &["gpu", "uuid", "pid", "start", "flag"],
        "1 for each condition that applies to the process's values: covered, uncovered, late, blocked, paused, partial, stale, restarted (peaks since gpumemd was restarted).";
    LAYER: gauge "gpumem_process_names_layer" &["pid", "start", "layer", "state"],
        "1 for each source of names for memory in the process, with its state.";
    FINDING: gauge "gpumem_process_finding" &["gpu", "uuid", "pid", "start", "kind", "severity"],
        "Bytes that a finding about the process explains, by kind and severity (critical, warning, note); absent without a finding.";
    AGE: gauge "gpumem_process_sample_age_seconds" OF_DEVICE,
        "Age of the sample of used bytes.";
    EVENTS: counter "gpumem_process_events_total" PROCESS,
        "Ordered records of the agent that were applied.";
    LOST: counter "gpumem_process_events_lost_total" PROCESS,
        "Lost ordered records of the agent.";
    FAILED: counter "gpumem_process_allocation_failures_total" PROCESS,
        "Failed driver allocations.";
    CLAIMED_DEVICES: gauge "gpumem_process_claimed_devices" PROCESS,
        "Devices that only the process reports and NVML, which works, does not have; they have no other series.";
}

/// Maximum number of series of a process that do not depend on its devices: one for its identity, four counts, and eight for the
/// sources that name its memory.
pub(super) const MAX_PER_PROCESS: usize = 13;
/// Maximum number of series of a process on a device, without categories and tags: two peaks, protected, five further kinds, six
/// flags, one age, and the findings.
const MAX_PER_ACCOUNT: usize = amounts::MAX_SERIES + 15 + MAX_FINDINGS;
/// Maximum number of findings of a process on a device that have series: the most important ones.
const MAX_FINDINGS: usize = 4;

/// Returns the maximum number of series of a process on a device: the number if every category and tag has bytes.
pub(super) fn max_per_account(categories: usize, tags: usize) -> usize {
    let tags = if tags == 0 { 0 } else { tags + EXTRA_TAGS };
    MAX_PER_ACCOUNT + categories + EXTRA_CATEGORIES + tags
}

/// Number of processes without series of their own, by reason.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Folded {
    /// The process is young.
    pub young: u64,
    /// The limit of series was reached.
    pub room: u64,
}

/// Index of a device in the snapshot, and a process's account and values on that device.
type OnDevice<'a> = (usize, &'a AccountView, Amounts<'a>);

pub(super) struct ProcessSeries<'a> {
    published: &'a Published,
    shown: &'a ViewSettings,
    live: &'a LiveFindings,
    scope: Arc<Scope>,
}

impl<'a> ProcessSeries<'a> {
    pub(crate) fn new(
        published: &'a Published,
        health: &Health,
        shown: &'a ViewSettings,
        live: &'a LiveFindings,
    ) -> Self {
        let devices = &published.snapshot.devices;
        let is_present = devices.iter().map(|device| health.nvml.may_have(device.name)).collect();
        let device_labels = devices.iter().map(|device| devices::labels(device, health)).collect();
        let (rules, tags, tenants) = (Arc::clone(&shown.rules), shown.tags, shown.tenants);
        let scope = Arc::new(Scope { is_present, device_labels, rules, tags, tenants });
        ProcessSeries { published, shown, live, scope }
    }

    pub(crate) fn write(&self, rendered: &mut Rendered, out: &mut Families) -> Folded {
        let is_live = |process: &&Arc<ProcessView>| process.ended.is_none() && !process.accounts.is_empty();
        let mut live: Vec<_> = self.published.snapshot.processes.iter().filter(is_live).collect();
        live.sort_by_key(|process| (process.key.start_ticks, process.key.pid));
        out.add(self.counts(&live));
        rendered.set_scope(&self.scope);
        let up = since_boot();
        // Reserve room for the series of the process `(other)`.
        let categories = self.shown.rules.structure.rules.len();
        let present = self.scope.is_present.iter().filter(|is_present| **is_present).count();
        let reserve = 1 + present * (amounts::MAX_SERIES + categories + EXTRA_CATEGORIES + EXTRA_TAGS);
        let (mut folded, mut rest, live_findings) = (Folded::default(), Vec::new(), self.live.read());
        for process in &live {
            let start_ticks = process.key.start_ticks;
            if start_ticks != 0 && process_age(start_ticks, up) < self.shown.young {
                folded.young += 1;
            } else {
                let findings = live_findings.of(process.key);
                let render = |parts: &mut Parts, out| self.render(process, findings.as_deref(), parts, out);
                let series = rendered.series(process, &findings, out.room(reserve), render);
                if series.is_some_and(|series| out.add_whole(series, reserve)) {
                    continue;
                }
                folded.room += 1;
            }
            rest.push(process);
        }
        drop(live_findings);
        rest.iter().for_each(|process| rendered.make_categories(process, || self.categories(process)));
        let categories = rest.iter().map(|process| (&****process, rendered.categories(process.key)));
        out.add(self.rest(&categories.collect::<Vec<_>>()));
        rendered.keep(&live);
        folded
    }

    /// Returns the series of the process `(other)`: the sums over processes without series of their own.
    fn rest(&self, processes: &[(&ProcessView, Option<&Names<'static>>)]) -> Series {
        let (mut series, mut sums) = (Series::default(), BTreeMap::<usize, Amounts<'_>>::new());
        for (process, categories) in processes {
            for (device, _, mut amounts) in self.amounts(process, *categories) {
                amounts.fold_tags();
                sums.entry(device).or_default().add(amounts);
            }
        }
        if !processes.is_empty() {
            series.add_with(&INFO, &process_labels(Labels::new(), REST, "0"), ("comm", REST), 1_u64);
        }
        for (device, amounts) in sums {
            amounts.write(&process_labels(self.device_labels(device), REST, "0"), &mut series);
        }
        series
    }

    fn device_labels(&self, device: usize) -> Labels {
        self.scope.device_labels[device].clone()
    }

    /// Returns the numbers of processes with and without an agent on each device.
    fn counts(&self, live: &[&Arc<ProcessView>]) -> Series {
        let (mut series, mut counts) = (Series::default(), vec![[0_u64; 2]; self.scope.is_present.len()]);
        for process in live {
            for device in process.accounts.iter().filter_map(|account| account.device) {
                if let Some(counts) = counts.get_mut(device) {
                    counts[usize::from(!process.coverage.covered)] += 1;
                }
            }
        }
        for (device, counts) in counts.iter().enumerate().filter(|(device, _)| self.scope.is_present[*device])
        {
            for (word, count) in ["covered", "uncovered"].into_iter().zip(counts) {
                let labels = &self.scope.device_labels[device];
                series.add_with(&COUNT, labels, ("coverage", Label::word(word)), *count);
            }
        }
        series
    }

    /// Returns whether this machine has the device of an account; `None` if the account has no device.
    fn has_device(&self, account: &AccountView) -> Option<bool> {
        self.scope.is_present.get(account.device?).copied()
    }

    /// Returns the category of each cell of a process with an agent.
    fn categories(&self, process: &ProcessView) -> Option<Names<'_>> {
        process.coverage.covered.then(|| Names::categories(process, &self.scope.rules.structure))
    }

    fn amounts<'p>(&self, process: &'p ProcessView, categories: Option<&'p Names<'_>>) -> Vec<OnDevice<'p>> {
        let covered = process.coverage.covered;
        let of_account = |account: &'p AccountView| {
            let (mut amounts, held) = Amounts::of(account, covered);
            if let Some(categories) = categories {
                amounts.categories = categories.sums(held);
            }
            if covered && self.scope.tags > 0 && self.scope.tenants == Tenants::Named {
                let tags = Names::tags(process, &account.peak.amounts, self.scope.tags);
                amounts.tags = tags.into_sums(held);
            }
            Some((account.device?, account, amounts))
        };
        let accounts = process.accounts.iter().filter(|account| self.has_device(account) == Some(true));
        accounts.filter_map(of_account).collect()
    }

    /// Adds pid and start of a process to labels.
    fn process_labels(&self, labels: Labels, key: ProcessKey) -> Labels {
        match self.scope.tenants {
            Tenants::Named => process_labels(labels, &key.pid.to_string(), &key.start_ticks.to_string()),
            Tenants::Anonymous => process_labels(labels, &pseudonym(key), "0"),
        }
    }

    /// Adds the series of a process to `out`. `parts`: parts of its earlier series.
    fn render(
        &self,
        process: &ProcessView,
        findings: Option<&[(Option<String>, Finding)]>,
        parts: &mut Parts,
        mut out: Series,
    ) -> Series {
        let is_named = self.scope.tenants == Tenants::Named;
        let mut process_labels = std::mem::take(&mut parts.labels);
        let own = process_labels.own(|| self.process_labels(Labels::new(), process.key));
        match is_named {
            true => out.add(&INFO, parts.identity(process, |facts| identity_labels(facts, own)), 1_u64),
            false => out.add(&INFO, own, 1_u64),
        }
        if process.coverage.covered && is_named {
            out.add(&EVENTS, own, process.coverage.events);
            out.add(&LOST, own, process.coverage.lost_in_all());
            out.add(&FAILED, own, process.coverage.failed_allocations);
            for source in process.coverage.layers.iter().filter(|source| source.state != "absent") {
                let labels = own.clone().with("layer", &source.layer);
                out.add_with(&LAYER, &labels, ("state", source.state.as_str()), 1_u64);
            }
        }
        let claimed = process.accounts.iter().filter(|account| self.has_device(account) == Some(false));
        let claimed = claimed.count() as u64;
        out.add(&CLAIMED_DEVICES, own, (claimed > 0).then_some(claimed));
        let categories = parts.categories(process, || self.categories(process));
        for (device, account, amounts) in self.amounts(process, categories) {
            let make = || self.process_labels(self.device_labels(device), process.key);
            let labels = process_labels.of_device(device, make);
            amounts.write(labels, &mut out);
            write_other(process, account, labels, &mut out);
            self.write_findings(findings.unwrap_or_default(), device, labels, &mut out);
        }
        parts.labels = process_labels;
        out
    }

    /// Writes the bytes of the findings about a process on a device, one series for each kind and severity.
    fn write_findings(
        &self,
        findings: &[(Option<String>, Finding)],
        device: usize,
        labels: &Labels,
        out: &mut Series,
    ) {
        if findings.is_empty() {
            return;
        }
        let uuid = self.published.snapshot.devices[device].name.to_string();
        let mut sums = BTreeMap::new();
        for (_, finding) in findings.iter().filter(|(of, _)| of.as_deref() == Some(&*uuid)).take(MAX_FINDINGS)
        {
            let sum = sums.entry((finding.severity, finding.kind)).or_insert(0_i64);
            *sum = sum.saturating_add(finding.bytes);
        }
        for ((severity, kind), bytes) in sums {
            let labels = labels.clone().with("kind", &kind.name());
            out.add_with(&FINDING, &labels, ("severity", &*severity.name()), bytes);
        }
    }
}

/// Writes the values that cannot be added to those of other processes.
fn write_other(process: &ProcessView, account: &AccountView, labels: &Labels, out: &mut Series) {
    if let Some(sample) = ConsistentSample::of(account).sample {
        let may_repeat = !process.coverage.covered && process.ended.is_none();
        let reading = account.device.filter(|_| may_repeat).map(|device| (device, sample.number));
        out.add_age(&AGE, labels, Since { time_ns: sample.t1_ns, reading });
    }
    if process.coverage.covered {
        out.add(&TRACKED_PEAK, labels, account.peak.tracked_bytes);
        let outside = &account.beside;
        for (kind, bytes) in [
            ("managed", outside.managed_bytes),
            ("pinned", outside.pinned_bytes),
            ("registered", outside.registered_bytes),
            ("imported", outside.imported_bytes),
            ("host_vmm", outside.host_vmm_bytes),
        ] {
            out.add_with(&OUTSIDE, labels, ("kind", Label::word(kind)), (bytes != 0).then_some(bytes));
        }
    }
    out.add(&USED_PEAK, labels, account.peak_used.map(|(used, _)| used));
    out.add(&PROTECTED, labels, account.protected_bytes.filter(|_| account.complete.is_some()));
    for flag in flags(process, account) {
        out.add_with(&FLAG, labels, ("flag", Label::word(flag)), 1_u64);
    }
}

/// Returns the pseudonym of a process whose pid is hidden. It is constant while process and daemon live. A random key prevents
/// others from finding the pid by trying all pids.
fn pseudonym(key: ProcessKey) -> String {
    static SECRET: OnceLock<RandomState> = OnceLock::new();
    format!("hidden-{:016x}", SECRET.get_or_init(RandomState::new).hash_one((key.pid, key.start_ticks)))
}

fn process_labels(labels: Labels, pid: &str, start: &str) -> Labels {
    labels.with("pid", pid).with("start", start)
}

fn identity_labels(facts: &Facts, own: &Labels) -> Labels {
    let owner = Owner::of(&facts.seen, &facts.claims, facts.uid);
    let mut labels = owner.iter().fold(own.clone(), |labels, field| labels.with(field.label(), &field.value));
    if let Some(cgroup) = facts.seen.get("cgroup") {
        labels = labels.with("cgroup", cgroup);
    }
    let claimed: Vec<&str> = owner.iter().filter(|field| field.is_claim).map(OwnerField::label).collect();
    if !claimed.is_empty() {
        labels = labels.with(CLAIMED, &claimed.join(" "));
    }
    labels
}
