//! Wake-ups of a daemon while nothing changes. A wake-up costs more than most of its work.

use gpumem_tests::live::{Daemon, Machine, until};
use std::time::{Duration, Instant};

const CONFIG: &str = "[nvml]\nmemory_hz = 1\nlist_every_s = 1.0\nlist_budget = 1.0\n";

/// Returns how often the main thread of a process has waited.
fn waits(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.and_then(|count| count.trim().parse().ok()).expect("a count")
}

#[test]
fn idle_daemon_wakes_up_about_once_for_each_sample() {
    let machine = Machine::new(&["devices=1"]);
    let daemon = Daemon::start(&machine, "daemon", CONFIG);
    until(20, "three lists", || (machine.lists() >= 3).then_some(()));
    let (pid, before, began) = (daemon.job.pid(), waits(daemon.job.pid()), Instant::now());
    std::thread::sleep(Duration::from_secs(6));
    let rate = (waits(pid) - before) as f64 / began.elapsed().as_secs_f64();
    println!("{rate:.2} wake-ups a second");
    // One for each sample, and further ones when the beats of a timer and a sample come close to each other.
    assert!(rate < 3.0, "{rate:.2} wake-ups a second");
}
