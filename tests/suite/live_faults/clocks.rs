//! Clocks that are set, and clocks of other namespaces.

use super::{Node, QUICK, can, family};
use gpumem_model::run::Run;
use gpumem_runs::store::Store;
use gpumem_tests::live::{Daemon, Job, Machine, until};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime};

fn wall_s() -> i64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a time").as_secs().cast_signed()
}

/// Returns the seconds since 1970 at a time of a run's clock.
fn told_s(run: &Run, time_ns: u64) -> i64 {
    let gpumem_model::run::Clock::Monotonic { wall_offset_ns: Some(offset) } = run.clock else {
        panic!("{:?}", run.clock)
    };
    ((i128::from(time_ns) + i128::from(offset)) / 1_000_000_000) as i64
}

#[test]
fn wall_clock_jump_changes_no_duration_and_no_order() {
    let wall = WallClock::new("gpumem-wall");
    let by = wall.by();
    let by: Vec<&str> = by.iter().map(String::as_str).collect();
    let mut node = Node::new(&["devices=1"], "", |machine, config| Daemon::start_by(machine, &by, config));
    let age = |node: &Node| {
        let text = node.text();
        let ages = family(&text, "gpumem_process_sample_age_seconds");
        ages.into_iter().map(|(_, age)| age).fold(0.0, f64::max)
    };
    let mut jobs: Vec<(Job, i64)> = Vec::new();
    for seconds in [0, 3600, -7200] {
        wall.set(seconds);
        // It is polled once a second.
        std::thread::sleep(Duration::from_millis(1500));
        let job = node.holding("0");
        jobs.push((job, seconds));
        node.until_covered(&jobs.iter().map(|(job, _)| job).collect::<Vec<_>>());
        until(20, "fresh samples", || (age(&node) < 2.0).then_some(()));
    }
    for (job, _) in &mut jobs {
        job.enough();
    }
    let pids: Vec<u32> = jobs.iter().map(|(job, _)| job.pid()).collect();
    node.until_value("gpumemd_runs_finished_total", |ended| ended == 3.0);
    assert_eq!(node.value("gpumemd_store_deleted_total{reason=\"age\"}"), Some(0.0));
    println!("{:?}", node.compare(&pids));
    let store = Store::open_read_only(node.machine.dir.join("runs.sqlite")).expect("a store");
    let lines = store.list().expect("runs");
    let order: Vec<u32> = lines.iter().rev().map(|line| line.pid).collect();
    assert_eq!(order, pids, "in the order of their start, independent of the wall clock");
    for line in &lines {
        let run = store.load(line.id).expect("a run");
        let device = &run.devices[0];
        let (first, last) = (device.series.buckets[0].time_ns, device.last.time_ns);
        assert!(last - first < 60_000_000_000, "{first} {last}");
        let reported = told_s(&run, last);
        // The run uses the wall clock of its end, because a machine may boot with a wrong clock and correct it later.
        assert!((reported + 7200 - wall_s()).abs() < 120, "{reported}");
    }
}

