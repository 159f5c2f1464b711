//! Conclusions about a run: why memory ran out, which memory grows, which is unused, or that nothing is wrong.
//!
//! A finding explains a number of bytes. Findings are sorted by severity, so the causes of an error that ended the process come
//! first. Findings of one severity are sorted by the bytes that they explain. After the first finding, those below 2 %
//! of the process's memory are omitted. Missing records come last. Every form of output shows the same list.

mod clues;
mod finding;
mod growth;
mod out_of_memory;
pub mod text;

pub(crate) use clues::{is_divided_alike, retained_graphs};
pub use finding::{Finding, Kind, Rate, Severity};
pub(crate) use finding::{KeptBy, PINNED};
pub(crate) use out_of_memory::{
    FRAGMENTED_SHARE, is_of_second_optimizer, of_request, pool_limit_setting, state_of_earlier_steps,
};

use crate::{Report, held, ooms, used_or_tracked};
pub(crate) use finding::mib;
use finding::rank;
use gpumem_model::gap::{Cause, UntrackableChange};
use gpumem_model::names::Named;
use gpumem_model::run::{Amounts, Class, Device, Fate, Oom, Run, State};
use gpumem_model::timeline::Point;
use gpumem_model::units::{plural, signed};
use serde::Serialize;
use std::cmp::Reverse;

/// Minimum unused memory of pools for a finding, as a share of the process's memory.
const UNUSED_SHARE: f64 = 0.25;
/// Minimum unused memory of pools for a finding, as a share of the device's memory.
const UNUSED_DEVICE_SHARE: f64 = 0.25;
/// Minimum Untrackable memory for a finding, unexplained or of modules, as a share of the process's memory.
const UNEXPLAINED_SHARE: f64 = 0.10;
/// Minimum size in bytes of unused or unexplained memory for a finding.
const LEAST_BYTES: i64 = 512 << 20;
/// Minimum size in bytes of unused memory of several streams, if they cache more than is ever in use.
const LEAST_OF_STREAMS: i64 = 256 << 20;

/// How the run ended, as far as memory is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The process ended because memory ran out.
    OutOfMemory,
    /// The process ended, and memory may have run out.
    Suspected,
    /// Memory ran out, and the process continued, or its fate is not known yet.
    Survived,
    /// The process ended for another reason.
    Ended,
    /// The process is running.
    Running,
}

impl Outcome {
    /// Returns how a run ended.
    pub fn of(run: &Run) -> Self {
        match (decisive_of(run), run.state) {
            (Some((.., outcome)), _) => outcome,
            (None, State::Open) => Outcome::Running,
            (None, _) => Outcome::Ended,
        }
    }

    /// Returns the outcome as a few words; `None` if memory did not run out, or the program survived it.
    pub fn words(self) -> Option<&'static str> {
        match self {
            Outcome::OutOfMemory => Some("out of memory"),
            Outcome::Suspected => Some("perhaps out of memory"),
            Outcome::Survived | Outcome::Ended | Outcome::Running => None,
        }
    }
}

/// The conclusions about a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Findings {
    pub outcome: Outcome,
    /// Findings, the most important first; empty if nothing was found.
    pub findings: Vec<Finding>,
}

/// Returns the out-of-memory record that decides the outcome, with its device: the last fatal one, else the last suspected one,
/// else the last one that the program survived, or whose outcome is not known yet.
pub(crate) fn decisive<'r>(report: &Report<'r>) -> Option<(&'r Device, &'r Oom, Outcome)> {
    decisive_of(report.run)
}

fn decisive_of(run: &Run) -> Option<(&Device, &Oom, Outcome)> {
    let rank = |oom: &Oom| match oom.fate {
        Fate::Fatal { .. } if oom.is_out_of_memory() => Some(Outcome::OutOfMemory),
        Fate::Fatal { .. } if oom.is_suspected() => Some(Outcome::Suspected),
        _ if oom.is_out_of_memory() => Some(Outcome::Survived),
        _ => None,
    };
    let ranked = ooms(run).filter_map(|(device, oom)| Some((device, oom, rank(oom)?)));
    ranked.min_by_key(|(_, oom, outcome)| (*outcome, Reverse(oom.time_ns)))
}

