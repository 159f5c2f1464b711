//! The daemon's resources, measured while it runs, and its log.

use super::fault::value;
use super::{Fault, Manager};
use crate::live::prometheus::get;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

/// A reading of the daemon's resources.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    /// Seconds since the soak began.
    pub at_s: f64,
    /// Life of the daemon.
    pub life: u64,
    /// Resident memory of the daemon, and of the process that reads NVML.
    pub rss_kib: [u64; 2],
    /// Heap that the daemon uses, if it answered.
    pub heap_kib: Option<u64>,
    /// Numbers of descriptors, for the same processes.
    pub fds: [usize; 2],
    /// Threads of the daemon.
    pub threads: usize,
}

/// Readings so far.
#[derive(Debug)]
pub struct Health {
    began: Instant,
    /// All readings in order.
    pub readings: Vec<Reading>,
    /// Readings while the daemon knew no process.
    pub alone: Vec<Reading>,
}

impl Default for Health {
    fn default() -> Self {
        Health { began: Instant::now(), readings: Vec::new(), alone: Vec::new() }
    }
}

impl Health {
    /// Takes a reading.
    pub fn read(&mut self, manager: &Manager, http: SocketAddr) -> Reading {
        let pid = manager.daemon().job.pid();
        let poller = children(pid).first().map_or(0, |child| child.0);
        let reading = Reading {
            at_s: self.began.elapsed().as_secs_f64(),
            life: manager.lives,
            rss_kib: [rss_kib(pid), rss_kib(poller)],
            heap_kib: get(http, "/metrics")
                .and_then(|text| value(&text, "gpumemd_heap_bytes"))
                .map(|bytes| bytes as u64 / 1024),
            fds: [fds(pid).values().sum(), fds(poller).values().sum()],
            threads: std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count),
        };
        self.readings.push(reading.clone());
        reading
    }

    /// Takes a reading while the daemon has no processes, so that it does not depend on which ones exist. Returns the
    /// lowest of a few readings, because replies to clients are on the heap while they are made.
    pub fn read_alone(&mut self, manager: &Manager, http: SocketAddr) -> Reading {
        let mut few: Vec<Reading> = Vec::new();
        for _ in 0..8 {
            std::thread::sleep(Duration::from_millis(100));
            few.push(self.read(manager, http));
        }
        let least =
            few.into_iter().min_by_key(|reading| reading.heap_kib.unwrap_or(u64::MAX)).unwrap_or_default();
        self.alone.push(least.clone());
        least
    }

    /// Heap growth of the last life in MiB an hour: the median slope between all readings without processes. `None` for
    /// fewer than four readings. (RSS includes temporary memory until it is returned, so it varies by more than the
    /// growth allowed in an hour. The heap does so too while sixty processes start and end.)
    pub fn slope_mib_per_h(&self) -> Option<f64> {
        let life = self.readings.last()?.life;
        let of_it = self.alone.iter().filter(|reading| reading.life == life);
        let of_it: Vec<(f64, f64)> =
            of_it.filter_map(|reading| Some((reading.at_s, reading.heap_kib? as f64))).collect();
        if of_it.len() < 4 {
            return None;
        }
        let pairs = of_it
            .iter()
            .enumerate()
            .flat_map(|(at, one)| of_it[at + 1..].iter().map(move |other| (one, other)));
        let mut slopes: Vec<f64> = pairs.map(|(one, other)| (other.1 - one.1) / (other.0 - one.0)).collect();
        slopes.sort_by(f64::total_cmp);
        slopes.get(slopes.len() / 2).map(|kib_per_s| kib_per_s * 3600.0 / 1024.0)
    }
}

/// Returns the resident memory of a process; 0 if it is gone.
pub fn rss_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}

/// Counts its descriptors by kind, without the lock of a daemon that created its own sockets.
pub fn fds(pid: u32) -> BTreeMap<String, usize> {
    let mut kinds = BTreeMap::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
        if let Ok(target) = std::fs::read_link(entry.path()) {
            let name = target.to_string_lossy().into_owned();
            if name.ends_with("/gpumemd.lock") {
                continue;
            }
            let kind = name.split([':', '.']).next().unwrap_or_default().to_owned();
            *kinds.entry(kind).or_insert(0) += 1;
        }
    }
    kinds
}

/// Returns the children of a process: pid, and whether it is a zombie.
pub fn children(pid: u32) -> Vec<(u32, bool)> {
    let text = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let of_tasks: Vec<String> = tasks.map(|task| text(&task.path().join("children"))).collect();
    let all = of_tasks.iter().flat_map(|text| text.split_whitespace()).filter_map(|word| word.parse().ok());
    all.map(|child: u32| {
        let stat = text(Path::new(&format!("/proc/{child}/stat")));
        (child, stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z')))
    })
    .collect()
}

/// Log lines that disconnecting clients may cause.
const BY_CLIENTS: [&str; 2] =
    ["a peer on the agent socket was refused", "too many log lines about this user's peers"];

/// Returns log lines at warning or error that no fault of that life explains.
pub fn unexplained(manager: &Manager, injected: &[(u64, Fault)]) -> Vec<String> {
    let mut found = Vec::new();
    for life in 1..=manager.lives {
        let log = std::fs::read_to_string(manager.log(life)).unwrap_or_default();
        let of_life = injected.iter().filter(|(of, _)| *of == life).flat_map(|(_, fault)| fault.says());
        let allowed: Vec<&str> = of_life.copied().chain(BY_CLIENTS).collect();
        let is_bad = |line: &&str| [" WARN ", " ERROR ", "panicked"].iter().any(|word| line.contains(word));
        let is_known = |line: &&str| allowed.iter().any(|known| line.contains(known));
        let lines = log.lines().filter(is_bad).filter(|line| !is_known(line));
        found.extend(lines.map(|line| format!("life {life}: {line}")));
    }
    found
}
