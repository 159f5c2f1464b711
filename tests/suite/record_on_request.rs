//! A process that records at another process's request: gpumemctl, the daemon, the agent.
use gpumem_import::read_file;
use gpumem_model::run::{Run, State};
use gpumem_tests::live::{Daemon, Job, Machine, Mixer, replay, until};
use std::path::Path;
use std::process::Output;

fn ctl(machine: &Machine, daemon: &Daemon, arguments: &[&str]) -> Output {
    daemon.ctl(machine, arguments).current_dir(&machine.dir).output().expect("gpumemctl runs")
}

fn done(machine: &Machine, daemon: &Daemon, arguments: &[&str]) -> String {
    let output = ctl(machine, daemon, arguments);
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {} {printed}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns the tracked bytes at the end of a recording by its own report, and its tags.
fn tracked_and_tags(machine: &Machine, daemon: &Daemon, file: &Path) -> (i64, String) {
    let file = file.to_str().expect("UTF-8");
    let report: serde_json::Value =
        serde_json::from_str(&done(machine, daemon, &["report", file, "--json"])).expect("JSON");
    let text = report.to_string();
    let tracked = report["devices"][0]["moments"]["end"]["tracked_bytes"].as_i64();
    (tracked.or_else(|| find(&report, "tracked_bytes")).unwrap_or_else(|| panic!("{text}")), text)
}

/// Returns the last number with that name, at any depth.
fn find(value: &serde_json::Value, name: &str) -> Option<i64> {
    match value {
        serde_json::Value::Object(map) => {
            let deeper = map.values().filter_map(|value| find(value, name)).next_back();
            map.get(name).and_then(serde_json::Value::as_i64).or(deeper)
        }
        serde_json::Value::Array(values) => values.iter().filter_map(|value| find(value, name)).next_back(),
        _ => None,
    }
}

#[test]
fn running_process_records_on_request() {
    let machine = Machine::new(&["devices=1", "memory=16G"]);
    let mut daemon = Daemon::start(&machine, "daemon", "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n");
    let mut trainer = Job::start(
        machine.trainer(&daemon.runtime, &["--steps", "1000000", "--step-ms", "20"]).env("RANK", "5"),
    );
    trainer.wait_for("ready");
    let pid = trainer.pid().to_string();
    until(20, "the process", || daemon.pids(&machine).contains(&u64::from(trainer.pid())).then_some(()));

    let recording = machine.dir.join("on request.gpumem");
    let output = recording.to_str().expect("UTF-8");
    let printed = done(&machine, &daemon, &["record", &pid, "start", "--output", output]);
    assert_eq!(printed, format!("pid {pid} records to '{output}'\n"), "as a shell takes it");
    let grown = |bytes: u64| {
        until(20, "a longer recording", || (std::fs::metadata(&recording).ok()?.len() > bytes).then_some(()))
    };
    grown(50_000);
    assert!(tracked_and_tags(&machine, &daemon, &recording).0 > 0, "it can be read while it goes on");
    let again = ctl(&machine, &daemon, &["record", &pid, "start", "--output", "other.gpumem"]);
    assert!(
        !again.status.success() && String::from_utf8_lossy(&again.stderr).contains("is already running"),
        "{again:?}"
    );
    let printed = done(&machine, &daemon, &["record", &pid, "stop"]);
    assert!(printed.contains(output), "{printed}");
    assert!(tracked_and_tags(&machine, &daemon, &recording).0 > 0);
    let replayed = replay(&recording);
    assert_eq!(replayed.rejected, 0);
    assert_eq!(replayed.process(trainer.pid()).odd, Default::default());

    // Its current memory, in a file with rank and pid in its name.
    let printed = done(&machine, &daemon, &["record", &pid, "dump", "-o", "."]);
    let file = printed.rsplit(' ').next().expect("a file").trim().to_owned();
    assert!(file.ends_with(&format!("-r5-p{pid}-1.gpumem")) && Path::new(&file).exists(), "{printed}");
    assert!(tracked_and_tags(&machine, &daemon, Path::new(&file)).0 > 0);
    let refused = ctl(&machine, &daemon, &["record", &pid, "dump", "-o", &file]);
    assert!(
        !refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("exists"),
        "{refused:?}"
    );

    done(&machine, &daemon, &["record", &pid, "pause"]);
    std::thread::sleep(std::time::Duration::from_millis(300)); // an interval without records
    done(&machine, &daemon, &["record", &pid, "resume"]);
    let lists = || machine.truth().iter().filter(|truth| truth.pid == trainer.pid()).count();
    let goal = lists() + 15;
    until(60, "lists", || (lists() >= goal).then_some(()));
    assert_eq!(done(&machine, &daemon, &["record", &pid, "stop"]), format!("pid {pid} was not recording\n"));
    let nobody = ctl(&machine, &daemon, &["record", "1", "start"]);
    assert!(!nobody.status.success(), "{nobody:?}");

    trainer.enough();
    daemon.wait_for_the_end_of(&machine, &[&trainer]);
    daemon.stop();
    let compared = replay(&daemon.recording).compare(&machine.truth(), Some(trainer.pid()));
    println!("{compared:?}");
    assert!(compared.exact >= 10, "exact again after the pause: {compared:?}");
    let process = replay(&daemon.recording).process(trainer.pid()).clone();
    assert!(process.coverage.partial_history && !process.coverage.partial_state, "{:?}", process.coverage);
}

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";
const MIB: i64 = 1 << 20;

/// A trainer that makes a step each 20 ms until it is signalled to finish.
fn trainer(machine: &Machine, daemon: &Daemon) -> Job {
    let mut trainer = Job::start(
        machine.trainer(&daemon.runtime, &["--steps", "1000000", "--step-ms", "20"]).env("RANK", "5"),
    );
    trainer.wait_for("ready");
    until(20, "the process", || daemon.pids(machine).contains(&u64::from(trainer.pid())).then_some(()));
    trainer
}

fn steps(run: &Run) -> Vec<u64> {
    let rows = run.devices.iter().flat_map(|device| {
        let iterations = &device.details.iterations;
        iterations.rows.iter().chain(&iterations.open)
    });
    rows.flat_map(|row| row.first..=row.last).collect()
}

fn one(file: &Path) -> Run {
    let mut runs = read_file(file, None).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    assert_eq!(runs.len(), 1, "{}", file.display());
    runs.remove(0)
}

#[test]
fn recorded_steps_are_complete_and_every_copy_loads() {
    let machine = Machine::new(&["devices=1", "memory=16G"]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let mut trainer = trainer(&machine, &daemon);
    let pid = trainer.pid().to_string();
    // Finds the current step, and so the next steps.
    let now = machine.dir.join("now.gpumem");
    done(&machine, &daemon, &["record", &pid, "start", "-o", now.to_str().expect("UTF-8")]);
    let at = until(30, "its step", || steps(&one(&now)).last().copied());
    done(&machine, &daemon, &["record", &pid, "stop"]);
    let (first, last) = (at + 100, at + 130);
    let file = machine.dir.join("window.gpumem");
    let output = file.to_str().expect("UTF-8");
    let window = format!("{first}:{last}");
    let printed = done(&machine, &daemon, &["record", &pid, "start", "--steps", &window, "-o", output]);
    assert_eq!(printed, format!("pid {pid} will record its steps {first} to {last} to {output}\n"));
    let busy = ctl(&machine, &daemon, &["record", &pid, "start", "-o", "other.gpumem"]);
    assert!(String::from_utf8_lossy(&busy.stderr).contains(&format!("begins at step {first}")), "{busy:?}");
    // Copies the file before and during its writing.
    let (mut copies, mut in_between) = (0, 0);
    let copy = machine.dir.join("copy.gpumem");
    let all: Vec<u64> = (first..=last).collect();
    until(60, "the end of the window", || {
        std::fs::copy(&file, &copy).expect("copied");
        let run = one(&copy);
        let seen = steps(&run);
        copies += 1;
        in_between += u64::from(!seen.is_empty() && seen.len() < all.len());
        assert!(all.starts_with(&seen), "{seen:?}");
        let replayed = replay(&copy);
        assert_eq!(replayed.process(trainer.pid()).odd, Default::default());
        (seen.len() == all.len() && copies > 50).then_some(())
    });
    assert!(in_between > 0, "{copies} copies");
    // It has stopped at its limit, and reports that when queried.
    let size = std::fs::metadata(&file).expect("a file").len();
    let printed = until(20, "its end", || {
        let printed = done(&machine, &daemon, &["record", &pid, "stop"]);
        printed.contains(output).then_some(printed)
    });
    assert!(printed.contains("has recorded to"), "{printed}");
    let after = std::fs::metadata(&file).expect("a file").len();
    assert!(after >= size && steps(&one(&file)) == all, "{:?}", steps(&one(&file)));
    assert!(one(&file).devices[0].peak.tracked_bytes > Some(0), "with the state that it began with");
    // One whose steps have passed records nothing and leaves nothing.
    let past = machine.dir.join("past.gpumem");
    done(
        &machine,
        &daemon,
        &["record", &pid, "start", "--steps", "1:2", "-o", past.to_str().expect("UTF-8")],
    );
    until(20, "nothing", || (!past.exists()).then_some(()));
    trainer.enough();
}

#[test]
fn recording_stops_at_its_time_or_size_limit() {
    let machine = Machine::new(&["devices=1", "memory=16G"]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let mut trainer = trainer(&machine, &daemon);
    let pid = trainer.pid().to_string();
    let path = |name: &str| machine.dir.join(name);
    let start = |name: &str, limit: [&str; 2]| {
        let path = path(name);
        let path = path.to_str().expect("UTF-8");
        done(&machine, &daemon, &["record", &pid, "start", limit[0], limit[1], "-o", path]);
    };
    let stopped = |name: &str| {
        let path = path(name);
        // Another one can begin: that one is over.
        until(60, "its end", || {
            let spare = machine.dir.join(format!("{name}.spare"));
            let spare = spare.to_str().expect("UTF-8");
            let printed = ctl(&machine, &daemon, &["record", &pid, "start", "-o", spare]);
            printed.status.success().then_some(())
        });
        done(&machine, &daemon, &["record", &pid, "stop"]);
        one(&path)
    };
    start("time.gpumem", ["--for", "1s"]);
    let run = stopped("time.gpumem");
    let coverage = &run.coverage;
    assert!(steps(&run).len() >= 2, "{coverage:?}");
    assert!(coverage.late && coverage.complete && coverage.lost == 0, "{coverage:?}");
    assert!(!coverage.partial_state && !coverage.partial_history, "{coverage:?}");
    assert!(matches!(run.state, State::Closed { status: None, .. }), "{:?}", run.state);
    let late = run.caveats.iter().find(|caveat| caveat.code == "late").expect("memory from before the agent");
    assert!(late.text.contains(" bytes existed before the recording began"), "{}", late.text);
    let file = path("time.gpumem");
    let report = done(&machine, &daemon, &["report", "--verbose", file.to_str().expect("UTF-8")]);
    let is_clean = |words: &str| report.contains(words);
    assert!(is_clean("complete: the recording was ended at") && is_clean("0 events lost"), "{report}");
    assert!(!is_clean("interrupted") && !is_clean("lower bound"), "{report}");
    start("size.gpumem", ["--max-size", "200K"]);
    let run = stopped("size.gpumem");
    let size = std::fs::metadata(path("size.gpumem")).expect("a file").len();
    assert!(size <= 200 << 10 && size > 100 << 10, "{size}");
    assert!(!run.coverage.partial_state, "exact up to its end: {:?}", run.coverage);
    let output = path("small.gpumem");
    let small = ["record", &pid, "start", "--max-size", "1K", "-o", output.to_str().expect("UTF-8")];
    let refused = ctl(&machine, &daemon, &small);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("the state at the start has"), "{refused:?}");
    assert!(!output.exists());
    let wrong = ctl(&machine, &daemon, &["record", &pid, "stop", "--for", "1s"]);
    assert!(!wrong.status.success(), "{wrong:?}");
    trainer.enough();
}

#[test]
fn balances_hold_across_a_pause_and_missing_records_are_counted() {
    let machine = Machine::new(&["memory=16G"]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let mut mixer = Mixer::start(&machine, &daemon);
    mixer.ok("device 0; tag before; alloc a 3M; alloc b 1M");
    let pid = mixer.pid().to_string();
    until(20, "the process", || daemon.pids(&machine).contains(&u64::from(mixer.pid())).then_some(()));
    let file = machine.dir.join("paused.gpumem");
    done(&machine, &daemon, &["record", &pid, "start", "-o", file.to_str().expect("UTF-8")]);
    done(&machine, &daemon, &["record", &pid, "pause"]);
    mixer.ok("tag between; alloc c 64M; free c; alloc d 5M; free a");
    assert_eq!(one(&file).devices[0].last.tracked_bytes, Some(4 * MIB), "kept back");
    done(&machine, &daemon, &["record", &pid, "resume"]);
    mixer.ok("tag after; alloc e 7M");
    done(&machine, &daemon, &["record", &pid, "stop"]);
    let run = one(&file);
    assert_eq!(run.devices[0].last.tracked_bytes, Some(13 * MIB), "b, d and e");
    let coverage = &run.coverage;
    assert!(coverage.lost == 0 && coverage.withheld >= 5, "kept back, and not lost: {coverage:?}");
    assert!(coverage.partial_history && !coverage.partial_state, "its peak is a lower bound: {coverage:?}");
    let report = done(&machine, &daemon, &["report", "--verbose", file.to_str().expect("UTF-8")]);
    assert!(report.contains("peak is a lower bound: records were withheld on request"), "{report}");
    let tags: Vec<_> = run.cells.iter().filter_map(|cell| cell.tag.clone()).collect();
    assert!(tags.contains(&"between".to_owned()), "what was born unseen has its name: {tags:?}");
    let buckets = &run.devices[0].series.buckets;
    let (first, last) =
        (buckets.first().map_or(0, |it| it.time_ns), buckets.last().map_or(0, |it| it.time_ns));
    assert!(last - first < 60_000_000_000, "the series begins with the recording: {buckets:?}");
    mixer.end();
}

#[test]
fn a_recording_that_is_there_is_never_overwritten() {
    let machine = Machine::new(&["memory=16G"]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let file = machine.dir.join("run.gpumem");
    for _ in 0..3 {
        let mut command = Mixer::command(&machine, &daemon);
        command.env("GPUMEM_RECORD", &file);
        let mut mixer = Mixer::run(&mut command);
        mixer.ok("device 0; alloc a 3M");
        mixer.end();
    }
    for name in ["run.gpumem", "run-2.gpumem", "run-3.gpumem"] {
        assert_eq!(one(&machine.dir.join(name)).devices[0].peak.tracked_bytes, Some(3 * MIB), "{name}");
    }
}
