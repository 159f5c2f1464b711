//! A program that uses driver memory as the test commands (tests/mixer), with the figures found at each checkpoint of
//! the test.

use super::machine::Machine;
use super::programs::programs;
use super::truth::Truth;
use super::{Daemon, Replay, until};
use gpumem_ledger::{ClosedSample, Ledger, Origin, SideMemory};
use gpumem_model::run::{Class, Run};
use gpumem_runs::builder::Sink;
use gpumem_runs::input::Input;
use gpumem_runs::recording;
use gpumem_wire::{Body, Flags, Record};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Largest difference between the agent's clock and the kernel's (agent-lib/src/base/clock.rs).
const CLOCK_NS: u64 = 50_000;

/// Reply of the program to a command.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    /// Result code of the driver.
    pub result: i32,
    /// Time at which the call began.
    pub began_ns: u64,
    /// Time at which the call ended.
    pub ended_ns: u64,
    /// A number, for commands that return one.
    pub number: u64,
    /// A text, for commands that return one.
    pub text: String,
}

/// A checkpoint at which memory did not change.
#[derive(Debug, Clone)]
struct Check {
    what: String,
    after_ns: u64,
    before_ns: u64,
    /// By CUDA ordinal.
    tracked: Vec<i64>,
    beside: SideMemory,
}

/// The program, its commands, and its expected memory.
#[derive(Debug)]
pub struct Mixer {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    checks: Vec<Check>,
    /// Calls that end a context. It counts as ended when the call begins; the driver frees its memory later.
    ends: Vec<(u64, u64)>,
    /// Expected memory outside the sum from now on.
    pub beside: SideMemory,
    /// It uses pools of the driver, whose reservation is polled: between the checks, samples may lag behind it.
    pub is_polled: bool,
}

impl Mixer {
    /// Starts a program with the agent, which reports to `daemon`.
    pub fn start(machine: &Machine, daemon: &Daemon) -> Self {
        Self::run(&mut Self::command(machine, daemon))
    }

    /// Returns the command, for a test that adds to it.
    pub fn command(machine: &Machine, daemon: &Daemon) -> Command {
        let mut command = machine.command(programs().fake.join("bin/mixer"));
        command.env("CUDA_INJECTION64_PATH", programs().ours.join("libgpumem.so"));
        command.env("GPUMEM_SOCKET", daemon.runtime.join("agent.sock"));
        command
    }

    /// Starts a prepared command.
    ///
    /// # Panics
    /// If it does not report that it is ready.
    pub fn run(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started");
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let (checks, beside) = (Vec::new(), SideMemory::default());
        let ends = Vec::new();
        let mut mixer = Mixer { child, stdin, stdout, checks, ends, beside, is_polled: false };
        let ready = mixer.hear();
        assert!(ready.starts_with("ready"), "{ready:?}");
        mixer
    }

    /// Returns its pid.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns its next line.
    ///
    /// # Panics
    /// If it ends instead.
    pub fn hear(&mut self) -> String {
        let mut line = String::new();
        let count = self.stdout.read_line(&mut line).expect("read");
        assert!(count > 0, "the program ended: {:?}", self.child.wait());
        line.trim_end().to_owned()
    }

    /// Sends it a line.
    ///
    /// # Panics
    /// If it does not accept it.
    pub fn send(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().expect("not ended");
        stdin.write_all(format!("{line}\n").as_bytes()).expect("written");
    }

    /// Sends a command and returns the reply.
    ///
    /// # Panics
    /// If the program does not support the command.
    pub fn say(&mut self, command: &str) -> Answer {
        self.moves();
        self.send(command);
        let line = self.hear();
        let mut words = line.splitn(5, ' ');
        let mut number = || -> i64 {
            words.next().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{command}: {line:?}"))
        };
        let (result, began, ended, value) = (number(), number(), number(), number());
        if ["context-end", "green-end", "device-re"].iter().any(|end| command.starts_with(end)) {
            self.ends.push((began as u64, ended as u64));
        }
        Answer {
            result: result as i32,
            began_ns: began as u64,
            ended_ns: ended as u64,
            number: value as u64,
            text: words.next().unwrap_or("").to_owned(),
        }
    }

    /// Sends commands that the driver must execute, separated by semicolons. Returns the last reply.
    ///
    /// # Panics
    /// If the driver refuses one.
    pub fn ok(&mut self, commands: &str) -> Answer {
        let mut last = Answer::default();
        for command in commands.split(';').map(str::trim) {
            last = self.say(command);
            assert_eq!(last.result, 0, "{command}");
        }
        last
    }

