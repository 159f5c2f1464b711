//! PyTorch's snapshots: the content is imported completely, for every version of the writer. Hostile content of such a
//! file is refused without further effect.
mod allocator;
mod pickle;

use allocator::{Allocator, frame};
use gpumem_import::{format, read_file};
use gpumem_model::run::{Fate, OomKind, Run, State};
use gpumem_report::rules::Groupings;
use gpumem_report::{GroupBy, Report, json};
use pickle::{Value, dict, pickle, with};
use proptest::prelude::*;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const MIB: i64 = 1 << 20;
const AT: i64 = 0x7f00_0000_0000;

/// A temporary file, removed on drop.
struct File(PathBuf);

impl File {
    fn new(bytes: &[u8]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("gpumem-snapshot-{}-{number}", std::process::id()));
        std::fs::write(&path, bytes).expect("a file");
        File(path)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn forced(bytes: &[u8]) -> Result<Run, String> {
    let file = File::new(bytes);
    let name = file.0.display().to_string();
    match read_file(&file.0, format("torch-snapshot")) {
        Ok(mut runs) => {
            assert_eq!(runs.len(), 1, "one process");
            adds_up(&runs[0]);
            Ok(runs.remove(0))
        }
        Err(error) => Err(error.to_string().replace(&name, "FILE")),
    }
}

fn read(value: &Value) -> Run {
    let bytes = pickle(value);
    let file = File::new(&bytes);
    let mut runs = read_file(&file.0, None).expect("recognised");
    assert_eq!(runs[0].source.kind, "torch-snapshot");
    adds_up(&runs[0]);
    runs.remove(0)
}

/// Asserts that every sum adds up, in every grouping.
fn adds_up(run: &Run) {
    for device in &run.devices {
        for moment in [&device.last, &device.peak] {
            let sum: i64 = moment.amounts.iter().map(|(_, bytes)| bytes).sum();
            assert_eq!(moment.tracked_bytes, Some(sum), "{device:#?}");
        }
        for by in [GroupBy::Layer, GroupBy::Structure, GroupBy::Tag] {
            let report = Report::new(run, Groupings::of_run(run), Some(by));
            assert!(report.statement(device, 8, 0).adds_up(), "{by:?}");
        }
    }
    serde_json::from_str::<serde_json::Value>(&json::json(&Report::new(run, Groupings::of_run(run), None)))
        .expect("JSON");
}

fn caveat<'r>(run: &'r Run, code: &str) -> Option<&'r str> {
    run.caveats.iter().find(|caveat| caveat.code == code).map(|caveat| caveat.text.as_str())
}

/// Returns the final bytes by tag.
fn tags(run: &Run) -> Vec<(String, i64)> {
    let amounts = run.devices[0].last.amounts.iter();
    let named = amounts.filter_map(|&(cell, bytes)| Some((run.cells[cell as usize].tag.clone()?, bytes)));
    named.collect()
}

fn block(address: i64, bytes: i64, state: &str) -> Value {
    dict([
        ("address", address.into()),
        ("size", bytes.into()),
        ("requested_size", (bytes - 1).into()),
        ("state", state.into()),
        ("frames", vec![frame("/home/me/model.py", "forward", 7)].into()),
    ])
}

fn segment(address: i64, bytes: i64, blocks: Vec<Value>) -> Value {
    dict([
        ("device", 0_i64.into()),
        ("address", address.into()),
        ("total_size", bytes.into()),
        ("stream", 0_i64.into()),
        ("segment_type", "large".into()),
        ("blocks", blocks.into()),
    ])
}

fn event(action: &str, address: i64, bytes: i64, time_us: i64) -> Value {
    dict([
        ("action", action.into()),
        ("addr", address.into()),
        ("size", bytes.into()),
        ("time_us", time_us.into()),
        ("frames", vec![frame("/home/me/model.py", "forward", 8)].into()),
    ])
}

fn snapshot(segments: Vec<Value>, trace: Vec<Value>) -> Value {
    dict([("segments", segments.into()), ("device_traces", vec![trace.into()].into())])
}

