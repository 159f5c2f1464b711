//! Importers on real files of other tools, to the byte.
use gpumem_import::read_file;
use gpumem_model::run::{Device, Run};
use gpumem_report::rules::Groupings;
use gpumem_report::{GroupBy, Report};
use gpumem_tests::samples::sample;
use std::collections::BTreeMap;

const BERT: &str = "mxnet2-csv/finetune_classifier.csv";
const BERT_LATE: &str = "mxnet2-csv/finetune_classifier-pid_17827.673cf9f.csv";
const TRACE: &str = "mxnet1-trace/gpu_mnist_cnn_profile_output.json";
const TABLE: &str = "mxnet1-trace/mnist_cnn.table.md";
const ANALYSIS: &str = "tbd-analysis/iwslt15-vi_en-groundhog-memory_profile.log_ANALYSIS";
const MASK_RCNN: &str = "pytorch-mem-profiler-csv/maskrcnn-20200731171701.csv";
const SMI: &str = "nvidia-smi-csv/tbd-econmt-B128-memory_usage.csv";
const MIB: i64 = 1 << 20;

/// Imports a sample with its detected format, and asserts that the sums add up in every grouping.
fn imported(name: &str) -> Option<Vec<Run>> {
    let path = sample(name)?;
    let runs = read_file(&path, None).expect(name);
    for run in &runs {
        for preset in ["default", "mxnet", "tbd", "torch"] {
            for by in [GroupBy::Layer, GroupBy::Structure, GroupBy::Tag] {
                let report = Report::new(run, Groupings::load(preset).expect(preset), Some(by));
                for device in &run.devices {
                    assert!(report.statement(device, 3, 0).adds_up(), "{name} {preset} {by:?}");
                    assert!(report.statement(device, usize::MAX, 0).adds_up(), "{name} {preset} {by:?}");
                    if let Some(tracked) = device.last.tracked_bytes {
                        assert_eq!(report.composition(&device.last, by).total(), tracked, "{name} {preset}");
                    }
                }
            }
        }
        assert_eq!((run.coverage.rejected, run.coverage.odd, run.coverage.lost), (0, 0, 0), "{name}");
    }
    Some(runs)
}

fn only(name: &str, kind: &str) -> Option<Run> {
    let mut runs = imported(name)?;
    assert_eq!((runs.len(), runs[0].source.kind.as_str()), (1, kind));
    Some(runs.remove(0))
}

fn structures(run: &Run) -> BTreeMap<String, i64> {
    let report = Report::new(run, Groupings::of_run(run), Some(GroupBy::Structure));
    report.composition(&run.devices[0].last, GroupBy::Structure).categories
}

fn caveat<'r>(run: &'r Run, code: &str) -> &'r str {
    let found = run.caveats.iter().find(|caveat| caveat.code == code);
    &found.unwrap_or_else(|| panic!("no {code} among {:?}", run.caveats)).text
}

fn device(run: &Run) -> &Device {
    assert_eq!(run.devices.len(), 1);
    &run.devices[0]
}

#[test]
fn bert_has_its_totals_and_classes() {
    let Some(run) = only(BERT, "mxnet2-csv") else { return };
    let last = &device(&run).last;
    assert_eq!((run.coverage.allocations, run.coverage.allocated_bytes), (1152, 7_157_874_688));
    assert_eq!(last.tracked_bytes, Some(7_157_874_688));
    assert_eq!(last.untrackable_bytes, Some(676_036_608), "644.7 MiB");
    assert_eq!(last.used_bytes(), Some(7471 * MIB));
    // Published shares of recorded bytes.
    let of = structures(&run);
    let share = |name: &str| (of[name] as f64 * 1000.0 / 7_157_874_688.0).round() / 10.0;
    for (name, percent) in [
        ("Optimizer State", 15.5),
        ("Weights", 7.7),
        ("Weight Gradients", 7.7),
        ("Workspace", 0.2),
        ("Unknown", 2.8),
        ("Feature Maps", 66.1),
    ] {
        assert_eq!(share(name), percent, "{name}");
    }
    let rounding = caveat(&run, "rounding");
    assert!(rounding.contains("7,157,874,688 bytes were allocated for 6,419,828,272"), "{rounding}");
    assert!(
        rounding.contains(
            "11.5 % more; the difference of 738,046,416 bytes: Feature Maps 264,218,712, Optimizer State 231,622,640, "
        ),
        "{rounding}"
    );
    assert_eq!(waste(rounding).iter().sum::<u64>(), 738_046_416, "{rounding}");
    assert!(caveat(&run, "reused").starts_with("75 of 1,152 rows"));
    assert!(caveat(&run, "live_set").contains("may be less than the peak"));
}

/// Returns the amounts by category after the last colon.
fn waste(rounding: &str) -> Vec<u64> {
    let (_, parts) = rounding.rsplit_once(": ").expect("categories");
    let amounts = parts.split(", ").map(|part| part.rsplit_once(' ').expect("an amount").1.replace(',', ""));
    amounts.map(|bytes| bytes.parse().expect("bytes")).collect()
}

