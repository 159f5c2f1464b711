//! Runs diff, explain, export and runs as a user would.

use crate::common::{FakeDaemon, Folder, failure, quoted, run_of, shipped, stderr, stdout};
use gpumem_model::run::State;
use gpumem_runs::export::{self, From};
use serde_json::Value;
use std::fs;

fn log() -> String {
    shipped().to_string_lossy().into_owned()
}

/// Returns the shipped log with one more allocation of this size.
fn larger(folder: &Folder, bytes: u64) -> String {
    let text = fs::read_to_string(shipped()).expect("a log");
    let more = format!("[mem] Allocate {bytes} bytes GPU memory (in_arg:new_weight).\n");
    fs::write(folder.path("larger.log"), text + &more).expect("a file");
    folder.text("larger.log")
}

#[test]
fn files_and_runs_are_compared() {
    let folder = Folder::new("diff");
    let more = larger(&folder, 100 << 20);
    let text = stdout(&folder.run(&["diff", &log(), &more]));
    assert!(text.contains("Weights +100.0"), "{text}");
    assert!(text.lines().count() <= 35, "{text}");
    assert!(
        text.contains(&format!("next: gpumemctl diff {} {} --by ", quoted(&log()), quoted(&more))),
        "{text}"
    );
    stdout(&folder.run(&["import", &log(), &more]));
    let stored = stdout(&folder.run(&["diff", "r1", "r2"]));
    assert!(
        stored.starts_with("A  train.py --batch-size 64 --hidden 256 --layers 2:2  run r1  pid 20417"),
        "{stored}"
    );
    let json: Value =
        serde_json::from_str(&stdout(&folder.run(&["diff", "r1", "r2", "--json"]))).expect("JSON");
    assert_eq!(json["pairs"][0]["tracked"]["difference_bytes"], 100 << 20);
    assert_eq!((&json["a"]["run"], &json["gate"]), (&"r1".into(), &Value::Null));
    let csv = stdout(&folder.run(&["diff", "r1", "r2", "--csv"]));
    assert!(csv.contains(",tag,category,in_arg/new_weight,0,104857600,104857600,b\n"), "{csv}");
    let out = folder.text("diff.svg");
    stdout(&folder.run(&["diff", "r1", "r2", "--svg", "-o", &out]));
    assert!(fs::read_to_string(&out).expect("a picture").starts_with("<svg"), "a picture");
    let (code, message) = failure(&folder.run(&["diff", "r1", "r2", "--png", "-o", &out]));
    assert_eq!((code, message.contains("--force")), (1, true), "{message}");
}

#[test]
fn the_gate_has_exit_codes_of_its_own() {
    let folder = Folder::new("gate");
    let more = larger(&folder, 100 << 20);
    let gate = |limit: &str, of: &[&str]| {
        let log = log();
        let output = folder.run(&[&["diff", &log, &more, "--fail-above", limit], of].concat());
        assert!(String::from_utf8_lossy(&output.stdout).contains("B - A"), "it is told in any case");
        (output.status.code(), stderr(&output))
    };
    assert_eq!(gate("100MiB", &["--of", "tracked"]), (Some(0), String::new()));
    let (code, message) = gate("99.9MiB", &["--of", "tracked"]);
    assert_eq!(code, Some(8), "{message}");
    assert!(message.contains("B's tracked exceeds A's by 100.0 MiB, more than 99.9 MiB"), "{message}");
    assert_eq!(gate("1%", &["--of", "weights"]).0, Some(8), "a category, however it is written");
    assert_eq!(gate("1%", &["--of", "Logit"]).0, Some(0), "of the other grouping too");
    let log = log();
    let (code, message) =
        failure(&folder.run(&["diff", &log, &more, "--fail-above", "1%", "--of", "nothing"]));
    assert_eq!(code, 3);
    assert!(
        message.contains("there are: used, tracked, gap") && message.contains("Feature Maps"),
        "{message}"
    );
    for wrong in ["5", "ten", "-1MiB", "%"] {
        let (code, message) = failure(&folder.run(&["diff", &log, &more, &format!("--fail-above={wrong}")]));
        assert_eq!((code, message.contains("500MiB")), (2, true), "{message}");
    }

    // A process without an agent.
    let mut bare = run_of(7, "j", None);
    bare.coverage.covered = false;
    let device = &mut bare.devices[0];
    for moment in [&mut device.last, &mut device.peak] {
        (moment.tracked_bytes, moment.amounts) = (None, Default::default());
        moment.uncovered_used_bytes = Some(5 << 30);
    }
    let file = folder.path("bare.gpumem-run");
    fs::write(&file, export::write(&bare, "u", &From::default()).expect("small")).expect("a file");
    let output =
        folder.run(&["diff", &log, &folder.text("bare.gpumem-run"), "--fail-above", "1%", "--of", "tracked"]);
    assert_eq!(output.status.code(), Some(9));
    let message = stderr(&output);
    assert!(
        message
            .contains("cannot judge tracked: B's tracked is unknown (B: uncovered: the process has no agent"),
        "{message}"
    );
}