fn one_segment() -> Value {
    segment(
        AT,
        20 * MIB,
        vec![block(AT, 4 * MIB, "active_allocated"), block(AT + 4 * MIB, 16 * MIB, "inactive")],
    )
}

#[test]
fn states_and_keys_of_other_versions_are_read() {
    let blocks = vec![
        block(AT, 2 * MIB, "active_allocated"),
        block(AT + 2 * MIB, 3 * MIB, "active_awaiting_free"),
        block(AT + 5 * MIB, MIB, "active_pending_free"),
        with(block(AT + 6 * MIB, MIB, "inactive"), "future", dict([("a", Value::Nothing)])),
        block(AT + 7 * MIB, MIB, "on_holiday"),
    ];
    let segment = with(
        segment(AT, 20 * MIB, blocks),
        "segment_pool_id",
        Value::Tuple(vec![0_i64.into(), 3_i64.into()]),
    );
    let run = read(&with(snapshot(vec![segment], vec![]), "new_key", vec![1_i64.into()]));
    let pool = &run.devices[0].details.pools[0];
    assert_eq!((pool.segment_bytes, pool.block_bytes, pool.pending_bytes), (20 << 20, 7 << 20, 4 << 20));
    assert_eq!(run.devices[0].last.tracked_bytes, Some(20 * MIB));
    assert_eq!(tags(&run)[0].0, "model.py:7(forward)");
    assert!(caveat(&run, "unknown_states").expect("said").contains("`on_holiday`"));
    assert!(caveat(&run, "private_pools").expect("said").contains("1 segment (20,971,520 bytes)"));
    assert!(caveat(&run, "no_history").is_some() && caveat(&run, "partial_history").is_none());
    assert_eq!(run.devices[0].last.used_bytes(), None, "nobody asked NVML");
}

#[test]
fn lists_of_segments_from_older_versions_are_read() {
    let old = |bytes: i64, state: &str| {
        let history =
            dict([("real_size", (bytes - 100).into()), ("frames", vec![frame("a.py", "f", 1)].into())]);
        dict([("size", bytes.into()), ("state", state.into()), ("history", vec![history].into())])
    };
    let blocks = vec![old(MIB, "active_allocated"), old(2 * MIB, "inactive"), old(MIB, "active_allocated")];
    let run = read(&Value::List(vec![segment(AT, 4 * MIB, blocks)]));
    assert_eq!(tags(&run), [("a.py:1(f)".to_owned(), 2 * MIB)]);
    assert!(caveat(&run, "snapshot_figures").expect("said").contains("requested 2,096,952"));
}

#[test]
fn snapshot_is_complete_and_its_figures_are_fields() {
    // The block of 4 MiB existed before, so the peak is 7 MiB.
    let (free, bytes) = (AT + 8 * MIB, 3 * MIB);
    let trace = vec![event("alloc", free, bytes, 10), event("free_completed", free, bytes, 20)];
    let run = read(&snapshot(vec![one_segment()], trace));
    assert!(
        matches!(run.state, State::Closed { status: None, .. }) && run.coverage.complete,
        "{:?}",
        run.state
    );
    let report = Report::new(&run, Groupings::of_run(&run), None);
    let json: serde_json::Value = serde_json::from_str(&json::json(&report)).expect("JSON");
    let of = |field: &str| json["snapshot"][field].as_i64();
    for (field, expected) in [
        ("reserved_bytes", 20 * MIB),
        ("segments", 1),
        ("allocated_bytes", 4 * MIB),
        ("requested_bytes", 4 * MIB - 1),
        ("peak_allocated_bytes", 7 * MIB),
        ("blocks", 1),
        ("pending_blocks", 0),
        ("idle_blocks", 1),
        ("trace_entries", 2),
    ] {
        assert_eq!(of(field), Some(expected), "{field}");
    }
    let told = json["caveats"].to_string() + &json["state"].to_string();
    assert!(!told.contains("interrupted"), "{told}");
    let text = gpumem_report::text::text(&report, gpumem_report::text::Layout::default());
    assert!(text.contains("complete: a snapshot of one moment") && !text.contains("interrupted"), "{text}");
}