#[test]
fn late_start_leaves_the_weights_untracked() {
    let (Some(early), Some(late)) = (only(BERT, "mxnet2-csv"), only(BERT_LATE, "mxnet2-csv")) else { return };
    let last = &device(&late).last;
    assert_eq!((late.process.pid, late.coverage.allocations), (17827, 750));
    assert_eq!(last.tracked_bytes, Some(5_954_453_504));
    assert_eq!((last.untrackable_bytes, last.used_bytes()), (Some(1_782_988_800), Some(7379 * MIB)));
    let (before, after) = (structures(&early), structures(&late));
    let of = |of: &BTreeMap<String, i64>, name: &str| of.get(name).copied().unwrap_or(0);
    let moved: i64 =
        ["Weights", "Weight Gradients"].map(|name| of(&before, name) - of(&after, name)).iter().sum();
    assert_eq!(moved / MIB, 1056);
    let gap = last.untrackable_bytes.unwrap_or(0) - device(&early).last.untrackable_bytes.unwrap_or(0);
    assert_eq!(gap * 10 / MIB, 10_556, "1055.7 MiB, rounded down");
    assert_eq!(
        of(&before, "Optimizer State"),
        of(&after, "Optimizer State"),
        "updated: and updater: are one"
    );
}

#[test]
fn a_trace_has_its_exact_peak_and_a_mean_over_time() {
    let Some(run) = only(TRACE, "mxnet1-trace") else { return };
    let device = device(&run);
    assert_eq!(device.peak.tracked_bytes, Some(25_221_892));
    assert_eq!(device.last.tracked_bytes, Some(7_990_788), "last by time, not by place in the file");
    let means = "gpu/0: peak 25,221,892 bytes, time-weighted mean 6,171,326 bytes over 60.1 ms, 147 readings";
    assert_eq!(caveat(&run, "means"), means);
    assert!(caveat(&run, "host_memory").contains("cpu/0: peak 401,664 bytes"));
    let tracked = device.series.buckets.iter().filter_map(|bucket| bucket.tracked);
    let (min, max) =
        tracked.fold((i64::MAX, 0), |(min, max), extremes| (min.min(extremes.min), max.max(extremes.max)));
    assert_eq!((min, max), (0, 25_221_892));
    for (cell, bytes) in &device.peak.amounts {
        assert_eq!(run.cells[*cell as usize].tag, None, "a counter has no names: {bytes} bytes");
    }
}

#[test]
fn truncated_trace_is_read_up_to_the_cut() {
    let Some(path) = sample(TRACE) else { return };
    let whole = std::fs::read(path).expect("bytes");
    let folder = tempfile("trace");
    let mut least = 0;
    for part in 1..=16 {
        std::fs::write(&folder, &whole[..whole.len() * part / 17]).expect("a file");
        let Ok(runs) = read_file(&folder, None) else { continue };
        let events = caveat(&runs[0], "cut").to_owned();
        assert!(events.contains("without its closing bracket"), "{events}");
        let peak = runs[0].devices.first().and_then(|device| device.peak.tracked_bytes).unwrap_or(0);
        assert!(peak >= least && peak <= 25_221_892, "{peak}");
        least = peak;
    }
    assert_eq!(least, 25_221_892);
    let _ = std::fs::remove_file(folder);
}

fn tempfile(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("gpumem-imports-{}-{name}", std::process::id()))
}

#[test]
fn table_gives_only_the_maximum_and_reports_that() {
    let Some(run) = only(TABLE, "mxnet1-table") else { return };
    let peak = device(&run).peak.tracked_bytes.expect("covered");
    assert!(peak.abs_diff(25_221_892) <= 1, "{peak}: exact to a 32-bit float");
    assert!(
        caveat(&run, "table").contains("table 2, gpu/0: max")
            && caveat(&run, "table").ends_with("147 changes")
    );
    assert!(caveat(&run, "host_memory").contains("table 1, cpu/0: max 14,080,784 bytes"));
}

#[test]
fn an_analysis_has_its_sums_and_counts() {
    let Some(run) = only(ANALYSIS, "tbd-analysis") else { return };
    assert_eq!((run.coverage.allocations, run.coverage.allocated_bytes), (2918, 4_166_440_378));
    let path = sample(ANALYSIS).expect("as above");
    let text = std::fs::read_to_string(path).expect("text");
    let file: BTreeMap<String, (f64, Vec<String>)> = serde_json::from_str(&text).expect("JSON");
    let mut of_file: Vec<i64> = file.values().map(|(bytes, _)| *bytes as i64).collect();
    let report = Report::new(&run, Groupings::of_run(&run), Some(GroupBy::Layer));
    let composition = report.composition(&device(&run).last, GroupBy::Layer);
    let mut of_run: Vec<i64> = composition.categories.values().copied().collect();
    of_file.sort_unstable();
    of_run.sort_unstable();
    assert_eq!((of_run, composition.others), (of_file, 0));
    assert_eq!(composition.categories["Weights"], 187_843_712);
}

#[test]
fn profile_without_rows_is_reported() {
    let Some(path) = sample(MASK_RCNN) else { return };
    let error = read_file(&path, None).expect_err("no row").to_string();
    assert!(error.contains("198 columns), but no readable row"), "{error}");
}

#[test]
fn nvidia_smi_log_becomes_a_run_of_nvml_data() {
    let Some(run) = only(SMI, "nvidia-smi-csv") else { return };
    assert!(!run.coverage.covered);
    assert_eq!(run.coverage.samples, 399);
    let device = device(&run);
    assert_eq!(device.last.used_bytes(), Some(4375 * MIB));
    assert_eq!(device.last.tracked_bytes, None, "unknown is not zero");
    let used = device.series.buckets.iter().filter_map(|bucket| bucket.used);
    let (min, max) =
        used.fold((i64::MAX, 0), |(min, max), extremes| (min.min(extremes.min), max.max(extremes.max)));
    assert_eq!((min / MIB, max / MIB), (4031, 4375), "published range");
    let width = device.last.time_ns / 1_000_000_000;
    assert_eq!(width, 1_543_215_332 - 1_543_210_121);
}
