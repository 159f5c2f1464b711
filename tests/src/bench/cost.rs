//! Cost of a process, CPU time and resident memory, as the kernel accounts them.

use std::fs;
use std::time::Duration;

/// Returns the CPU time of all threads of a process, in ns.
///
/// # Panics
/// If the process is gone.
pub fn cpu(pid: u32) -> Duration {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    let of_task = |task: fs::DirEntry| -> Option<u64> {
        fs::read_to_string(task.path().join("schedstat")).ok()?.split(' ').next()?.parse().ok()
    };
    Duration::from_nanos(tasks.flatten().filter_map(of_task).sum())
}

/// Returns the CPU time of this thread.
pub fn cpu_of_thread() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns CLOCK_MONOTONIC in ns, as in records.
pub fn now_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns the resident memory in MiB.
///
/// # Panics
/// If the process is gone.
pub fn resident_mib(pid: u32) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    rss.trim().trim_end_matches(" kB").parse::<f64>().expect("kB") / 1024.0
}

/// Returns the proportional set size in MiB: private pages, and the process's share of shared ones.
///
/// # Panics
/// If the process is gone.
pub fn pss_mib(pid: u32) -> f64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("a process");
    let pss = rollup.lines().find_map(|line| line.strip_prefix("Pss:")).expect("Pss");
    pss.trim().trim_end_matches(" kB").parse::<f64>().expect("kB") / 1024.0
}

/// Returns the children of a process.
pub fn children(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}