#[test]
fn what_cannot_be_compared_is_answered() {
    let folder = Folder::new("words");
    for (args, code, words) in [
        (&["diff", "r1"][..], 2, "required arguments"),
        (&["diff", "r1", "r2"][..], 3, "run store"),
        (&["diff", "x.log", "y.log"][..], 3, "x.log"),
        (&["explain", "untrackabel"][..], 3, "Did you mean Untrackable?"),
        (&["explain", "xyzzy"][..], 3, "gpumemctl explain lists all words"),
        (&["export", "r1"][..], 3, "run store"),
        (&["runs", "--since", "soon"][..], 3, "run store"),
    ] {
        let (exit, message) = failure(&folder.run(args));
        assert_eq!((exit, message.contains(words)), (code, true), "{args:?}: {message}");
    }
    stdout(&folder.run(&["import", &log()]));
    for (args, code, words) in [
        (&["runs", "--since", "soon"][..], 2, "--since `soon` is not a time"),
        (&["runs", "--state", "gone"][..], 2, "possible values: running, ended, interrupted, rolled"),
        (&["diff", "r1", "r1", "--device", "7"][..], 3, "there are: 0 (ordinal-0)"),
        (&["diff", "r1", "r99"][..], 3, "r99"),
    ] {
        let (exit, message) = failure(&folder.run(args));
        assert_eq!((exit, message.contains(words)), (code, true), "{args:?}: {message}");
    }
}

#[test]
fn a_run_is_moved_to_another_machine_and_back() {
    let folder = Folder::new("move");
    stdout(&folder.run(&["import", &log()]));
    let file = folder.text("r1.gpumem-run");
    let done = folder.run(&["export", "r1", "-o", &file]);
    assert!(
        stdout(&done).is_empty() && stderr(&done).contains(&format!("gpumemctl import {file}")),
        "{done:?}"
    );
    let (code, message) = failure(&folder.run(&["export", "r1", "-o", &file]));
    assert_eq!((code, message.contains("--force")), (1, true), "{message}");
    assert!(stdout(&folder.run(&["import", &file])).starts_with("r1 (already stored)"), "home again");

    let there = folder.text("there.sqlite");
    let first = stdout(&folder.run(&["import", &file, "--store", &there]));
    assert!(first.starts_with("r1  train.py pid 20417: "), "{first}");
    let again = stdout(&folder.run(&["import", &file, "--store", &there]));
    assert!(again.starts_with("r1 (already stored)"), "{again}");
    let of_file = stdout(&folder.run(&["report", "--verbose", &file]));
    let of_store = stdout(&folder.run(&["report", "--verbose", "r1", "--store", &there]));
    let home = stdout(&folder.run(&["report", "--verbose", "r1"]));
    let body = |text: &str| -> Vec<String> {
        let told = |line: &&str| !line.starts_with("next: ") && !line.contains("the run was exported on ");
        text.replace("  run r1", "").lines().filter(told).map(str::to_owned).collect()
    };
    assert_eq!((body(&of_file), body(&of_store)), (body(&home), body(&home)));
    assert!(
        of_store.contains("note: the run was exported on ") && of_store.contains(", where it is run r1, at "),
        "{of_store}"
    );

    let mut broken = fs::read(&file).expect("bytes");
    let at = broken.len() / 2;
    broken[at] ^= 1;
    fs::write(folder.path("broken"), &broken).expect("a file");
    let (code, message) = failure(&folder.run(&["import", &folder.text("broken")]));
    assert_eq!((code, message.contains("damaged at byte ")), (4, true), "{message}");
    fs::write(folder.path("short"), &broken[..at]).expect("a file");
    let (code, message) = failure(&folder.run(&["report", &folder.text("short")]));
    assert_eq!((code, message.contains("bytes are missing")), (4, true), "{message}");
    let newer = String::from_utf8_lossy(&broken).replacen("\"version\":1", "\"version\":7", 1);
    fs::write(folder.path("newer"), newer).expect("a file");
    let (code, message) = failure(&folder.run(&["report", &folder.text("newer")]));
    assert_eq!(
        (code, message.contains("run of format 7; this program reads up to 1")),
        (4, true),
        "{message}"
    );
}