    /// Sends a command that the driver must refuse.
    ///
    /// # Panics
    /// If it does not.
    pub fn refused(&mut self, command: &str) {
        assert_ne!(self.say(command).result, 0, "{command}");
    }

    /// Discards earlier findings, which may change from now on.
    fn moves(&mut self) {
        let now = now_ns();
        if let Some(check) = self.checks.last_mut().filter(|check| check.before_ns == u64::MAX) {
            check.before_ns = now;
        }
    }

    /// Waits until the daemon has sampled the program's present memory, which should be `tracked` on its devices, by CUDA
    /// ordinal. `verify` compares the values.
    ///
    /// # Panics
    /// If the daemon takes no sample.
    pub fn holds(&mut self, machine: &Machine, daemon: &Daemon, what: &str, tracked: &[i64]) {
        self.moves();
        let after_ns = self.looked_at(machine, daemon, tracked.len());
        let (what, tracked) = (what.to_owned(), tracked.to_vec());
        self.checks.push(Check { what, after_ns, before_ns: u64::MAX, tracked, beside: self.beside });
    }

    /// Waits until the daemon agrees with the machine, in sum and idle memory, on each device in use. The agent polls
    /// driver pools once a second, so unreported changes are included then.
    ///
    /// # Panics
    /// If they do not come to agree.
    pub fn settles(&self, machine: &Machine, daemon: &Daemon) {
        let began_ns = now_ns() + CLOCK_NS;
        let is_settled = || {
            let truths = machine.latest_truth();
            let of_it = |truth: &&Truth| truth.pid == self.pid() && !truth.is_end() && truth.t > began_ns;
            let newest: BTreeMap<&str, &Truth> =
                truths.iter().filter(of_it).map(|truth| (truth.device.as_str(), truth)).collect();
            let runs = daemon.asked(&format!("/v1/runs?pid={}", self.pid()))?;
            let runs: Vec<Run> = serde_json::from_value(runs).expect("runs");
            let run = runs.last()?;
            let is_idle =
                |cell: &u32| run.cells.get(*cell as usize).is_some_and(|cell| cell.class == Class::PoolIdle);
            let has = |truth: &Truth| {
                let device = run.devices.iter().find(|device| device.name == truth.device)?;
                let device = Some(device).filter(|device| device.last.time_ns > began_ns)?;
                let idle: i64 = device
                    .last
                    .amounts
                    .iter()
                    .filter(|(cell, _)| is_idle(cell))
                    .map(|(_, bytes)| bytes)
                    .sum();
                Some((device.last.tracked_bytes?, idle))
            };
            let is_same = |truth: &Truth| has(truth) == Some((truth.tracked, truth.idle));
            (!newest.is_empty() && newest.values().all(|truth| is_same(truth))).then_some(())
        };
        until(60, &format!("the figures of the pools of {}", self.pid()), is_settled);
    }

    /// Waits until the daemon knows everything up to the present time, which is returned, and has then sampled `devices` devices.
    ///
    /// # Panics
    /// If it does not.
    pub fn looked_at(&self, machine: &Machine, daemon: &Daemon, devices: usize) -> u64 {
        until(60, &format!("a known state of {}", self.pid()), || {
            let runs = daemon.asked(&format!("/v1/runs?pid={}", self.pid()))?;
            let is_known = |run: &serde_json::Value| run["coverage"]["partial_state"] == false;
            runs.as_array()?.iter().all(is_known).then_some(())
        });
        let after_ns = now_ns();
        let mine = |row: &serde_json::Value| {
            let flags: Vec<&str> =
                row["flags"].as_array().into_iter().flatten().filter_map(|f| f.as_str()).collect();
            let is_well = flags.contains(&"covered") && !flags.contains(&"stale");
            row["pid"].as_u64() == Some(self.pid().into()) && is_well
        };
        until(60, &format!("a sample of {}", self.pid()), || {
            let truths = machine.latest_truth();
            let lists = |ordinal| {
                let uuid = uuid(ordinal);
                let of_it = |truth: &&Truth| truth.pid == self.pid() && truth.device == uuid;
                truths.iter().filter(of_it).filter(|truth| truth.t > after_ns + CLOCK_NS).count()
            };
            (0..devices).all(|ordinal| lists(ordinal) >= 3).then_some(())
        });
        until(60, &format!("a fresh sample of {}", self.pid()), || {
            let now = now_ns();
            let ps = daemon.asked("/v1/ps")?;
            let is_fresh = |row: &&serde_json::Value| {
                let age_ns = row["age_ms"].as_u64().map(|age| (age + 1) * 1_000_000);
                age_ns.is_some_and(|age| now.saturating_sub(age) > after_ns + CLOCK_NS)
            };
            let fresh = ps["processes"].as_array()?.iter().filter(|row| mine(row)).filter(is_fresh).count();
            (fresh >= devices).then_some(())
        });
        after_ns
    }

