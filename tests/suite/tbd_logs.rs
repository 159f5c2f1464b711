//! The TBD importer and the ledger on real training logs, to the byte.
use gpumem_import::{observe_file, read_file};
use gpumem_ledger::{ClosedSample, Ledger, Origin, ProcessView};
use gpumem_model::run::Run;
use gpumem_report::rules::Groupings;
use gpumem_report::{GroupBy, Report};
use gpumem_runs::builder::Sink;
use gpumem_tests::samples::sample;
use gpumem_wire::{Body, Record};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const WITH_SMI: &str = "tbd-log/iwslt15-vi_en-tbd-partial_fw_prop-memory_profile.with-nvidia-smi.log";
const GROUNDHOG: &str = "tbd-log/iwslt15-vi_en-groundhog-memory_profile.log";
const MICRO19: &str = "tbd-log/micro19-iwslt15-vi_en-groundhog-010.log";
const ANALYSIS: &str = "tbd-analysis/iwslt15-vi_en-groundhog-memory_profile.log_ANALYSIS";
const MIB: f64 = 1_048_576.0;

fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/small-train.log")
}

fn one_run(path: &Path) -> Run {
    let mut runs = read_file(path, None).expect("a log");
    assert_eq!(runs.len(), 1);
    runs.remove(0)
}

/// Every log that is here, the project's own among them.
fn logs() -> Vec<PathBuf> {
    let samples = [WITH_SMI, GROUNDHOG, MICRO19].into_iter().filter_map(sample);
    samples.chain([shipped()]).collect()
}

#[test]
fn with_nvidia_smi_has_every_record_and_the_known_gap() {
    let Some(path) = sample(WITH_SMI) else { return };
    let run = one_run(&path);
    assert_eq!(run.coverage.allocations, 6775);
    assert_eq!(run.coverage.allocated_bytes, 3_853_070_536);
    assert_eq!(run.coverage.rejected, 0);
    assert_eq!((run.coverage.odd, run.coverage.lost), (0, 0));
    assert_eq!(run.devices[0].last.tracked_bytes, Some(3_853_070_536));

    let text = std::fs::read_to_string(&path).expect("text");
    let batch_100 = text.lines().position(|line| line.contains("Batch [100]")).expect("batch 100") as u64 + 1;
    let mut readings = 0;
    for sample in samples_of(&path).into_iter().filter(|sample| sample.t0_ns >= batch_100) {
        let mib = sample.untrackable_bytes().expect("both known") as f64 / MIB;
        assert!((592.4..=596.6).contains(&mib), "{mib} at line {}", sample.t0_ns);
        readings += 1;
    }
    assert_eq!(readings, text.matches("Memory Usage:").count() - 1, "all but batch 50");
}

#[test]
fn groundhog_equals_its_analysis_and_others() {
    let (Some(log), Some(analysis)) = (sample(GROUNDHOG), sample(ANALYSIS)) else { return };
    let run = one_run(&log);
    assert_eq!((run.coverage.allocations, run.coverage.allocated_bytes), (2920, 4_167_080_442));
    let report = Report::new(&run, Groupings::load("tbd").expect("preset"), None);
    let composition = report.composition(&run.devices[0].last, GroupBy::Layer);

    let analysis = std::fs::read_to_string(analysis).expect("text");
    let analysis: BTreeMap<String, (f64, Vec<String>)> = serde_json::from_str(&analysis).expect("ANALYSIS");
    // The analysis names categories by its search words; the preset has the name of each.
    let names = words_and_names();
    let mut expected: BTreeMap<String, i64> = BTreeMap::new();
    for (word, (bytes, _)) in &analysis {
        *expected.entry(names[word.as_str()].to_owned()).or_default() += *bytes as i64;
    }
    assert_eq!(composition.categories, expected);
    assert_eq!(expected.values().sum::<i64>(), 4_166_440_378);
    assert_eq!(composition.others, 640_064);
    let others: i64 =
        report.others(&run.devices[0].last, GroupBy::Layer).iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(others, 640_064, "listed by tag, not dropped");
}

/// The search words of the analysis that occur in the groundhog log, with the names of their categories.
fn words_and_names() -> BTreeMap<&'static str, &'static str> {
    BTreeMap::from([
        ("(source)", "Source"),
        ("(target)", "Target"),
        ("(target_label)", "Target Label"),
        (":_mul", "Multiplication Op"),
        (":broadcast", "Broadcast Op"),
        (":mean", "Mean Op"),
        (":split", "Split Op"),
        ("_sc", "SC unit"),
        ("arg_grad", "Weight Gradients"),
        ("att", "Attention Layer"),
        ("dot", "Dot Op"),
        ("embed", "Embedding Layer"),
        ("in_arg", "Weights"),
        ("logit", "Logit"),
        ("optimizer", "Optimizer State"),
        ("rnn", "RNN Layer"),
        ("rsqrt", "Sqrt Op"),
        ("sequencereverse", "SequenceReverse Op"),
        ("softmax", "SoftMax"),
        ("square", "Square Op"),
        ("sum", "Sum Op"),
        ("swapaxes", "SwapAxes Op"),
        ("untagged", "Unknown (From Python Side)"),
        ("workspace", "Workspace"),
        ("zeros", "Zero Op"),
    ])
}

