//! Clocks that are set, and clocks of other namespaces.

use super::{Node, can, family};
use gpumem_model::run::Run;
use gpumem_runs::store::Store;
use gpumem_tests::live::{Daemon, Job, until};
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
    let folder = std::env::temp_dir().join(format!("gpumem-wall-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let (library, ahead) = (folder.join("wall.so"), folder.join("ahead"));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/suite/live_faults/wall.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-o"]).arg(&library).arg(source).arg("-ldl");
    assert!(compiler.status().expect("a C compiler").success());
    let by = [
        "env".to_owned(),
        format!("LD_PRELOAD={}", library.display()),
        format!("GPUMEM_TEST_WALL={}", ahead.display()),
    ];
    let by: Vec<&str> = by.iter().map(String::as_str).collect();
    let mut node = Node::new(&["devices=1"], "", |machine, config| Daemon::start_by(machine, &by, config));
    let age = |node: &Node| {
        let text = node.text();
        let ages = family(&text, "gpumem_process_sample_age_seconds");
        ages.into_iter().map(|(_, age)| age).fold(0.0, f64::max)
    };
    let mut jobs: Vec<(Job, i64)> = Vec::new();
    for seconds in [0, 3600, -7200] {
        std::fs::write(&ahead, seconds.to_string()).expect("set");
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
    let _ = std::fs::remove_dir_all(&folder);
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
