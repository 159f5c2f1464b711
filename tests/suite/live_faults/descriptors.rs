//! No descriptors left.

use super::{Node, can};
use gpumem_tests::live::{Daemon, Job, until};
use std::process::Command;
use std::time::{Duration, Instant};

/// Limit for tracking every byte of a new process, from its start, once descriptors are available again.
const SOON: Duration = Duration::from_secs(1);

fn limit(pid: u32, files: usize) {
    let status = Command::new("prlimit")
        .args(["--pid", &pid.to_string(), &format!("--nofile={files}:1024")])
        .status()
        .expect("prlimit runs");
    assert!(status.success());
}

/// Frees descriptors, starts a process, adds it to `jobs`, and returns the time until it is fully tracked.
fn recovery(node: &Node, jobs: &mut Vec<Job>) -> Duration {
    limit(node.daemon.job.pid(), 1024);
    let since = Instant::now();
    let fresh = node.holding("0");
    node.until_covered(&[&fresh]);
    jobs.push(fresh);
    since.elapsed()
}

#[test]
fn exhausted_descriptors_affect_only_new_processes_until_freed() {
    if !can("prlimit", Command::new("prlimit").arg("--version")) {
        return;
    }
    let mut node = Node::plain(&["devices=2"], "");
    let first = node.holding("0");
    node.until_covered(&[&first]);
    let pid = node.daemon.job.pid();
    let exhausted = Instant::now();
    limit(pid, node.open_files());
    let mut late: Vec<Job> = (0..3).map(|_| node.holding("1")).collect();
    // Refused at accept(), or by the connection limit, which depends on the number of descriptors.
    let refused = || {
        let full = node.value("gpumemd_agent_refused_total{reason=\"connections\"}").unwrap_or_default();
        full + node.value("gpumemd_accept_failures_total").unwrap_or_default()
    };
    until(20, "agents that could not connect", || (refused() >= 3.0).then_some(()));
    let reported = node.doctor();
    assert!(reported.contains("could not be accepted") || reported.contains("LimitNOFILE="), "{reported}");
    // An interval in which processes without a pidfd are polled, too.
    let (ticks, since) = (node.cpu_ticks(), Instant::now());
    let before = refused();
    until(30, "more refusals", || (refused() >= before + 6.0).then_some(()));
    let share = (node.cpu_ticks() - ticks) as f64 / 100.0 / since.elapsed().as_secs_f64();
    println!("{:.1} % of a core while there are none", share * 100.0);
    assert!(share < 0.25, "{share}: it spins");
    assert_eq!(node.value("gpumemd_runs_finished_total"), Some(0.0), "no run has ended");
    assert_eq!(node.value("gpumemd_source_up{source=\"nvml\"}"), Some(1.0));
    let log = std::fs::read_to_string(node.machine.dir.join("daemon.log")).expect("a log");
    // The warning comes once a minute.
    let warnings = log.matches("agents cannot connect").count() as u64;
    assert!(warnings <= 1 + exhausted.elapsed().as_secs() / 60 && !log.contains("was refused"), "{log}");

    let mut took = vec![recovery(&node, &mut late)];
    // On a busy machine it may take longer once, but not each time.
    while took.iter().all(|took| *took >= SOON) && took.len() < 3 {
        limit(pid, node.open_files());
        let before = refused();
        late.push(node.holding("1"));
        until(20, "one that could not connect", || (refused() > before).then_some(()));
        took.push(recovery(&node, &mut late));
    }
    println!("a new process is known after {took:.2?}");
    gpumem_test_support::bar("a new process is known", *took.iter().min().expect("some"), SOON);
    let all: Vec<&Job> = late.iter().chain([&first]).collect();
    node.until_covered(&all);
    let pids: Vec<u32> = all.iter().map(|job| job.pid()).collect();
    println!("{:?}", node.compare(&pids));
}

#[test]
fn too_low_descriptor_limit_is_reported_and_survived() {
    if !can("prlimit", Command::new("prlimit").arg("--version")) {
        return;
    }
    let by = ["prlimit", "--nofile=24:1024", "--"];
    // The daemon raises its own soft limit, because a shell's limit is not meant for it.
    let node = Node::new(&["devices=1"], "", |machine, config| Daemon::start_by(machine, &by, config));
    node.until_value("gpumemd_source_up{source=\"store\"}", |up| up == 1.0);
    node.until_value("gpumemd_source_up{source=\"nvml\"}", |up| up == 1.0);
    // One less than its normal number of descriptors, which differs between users.
    let few = format!("--nofile={0}:{0}", node.open_files() - 1);
    drop(node);
    let by = ["prlimit", &few, "--"];
    let mut node = Node::new(&["devices=1"], "", |machine, config| Daemon::start_by(machine, &by, config));
    let mut job = node.holding("0");
    // Which part fails depends on which part opens its file first. If it is the control socket, only gpumemctl can report it.
    let texts = ["Too many open files", "no file descriptor left", "could not be accepted", "LimitNOFILE="];
    until(20, "the finding", || {
        let reported = node.doctor();
        texts.iter().any(|text| reported.contains(text)).then_some(())
    });
    // There are no scrapes in this interval: the CPU time is the daemon's own.
    let ticks = node.cpu_ticks();
    std::thread::sleep(Duration::from_secs(2));
    let ticks = node.cpu_ticks() - ticks;
    println!("{ticks} hundredths of a second in two, without a descriptor");
    assert!(ticks < 40, "{ticks}: it spins");
    // The file is not at fault: it is not set aside under another name.
    let names = std::fs::read_dir(&node.machine.dir)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name());
    let stores: Vec<_> = names
        .filter_map(|name| name.into_string().ok())
        .filter(|name| name.starts_with("runs.sqlite"))
        .collect();
    let known =
        ["runs.sqlite", "runs.sqlite-wal", "runs.sqlite-shm", "runs.sqlite-journal", "runs.sqlite-deltas"];
    assert!(stores.iter().all(|name| known.contains(&&**name)), "{stores:?}");
    assert!(node.daemon.job.is_running() && job.is_running());
}
