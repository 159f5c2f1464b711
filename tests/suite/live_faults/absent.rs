//! An agent without a daemon.

use super::Machine;
use gpumem_tests::live::{Daemon, Job, until};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::path::Path;
use std::time::{Duration, Instant};

/// Nanoseconds on a processor and voluntary switches of the agent's thread.
fn sender(pid: u32) -> (u64, u64) {
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).expect("it lives") {
        let task = task.expect("a thread").path();
        let read = |name: &str| std::fs::read_to_string(task.join(name)).unwrap_or_default();
        if read("comm").trim() != "gpumem" {
            continue;
        }
        let ran = read("schedstat").split(' ').next().and_then(|ns| ns.parse().ok());
        let switches = read("status").lines().find_map(|line| {
            line.strip_prefix("voluntary_ctxt_switches:").and_then(|count| count.trim().parse().ok())
        });
        return (ran.expect("ns"), switches.expect("a count"));
    }
    panic!("no agent in {pid}");
}

const WORK: [&str; 6] = ["--devices", "0", "--steps", "20", "--hold", "600"];

#[test]
fn agent_without_a_daemon_costs_almost_nothing() {
    let machine = Machine::new(&["devices=1"]);
    let mut job = Job::start(&mut machine.trainer(Path::new("/nonexistent"), &WORK));
    job.wait_for("holding");
    let (ran_ns, switches) = sender(job.pid());
    let since = Instant::now();
    std::thread::sleep(Duration::from_secs(4));
    let (ran_ns, switches) = (sender(job.pid()).0 - ran_ns, sender(job.pid()).1 - switches);
    let seconds = since.elapsed().as_secs_f64();
    let share = ran_ns as f64 / 1e9 / seconds;
    println!(
        "the agent's thread: {:.3} % of a core, {:.1} switches a second",
        share * 100.0,
        switches as f64 / seconds
    );
    assert!((switches as f64) < 15.0 * seconds, "{switches} switches in {seconds} s");
    gpumem_test_support::bar(
        "the agent's thread, in 4 s",
        Duration::from_nanos(ran_ns),
        Duration::from_secs_f64(0.005 * seconds),
    );
    job.enough();
    assert_eq!(machine.truth().iter().filter(|line| line.is_end()).count(), 1);
}

#[test]
fn agent_finds_a_late_daemon_within_seconds() {
    let machine = Machine::new(&["devices=1"]);
    let mut job = Job::start(&mut machine.trainer(&machine.dir.join("run"), &WORK));
    job.wait_for("holding");
    // Until attempts are at their maximum interval.
    std::thread::sleep(Duration::from_secs(8));
    let daemon = Daemon::start(&machine, "daemon", "");
    let since = Instant::now();
    let pid = job.pid().to_string();
    until(30, "what the program holds", || {
        let report = daemon.ctl(&machine, &["report", &pid, "--json"]).output().expect("gpumemctl runs");
        let report: serde_json::Value = serde_json::from_slice(&report.stdout).ok()?;
        let cells = report["devices"][0]["last"]["cells"].as_array()?;
        cells.iter().any(|cell| cell["tag"].is_string()).then_some(())
    });
    println!("{:.1} s after it came", since.elapsed().as_secs_f64());
    // 5 s, a quarter more or less, and a few seconds to start.
    gpumem_test_support::bar("a daemon that came later is met", since.elapsed(), Duration::from_secs(10));
    job.enough();
}

#[test]
fn refused_agent_reconnects_with_backoff() {
    let machine = Machine::new(&["devices=1"]);
    let path = machine.dir.join("agent.sock");
    let kind = SocketType::SEQPACKET;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).expect("a socket");
    rustix::net::bind(&socket, &SocketAddrUnix::new(&path).expect("a path")).expect("bound");
    rustix::net::listen(&socket, 16).expect("listens");
    let mut job = Job::start(&mut machine.trainer(&machine.dir, &WORK));
    let mut came = Vec::new();
    until(30, "three seconds of attempts", || {
        if let Ok(peer) = rustix::net::accept(&socket) {
            came.push(Instant::now());
            drop(peer);
        }
        came.first().is_some_and(|first| first.elapsed() > Duration::from_secs(3)).then_some(())
    });
    println!("{} attempts in 3 s", came.len());
    assert!(
        (3..=8).contains(&came.len()),
        "0.1, 0.2, 0.4... seconds apart, a quarter more or less: {}",
        came.len()
    );
    job.wait_for("holding");
    job.enough();
}