impl Findings {
    /// Draws the conclusions about a run.
    pub fn of(report: &Report<'_>) -> Self {
        let (decisive, outcome) = (decisive(report), Outcome::of(report.run));
        let mut findings = Vec::new();
        for device in &report.run.devices {
            match decisive {
                Some((of, oom, outcome)) if std::ptr::eq(of, device) && outcome != Outcome::Survived => {
                    findings.extend(out_of_memory::causes(report, device, oom));
                }
                _ => {
                    findings.extend(growth::finding(report, device));
                    findings.extend(growth::pinned(report, device));
                    findings.extend(unused_pool(report, device));
                }
            }
            findings.extend(untrackable(report, device));
            findings.extend(eager_modules(report, device));
        }
        rank(&mut findings);
        findings.extend(losses(report));
        Findings { outcome, findings }
    }
}

/// Returns the bytes of pools that no block used.
fn idle_of(run: &Run, amounts: &Amounts) -> i64 {
    held(run, amounts, |cell| cell.class == Class::PoolIdle)
}

/// Returns the bytes that were in use at a moment.
fn in_use(run: &Run, point: &Point) -> i64 {
    point.tracked_bytes().saturating_sub(idle_of(run, &point.amounts))
}

/// Returns the most bytes that were in use until the end of the last completed step (0 before the first one), and how many more a
/// failed request found in use.
pub(crate) fn beyond_steps(run: &Run, device: &Device, oom: &Oom) -> (i64, i64) {
    let end_ns = device.details.iterations.rows.last().map_or(0, |row| row.end_ns);
    let points = device.details.timeline.points.iter().filter(|point| point.time_ns <= end_ns);
    let of_steps = points.map(|point| in_use(run, point)).max().unwrap_or(0);
    let now = oom.tracked_bytes.saturating_sub(signed(oom.idle_bytes.unwrap_or(0)));
    (of_steps, now.saturating_sub(of_steps).max(0))
}

/// Returns the most tracked bytes that were in use at one moment, and that moment; `None` if it is the peak.
pub(crate) fn most_in_use(run: &Run, device: &Device) -> (i64, Option<u64>) {
    let peak = device.peak.tracked_bytes.unwrap_or(0).saturating_sub(idle_of(run, &device.peak.amounts));
    let points = device.details.timeline.points.iter();
    let moments = points.map(|point| (in_use(run, point), Some(point.time_ns)));
    moments.max_by_key(|moment| moment.0).filter(|moment| moment.0 > peak).unwrap_or((peak, None))
}

/// Returns the finding on unused memory of pools at the peak. PyTorch returns it to the driver before a request fails, so it
/// matters only if it is a large part of the device, or if several streams cache more than is ever in use: each further stream adds
/// its own.
fn unused_pool(report: &Report<'_>, device: &Device) -> Option<Finding> {
    // With lost records, blocks may be missing at the peak.
    let coverage = &report.run.coverage;
    if coverage.partial_state || coverage.partial_history && coverage.lost > 0 {
        return None;
    }
    let idle = idle_of(report.run, &device.peak.amounts);
    let used = used_or_tracked(&device.peak)?;
    let mut what = format!("{} MiB were cached by the allocator and not in use at the peak", mib(idle));
    let at_peak = device.peak.tracked_bytes.unwrap_or(0).saturating_sub(idle);
    let (in_use, time_ns) = most_in_use(report.run, device);
    if let Some(ns) = time_ns.filter(|_| in_use.saturating_sub(at_peak) >= idle / 2) {
        what += &format!("; {} MiB were in use at {}", mib(in_use), report.times().time(ns));
    }
    if let Some(count) = clues::streams(device) {
        what += &format!(
            "; {count} streams requested memory, and what one stream or private pool of CUDA graphs caches serves no other"
        );
    } else if has_graphs(device) {
        what += "; CUDA graphs keep pools of their own";
    }
    let note = Finding::new(Kind::UnusedPool, Severity::Note, Some(device), (idle, used), what);
    let is_of_streams = clues::streams(device).is_some() && idle > in_use && idle >= LEAST_OF_STREAMS;
    let least = device.total_bytes.map_or(0, signed) as f64 * UNUSED_DEVICE_SHARE;
    let is_of_device = idle as f64 >= least && idle >= LEAST_BYTES;
    if note.share < UNUSED_SHARE || !is_of_device && !is_of_streams {
        return None;
    }
    let Some(growth) = growth::idle(report, device, None) else { return Some(note) };
    let what = format!("{}; they grow: {}", note.what, growth.rate());
    Some(Finding { severity: Severity::Warning, confidence: Some(growth.confidence), what, ..note })
}