#[test]
fn a_history_is_gone_through() {
    let gone = AT + 64 * MIB;
    let oom = with(with(event("oom", 0, 30 * MIB, 60), "device_free", MIB), "addr", Value::Nothing);
    let trace = vec![
        event("segment_alloc", gone, 20 * MIB, 10),
        with(event("alloc", gone, 18 * MIB + 5, 20), "user_metadata", "batch/1"),
        event("snapshot", 0, 0, 25),
        event("free_requested", gone, 18 * MIB + 5, 30),
        event("alloc", AT, 4 * MIB - 1, 40),
        event("free_completed", gone, 18 * MIB + 5, 50),
        oom,
        event("segment_free", gone, 20 * MIB, 70),
        event("new_kind", gone, 1, 80),
        with(event("annotate", AT, 0, 90), "user_metadata", "weights"),
    ];
    let annotations = ["START", "END"].into_iter().zip([35_i64, 45]).map(|(stage, time_us)| {
        dict([
            ("stage", stage.into()),
            ("name", "## warm-up ##".into()),
            ("device", 0_i64.into()),
            ("time_us", time_us.into()),
        ])
    });
    let whole = with(
        snapshot(vec![one_segment()], trace),
        "external_annotations",
        Value::List(annotations.collect()),
    );
    let run = read(&whole);
    let device = &run.devices[0];
    assert_eq!(device.last.tracked_bytes, Some(20 * MIB));
    assert_eq!(device.peak.tracked_bytes, Some(40 * MIB));
    assert_eq!(
        tags(&run),
        [("weights/model.py:8(forward)".to_owned(), 4 * MIB)],
        "its annotation goes with it"
    );
    let known: Vec<&str> = run.cells.iter().filter_map(|cell| cell.tag.as_deref()).collect();
    assert!(known.contains(&"batch.1/model.py:8(forward)"), "{known:?}");
    assert!(
        caveat(&run, "unknown_actions")
            .expect("said")
            .starts_with("trace entries with an action that this version does not know: 1 ")
    );
    assert!(caveat(&run, "contradictions").is_none(), "{:?}", run.caveats);
    // A block of 18 MiB and 5 bytes is split from its segment of 20 MiB; one of 4 MiB - 1 is rounded to 4 MiB.
    let figures = caveat(&run, "snapshot_figures").expect("said");
    let most = 18 * MIB + 5 + 4 * MIB - 1;
    let blocks = 18 * MIB + 512 + 4 * MIB;
    let words = |bytes: i64| gpumem_model::units::thousands(bytes as u64);
    let expected = format!("at most {} bytes requested and {} allocated", words(most), words(blocks));
    assert!(figures.contains(&expected), "{figures}");
    let oom = &device.details.ooms[0];
    assert_eq!((oom.kind, oom.asked_bytes), (OomKind::Device, 30 << 20));
    assert_eq!((oom.device_free_bytes, oom.driver_asked_bytes), (Some(1 << 20), Some(30 << 20)));
    assert_eq!(oom.pool_reserved_bytes, Some(40 << 20));
    assert_eq!(oom.fate, Fate::Open, "what became of it is not in the file");
    assert_eq!(oom.stack.as_deref(), Some("forward\t/home/me/model.py\t8"));
    assert_eq!(oom.tag.as_deref(), Some("model.py:8(forward)"));
    let report = gpumem_report::Report::new(&run, gpumem_report::rules::Groupings::of_run(&run), None);
    let form = gpumem_report::oom::OomOptions { all: true, ..Default::default() };
    let told = gpumem_report::oom::text(&report, form);
    assert!(!told.contains("holders") && !told.contains("others hold"), "{told}");
    assert!(!told.contains("pid 0"), "{told}");
}

