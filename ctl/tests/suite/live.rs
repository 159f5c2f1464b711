//! gpumemctl and a daemon: its requests, and its output for the replies.

use crate::common::{FakeDaemon, Folder, failure, quoted, run_of, shipped, stderr, stdout};
use gpumem_model::control::{self, DeviceRow, Doctor, Finding, ProcessRow, Ps};
use gpumem_model::run::{Clock, Device, Oom, OomKind, Run, State};
use gpumem_runs::store::Store;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;

const MIB: u64 = 1 << 20;

fn daemon(folder: &Folder) -> FakeDaemon {
    FakeDaemon::at(&folder.path("gpumem/control.sock"))
}

pub fn machine() -> String {
    let device = DeviceRow {
        index: 3,
        uuid: "GPU-5f1c0003-aaaa".into(),
        total_bytes: Some(81_559 * MIB),
        free_bytes: Some(10_355 * MIB),
        ..DeviceRow::default()
    };
    let process = ProcessRow {
        pid: 41873,
        user: Some("alice".into()),
        flags: vec!["covered".into()],
        used_bytes: Some(71_204 * MIB),
        tracked_bytes: Some(69_918 * MIB as i64),
        idle_bytes: Some(8_648 * MIB as i64),
        command: Some("python train.py".into()),
        ..ProcessRow::default()
    };
    serde_json::to_string(&Ps { devices: vec![device], processes: vec![process], ..Ps::default() })
        .expect("JSON")
}

#[test]
fn ps_shows_what_holds_the_devices() {
    let folder = Folder::new("ps");
    let daemon = daemon(&folder);
    daemon.says("GET /v1/ps", 200, machine());
    let text = stdout(&folder.run(&["ps"]));
    assert!(
        text.contains("\n3   41873 alice covered 71,204  69,918 8,648   1,286    - python train.py\n"),
        "{text}"
    );
    assert!(text.contains(" free    10,355\n"), "{text}");
    for device in ["3", "GPU-5f1c"] {
        assert_eq!(stdout(&folder.run(&["ps", "--device", device])), text);
    }
    let (exit, message) = failure(&folder.run(&["ps", "--device", "0"]));
    assert_eq!((exit, message.contains("there are: 3 (GPU-5f1c0003-aaaa)")), (3, true), "{message}");
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&folder.run(&["ps", "--json"]))).expect("JSON");
    assert_eq!(json["processes"][0]["used_bytes"], 71_204 * MIB);
    assert!(json["processes"][0]["why"].is_null(), "absent is null");
    daemon.says("GET /v1/ps", 200, r#"{"devices":[],"processes":[]}"#);
    assert!(stdout(&folder.run(&["ps"])).starts_with("no device: "));
}