    /// Ends it successfully.
    ///
    /// # Panics
    /// If it does not end.
    pub fn end(&mut self) {
        self.moves();
        drop(self.stdin.take());
        let status = until(60, "the mixer's end", || self.child.try_wait().expect("waited for"));
        assert!(status.success(), "{status}");
    }

    /// Ends it by SIGKILL.
    ///
    /// # Panics
    /// If that fails.
    pub fn kill(&mut self) {
        self.moves();
        self.child.kill().expect("killed");
        self.child.wait().expect("waited for");
    }

    /// Compares the daemon's samples with the expected ones. Each check needs an exact sample with the machine's
    /// figures and the test's. Other samples must satisfy their own claims, and the last one is the memory at the
    /// program's end.
    ///
    /// # Panics
    /// At the first difference.
    pub fn verify(&self, seen: &Replay, truths: &[Truth], recording: &Path) {
        let pid = self.pid();
        if !self.is_polled {
            let at_an_end = |sample: &ClosedSample| {
                let overlaps = |&(began, ended): &(u64, u64)| {
                    sample.t0_ns < ended + CLOCK_NS && sample.t1_ns + CLOCK_NS > began
                };
                self.ends.iter().any(overlaps)
            };
            let compared = seen.compare_where(truths, Some(pid), |sample| !at_an_end(sample));
            println!("{pid}: {compared:?}, {} checks", self.checks.len());
        }
        assert!(self.checks.iter().all(|check| check.before_ns != u64::MAX), "checked before its end");
        let besides = besides(recording, pid, &self.checks);
        for (check, beside) in self.checks.iter().zip(besides) {
            for (ordinal, &tracked) in check.tracked.iter().enumerate() {
                let window = (check.after_ns, check.before_ns);
                let held = compare_still(seen, truths, (pid, ordinal), window, &check.what);
                assert_eq!(held, tracked, "{} on device {ordinal}: the machine, and the test", check.what);
            }
            assert_eq!(beside, check.beside, "outside the sum {}", check.what);
        }
        let process = seen.process(pid);
        assert!(process.ended.is_some(), "its end was seen");
        assert!(process.coverage.covered, "{:?}", process.coverage);
        assert!(!process.coverage.partial_history && process.coverage.lost == 0, "{:?}", process.coverage);
        let ends: Vec<_> = truths.iter().filter(|truth| truth.is_end() && truth.pid == pid).collect();
        assert!(!ends.is_empty(), "the machine saw its end");
        for end in ends {
            let held: i64 = process
                .accounts
                .iter()
                .filter(|account| {
                    account.device.is_some_and(|d| seen.snapshot.devices[d].name.to_string() == end.device)
                })
                .map(|account| account.tracked_bytes)
                .sum();
            assert_eq!(held, end.tracked, "at its end on {}", end.device);
        }
    }
}

/// Compares samples in an interval without changes, from `after_ns` to `before_ns`. Every sample that claims to be exact must
/// equal the machine's figures, in sum, by name and idle, and there must be at least one. Returns the machine's figures.
///
/// # Panics
/// If they differ.
pub fn compare_still(
    seen: &Replay,
    truths: &[Truth],
    (pid, ordinal): (u32, usize),
    (after_ns, before_ns): (u64, u64),
    what: &str,
) -> i64 {
    let (uuid, what) = (uuid(ordinal), format!("{what} on device {ordinal}"));
    let (after, before) = (after_ns + CLOCK_NS, before_ns - CLOCK_NS);
    let of_machine: Vec<&Truth> = truths
        .iter()
        .filter(|truth| truth.pid == pid && truth.device == uuid && !truth.is_end())
        .filter(|truth| truth.t > after && truth.t < before)
        .collect();
    let truth = of_machine.last().unwrap_or_else(|| panic!("{what}: the machine was not asked"));
    assert!(of_machine.iter().all(|other| other.tracked == truth.tracked), "{what}: it moves");
    let within: Vec<_> = seen
        .samples
        .iter()
        .filter(|(key, device, _)| key.pid == pid && seen.snapshot.devices[*device].name.to_string() == uuid)
        .filter(|(_, _, sample)| sample.t0_ns > after && sample.t1_ns < before)
        .filter(|(_, _, sample)| !sample.stale && sample.tracked_bytes.is_some())
        .collect();
    let exact = within.iter().filter(|(_, _, sample)| !sample.torn && !sample.partial);
    assert!(exact.clone().count() > 0, "{what}: no exact sample: {within:?}");
    for (key, _, sample) in exact {
        let (mut tags, idle) = seen.composition(*key, sample);
        tags.retain(|_, bytes| *bytes != 0);
        let known = nameless_graphs(&truth.tags);
        if sample.tracked_bytes != Some(truth.tracked) || tags != known || idle != truth.idle {
            let names: BTreeSet<&String> = tags.keys().chain(known.keys()).collect();
            let pairs = names.into_iter().map(|name| (name, tags.get(name), known.get(name)));
            let differ: Vec<_> = pairs.filter(|(_, ours, theirs)| ours != theirs).collect();
            panic!("{what}: {truth:?}\nidle {idle}, names {differ:?}\n{sample:?}");
        }
        assert_eq!(sample.used_bytes, Ok(truth.used), "{what}");
    }
    truth.tracked
}