#[test]
fn expandable_segments_grow_and_shrink() {
    let part = 20 * MIB;
    let end =
        with(segment(AT, 2 * part, vec![block(AT, 30 * MIB, "active_allocated")]), "is_expandable", true);
    let trace = vec![
        event("segment_map", AT + part, part, 10),
        event("alloc", AT, 30 * MIB - 1, 20),
        event("segment_map", AT + 2 * part, 2 * part, 30),
        event("alloc", AT + 30 * MIB, 45 * MIB, 40),
        event("free_requested", AT + 30 * MIB, 45 * MIB, 50),
        event("free_completed", AT + 30 * MIB, 45 * MIB, 50),
        event("segment_unmap", AT + 2 * part, 2 * part, 60),
    ];
    let run = read(&snapshot(vec![end], trace));
    let device = &run.devices[0];
    assert_eq!((device.last.tracked_bytes, device.peak.tracked_bytes), (Some(2 * part), Some(4 * part)));
    assert!(caveat(&run, "contradictions").is_none(), "{:?}", run.caveats);
    assert_eq!(run.coverage.odd, 0);
    assert_eq!(device.beside.unbooked_block_bytes, 0);
}

#[test]
fn a_history_that_cannot_have_been_changes_nothing_at_the_end() {
    let trace = vec![
        event("alloc", AT, 5, 10),
        event("free_completed", AT + MIB, 5, 20),
        event("free_requested", AT + 77 * MIB, 5, 30),
        event("segment_free", AT, 20 * MIB, 40),
        event("segment_alloc", AT + MIB, 20 * MIB, 50),
        event("alloc", AT + 8 * MIB, 40 * MIB, 60),
        event("alloc", AT + 100 * MIB, MIB, 70),
        event("segment_unmap", AT + 3, 1 << 40, 80),
        event("segment_alloc", AT + 200 * MIB, 2 * MIB, 90),
        event("alloc", AT + 200 * MIB, 100, 95),
    ];
    let run = read(&snapshot(vec![one_segment(), one_segment()], trace));
    let device = &run.devices[0];
    assert_eq!(device.last.tracked_bytes, Some(20 * MIB));
    assert_eq!(device.details.pools[0].block_bytes, 4 << 20);
    assert!(caveat(&run, "contradictions").is_some());
    assert_eq!(run.coverage.odd, 0, "nothing odd reaches the ledger");
}

#[test]
fn rows_that_cannot_be_are_named() {
    let bad = |key: &str, value: Value| with(one_segment(), key, value);
    let segments = vec![
        bad("address", (-5_i64).into()),
        bad("total_size", i64::MAX.into()),
        bad("device", 1_000_000_i64.into()),
        Value::Int(7),
        with(one_segment(), "address", AT + 64 * MIB),
    ];
    let trace = vec![Value::Nothing, event("alloc", AT, -1, 1), event("alloc", -1, 1, 1)];
    let run = read(&snapshot(segments, trace));
    assert_eq!(run.coverage.rejected, 4 + 2 + 3, "two blocks lie outside of their moved segment");
    let named = caveat(&run, "rejected_rows").expect("said");
    assert!(
        named.contains("segment 0 (device, address or total_size)") && named.ends_with(", ..."),
        "{named}"
    );
}

#[test]
fn pinned_memory_is_beside() {
    let host = with(segment(0x5500_0000_0000, 4 * MIB, vec![]), "device", Value::Nothing);
    let run = read(&with(snapshot(vec![one_segment()], vec![]), "host_segments", vec![host]));
    assert_eq!(run.devices[0].last.tracked_bytes, Some(20 * MIB));
    assert_eq!(run.devices[0].beside.pinned_bytes, 4 * MIB);
}

/// Runs a program with `python3` and returns its output; `None` if there is no `python3`.
fn python(program: &str) -> Option<Vec<u8>> {
    let output = Command::new("python3").args(["-c", program]).output().ok()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(output.stdout)
}