#[test]
fn the_socket_is_looked_for_in_order_and_only_where_nobody_else_can_put_one() {
    let folder = Folder::new("search");
    let (exit, message) = failure(&folder.run(&["ps"]));
    assert_eq!(exit, 6);
    let usual = folder.text("gpumem/control.sock");
    assert!(message.contains(&format!("{usual}: is not there")), "{message}");
    assert!(message.contains("/run/gpumemd/control.sock") && message.contains("gpumemctl run"), "{message}");

    daemon(&folder).says("GET /v1/ps", 200, machine());
    let other = FakeDaemon::at(&folder.path("other/control.sock"));
    other.says("GET /v1/ps", 200, r#"{"devices":[],"processes":[]}"#);
    let with = |args: &[&str], name: &str, value: String| {
        let text = stdout(&folder.command(args).env(name, value).output().expect("gpumemctl"));
        assert!(text.starts_with("no device"), "{args:?} {name}: {text}");
    };
    with(&["ps"], "GPUMEM_CONTROL", folder.text("other"));
    with(&["ps"], "GPUMEM_CONTROL", folder.text("other/control.sock"));
    with(&["ps"], "GPUMEM_SOCKET", folder.text("other/agent.sock"));
    with(&["ps", "--socket", &folder.text("other")], "GPUMEM_CONTROL", "/nonexistent".into());
    let named = folder.command(&["ps"]).env("GPUMEM_CONTROL", "/nonexistent").output().expect("gpumemctl");
    let (exit, message) = failure(&named);
    assert_eq!((exit, message.contains(&usual)), (6, false), "no other is asked: {message}");

    fs::set_permissions(folder.path("other"), fs::Permissions::from_mode(0o777)).expect("a mode");
    let open =
        folder.command(&["ps"]).env("GPUMEM_CONTROL", folder.text("other")).output().expect("gpumemctl");
    assert!(failure(&open).1.contains("other users may write to the socket's directory"));
}

#[test]
fn a_daemon_that_does_not_answer_as_it_should_is_named_with_what_to_do() {
    let folder = Folder::new("odd");
    let daemon = daemon(&folder);
    for (status, body, code, words) in [
        (0, "SSH-2.0-x\r\n\r\n", 6, "does not answer in HTTP"),
        (0, "", 6, "without an answer"),
        (200, "{}", 6, "another version"),
        (200, "not json", 6, "another version"),
        (404, r#"{"error":"no such path"}"#, 6, "does not know /v1/ps (no such path)"),
        (403, r#"{"error":"not\u001b yours"}"#, 7, "refused: not\\u{1b} yours"),
        (503, r#"{"error":"ends"}"#, 1, "control.sock: ends"),
        (500, "", 1, "answered 500"),
    ] {
        daemon.says("GET /v1/ps", status, body);
        let (exit, message) = failure(&folder.run(&["ps"]));
        assert_eq!((exit, message.contains(words)), (code, true), "{message}");
    }
    fs::create_dir(folder.path("old")).expect("a folder");
    drop(UnixListener::bind(folder.path("old/control.sock")).expect("a socket"));
    let (exit, message) = failure(&folder.run(&["ps", "--socket", &folder.text("old")]));
    assert_eq!((exit, message.contains("no process listens")), (6, true), "{message}");
    let (_, message) = failure(&folder.run(&["ps", "--socket", &shipped().to_string_lossy()]));
    assert!(message.contains("is not a socket"), "{message}");
}

#[test]
fn a_live_process_is_told_like_its_log() {
    let folder = Folder::new("live");
    let daemon = daemon(&folder);
    let run = run_of(41873, "j1", None);
    daemon.runs("?pid=41873", &[&run]);
    let log = shipped().to_string_lossy().into_owned();
    let own = |text: &str| -> Vec<String> {
        let table = text.lines().skip_while(|line| !line.starts_with("used"));
        table.take_while(|line| !line.starts_with("next: ")).map(str::to_owned).collect()
    };
    for more in [&[][..], &["--by", "tag"], &["--by", "structure", "--all"], &["--rules", "mxnet"]] {
        let live = stdout(&folder.run(&[&["report", "--verbose", "41873"], more].concat()));
        let read = stdout(&folder.run(&[&["report", "--verbose", &log], more].concat()));
        assert_eq!(own(&live), own(&read));
        assert!(live.contains("pid 41873") && live.contains("\non node7; "), "{live}");
        assert!(live.contains("\nnext: gpumemctl report 41873 "), "{live}");
    }
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&folder.run(&["report", "41873", "--json"]))).expect("JSON");
    assert_eq!((&json["schema"], &json["process"]["pid"]), (&"gpumem.report".into(), &41873.into()));
    assert!(stdout(&folder.run(&["report", "41873", "--csv"])).starts_with("device,moment,"));
    let with = stdout(&folder.run(&["report", "41873", "--socket", &folder.text("gpumem")]));
    assert!(with.contains(&format!("report 41873 --socket {} ", folder.text("gpumem"))), "{with}");
}

fn device(run: &Run, ordinal: u16, gap: Option<i64>) -> Device {
    let mut device = run.devices[0].clone();
    device.name = format!("GPU-0000000{ordinal}-bbbb");
    device.ordinal = ordinal;
    device.last.untrackable_bytes = gap;
    device
}

#[test]
fn one_of_several_devices_can_be_asked_for() {
    let folder = Folder::new("devices");
    let daemon = daemon(&folder);
    let mut run = run_of(7, "j1", None);
    run.devices = vec![device(&run, 0, Some(1 << 30)), device(&run, 5, Some(3 << 20))];
    daemon.runs("?pid=7", &[&run]);
    let text = stdout(&folder.run(&["report", "--verbose", "7"]));
    let rows = text.lines().filter(|line| line.starts_with("GPU ") || line.starts_with("sum "));
    assert_eq!(rows.count(), 3, "{text}");
    for name in ["5", "GPU-00000005"] {
        let one = stdout(&folder.run(&["report", "--verbose", "7", "--device", name]));
        let (command, rest) = one.split_once("  ").expect("a title");
        assert!(command.starts_with("train.py --batch-size 64"), "{one}");
        assert!(rest.starts_with("pid 7 (python3)  job j1  GPU 5 (GPU-00000005)\n"), "{one}");
        assert!(
            one.contains("\nused (= nvidia-smi) ") && one.contains(&format!("--device {name} --by ")),
            "{one}"
        );
    }
    let (exit, message) = failure(&folder.run(&["report", "7", "--device", "1"]));
    assert_eq!(
        (exit, message.contains("there are: 0 (GPU-00000000-bbbb), 5 (GPU-0")),
        (3, true),
        "{message}"
    );
}

#[test]
fn a_launcher_is_the_table_of_its_children() {
    let folder = Folder::new("launcher");
    let daemon = daemon(&folder);
    let runs: Vec<Run> = [(101, 1), (100, 0)]
        .map(|(pid, rank)| {
            let mut run = run_of(pid, "j1", Some(rank));
            run.devices = vec![device(&run, rank as u16, Some(i64::from(rank + 1) * 333_333))];
            run
        })
        .into();
    let mut uncovered = run_of(102, "j1", None);
    uncovered.coverage.covered = false;
    for device in &mut uncovered.devices {
        (device.last.tracked_bytes, device.last.uncovered_used_bytes) = (None, Some(5 << 20));
        device.last.amounts.clear();
    }
    let all: Vec<&Run> = runs.iter().chain([&uncovered]).collect();
    let launcher = std::process::id();
    daemon.runs(&format!("?tree={launcher}"), &all).runs("?job=j1", &all).runs("?pid=100", &[&runs[1]]);
    let text = stdout(&folder.run(&["report", &launcher.to_string()]));
    assert!(text.starts_with(&format!("3 processes started by pid {launcher} (")), "{text}");
    let rows: Vec<&str> = text.lines().skip(2).take(5).collect();
    assert!(rows[0].starts_with("rank  pid  device "), "{text}");
    let starts: Vec<&str> = rows[1..].iter().map(|row| &row[..9]).collect();
    assert_eq!(starts, ["0     100", "1     101", "-     102", "sum      "], "{text}");
    assert!(rows[3].contains("5.0        -     -            -  train.py (uncovered)"), "{text}");
    assert!(rows[4].ends_with("of the known values"), "{text}");
    assert_eq!(
        text.replace(&format!("started by pid {launcher}"), "").lines().nth(3),
        stdout(&folder.run(&["report", "--job", "j1"])).lines().nth(3)
    );

    let mut living = runs.clone();
    living[0].state = State::Open;
    daemon.runs("?job=j3", &living.iter().collect::<Vec<_>>());
    let half = stdout(&folder.run(&["report", "--job", "j3"]));
    assert!(half.starts_with("1 process of job j3, 1 more ended\n") && !half.contains("sum"), "{half}");

    let csv = stdout(&folder.run(&["report", &launcher.to_string(), "--csv"]));
    assert!(csv.lines().any(|line| line.starts_with("1,101,GPU-00000001-bbbb,")), "{csv}");
    assert!(csv.lines().any(|line| line.contains(",102,") && line.contains(",5242880,,,,,")), "{csv}");
    let json: serde_json::Value =
        serde_json::from_str(&stdout(&folder.run(&["report", &launcher.to_string(), "--json"])))
            .expect("JSON");
    assert_eq!(json.as_array().map(Vec::len), Some(3));
    let whole = stdout(&folder.run(&["report", &launcher.to_string(), "--all"]));
    assert_eq!(whole.matches("used (= nvidia-smi)").count(), 3, "{whole}");
    daemon.runs("?tree=5", &[&runs[0]]);
    let only = stdout(&folder.run(&["report", "--verbose", "5"]));
    assert!(
        only.contains("  pid 101 ") && only.contains("\nused (= nvidia-smi)"),
        "one child is told whole: {only}"
    );
    let one = stdout(&folder.run(&["report", "--verbose", "100"]));
    assert!(one.contains("\nits job has 2 more processes: gpumemctl report --job j1\n"), "{one}");
    let (exit, message) = failure(&folder.run(&["report", "--job", "j2"]));
    assert_eq!((exit, message.contains("no job j2: asked the daemon at ")), (3, true), "{message}");

    let mut store = Store::open(folder.path("runs.sqlite")).expect("a store");
    for run in &runs {
        store.insert(run, &run.process.pid.to_string()).expect("stored");
    }
    fs::remove_file(folder.path("gpumem/control.sock")).expect("removed");
    let stored = stdout(&folder.run(&["report", "--job", "j1"]));
    assert!(stored.starts_with("2 processes of job j1, all ended\n"), "{stored}");
    let (exit, message) = failure(&folder.run(&["report", "--job", "j2"]));
    assert_eq!((exit, message.contains("asked no daemon")), (3, true), "{message}");
}

#[test]
fn without_a_name_it_is_the_latest_that_is_mine() {
    let folder = Folder::new("latest");
    let log = shipped().to_string_lossy().into_owned();
    stdout(&folder.run(&["import", "tbd-log", &log]));
    assert!(stdout(&folder.run(&["report"])).contains("  run r1  "), "no daemon: the store");
    let daemon = daemon(&folder);
    assert!(stdout(&folder.run(&["report"])).contains("  run r1  "), "nothing lives: the store");
    let mut others = run_of(9, "j9", None);
    others.process.uid = others.process.uid.map(|uid| uid + 1);
    let mut mine = run_of(8, "j8", None);
    mine.state = State::Open;
    let mut older = run_of(7, "j7", None);
    older.process.start_ticks -= 1;
    daemon.runs("", &[&others, &older, &mine]);
    let text = stdout(&folder.run(&["report", "--verbose"]));
    assert!(text.contains("  pid 8 ") && text.contains("; running\n"), "{text}");
}

#[test]
fn without_a_name_oom_is_of_my_newest_run_that_was_out_of_memory() {
    let folder = Folder::new("latest-oom");
    let user = u64::from(rustix::process::getuid().as_raw());
    let oom = |pid: u32, time_ns: u64| {
        let mut run = run_of(pid, "j", None);
        run.state = State::Closed { time_ns: 90, status: Some(9) };
        let kind = gpumem_model::run::OomKind::Device;
        run.devices[0].details.ooms = vec![gpumem_model::run::Oom { time_ns, kind, ..Default::default() }];
        run
    };
    let (older, newer, mut of_another) = (oom(11, 40), oom(12, 50), oom(13, 60));
    of_another.process.uid = Some(user + 1);
    let without = run_of(14, "j", None);
    let mut store = Store::open(folder.path("runs.sqlite")).expect("a store");
    for run in [&newer, &older, &of_another, &without] {
        store.insert(run, &run.process.pid.to_string()).expect("stored");
    }
    drop(store);
    let output = folder.run(&["oom"]);
    assert!(stdout(&output).contains("pid 12"), "{output:?}");
    assert!(stderr(&output).starts_with("your newest run that ran out of memory: r1, pid 12"), "{output:?}");
    let output = folder.run(&["report"]);
    assert!(stdout(&output).contains("pid 14"), "{output:?}");
    assert!(stderr(&output).starts_with("your newest run: r4, pid 14"), "{output:?}");
    // A live process, known to the daemon, that runs out of memory later.
    let daemon = daemon(&folder);
    let mut live = oom(15, 70);
    live.state = State::Open;
    daemon.runs("", &[&live]);
    let output = folder.run(&["oom"]);
    assert!(stdout(&output).contains("pid 15"), "{output:?}");
    assert!(stderr(&output).contains("pid 15") && stderr(&output).contains("live"), "{output:?}");
}

#[test]
fn without_a_name_all_daemons_and_their_stores_are_searched() {
    let folder = Folder::new("daemons");
    let first = FakeDaemon::at(&folder.path("tree/control.sock"));
    let second = daemon(&folder);
    let socket = folder.text("gpumem/control.sock");
    let (usual, other) = (folder.path("state/gpumem/runs.sqlite"), folder.path("other/runs.sqlite"));
    let ask = |command: &str| {
        let mut ctl = folder.command(&[command]);
        ctl.env("GPUMEM_SOCKET", folder.path("tree/agent.sock")).env_remove("GPUMEM_STORE");
        let output = ctl
            .env("XDG_STATE_HOME", folder.path("state"))
            .env("HOME", &folder.0)
            .output()
            .expect("gpumemctl");
        (stdout(&output), stderr(&output))
    };
    let has_store = |daemon: &FakeDaemon, store: &str| {
        let facts = vec![("store".to_owned(), store.to_owned())];
        let doctor = Doctor { facts, ..Doctor::default() };
        daemon.says("GET /v1/doctor", 200, serde_json::to_string(&doctor).expect("JSON"));
    };
    has_store(&first, &usual.to_string_lossy());
    has_store(&second, &other.to_string_lossy());
    // The higher the pid, the newer are the run and its OOM.
    let at = |pid: u32, has_oom: bool| {
        let mut run = run_of(pid, "j", None);
        run.process.start_ticks = u64::from(pid);
        run.clock = Clock::Monotonic { wall_offset_ns: Some(0) };
        run.state = State::Closed { time_ns: 90, status: Some(9) };
        let oom = Oom { time_ns: u64::from(pid), kind: OomKind::Device, ..Default::default() };
        run.devices[0].details.ooms = if has_oom { vec![oom] } else { Vec::new() };
        run
    };
    let live = |pid: u32, has_oom: bool| Run { state: State::Open, ..at(pid, has_oom) };
    for (path, runs) in [(&usual, [at(10, true), at(30, false)]), (&other, [at(20, true), at(40, false)])] {
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        let mut store = Store::open(path).expect("a store");
        for run in &runs {
            store.insert(run, &run.process.pid.to_string()).expect("stored");
        }
    }
    let stored = format!("r2 of {}, pid 40", other.display());
    let (text, why) = ask("report");
    assert!(text.contains("pid 40") && why.starts_with(&format!("your newest run: {stored}")), "{why}{text}");
    let stored = format!("r1 of {}, pid 20", other.display());
    let (text, why) = ask("oom");
    assert!(text.contains("pid 20"), "{why}{text}");
    assert!(why.starts_with(&format!("your newest run that ran out of memory: {stored}")), "{why}");

    // A live process of the second daemon is newer than one of the first.
    first.runs("", &[&live(50, true)]);
    second.runs("", &[&live(60, true)]);
    for command in ["report", "oom"] {
        let (text, why) = ask(command);
        assert!(text.contains("pid 60"), "{why}{text}");
        assert!(
            why.contains("pid 60")
                && why.contains(&format!("which is live, known to the daemon at {socket}")),
            "{why}"
        );
    }
    let (text, _) = ask("report");
    assert!(text.contains(&format!("gpumemctl report 60 --socket {} ", quoted(&socket))), "{text}");
    first.runs("", &[&live(70, true)]);
    for command in ["report", "oom"] {
        let (text, why) = ask(command);
        assert!(
            text.contains("pid 70") && why.contains("pid 70") && !why.contains(" daemon at "),
            "{why}{text}"
        );
    }

    // A store that the caller cannot read: its daemon sends the ended runs.
    has_store(&second, &folder.text("absent/runs.sqlite"));
    second.runs("?*", &[&at(80, true)]);
    for command in ["report", "oom"] {
        let (text, why) = ask(command);
        assert!(text.contains("pid 80"), "{why}{text}");
        assert!(why.contains(&format!("which has ended, known to the daemon at {socket}")), "{why}");
    }
}

#[test]
fn a_pid_that_nobody_knows_is_answered_with_what_was_looked_at() {
    let folder = Folder::new("unknown");
    let (exit, message) = failure(&folder.run(&["report", "999999999"]));
    assert_eq!(exit, 3);
    for words in ["no daemon answers", "runs.sqlite", "no process with this pid runs"] {
        assert!(message.contains(words), "{message}");
    }
    let _daemon = daemon(&folder);
    let (exit, message) = failure(&folder.run(&["report", &std::process::id().to_string()]));
    assert_eq!(exit, 3);
    for words in ["gpumem/control.sock has no run of this process", "the process runs (", "gpumemctl doctor"]
    {
        assert!(message.contains(words), "{message}");
    }
    stdout(&folder.run(&["import", "tbd-log", &shipped().to_string_lossy()]));
    let stored = stdout(&folder.run(&["report", "--verbose", "20417"]));
    assert!(stored.contains("  run r1  pid 20417 "), "ended, but kept: {stored}");
}

/// Returns the output of doctor, and checks that the exit code is 10 exactly if a check failed.
fn doctor(folder: &Folder, args: &[&str]) -> String {
    let output = folder.run(&[&["doctor"], args].concat());
    let text = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    let is_bad = text.lines().any(|line| line.starts_with("BAD "));
    assert_eq!(output.status.code(), Some(if is_bad { 10 } else { 0 }), "{output:?}");
    text
}

/// Returns the line about a check, without the state and with single blanks between words.
fn line(text: &str, state: &str, id: &str) -> String {
    let mut words = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let found = words.find(|words| words.starts_with(&[state, id]));
    found.unwrap_or_else(|| panic!("{state} {id}: {text}"))[2..].join(" ")
}

#[test]
fn doctor_puts_the_worst_first_and_needs_no_daemon() {
    let folder = Folder::new("doctor");
    let alone = doctor(&folder, &[]);
    assert!(alone.starts_with("BAD      daemon "), "{alone}");
    assert!(line(&alone, "BAD", "daemon").starts_with("no daemon answers; tried: "), "{alone}");
    assert!(alone.contains("-> gpumemctl run -- COMMAND starts a private one"), "{alone}");

    let daemon = daemon(&folder);
    let finding = |state, id: &str, fix: Option<&str>| Finding {
        id: id.into(),
        state,
        subject: id.into(),
        text: "is so".into(),
        fix: fix.map(str::to_owned),
    };
    let told = Doctor {
        version: "0.0.9".into(),
        pid: 812,
        uptime_s: 7_300,
        facts: vec![
            ("driver".into(), "550.54".into()),
            ("agents".into(), "3".into()),
            ("clock".into(), "1".into()),
        ],
        findings: vec![
            finding(control::State::Ok, "store", None),
            finding(control::State::Bad, "nvml", Some("mend it")),
            finding(control::State::Warn, "of.a.later.version", None),
        ],
    };
    let told = serde_json::to_string(&told).expect("JSON");
    daemon.says("GET /v1/doctor", 200, &told).says("GET /v1/doctor?*", 200, &told);
    let text = doctor(&folder, &[]);
    assert!(text.starts_with("gpumemd 0.0.9 pid 812, up 2 h, at "), "{text}");
    assert!(text.contains("\n  driver  550.54\n  agents  3\n\nBAD      "), "{text}");
    assert_eq!(line(&text, "BAD", "nvml"), "is so");
    assert!(text.contains("-> mend it\n"), "{text}");
    assert!(line(&text, "BAD", "sockets").contains("agent.sock: it is not there"), "{text}");
    assert!(line(&text, "warn", "daemon.version").starts_with("gpumemd is 0.0.9, gpumemctl is "), "{text}");
    assert!(line(&text, "warn", "namespace.time").contains("another time namespace"), "{text}");
    let order = |state: &str| text.find(&format!("\n{state}")).expect("a finding");
    assert!(order("BAD") < order("warn") && order("warn") < order("ok "), "{text}");
    let columns: BTreeSet<usize> = text.lines().filter_map(|line| line.find("-> ")).collect();
    assert_eq!(columns.len(), 1, "what to do is in one column: {text}");

    let _agent = UnixListener::bind(folder.path("gpumem/agent.sock")).expect("a socket");
    let own = std::process::id().to_string();
    let text = doctor(&folder, &[&own]);
    assert!(line(&text, "ok", "sockets").contains("agent.sock (mode "), "{text}");
    assert!(
        line(&text, "ok", "process.cuda").starts_with(&format!("pid {own}: has not opened libcuda")),
        "{text}"
    );
    assert!(daemon.was_asked().contains(&format!("GET /v1/doctor?pid={own}")));
    let json: serde_json::Value = serde_json::from_str(&doctor_json(&folder)).expect("JSON");
    assert_eq!((&json["schema"], &json["daemon"]["pid"]), (&"gpumem.doctor".into(), &812.into()));
    assert_eq!((&json["version"], &json["findings"][0]["state"]), (&2.into(), &"bad".into()));
    let bad = json["findings"].as_array().expect("findings").iter().filter(|of| of["state"] == "bad").count();
    assert_eq!(json["counts"]["bad"], bad);

    let library =
        folder.command(&["doctor"]).env("GPUMEM_LIBRARY", "/nonexistent.so").output().expect("gpumemctl");
    let library = String::from_utf8(library.stdout).expect("UTF-8");
    let library = line(&library, "BAD", "agent.library");
    assert_eq!(library, "libgpumem.so: was not found: $GPUMEM_LIBRARY is /nonexistent.so");
    let (exit, message) = failure(&folder.run(&["doctor", "999999999"]));
    assert_eq!((exit, message.contains("no such process")), (3, true), "{message}");
    daemon.says(&format!("GET /v1/doctor?pid={own}"), 404, r#"{"error":"process uses no GPU"}"#);
    let text = doctor(&folder, &[&own]);
    assert_eq!(line(&text, "unknown", "process"), format!("pid {own}: process uses no GPU"));
    assert!(text.starts_with("gpumemd 0.0.9 pid 812"), "{text}");
    daemon.says("GET /v1/doctor", 500, "");
    assert!(line(&doctor(&folder, &[]), "BAD", "daemon").contains("answered 500"));
    daemon.says("GET /v1/doctor", 200, r#"{"findings":[{"level":"bad"}]}"#);
    assert!(line(&doctor(&folder, &[]), "BAD", "daemon.version").contains("of another version"));
}

fn doctor_json(folder: &Folder) -> String {
    String::from_utf8(folder.run(&["doctor", "--json"]).stdout).expect("UTF-8")
}

#[test]
fn doctor_reads_this_shell_too() {
    let folder = Folder::new("doctor-shell");
    let long = format!("/{}", "x".repeat(120));
    let told = |name: &str, value: &str| {
        let output = folder.command(&["doctor"]).env(name, value).output().expect("gpumemctl");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let text = told("GPUMEM_SOCKET", &long);
    assert!(
        line(&text, "BAD", "sockets.path")
            .starts_with("GPUMEM_SOCKET: GPUMEM_SOCKET gives a socket path of 121"),
        "{text}"
    );
    let text = told("GPUMEM_DISABLE", "1");
    assert!(line(&text, "warn", "agent.environment").starts_with("GPUMEM_DISABLE: is set here"), "{text}");
    let text = told("CUDA_INJECTION64_PATH", "/nonexistent/libgpumem.so");
    assert!(line(&text, "BAD", "agent.environment").contains("which does not exist"), "{text}");
    let text = told("CUDA_INJECTION64_PATH", "/bin/sh");
    assert!(line(&text, "ok", "agent.environment").contains("names another tool"), "{text}");
    let text = told("GPUMEM_RECORD", "/tmp/x.%p");
    assert!(line(&text, "warn", "agent.environment").contains("report to no daemon"), "{text}");
    let narrow =
        folder.command(&["doctor"]).env("GPUMEM_LIBRARY", "/etc/passwd").output().expect("gpumemctl");
    let text = String::from_utf8(narrow.stdout).expect("UTF-8");
    assert!(line(&text, "BAD", "agent.library").contains("is not an ELF file"), "{text}");
}

#[test]
fn nvml_is_released_for_as_long_as_asked() {
    let folder = Folder::new("nvml");
    let daemon = daemon(&folder);
    daemon.says("POST /v1/nvml/release?for_s=300", 200, r#"{"for_s":300}"#);
    let text = stdout(&folder.run(&["nvml", "release", "--for", "5m"]));
    assert!(text.starts_with("NVML is closed for 300 s: "), "{text}");
    daemon.says("POST /v1/nvml/release?for_s=60", 403, r#"{"error":"only root and the group gpumemd"}"#);
    let (exit, message) = failure(&folder.run(&["nvml", "release"]));
    assert_eq!((exit, message.contains("only root and the group")), (7, true), "{message}");
    assert!(daemon.was_asked().contains(&"POST /v1/nvml/release?for_s=60".to_owned()));
    let wrong = folder.run(&["nvml", "release", "--for", "soon"]);
    assert_eq!((wrong.status.code(), stderr(&wrong).contains("60s, 5m or 1h")), (Some(2), true));
}