/// Returns whether the program has captured CUDA graphs on a device. Runs of earlier versions have no number of graphs.
pub(crate) fn has_graphs(device: &Device) -> bool {
    let captured = Cause::GraphInstantiated.name();
    let causes = |step: &UntrackableChange| {
        step.also.iter().chain([&step.cause]).any(|cause| Some(cause.as_str()) == captured)
    };
    device.details.graphs > 0 || device.details.steps.iter().any(causes)
}

/// Returns whether CUDA graphs may have several private pools. Graphs of one pool share what it caches.
pub(crate) fn has_pools_of_graphs(device: &Device) -> bool {
    let private_pools = device.details.pools.iter().filter_map(|pool| pool.private_pools).max();
    has_graphs(device) && private_pools.is_none_or(|count| count > 1)
}

fn untrackable(report: &Report<'_>, device: &Device) -> Option<Finding> {
    let moment = &device.last;
    let unexplained = report.run.coverage.covered.then(|| moment.gap_parts()).flatten()?.unexplained_bytes;
    let what = format!("{} MiB are Untrackable and have no known cause", mib(unexplained));
    note(Kind::Untrackable, device, (unexplained, moment.used_bytes()?), UNEXPLAINED_SHARE, what)
}

/// Returns the finding on modules that are large because the program loads them all at its start.
fn eager_modules(report: &Report<'_>, device: &Device) -> Option<Finding> {
    let bytes = device.last.gap_parts()?.modules_bytes;
    let what =
        format!("at most {} MiB of kernels were loaded at once: CUDA_MODULE_LOADING=EAGER", mib(bytes));
    let note = note(Kind::Untrackable, device, (bytes, device.last.used_bytes()?), UNEXPLAINED_SHARE, what)?;
    is_eager(report.run).then(|| Finding { advice: Some("remove that variable".into()), ..note })
}

/// Returns whether the environment makes the driver load all modules at the start of the process.
pub(crate) fn is_eager(run: &Run) -> bool {
    run.process.claims.get("module_loading").is_some_and(|value| value == "EAGER")
}

/// Returns a note on `bytes`, if they are large and at least `least_share` of `used`.
fn note(
    kind: Kind,
    device: &Device,
    (bytes, used): (i64, i64),
    least_share: f64,
    what: String,
) -> Option<Finding> {
    let note = Finding::new(kind, Severity::Note, Some(device), (bytes, used), what);
    (note.share >= least_share && bytes >= LEAST_BYTES).then_some(note)
}

