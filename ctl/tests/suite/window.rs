//! `gpumemctl report --since|--at|--between`, and `gpumemctl mark`.

use crate::common::{FakeDaemon, Folder, failure, run_of, stdout};
use gpumem_model::run::State;
use gpumem_runs::requests::Piece;
use gpumem_runs::store::{RunId, Store};
use gpumem_wire::*;

const MIB: u64 = 1 << 20;
const S: u64 = 1_000_000_000;

/// A recording of one minute from 10:30:00Z: 100 MiB from its 10th second, 300 more from the 20th to the 30th, a mark at the
/// 25th.
fn recording(folder: &Folder) -> String {
    let mut out = frame::header().to_vec();
    let mut seq = 0;
    let mut say = |tag: u32, time_s: u64, body: Body<'_>| {
        let is_plain = matches!(
            body,
            Body::Tag { .. } | Body::Device { .. } | Body::Hello { .. } | Body::ClockAnchor { .. }
        );
        seq += u64::from(!is_plain);
        let seq = if is_plain { 0 } else { seq };
        let stamp = Stamp { seq, tag, time_ns: time_s * S, thread: 77, context: 1, ..Stamp::default() };
        Record { stamp, body }.append_frame(&mut out);
    };
    say(0, 0, Body::Hello { start_ticks: 1, versions: 1 << 16, capabilities: 0, instance: 1, claims: "" });
    let realtime_ns = 1_795_170_600 * S;
    say(0, 0, Body::ClockAnchor { realtime_ns, clock: ClockKind::Monotonic, boottime_ns: 0 });
    let (id, total_bytes) = (DeviceIdKind::Gpu, Reading::of(1000 * MIB));
    say(0, 0, Body::Device { uuid_high: 1, uuid_low: 2, total_bytes, ordinal: 0, id, name: "H100" });
    for (tag, path) in [(1, "weights"), (2, "activations"), (3, "warm up over")] {
        say(tag, 0, Body::Tag { path });
    }
    let memory = MemoryKind::Device;
    say(1, 10, Body::AllocEnd { address: 1 << 30, bytes: 100 * MIB, pool: 0, took_us: 0, memory });
    say(2, 20, Body::AllocEnd { address: 2 << 30, bytes: 300 * MIB, pool: 0, took_us: 0, memory });
    say(3, 25, Body::Marker {});
    say(0, 30, Body::FreeBegin { address: 2 << 30 });
    say(0, 30, Body::FreeEnd { begin_seq: 4, result: 0 });
    say(1, 60, Body::AllocEnd { address: 3 << 30, bytes: MIB, pool: 0, took_us: 0, memory });
    let path = folder.path("run.gpumem");
    std::fs::write(&path, out).expect("a file");
    path.to_string_lossy().into_owned()
}

/// Returns the headings and the tracked amounts of both columns.
fn columns(text: &str) -> (Vec<&str>, Vec<&str>) {
    let row = |start: &str| {
        text.lines()
            .find(|line| line.trim_start().starts_with(start))
            .map(|line| line.split("  ").map(str::trim).filter(|word| !word.is_empty()).skip(1).collect())
    };
    (row("MiB").unwrap_or_default(), row("tracked").unwrap_or_default())
}

#[test]
fn a_recording_tells_of_any_time_exactly() {
    let folder = Folder::new("window");
    let file = recording(&folder);
    let told =
        |args: &[&str]| stdout(&folder.run(&[&["report", "--verbose", &file, "--by", "tag"], args].concat()));
    for (args, heads, tracked) in [
        (&["--at", "10:30:22Z"][..], ["last", "then"], ["101.0", "400.0"]),
        (&["--at", "warm up over"], ["last", "then"], ["101.0", "400.0"]),
        (&["--at", "38s"], ["last", "then"], ["101.0", "400.0"]),
        (&["--at", "@1795170650"], ["last", "then"], ["101.0", "100.0"]),
        (&["--since", "10:30:40Z"], ["last", "highest"], ["101.0", "101.0"]),
        (&["--since", "2026-11-20T10:30:29Z"], ["last", "highest"], ["101.0", "400.0"]),
        (&["--between", "10:30:12Z,10:30:15Z"], ["at the end", "highest"], ["100.0", "100.0"]),
        (&["--between", "10:30:12Z,warm up over"], ["at the end", "highest"], ["400.0", "400.0"]),
    ] {
        let text = told(args);
        assert_eq!(columns(&text), (heads.to_vec(), tracked.to_vec()), "{args:?}\n{text}");
    }
    let text = told(&["--between", "10:30:12Z,10:30:40Z"]);
    assert!(text.contains("\n10:30:12Z to 10:30:40Z, 28.0 s; counts cover the window\n"), "{text}");
    assert!(text.contains("--between 10:30:12Z,10:30:40Z"), "how to go on:\n{text}");
    let json: serde_json::Value = serde_json::from_str(&told_json(&folder, &file)).expect("JSON");
    assert_eq!(
        json["window"],
        serde_json::json!({"part": "at", "from_ns": 22 * S, "to_ns": 22 * S, "exact": true})
    );
    assert_eq!(json["devices"][0]["peak"]["tracked_bytes"], 400 * MIB);
    assert_eq!(json["coverage"]["marks"][0]["name"], "warm up over");
    let points = json["devices"][0]["timeline"]["points"].as_array().expect("points");
    for point in points {
        for names in ["layers", "structures"] {
            let sum = |list: &serde_json::Value| {
                list.as_array().expect("amounts").iter().filter_map(serde_json::Value::as_i64).sum::<i64>()
            };
            let idle =
                point["pool_idle_bytes"].as_i64().unwrap_or(0) + point["opaque_bytes"].as_i64().unwrap_or(0);
            assert_eq!(Some(sum(&point[names]) + idle), point["tracked_bytes"].as_i64(), "{point}");
        }
    }
}