/// With the defaults for keeping runs, a clock that is a year ahead makes all of them too old.
#[test]
fn clock_that_is_a_year_ahead_deletes_no_run() {
    const RUNS: usize = 144;
    const DAY_S: i64 = 86_400;
    let wall = WallClock::new("gpumem-year");
    let machine = Machine::new(&["devices=1"]);
    let path = machine.dir.join("runs.sqlite");
    let mut daemon = Daemon::start(&machine, "before", QUICK);
    let mut job = Job::start(&mut machine.trainer(&daemon.runtime, &["--steps", "2"]));
    assert!(job.end().success());
    daemon.wait_for_the_end_of(&machine, &[&job]);
    daemon.stop();
    let mut store = Store::open(&path).expect("a store");
    let first = store.list().expect("runs")[0].id;
    let run = store.load(first).expect("its run");
    for number in 1..RUNS {
        store.insert(&run, &format!("another boot:7:{number}")).expect("stored");
    }
    drop(store);
    let count = || Store::open_read_only(&path).and_then(|store| store.list()).expect("runs").len();
    assert_eq!(count(), RUNS);

    wall.set(365 * DAY_S);
    let by = wall.by();
    let by: Vec<&str> = by.iter().map(String::as_str).collect();
    let daemon = Daemon::start_by(&machine, &by, "[runs]\n");
    let reason = |state: &str, words: &str| {
        let doctor = daemon.asked("/v1/doctor")?;
        let is_it = |of: &&serde_json::Value| {
            let text = of["text"].as_str().unwrap_or_default();
            of["id"] == "store.age"
                && text.starts_with("no run is deleted for its age")
                && text.contains(words)
        };
        let finding = doctor["findings"].as_array()?.iter().find(is_it)?.clone();
        assert_eq!(finding["state"], state, "{finding}");
        Some(())
    };
    let log = || std::fs::read_to_string(machine.dir.join("daemon.log")).expect("a log");
    until(20, "doctor's reason", || reason("ok", "the daemon started less than runs.keep_steady_s ago"));
    assert!(
        log().contains("no run is deleted for its age") && log().contains("started less than"),
        "{}",
        log()
    );
    assert_eq!(count(), RUNS);

    // The gap to the last write is longer than any that a believed clock has.
    let config = machine.dir.join("daemon.toml");
    let text = std::fs::read_to_string(&config).expect("a configuration");
    std::fs::write(&config, text.replace("[runs]\n", "[runs]\nkeep_steady_s = 0.0\n")).expect("written");
    daemon.job.signal("HUP");
    until(20, "doctor's other reason", || reason("warn", "the clock is 36"));
    assert!(log().contains("days after the latest write of a run"), "{}", log());
    let deleted = until(10, "the metrics", || daemon.asked("/v1/metrics")).to_string();
    assert!(deleted.contains("gpumemd_store_deleted_total{reason=\\\"age\\\"} 0"), "{deleted}");
    assert_eq!(count(), RUNS);
}

/// A library that shows a daemon a wall clock that is ahead.
struct WallClock {
    folder: PathBuf,
}

impl WallClock {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/suite/live_faults/wall.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-o"]).arg(folder.join("wall.so"));
        assert!(compiler.arg(source).arg("-ldl").status().expect("a C compiler").success());
        WallClock { folder }
    }

    /// Returns the command that starts a program with this clock.
    fn by(&self) -> [String; 3] {
        let (library, ahead) = (self.folder.join("wall.so"), self.folder.join("ahead"));
        [
            "env".to_owned(),
            format!("LD_PRELOAD={}", library.display()),
            format!("GPUMEM_TEST_WALL={}", ahead.display()),
        ]
    }

    /// Sets by how many seconds it is ahead.
    fn set(&self, seconds: i64) {
        std::fs::write(self.folder.join("ahead"), seconds.to_string()).expect("set");
    }
}

impl Drop for WallClock {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Lane `privileged`.
mod privileged {
    use super::*;

    #[test]
    fn process_with_another_monotonic_clock_is_rebased() {
        let elsewhere =
            ["unshare", "--time", "--monotonic", "86400", "--boottime", "86400", "--fork", "--kill-child"];
        if !can("time namespaces", Command::new(elsewhere[0]).args(&elsewhere[1..]).arg("true")) {
            return;
        }
        let mut node = Node::plain(&["devices=1"], "");
        let work = ["--devices", "0", "--steps", "100", "--step-ms", "5", "--hold", "600"];
        let trainer = node.machine.trainer(&node.daemon.runtime, &work);
        let mut command = node.machine.command(elsewhere[0]);
        command.args(&elsewhere[1..]).arg(trainer.get_program()).args(trainer.get_args());
        command.envs(trainer.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let mut job = Job::start(&mut command);
        let line = job.wait_for("ready pid=");
        let pid = line.split_once("ready pid=").and_then(|(_, pid)| pid.trim().parse().ok()).expect("a pid");
        job.wait_for("holding");
        until(30, "all known to the last byte", || {
            let text = node.text();
            let known = family(&text, "gpumem_process_untrackable_bytes");
            known.iter().any(|(labels, _)| labels.contains(&format!("pid=\"{pid}\""))).then_some(())
        });
        println!("{:?}", node.compare(&[pid]));
    }
}