fn losses(report: &Report<'_>) -> Option<Finding> {
    let coverage = &report.run.coverage;
    let is_partial = coverage.partial_state || coverage.partial_history && coverage.lost > 0;
    let what = format!("{} are missing, so the numbers are too low", plural(coverage.lost, "record"));
    is_partial.then(|| Finding::new(Kind::Losses, Severity::Note, None, (0, 0), what))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Groupings;
    use gpumem_model::growth::Axis;
    use gpumem_model::run::{Cell, DeviceReading, Holder, Moment, OomDevice, OomKind, UntrackableParts};

    #[test]
    fn live_leak_has_the_time_until_the_device_is_full() {
        const STEP: i64 = 64 << 20;
        let mut run = run();
        run.state = State::Open;
        run.cells = vec![Cell { tag: Some("decoder".into()), ..run.cells[0].clone() }];
        let device = &mut run.devices[0];
        let free_bytes = (STEP * 41 * 60) as u64;
        device.reading = Some(DeviceReading {
            time_ns: 0,
            used_bytes: 0,
            free_bytes,
            system_reserved_bytes: None,
            unified: false,
        });
        device.details.timeline.points.clear();
        let growth = &mut device.details.growth;
        (growth.axis, growth.stride) = (Axis::Step, 1);
        growth.points = (0..60).map(|step| (step, step * 1_000_000_000)).collect();
        growth.named = (0..60).map(|step| step * STEP).collect();
        growth.cells = vec![(0, growth.named.clone())];
        let found = |run: &Run| {
            let report = Report::new(run, Groupings::default(), None);
            Findings::of(&report).findings.remove(0)
        };
        let live = found(&run);
        assert_eq!((live.kind, live.full_in_s), (Kind::Growth, Some(41 * 60)), "{live:?}");
        assert!(live.sentence().starts_with("the GPU is full in 41 min: "), "{live:?}");
        assert!(live.what.contains("decoder: +64.0 MiB per step over "), "{}", live.what);
        assert!(!live.anonymous_sentence().contains("decoder"));
        run.state = State::Closed { time_ns: 0, status: None };
        assert_eq!(found(&run).full_in_s, None, "an ended process fills nothing");
    }

    #[test]
    fn unused_pool_memory_matters_if_it_is_much_of_the_device() {
        const GIB: i64 = 1 << 30;
        let mut run = run();
        let of = |class| Cell { class, tag: None, ..run.cells[0].clone() };
        run.cells = vec![of(Class::Block), of(Class::PoolIdle)];
        let device = &mut run.devices[0];
        let amounts = |in_use: i64, idle: i64| Amounts::from(vec![(0, in_use * GIB), (1, idle * GIB)]);
        (device.peak.tracked_bytes, device.peak.amounts) = (Some(5 * GIB), amounts(1, 4));
        (device.peak.predates_bytes, device.peak.untrackable_bytes) = (Some(0), Some(0));
        let point = |time_ns, amounts| Point { time_ns, amounts, rest_bytes: 0 };
        device.details.timeline.points =
            vec![point(7_000_000_000, amounts(4, 0)), point(9_000_000_000, amounts(1, 4))];
        let found = |run: &mut Run, total_gib: u64| {
            run.devices[0].total_bytes = Some(total_gib << 30);
            let report = Report::new(run, Groupings::default(), None);
            unused_pool(&report, &report.run.devices[0]).map(|finding| finding.what)
        };
        let what = found(&mut run, 16).expect("a finding");
        assert!(
            what.contains("4,096 MiB were cached") && what.contains("; 4,096 MiB were in use at"),
            "{what}"
        );
        assert!(!what.contains("stream"), "{what}");
        let pool = gpumem_model::run::Pool { streams: Some(13), ..Default::default() };
        run.devices[0].details.pools = vec![pool];
        let what = found(&mut run, 16).expect("a finding");
        assert!(
            what.contains("; 13 streams requested memory, and what one stream or private pool"),
            "{what}"
        );
        assert_eq!(found(&mut run, 80), None, "as much was in use at another moment");
        let amounts = &mut run.devices[0].details.timeline.points[0].amounts;
        *amounts = Amounts::from(vec![(0, GIB), (1, 4 * GIB)]);
        assert!(found(&mut run, 80).is_some(), "streams cache more than is ever in use");
        run.devices[0].details.pools[0].streams = Some(1);
        assert_eq!(found(&mut run, 80), None, "one stream");
        (run.coverage.partial_history, run.coverage.lost) = (true, 9);
        assert_eq!(found(&mut run, 16), None, "blocks may be missing");
    }

    #[test]
    fn findings_that_explain_little_beside_the_first_are_omitted() {
        let kinds = |bytes: &[i64]| {
            let finding = |bytes: &i64| {
                Finding::new(Kind::Growth, Severity::Warning, None, (*bytes, 1000), String::new())
            };
            let mut findings: Vec<Finding> = bytes.iter().map(finding).collect();
            rank(&mut findings);
            findings.into_iter().map(|finding| finding.bytes).collect::<Vec<_>>()
        };
        assert_eq!(kinds(&[25, 900, 10, 60]), [900, 60], "below 3 % of the first");
        assert_eq!(kinds(&[500, 19, 21]), [500, 21], "below 2 % of the process");
        assert_eq!(kinds(&[5]), [5], "the first one");
    }

    /// Returns a run with a device of 16 GiB, for tests.
    fn run() -> Run {
        let log = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        gpumem_import::read_file(&log, None).expect("a log").remove(0)
    }

    #[test]
    fn a_share_is_of_the_process_or_of_the_device() {
        let finding = |kind| Finding::new(kind, Severity::Note, None, (3 << 20, 1 << 20), String::new());
        assert_eq!(finding(Kind::Growth).share, 1.0);
        assert_eq!(
            finding(Kind::Growth).anonymous_sentence(),
            "growth: 3 MiB, 100 % of the process's memory"
        );
        let others = Finding { share: 0.5, ..finding(Kind::OtherProcesses) };
        assert_eq!(others.anonymous_sentence(), "other processes: 3 MiB, 50 % of the device's memory");
    }

    #[test]
    fn large_modules_that_are_loaded_at_once_are_a_finding() {
        const MIB: i64 = 1 << 20;
        let mut run = run();
        let parts = UntrackableParts { modules_bytes: 900 * MIB, ..UntrackableParts::default() };
        let last = &mut run.devices[0].last;
        (last.predates_bytes, last.tracked_bytes) = (Some(0), Some(1000 * MIB));
        (last.untrackable_bytes, last.parts) = (Some(parts.sum()), Some(parts));
        let found = |run: &Run| eager_modules(&Report::new(run, Groupings::default(), None), &run.devices[0]);
        assert_eq!(found(&run), None);
        run.process.claims.insert("module_loading".into(), "EAGER".into());
        let finding = found(&run).expect("a finding");
        assert_eq!((finding.kind, finding.bytes), (Kind::Untrackable, 900 * MIB));
        assert!(finding.what.starts_with("at most 900 MiB of kernels"), "{}", finding.what);
        run.devices[0].last.tracked_bytes = Some(20_000 * MIB);
        assert_eq!(found(&run), None, "few of the process's bytes");
    }

    #[test]
    fn growing_pinned_memory_has_the_lines_that_grow() {
        let mut run = run();
        let tagged = |tag: &str| Cell { tag: Some(tag.into()), ..run.cells[0].clone() };
        run.cells = vec![tagged("load.py:7 stage"), tagged("load.py:3 fixed")];
        let growth = &mut run.devices[0].details.growth;
        (growth.axis, growth.stride) = (Axis::Step, 1);
        growth.points = (0..60).map(|step| (step, step * 1_000_000_000)).collect();
        growth.pinned = (0..60).map(|step| step << 24).collect();
        growth.latest = growth.points[59];
        let what = |run: &Run| {
            let report = Report::new(run, Groupings::default(), None);
            growth::pinned(&report, &run.devices[0]).expect("a finding").what
        };
        assert!(what(&run).starts_with("pinned host memory: +16.0 MiB per step"), "{}", what(&run));
        run.devices[0].details.growth.pinned_cells = vec![(0, 59 << 24)];
        assert!(what(&run).starts_with("pinned host memory of load.py:7 stage: +16.0"), "{}", what(&run));
        let growth = &mut run.devices[0].details.growth;
        growth.pinned_cells = vec![(1, 20 << 24), (0, 59 << 24)];
        growth.pinned.iter_mut().for_each(|bytes| *bytes += 20 << 24);
        let found = growth::pinned(&Report::new(&run, Groupings::default(), None), &run.devices[0])
            .expect("a finding");
        let whole_bytes = found.rate.as_ref().map(|rate| rate.whole_bytes);
        assert_eq!(whole_bytes, Some(60 << 24), "of all 60 steps");
        assert_eq!(
            found.names.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
            ["load.py:7 stage"]
        );
        let growth = &mut run.devices[0].details.growth;
        growth.pinned_cells[0].1 = 600 << 24;
        growth.pinned.iter_mut().for_each(|bytes| *bytes += 580 << 24);
        assert!(
            what(&run).starts_with("pinned host memory: +16.0"),
            "any line may have grown: {}",
            what(&run)
        );
        run.devices[0].details.growth.early_pinned_cells = vec![(1, 598 << 24), (0, 0)];
        assert!(what(&run).starts_with("pinned host memory of load.py:7 stage: +16.0"), "{}", what(&run));
    }

    #[test]
    fn largest_part_of_a_run_without_a_problem_may_be_unused() {
        let mut run = run();
        run.source.kind = "recording".into();
        (run.coverage.covered, run.state) = (true, State::Open);
        let of = |class, tag: &str| Cell { class, tag: Some(tag.into()), ..run.cells[0].clone() };
        run.cells = vec![of(Class::Block, "model"), of(Class::PoolIdle, "")];
        let device = &mut run.devices[0];
        device.details = Default::default();
        let mut line = |in_use: i64, idle: i64| {
            let amounts = Amounts::from(vec![(0, in_use << 20), (1, idle << 20)]);
            run.devices[0].peak = Moment { tracked_bytes: Some(100 << 20), amounts, ..Moment::default() };
            text::lines(&Report::new(&run, Groupings::default(), None)).remove(0)
        };
        assert!(line(30, 70).ends_with("cached by the allocator 70.0 MiB, 70 %"), "{}", line(30, 70));
        assert!(line(60, 40).ends_with("model 60.0 MiB, 60 %"), "{}", line(60, 40));
    }

    #[test]
    fn an_undecided_error_is_not_called_survived() {
        let mut run = run();
        let line = |run: &Run| text::lines(&Report::new(run, Groupings::default(), None)).remove(0);
        let oom = Oom { kind: OomKind::Device, asked_bytes: 1 << 30, ..Oom::default() };
        run.devices[0].details.ooms = vec![Oom { fate: Fate::Survived, ..oom.clone() }];
        assert!(line(&run).ends_with("and the program went on"), "{}", line(&run));
        run.devices[0].details.ooms = vec![oom];
        assert!(line(&run).ends_with("it is unknown whether that ends the program"), "{}", line(&run));
    }

    /// The amounts and times of a damaged store may have any value.
    #[test]
    fn damaged_runs_have_conclusions_too() {
        let mut run = run();
        run.cells = vec![Cell { tag: Some("a/b".into()), ..run.cells[0].clone() }; 2];
        let amounts = || Amounts::from(vec![(0, i64::MAX), (1, i64::MAX)]);
        let device = &mut run.devices[0];
        let times = [u64::MAX, 0, 5_000_000_000];
        let point = |time_ns: &u64| Point { time_ns: *time_ns, amounts: amounts(), rest_bytes: 0 };
        device.details.timeline.points = times.iter().cycle().take(90).map(point).collect();
        device.details.growth.points = (0..30).map(|at| (at, at)).collect();
        device.details.growth.cells = vec![(0, vec![i64::MIN, i64::MAX]), (9, vec![1])];
        device.details.ooms = vec![Oom {
            kind: OomKind::Pool,
            fate: Fate::Fatal { after_ns: 0, status: None },
            asked_bytes: u64::MAX,
            tracked_bytes: i64::MAX,
            predates_bytes: Some(i64::MAX),
            untrackable_bytes: Some(i64::MAX),
            time_ns: u64::MAX,
            device: Some(OomDevice {
                unaccounted_bytes: i64::MAX,
                system_bytes: Some(u64::MAX),
                holders: vec![Holder { used_bytes: i64::MIN, ..Holder::default() }; 3],
                ..OomDevice::default()
            }),
            ..Oom::default()
        }];
        let report = Report::new(&run, Groupings::default(), None);
        assert_eq!(Findings::of(&report).outcome, Outcome::OutOfMemory);
        assert!(text::lines(&report)[0].starts_with("OUT OF MEMORY"));
    }
}