fn told_json(folder: &Folder, file: &str) -> String {
    stdout(&folder.run(&["report", file, "--at", "10:30:22Z", "--json"]))
}

#[test]
fn what_is_no_time_of_the_run_says_what_is() {
    let folder = Folder::new("window-wrong");
    let file = recording(&folder);
    for (args, exit, expected) in [
        (&["--at", "11:00Z"][..], 3, "the run has data from 2026-11-20 10:30:"),
        (&["--since", "2026-11-21"], 3, "is outside of the run: the run has data from"),
        (&["--between", "20s,40s"], 3, "is after"),
        (&["--at", "warm"], 3, "its marks: warm up over"),
        (&["--at", "1200"], 3, "has no unit"),
        (&["--at", "10:75"], 2, "2026-11-20T10:30"),
        (&["--between", "10:30"], 2, "two times with a comma"),
        (&["--since", "1h", "--at", "1h"], 2, "cannot be used with"),
        (&["--since", "1h", "--job", "x"], 2, "cannot be used with"),
    ] {
        let (code, message) = failure(&folder.run(&[&["report", &file], args].concat()));
        assert!(message.contains(expected), "{args:?}: {message}");
        assert_eq!(code, exit, "{args:?}: {message}");
    }
}

#[test]
fn a_mark_goes_to_the_daemon_and_says_how_to_use_it() {
    let folder = Folder::new("mark");
    let daemon = FakeDaemon::at(&folder.path("gpumem/control.sock"));
    daemon.says("POST /v1/mark?name=warm%20up", 200, r#"{"pids":[41873],"time_ns":5}"#);
    let text = stdout(&folder.run(&["mark", "warm up"]));
    assert_eq!(text, "marked warm up in the run of pid 41873: gpumemctl report 41873 --since 'warm up'\n");
    daemon.says(
        "POST /v1/mark?name=10:30&pid=7",
        404,
        r#"{"error":"pid 7 is not a process of yours that uses a GPU"}"#,
    );
    daemon.says("POST /v1/mark?name=10:30&tree=7", 200, r#"{"pids":[8,9],"time_ns":5}"#);
    let text = stdout(&folder.run(&["mark", "10:30", "7"]));
    assert!(text.contains("pids 8, 9: gpumemctl report 8 --since mark:10:30\n"), "{text}");
    daemon.says("POST /v1/mark?name=x&job=j", 404, r#"{"error":"no process of job j uses a GPU"}"#);
    assert_eq!(failure(&folder.run(&["mark", "x", "--job", "j"])).0, 3);
    assert!(failure(&folder.run(&["mark", "x", "some"])).1.contains("all means every process"));
}

#[test]
fn page_of_a_part_has_the_requests_of_that_part() {
    let folder = Folder::new("window-requests");
    let path = folder.path("runs.sqlite");
    let mut store = Store::open(&path).expect("a store");
    let mut run = run_of(7, "j", None);
    run.state = State::Closed { time_ns: 9, status: None };
    let life = format!("boot:7:{}", run.process.start_ticks);
    let first = store.insert_part(&run, &life, 1).expect("saved");
    let second = store.insert_part(&run, &life, 2).expect("saved");
    // Another process has the same pid and start time after a restart of the machine.
    let other = store.insert_part(&run, &life.replace("boot", "other"), 1).expect("saved");
    store.add_requests(second, &[Piece { number: 0, first: 0, bytes: vec![0xff; 64] }]).expect("saved");
    drop(store);
    let is_damaged = |id: RunId| {
        let page =
            stdout(&folder.run(&["report", &id.to_string(), "--html", "--store", &path.to_string_lossy()]));
        page.contains("the page may lack single blocks")
    };
    assert_eq!([first, second, other].map(is_damaged), [false, true, false]);
}