#[test]
fn live_processes_are_compared_explained_and_exported() {
    let folder = Folder::new("live");
    let daemon = FakeDaemon::at(&folder.path("gpumem/control.sock"));
    let (mut small, mut large) = (run_of(41, "j1", None), run_of(42, "j1", None));
    (small.state, large.state) = (State::Open, State::Open);
    let device = &mut large.devices[0];
    for moment in [&mut device.last, &mut device.peak] {
        moment.amounts[0].1 += 300 << 20;
        moment.tracked_bytes = moment.tracked_bytes.map(|bytes| bytes + (300 << 20));
    }
    daemon.runs("", &[&small, &large]).runs("?pid=41", &[&small]).runs("?pid=42", &[&large]);
    daemon.runs("?job=j1", &[&small, &large]).runs("?tree=40", &[&small, &large]).runs("?pid=40", &[]);
    let text = stdout(&folder.run(&["diff", "41", "42", "--now"]));
    assert!(text.contains("B is 300.0 MiB higher than A (used, +41.6 %): "), "{text}");
    let text = stdout(&folder.run(&["diff", "40", "42"]));
    assert!(text.contains("--layers 2:2  2 GPUs  2 processes started by pid 40"), "{text}");

    let told = stdout(&folder.run(&["explain", "tracked"]));
    assert!(
        told.contains("here: 598.5 MiB now, 598.5 MiB at peak  (train.py pid 42, GPU 0)"),
        "the largest: {told}"
    );
    let told = stdout(&folder.run(&["explain", "tracked", "41"]));
    assert!(told.contains("here: 298.5 MiB now") && told.contains("pid 41"), "{told}");
    assert!(stdout(&folder.run(&["explain"])).contains("data quality"));

    let file = folder.text("42.gpumem-run");
    let done = folder.run(&["export", "42", "-o", &file]);
    assert!(done.status.success(), "{done:?}");
    let imported = stdout(&folder.run(&["import", &file]));
    assert!(imported.starts_with("r1  train.py pid 42: "), "{imported}");
    assert!(stdout(&folder.run(&["runs"])).contains("interrupted"), "nobody watches the copy");
}

#[test]
fn runs_are_found_again() {
    let folder = Folder::new("found");
    let more = larger(&folder, 1 << 20);
    stdout(&folder.run(&["import", &log(), &more]));
    let all = stdout(&folder.run(&["runs"]));
    assert!(all.contains("2 runs, peak of tracked in MiB; the store takes "), "{all}");
    let one = stdout(
        &folder.run(&["runs", "--label", "LARGER", "--since", "1h", "--state", "ended", "--sort", "peak"]),
    );
    assert!(one.contains("\nr2 ") && !one.contains("\nr1 "), "{one}");
    let list: Value =
        serde_json::from_str(&stdout(&folder.run(&["runs", "--json", "--limit", "1"]))).expect("JSON");
    assert_eq!((list.as_array().map(Vec::len), &list[0]["run"]), (Some(1), &"r2".into()));
    assert!(stdout(&folder.run(&["runs", "--user", "nobody"])).contains("0 runs, "));
}