/// Graphs allocate at launches, which no callback reports: the machine knows the names of their nodes, the agent does
/// not. By convention such names start with `graph`.
pub fn nameless_graphs(tags: &BTreeMap<String, i64>) -> BTreeMap<String, i64> {
    let mut known = BTreeMap::new();
    for (tag, bytes) in tags {
        let name = if tag.starts_with("graph") { "" } else { tag };
        *known.entry(name.to_owned()).or_insert(0) += bytes;
    }
    known
}

impl Drop for Mixer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the UUID of a simulated device.
pub fn uuid(ordinal: usize) -> String {
    format!("GPU-51006d75-1a7e-4d00-8000-4750550000{ordinal:02x}")
}

/// Returns CLOCK_MONOTONIC in ns, which all programs here use.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns time and bytes of every allocation that a process reported.
///
/// # Panics
/// If the recording cannot be read.
pub fn allocations(recording: &Path, pid: u32) -> Vec<(u64, u64)> {
    struct Finder(u32, Vec<(u64, u64)>);
    impl Sink for Finder {
        fn observe(&mut self, origin: Origin, record: &Record<'_>) {
            if let (Origin::Process(key), Body::AllocEnd { bytes, .. }) = (origin, record.body)
                && key.pid == self.0
                && !record.stamp.flags.has(Flags::RESTATED)
            {
                self.1.push((record.stamp.time_ns, bytes));
            }
        }
    }
    let mut finder = Finder(pid, Vec::new());
    let input = Input::open(recording).unwrap_or_else(|error| panic!("{error}"));
    recording::read(input, &mut finder).unwrap_or_else(|error| panic!("{error}"));
    finder.1
}

/// Returns a process's memory outside the sum at each check, summed over devices.
fn besides(recording: &Path, pid: u32, checks: &[Check]) -> Vec<SideMemory> {
    struct Looker<'a> {
        ledger: Ledger,
        pid: u32,
        checks: &'a [Check],
        found: Vec<SideMemory>,
    }
    impl Looker<'_> {
        fn look(&mut self) {
            let mut sum = SideMemory::default();
            for process in
                self.ledger.snapshot().processes.iter().filter(|process| process.key.pid == self.pid)
            {
                for beside in process.accounts.iter().map(|account| account.beside) {
                    sum.managed_bytes += beside.managed_bytes;
                    sum.pinned_bytes += beside.pinned_bytes;
                    sum.registered_bytes += beside.registered_bytes;
                    sum.imported_bytes += beside.imported_bytes;
                    sum.host_vmm_bytes += beside.host_vmm_bytes;
                    sum.unbooked_block_bytes += beside.unbooked_block_bytes;
                    sum.pending_block_bytes += beside.pending_block_bytes;
                }
            }
            self.found.push(sum);
        }
    }
    impl Sink for Looker<'_> {
        fn observe(&mut self, origin: Origin, record: &Record<'_>) {
            if let Origin::Process(key) = origin
                && key.pid == self.pid
                && record.stamp.seq != 0
            {
                while self
                    .checks
                    .get(self.found.len())
                    .is_some_and(|check| record.stamp.time_ns > check.before_ns)
                {
                    self.look();
                }
            }
            self.ledger.observe(origin, record);
            self.ledger.take_samples();
            self.ledger.take_windows();
        }
    }
    let mut looker = Looker { ledger: Ledger::new(), pid, checks, found: Vec::new() };
    let input = Input::open(recording).unwrap_or_else(|error| panic!("{error}"));
    recording::read(input, &mut looker).unwrap_or_else(|error| panic!("{error}"));
    while looker.found.len() < checks.len() {
        looker.look();
    }
    looker.found
}