#[test]
fn every_protocol_of_python_reads_the_same() {
    let mut seen: Option<Run> = None;
    for protocol in 0..=5 {
        let program = format!(
            "import pickle, sys\n\
             f = {{'name': 'forward', 'filename': '/home/me/tr\u{e4}in\u{2713}.py', 'line': 12}}\n\
             b = [{{'address': {AT} + n * 512, 'size': 512, 'requested_size': 500 - n % 7, 'state': 'active_allocated' if n % 3 else \
             'inactive', 'frames': [f] * 5}} for n in range(2500)]\n\
             s = {{'device': 0, 'address': {AT}, 'total_size': 2 << 20, 'stream': 140000000000000, 'is_expandable': False, \
             'segment_pool_id': (0, 0), 'blocks': b, 'huge': 1 << 99, 'less': -3, 'half': 0.5, 'set': {{1, 2}}, 'bytes': b'xy'}}\n\
             sys.stdout.buffer.write(pickle.dumps({{'segments': [s], 'device_traces': [[]]}}, {protocol}))"
        );
        // Sets and bytes are plain values only in protocols that have opcodes for them.
        let program = match protocol {
            0..=3 => program.replace(", 'set': {1, 2}, 'bytes': b'xy'", ""),
            _ => program,
        };
        let Some(bytes) = python(&program) else {
            gpumem_test_support::skip("no python3", "apt-get install python3");
            return;
        };
        let file = File::new(&bytes);
        let mut run =
            read_file(&file.0, None).unwrap_or_else(|error| panic!("{protocol}: {error}")).remove(0);
        assert_eq!(tags(&run)[0].1, 1666 * 512, "protocol {protocol}");
        run.source.origin.clear();
        if let Some(first) = &seen {
            assert_eq!(first, &run, "protocol {protocol}");
        }
        seen = Some(run);
    }
}

#[test]
fn code_is_refused_by_its_name_and_place() {
    let head = b"\x80\x04}\x94(X\x08\x00\x00\x00segments";
    let tails: [(&[u8], &str); 10] = [
        (b"cos\nsystem\n(S'x'\ntR.", "names Python code (os.system): opcode GLOBAL"),
        (b"\x8c\x02os\x8c\x06system\x93.", "opcode STACK_GLOBAL"),
        (b"(ios\nsystem\n.", "INST"),
        ("(io\u{e05a0}s\nsystem\n.".as_bytes(), "(o\\u{e05a0}s.system)"),
        (b"NNR.", "calls a Python function: opcode REDUCE"),
        (b"NNb.", "BUILD"),
        (b"NN\x81.", "NEWOBJ"),
        (b"\x82\x01.", "EXT1"),
        (b"Pabc\n.", "PERSID"),
        (b"\x97.", "NEXT_BUFFER"),
    ];
    for (tail, expected) in tails {
        let error = forced(&[head, tail].concat()).expect_err("refused");
        let at = error.strip_prefix("FILE: at byte ").and_then(|rest| rest.split(':').next());
        let at: usize = at.and_then(|at| at.parse().ok()).unwrap_or_else(|| panic!("{error}"));
        assert!((head.len()..head.len() + 20).contains(&at), "{error}");
        assert!(error.contains(expected) && error.contains("refused"), "{error}");
    }
}

#[test]
fn other_pickles_are_told_what_they_are() {
    for (value, what) in [
        (Value::Nothing, "is a pickle of None"),
        (Value::Int(4), "is a pickle of a number"),
        (
            dict([("a", Value::Nothing)]),
            "is a pickle of a dict; a snapshot is a dict with the lists `segments`",
        ),
        (Value::List(vec![1_i64.into()]), "is a pickle of a list without a segment"),
        (snapshot(vec![], vec![]), "nothing was allocated"),
    ] {
        let error = forced(&pickle(&value)).expect_err("none");
        assert!(error.contains(what), "{error}");
    }
    for (bytes, what) in [
        (&b"\x80\x07."[..], "pickle protocol 7"),
        (b"\x80\x04.", "takes a value, and there is none"),
        (b"\x80\x04h\x05.", "memo place 5 has no value"),
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "memo place 2147483647 is further than the file is long"),
        (b"\x80\x04}(Nu.", "a key without a value"),
        (b"\x80\x04Ne.", "needs a mark"),
        (b"\x80\x04N(Ne.", "puts something into None as if it were a List"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "the maximum is 1048576"),
        (b"\x80\x04I12x\n.", "a line that should be a number is not a number"),
        (b"\x80\x04\xfe", "byte 0xfe is not an opcode"),
    ] {
        let error = forced(bytes).expect_err("broken");
        assert!(error.starts_with("FILE: at byte ") && error.contains(what), "{error}");
    }
}

