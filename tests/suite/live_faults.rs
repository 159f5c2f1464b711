//! The daemon under faults: limits of their cost to others, and exact totals afterwards.
//!
//! | fault | test | bar | measured |
//! |---|---|---|---|
//! | no daemon for the whole job | absent::agent_without_a_daemon_costs_almost_nothing | the agent's thread: <= 0.5 % of a core, <= 15 switches a second (debug build) | 0.14 %, 9.7 |
//! | a daemon that comes in the middle of a job | absent::agent_finds_a_late_daemon_within_seconds | <= 10 s: attempts are 5 s apart, a quarter more or less | 4 s |
//! | a daemon that refuses every agent | absent::refused_agent_reconnects_with_backoff | <= 8 attempts in 3 s; waits of 0.1 s double to 5 s, a quarter more or less | 5 |
//! | a pid that is reused | pids | no row of the old process under the new one, at any look | 0 |
//! | a connection whose process ended, and whose pid another user's process has | pids | refused in every variant | 0 taken over |
//! | wall clock +3600 s, -7200 s | clocks::wall_clock_jump_changes_no_duration_and_no_order | durations monotonic, runs in the order in which they came, nothing deleted | held |
//! | monotonic and boot clock of another time namespace | clocks::process_with_another_monotonic_clock_is_rebased | every sample exact | 0 excused |
//! | no descriptors left | descriptors | no exit, no process marked as ended, < 25 % of a core, one line in the log; a process started then is tracked within 1 s of its start | 6 % while scraped without a pause, 0.3 s |
//! | disk full (tmpfs of 12 MiB) | disk::full_disk_is_reported_and_only_its_recording_has_gaps | every run closed and whole after there is room; recording readable and exact again | 0 lost |
//! | EIO of fsync, fdatasync, pwrite, ftruncate (strace) | disk::failing_disk_is_reported_survived_and_recovers | up, counted, recovers alone | 0 lost |
//! | 800 half requests that come again at once | http | <= 72 descriptors, median scrape < 1 s, none refused | 65, 0.3 s; before: 9 s, 251 tries |
//! | GPU lost, hung, refused, every code of NVML | nvml, daemon/tests/suite/nvml.rs | others fresh, no scrape waits, recovers alone | see there |
//! | library crashes, or returns garbage | nvml::crashing_or_lying_library_is_survived | the other GPU exact meanwhile, all exact afterwards | held |
//! | driver absent, unloaded, reloaded; library replaced; partition changed | nvml, daemon/tests/suite/nvml.rs a_driver_may_come_go_and_come_again, nvml/faults.rs | detected again | held |
//! | restart, upgrade, kill -9, SIGSTOP, watchdog under systemd | systemd.rs replaced, ends_unseen | same connection, exact, <= watchdog + 0.5 s | see there |
//! | the same with a service manager of 100 lines | daemon/tests/suite/kept.rs | one run; nothing lost at SIGTERM, nothing `partial` after it, reports cover both lives at once; a kill -9 loses the records since the last checkpoint | 0 lost |
//! | SIGTERM, a dead daemon's sockets | daemon/tests/suite/life.rs | runs continue in the next life | held |
//! | kill -9 of daemon and store at any instant | daemon/tests/suite/store/kills.rs, runs/tests/suite/store/crash.rs (`make kills`: 1000 each) | 0 acknowledged lost, integrity ok, no run loses more than the last interval | daemon: 1000 kills, at most 0.44 s lost with checkpoints every 0.05 s, on a machine with load 25 |
//! | full or failing store, damage | daemon/tests/suite/store/faults.rs | reported, survived, set aside once | held |
//! | 1000 agents, 500 of which send rubbish | daemon/tests/suite/life.rs a_thousand_agents_cost_less_than_64_mib | <= 64 MiB resident at most | 32 MiB (debug build) |
//!
//! Tests listed without a module are in the crate closest to the fault.
mod absent;
mod clocks;
mod descriptors;
mod disk;
mod http;
mod nvml;
mod pids;

use gpumem_tests::live::prometheus::{free_address, get};
use gpumem_tests::live::{Compared, Daemon, Job, Machine, replay, until};
use std::net::SocketAddr;
use std::process::Command;