/// A ledger that is queried at every sample.
#[derive(Default)]
struct Asking {
    ledger: Ledger,
    /// Our own sum of the allocations, at each sample.
    allocated: i64,
    sums: Vec<i64>,
    samples: Vec<ClosedSample>,
}

impl Sink for Asking {
    fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        if let Body::AllocEnd { bytes, .. } = record.body {
            self.allocated += bytes as i64;
        }
        self.ledger.observe(origin, record);
        for (_, _, sample) in self.ledger.take_samples() {
            self.sums.push(self.allocated);
            self.samples.push(std::sync::Arc::unwrap_or_clone(sample));
        }
    }
}

fn asked(path: &Path) -> Asking {
    let mut asking = Asking::default();
    observe_file(path, None, &mut asking).expect("a log");
    asking
}

fn samples_of(path: &Path) -> Vec<ClosedSample> {
    asked(path).samples
}

#[test]
fn every_sample_of_every_log_adds_up() {
    for path in logs() {
        let asking = asked(&path);
        let readings = std::fs::read_to_string(&path).expect("text").matches("Memory Usage:").count();
        assert_eq!(asking.samples.len(), readings, "{}", path.display());
        for (sample, sum) in asking.samples.iter().zip(&asking.sums) {
            let tracked = sample.tracked_bytes.expect("covered");
            assert_eq!(tracked, *sum, "tracked equals allocations up to the reading");
            assert_eq!(sample.amounts.iter().sum::<i64>(), tracked);
            let used = sample.used_bytes.expect("read") as i64;
            assert_eq!(used, sample.predates_bytes + tracked + sample.untrackable_bytes().expect("known"));
            assert!(!sample.torn && !sample.stale && !sample.partial);
        }
        let snapshot = asking.ledger.snapshot();
        let process: &ProcessView = &snapshot.processes[0];
        let account = &process.accounts[0];
        assert_eq!(account.amounts.iter().sum::<i64>(), account.tracked_bytes);
        assert_eq!(account.peak.amounts.iter().sum::<i64>(), account.peak.tracked_bytes);
    }
}

#[test]
fn every_grouping_of_every_log_adds_up() {
    for path in logs() {
        let run = one_run(&path);
        for preset in ["tbd", "mxnet", "default"] {
            for by in [GroupBy::Layer, GroupBy::Structure, GroupBy::Tag] {
                let report = Report::new(&run, Groupings::load(preset).expect(preset), Some(by));
                let device = &run.devices[0];
                for (limit, smallest) in [(1, 0), (3, 1 << 20), (usize::MAX, 0)] {
                    let statement = report.statement(device, limit, smallest);
                    assert!(statement.adds_up(), "{preset} {by:?} {}: {statement:#?}", path.display());
                }
                let tracked = device.last.tracked_bytes.expect("covered");
                assert_eq!(
                    report.composition(&device.last, by).total(),
                    tracked,
                    "totals do not depend on rules"
                );
            }
        }
    }
}

#[test]
fn micro19_has_its_known_gap() {
    let Some(path) = sample(MICRO19) else { return };
    let samples = samples_of(&path);
    let gaps: Vec<f64> =
        samples.iter().map(|sample| sample.untrackable_bytes().expect("known") as f64 / MIB).collect();
    let (low, high) =
        gaps.iter().fold((f64::MAX, f64::MIN), |(low, high), &gap| (low.min(gap), high.max(gap)));
    // Published for this log: 569 to 601 MiB.
    assert!(low > 568.0 && high < 602.0, "{low} to {high}");
}

/// Thousands of names become forty in each point of a timeline: the summed rest keeps enough names for the rules.
#[test]
fn timeline_of_thousands_of_names_keeps_categories() {
    for path in logs() {
        let run = one_run(&path);
        let rules = Groupings::load("tbd").expect("a preset");
        let report = Report::new(&run, rules, Some(GroupBy::Layer));
        let device = &run.devices[0];
        let peak = report.composition(&device.peak, GroupBy::Layer).categories;
        let points = &device.details.timeline.points;
        let point =
            points.iter().find(|point| point.time_ns == device.peak.time_ns).expect("the peak is a point");
        assert_eq!(Some(point.tracked_bytes()), device.peak.tracked_bytes);
        let (mut reported, mut untold) = (BTreeMap::<&str, i64>::new(), point.rest_bytes);
        for &(cell, bytes) in &point.amounts {
            let tag = run.cells[cell as usize].tag.as_deref().unwrap_or_default();
            match report.category(cell, GroupBy::Layer) {
                Some(name) => *reported.entry(name).or_default() += bytes,
                None if gpumem_model::cell::is_sum(tag) => untold += bytes,
                None => {}
            }
        }
        for (name, bytes) in reported {
            assert!(peak.get(name).is_some_and(|peak| bytes <= *peak), "{name} {bytes} of {peak:?}");
        }
        let share = untold as f64 / point.tracked_bytes() as f64;
        assert!(share < 0.1, "{share} of {} has no category", path.display());
    }
}