#[test]
fn a_file_that_is_cut_off_anywhere_says_so() {
    let whole = pickle(&snapshot(vec![one_segment()], vec![event("alloc", AT, 4 * MIB - 1, 5)]));
    assert!(forced(&whole).is_ok());
    for end in 1..whole.len() {
        let error = forced(&whole[..end]).expect_err("cut off");
        assert!(
            error.contains(&format!("at byte {end}: ")) && error.contains("it was cut off"),
            "{end}: {error}"
        );
    }
    let more = forced(&[&whole[..], b"more"].concat()).expect("its end is known");
    assert!(caveat(&more, "trailing_bytes").is_some());
}

fn quickly<T>(what: &str, run: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let value = run();
    gpumem_test_support::bar(what, start.elapsed(), Duration::from_secs(60));
    value
}

/// Pickles a list of `times` equal items and stores it in the memo at `place`.
fn repeated(place: u8, item: &[u8], times: usize) -> Vec<u8> {
    [&b"]("[..], &item.repeat(times), b"eq", &[place]].concat()
}

#[test]
fn what_is_small_in_a_file_stays_small() {
    // Lists of lists of lists: 10^30 items if they were written out.
    let mut laughs = b"\x80\x04}X\x08\x00\x00\x00segments".to_vec();
    laughs.extend(repeated(1, b"N", 1000));
    for place in 2..12 {
        laughs.extend(repeated(place, &[b'h', place - 1], 1000));
    }
    laughs.extend(b"s.");
    let error = quickly("laughs", || forced(&laughs));
    assert!(error.is_err() || error.is_ok_and(|run| run.coverage.rejected > 0));

    // A segment with 10,000 blocks, 10,000 times; a history of 10,000 entries, on 10,000 devices.
    let text = |text: &str| [&b"X"[..], &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
    let mut segment = b"}".to_vec();
    for (key, number) in [("address", AT), ("total_size", 20 * MIB)] {
        segment.extend(text(key));
        segment.extend([&[0x8a, 8], &number.to_le_bytes()[..], b"s"].concat());
    }
    segment.extend([text("blocks"), repeated(1, b"}", 10_000), b"sq\x02".to_vec()].concat());
    let history = [repeated(1, b"}", 10_000), b"q\x02".to_vec()].concat();
    for (key, shared) in [("segments", segment), ("device_traces", history)] {
        let lists = repeated(3, b"h\x02", 10_000);
        let whole = [&b"\x80\x04"[..], &shared, b"0}", &text(key), &lists, b"s."].concat();
        let error = quickly(key, || forced(&whole)).expect_err("refused");
        assert!(error.contains("too many times to be read"), "{key}: {error}");
    }
    let mut itself = b"\x80\x04}q\x01".to_vec();
    itself.extend(text("segments"));
    itself.extend(b"]q\x02(h\x02h\x02h\x01es");
    itself.extend(text("device_traces"));
    itself.extend(b"h\x02s.");
    let run = quickly("a list in itself", || forced(&itself));
    assert!(run.is_ok_and(|run| run.coverage.rejected > 0));
}

#[test]
fn depth_costs_nothing_but_its_bytes() {
    for unit in [&b"]"[..], b"(", b"}(N", b"](", b"((", b"\x85", b")\x85"] {
        let bytes = [&b"\x80\x04N"[..], &unit.repeat(1_000_000)].concat();
        let error = quickly("depth", || forced(&bytes)).expect_err("no end");
        assert!(error.contains("at byte"), "{error}");
    }
    let deep = [&b"\x80\x04N"[..], &b"\x85".repeat(3_000_000), b"."].concat();
    let error = quickly("tuples", || forced(&deep)).expect_err("no snapshot");
    assert!(error.contains("is a pickle of a tuple"), "{error}");
}

/// An action of a program on its memory.
#[derive(Debug, Clone)]
enum Act {
    Alloc(u64),
    LetGo(usize),
    Complete(usize),
    Free(usize),
    EmptyCache,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (1_u64..3000).prop_map(Act::Alloc),
        3 => (1_u64..30 << 20).prop_map(Act::Alloc),
        1 => any::<usize>().prop_map(Act::LetGo),
        1 => any::<usize>().prop_map(Act::Complete),
        4 => any::<usize>().prop_map(Act::Free),
        1 => Just(Act::EmptyCache),
    ]
}