/// Returns the samples of a family: labels as text, and value.
fn family(text: &str, name: &str) -> Vec<(String, f64)> {
    let line = |line: &str| {
        let (labels, value) = line.strip_prefix(name)?.strip_prefix('{')?.rsplit_once("} ")?;
        Some((labels.to_owned(), value.parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

/// Configuration with the shortest list interval, so that faults are detected soon.
const QUICK: &str = "[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\n";

/// A machine and a daemon that is scraped.
struct Node {
    machine: Machine,
    daemon: Daemon,
    address: SocketAddr,
}

impl Node {
    /// `start` gets the configuration; `config` is appended to it.
    fn new(keys: &[&str], config: &str, start: impl FnOnce(&Machine, &str) -> Daemon) -> Self {
        let machine = Machine::new(keys);
        let address = free_address();
        let daemon = start(&machine, &format!("{config}{QUICK}[metrics]\nlisten = \"{address}\"\n"));
        Node { machine, daemon, address }
    }

    fn plain(keys: &[&str], config: &str) -> Self {
        Node::new(keys, config, |machine, config| Daemon::start(machine, "daemon", config))
    }

    fn text(&self) -> String {
        until(10, "an exposition", || get(self.address, "/metrics"))
    }

    /// Returns the value of a series, which is given with its labels.
    fn value(&self, series: &str) -> Option<f64> {
        let text = self.text();
        text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
    }

    fn until_value(&self, series: &str, is_so: impl Fn(f64) -> bool) -> f64 {
        let mut last = None;
        until(30, series, || {
            last = self.value(series);
            last.filter(|value| is_so(*value))
        })
    }

    /// Starts a process with an agent that allocates this memory and holds it.
    fn holding(&self, devices: &str) -> Job {
        let arguments = ["--devices", devices, "--steps", "5", "--step-ms", "1", "--hold", "600"];
        let mut job = Job::start(&mut self.machine.trainer(&self.daemon.runtime, &arguments));
        job.wait_for("holding");
        job
    }

    /// Waits until the daemon accounts for every byte of `jobs`.
    fn until_covered(&self, jobs: &[&Job]) {
        let pid = |job: &Job| format!("pid=\"{}\"", job.pid());
        until(30, "all known to the last byte", || {
            let text = self.text();
            let known = family(&text, "gpumem_process_untrackable_bytes");
            jobs.iter().all(|job| known.iter().any(|(labels, _)| labels.contains(&pid(job)))).then_some(())
        });
    }

    /// Returns the output of `gpumemctl doctor`.
    fn doctor(&self) -> String {
        let output = self.daemon.ctl(&self.machine, &["doctor"]).output().expect("gpumemctl runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Returns the CPU time of the daemon in clock ticks.
    fn cpu_ticks(&self) -> u64 {
        cpu_ticks(self.daemon.job.pid())
    }

    fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.daemon.job.pid())).expect("it lives").count()
    }

    /// Ends the daemon, and compares every sample of `pids` with the machine's truth. First it waits for a few lists
    /// without changes, because on a busy machine all earlier ones may have been torn.
    fn compare(&mut self, pids: &[u32]) -> Compared {
        const LISTS: &str = "gpumemd_nvml_list_calls_total";
        let lists = self.value(LISTS).unwrap_or_default();
        self.until_value(LISTS, |now| now >= lists + 20.0);
        self.daemon.stop();
        let truths = self.machine.truth();
        let replay = replay(&self.daemon.recording);
        let mut all = Compared::default();
        for &pid in pids {
            let compared = replay.compare(&truths, Some(pid));
            assert!(compared.exact > 0, "{pid}: {compared:?}");
            all.exact += compared.exact;
            all.excused += compared.excused;
        }
        all
    }
}

fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
    let (_, fields) = stat.rsplit_once(") ").expect("a line");
    fields.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<u64>().expect("ticks")).sum()
}

/// Whether the requirement of a test is available here; if it is mandatory, the test fails without it.
fn can(what: &str, command: &mut Command) -> bool {
    let is_there = command.output().is_ok_and(|output| output.status.success());
    if !is_there {
        gpumem_test_support::skip(
            &format!("{what} is not possible here"),
            "sudo make test-all LANES=privileged",
        );
    }
    is_there
}