fn played(acts: &[Act]) -> Allocator {
    let mut allocator = Allocator::default();
    let (mut live, mut waiting) = (Vec::new(), Vec::new());
    for (line, act) in acts.iter().enumerate() {
        match act {
            Act::Alloc(bytes) => live.push(allocator.alloc(*bytes, line as i64 % 5 + 1)),
            Act::LetGo(which) | Act::Free(which) if !live.is_empty() => {
                let address = live.swap_remove(which % live.len());
                allocator.let_go(address);
                match act {
                    Act::LetGo(_) => waiting.push(address),
                    _ => allocator.complete(address),
                }
            }
            Act::Complete(which) if !waiting.is_empty() => {
                allocator.complete(waiting.swap_remove(which % waiting.len()));
            }
            Act::EmptyCache => allocator.empty_cache(),
            _ => {}
        }
    }
    allocator
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_the_allocator_did_is_told_from_its_last_entries(
        acts in prop::collection::vec(act(), 1..150),
        kept in 0.0..1.2_f64,
    ) {
        let allocator = played(&acts);
        let total = allocator.events.len();
        let entries = ((total as f64 * kept) as usize).min(total);
        let Ok(run) = forced(&pickle(&allocator.snapshot(entries))) else {
            prop_assert_eq!(allocator.now().reserved, 0);
            return Ok(());
        };
        let device = &run.devices[0];
        prop_assert!(caveat(&run, "contradictions").is_none(), "{:?}", run.caveats);
        prop_assert_eq!(run.coverage.odd, 0);
        prop_assert_eq!(run.coverage.rejected, 0);
        let now = allocator.now();
        prop_assert_eq!(device.last.tracked_bytes, Some(now.reserved as i64));
        prop_assert_eq!(device.beside.unbooked_block_bytes, 0);
        if let Some(pool) = device.details.pools.first() {
            let figures = (pool.segment_bytes, pool.block_bytes, pool.pending_bytes);
            prop_assert_eq!(figures, (now.reserved, now.allocated, allocator.pending()));
            prop_assert_eq!(pool.disagreement(), None);
        }
        // The state at the beginning of the window counts too.
        let from = (total - entries).saturating_sub(1);
        let window = &allocator.sums[if entries == total { 0 } else { from }..];
        let peak = window.iter().map(|sums| sums.reserved).max().unwrap_or(0);
        prop_assert_eq!(device.peak.tracked_bytes, Some(peak as i64));
        let requested = window.iter().map(|sums| sums.requested).max().unwrap_or(0);
        let figures = caveat(&run, "snapshot_figures").unwrap_or_default();
        let words = gpumem_model::units::thousands;
        let expected = match entries {
            0 => "no history".to_owned(),
            _ => format!("at most {} bytes requested", words(requested)),
        };
        prop_assert!(figures.contains(&expected), "{} {}", expected, figures);
        if entries == total && entries > 0 {
            let allocated = window.iter().map(|sums| sums.allocated).max().unwrap_or(0);
            let expected = format!("and {} allocated", words(allocated));
            prop_assert!(figures.ends_with(&expected), "{} {}", expected, figures);
        }
    }

    #[test]
    fn a_snapshot_with_some_other_bytes_is_read_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        moves in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..3),
    ) {
        let trace = vec![
            event("segment_alloc", AT, 20 * MIB, 10),
            event("alloc", AT, 4 * MIB - 1, 20),
            event("oom", AT, 4 * MIB - 1, 30),
            event("segment_map", AT + 64 * MIB, 40 * MIB, 40),
            event("segment_unmap", AT + 64 * MIB, 40 * MIB, 50),
        ];
        let mut bytes = pickle(&snapshot(vec![one_segment()], trace));
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        for (from, to) in moves {
            let (from, to) = (from.index(bytes.len()), to.index(bytes.len()));
            let piece = bytes[from..(from + 20).min(bytes.len())].to_vec();
            bytes.splice(to..to, piece);
        }
        match forced(&bytes) {
            Ok(_) => {}
            Err(error) => prop_assert!(error.starts_with("FILE: "), "{}", error),
        }
    }
}
