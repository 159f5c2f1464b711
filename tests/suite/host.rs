//! The observed program is never disturbed. Programs with every habit (tests/trainer/host*.c) run in
//! every state of the daemon. Each cell of the table is compared with the same program without an agent: output, end, files,
//! and the state that the program sees.
mod cell;
mod peers;
mod rows;
mod timing;

use cell::{Outcome, run};
use gpumem_tests::live::{Daemon, Machine, until};
use peers::{MANNERS, Peer};
use rows::{Row, rows};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::time::Duration;

/// More than there are cores: most cells wait most of their time.
const AT_A_TIME: usize = 8;
/// A process is recorded once its agent has sent a record; one that ends earlier has no run.
const NVML: &str = "[nvml]\nlist_every_s = 1.0\n";

/// A state of the daemon, and where its socket is.
struct Column {
    name: &'static str,
    socket: PathBuf,
    /// The test's own listener, if it is one, with the agents that have connected.
    peer: Option<Peer>,
}

struct Cells<'a> {
    machine: &'a Machine,
    rows: &'a [Row],
    columns: &'a [Column],
    bare: Vec<Outcome>,
    /// Differences by row and column.
    told: Mutex<BTreeMap<(usize, usize), String>>,
    /// Rows whose agent has connected to a listener of the test; normally all.
    met: Mutex<BTreeSet<usize>>,
}

impl Cells<'_> {
    fn run(&self, row: &Row, column: Option<&Column>) -> Outcome {
        let name = format!("{}-{}", row.name.replace(' ', "-"), column.map_or("bare", |column| column.name));
        let folder = self.machine.dir.join(name);
        std::fs::create_dir_all(&folder).expect("a folder");
        let mut command = match column {
            Some(column) => row.covered(self.machine, &column.socket),
            None => row.command(self.machine),
        };
        let outcome = run(&mut command, &folder);
        let _ = std::fs::remove_dir_all(folder);
        outcome
    }

    /// Returns the differences from the run without an agent; empty if there are none.
    fn compare(&self, row: usize, column: &Column) -> String {
        let outcome = self.run(&self.rows[row], Some(column));
        if column.peer.as_ref().is_some_and(|peer| peer.met(outcome.pid)) {
            self.met.lock().expect("no panic").insert(row);
        }
        let (bare, unordered) = (&self.bare[row], self.rows[row].unordered);
        match column.name {
            "bossy" => {
                outcome.without_next_descriptor().differs_from(&bare.without_next_descriptor(), unordered)
            }
            _ => outcome.differs_from(bare, unordered),
        }
    }
}

/// Runs `work` on all numbers below `count`, some at a time.
fn each(count: usize, work: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(number) = Some(next.fetch_add(1, Relaxed)).filter(|&number| number < count) {
                    work(number);
                }
            });
        }
    });
}

/// Kills and restarts the daemon repeatedly until `over`.
fn keep_killing(machine: &Machine, over: &AtomicBool) {
    for time in 0.. {
        if over.load(Relaxed) {
            return;
        }
        let mut daemon = Daemon::start(machine, &format!("killed-{time}"), NVML);
        std::thread::sleep(Duration::from_millis(200));
        daemon.job.signal("KILL");
        daemon.job.end();
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn table(cells: &Cells<'_>) -> String {
    let told = cells.told.lock().expect("no panic");
    let mut text = String::new();
    for (number, column) in cells.columns.iter().enumerate() {
        text += &format!("{:22}{}{}\n", "", "| ".repeat(number), column.name);
    }
    for (number, row) in cells.rows.iter().enumerate() {
        let mark = |column| match told.get(&(number, column)).map(String::as_str) {
            None => "  ",
            Some("") => ". ",
            Some(_) => "X ",
        };
        let marks: String = (0..cells.columns.len()).map(mark).collect();
        text += &format!("{:22}{marks} {}\n", row.name, cells.bare[number].end());
    }
    text + ". as without an agent   X not\n"
}

#[test]
fn every_program_in_every_state_of_the_daemon_is_as_without_an_agent() {
    all_are_unchanged(&rows());
}

fn all_are_unchanged(rows: &[Row]) {
    // A driver as new as the newest CUDA needs.
    let machine = Machine::new(&["devices=1", "memory=64G", "cuda.version=13990"]);
    let (for_stopped, for_killed) = (Machine::new(&["devices=1"]), Machine::new(&["devices=1"]));
    // No journal, which would add a file to each program.
    machine.set(&["truth="]);
    let running = Daemon::start(&machine, "daemon", NVML);
    let stopped = Daemon::start(&for_stopped, "stopped", NVML);
    stopped.job.signal("STOP");
    let real = |name, socket: PathBuf| Column { name, socket, peer: None };
    let mut columns = vec![
        real("absent", machine.dir.join("nobody.sock")),
        real("running", running.runtime.join("agent.sock")),
        real("stopped", stopped.runtime.join("agent.sock")),
        real("killed", for_killed.dir.join("run/agent.sock")),
    ];
    columns.extend(MANNERS.iter().map(|&(name, manner)| {
        let peer = Peer::listen(&machine.dir.join(format!("{name}.sock")), manner);
        Column { name, socket: peer.socket.clone(), peer: Some(peer) }
    }));
    let (told, met) = (Mutex::default(), Mutex::default());
    let mut cells = Cells { machine: &machine, rows, columns: &columns, bare: Vec::new(), told, met };
    let bare: Mutex<BTreeMap<usize, Outcome>> = Mutex::default();
    each(rows.len(), |row| {
        let outcome = cells.run(&rows[row], None);
        bare.lock().expect("no panic").insert(row, outcome);
    });
    cells.bare = bare.into_inner().expect("no panic").into_values().collect();
    for (row, bare) in rows.iter().zip(&cells.bare) {
        assert_eq!(bare.end(), row.end, "{} without an agent: {bare:#?}", row.name);
    }
    let wanted: Vec<(usize, usize)> = (0..rows.len())
        .flat_map(|row| (0..columns.len()).map(move |column| (row, column)))
        .filter(|&(row, column)| rows[row].is_for(columns[column].name))
        .collect();
    let (over, again) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| keep_killing(&for_killed, &over));
        each(wanted.len(), |number| {
            let (row, column) = wanted[number];
            let mut told = cells.compare(row, &columns[column]);
            // Threads may be faster or slower, and a descriptor of the agent has its low number for a moment.
            for _ in 0..2 {
                if told.is_empty() || again.fetch_add(1, Relaxed) >= wanted.len() / 20 {
                    break;
                }
                told = cells.compare(row, &columns[column]);
            }
            cells.told.lock().expect("no panic").insert((row, column), told);
        });
        over.store(true, Relaxed);
    });
    println!("{}", table(&cells));
    let told = cells.told.lock().expect("no panic");
    let mut bad = String::new();
    for ((row, column), told) in told.iter().filter(|(_, told)| !told.is_empty()) {
        bad += &format!("== {} with a daemon that is {}: {told}\n", rows[*row].name, columns[*column].name);
    }
    assert!(bad.is_empty(), "{bad}");
    let met = cells.met.lock().expect("no panic");
    let has_peer = |row: &Row| columns.iter().any(|column| column.peer.is_some() && row.is_for(column.name));
    let is_unseen = |row: &usize| rows[*row].agent && has_peer(&rows[*row]) && !met.contains(row);
    let unseen: Vec<&str> = (0..rows.len()).filter(is_unseen).map(|row| rows[row].name).collect();
    assert!(unseen.is_empty(), "no agent where there should be one: {unseen:?}");
    // The real daemon has seen them, too: one run for each program with a GPU.
    let covered = rows.iter().filter(|row| row.agent && row.is_for("running")).count();
    until(20, "a run of each covered program", || {
        let runs = running.ctl(&machine, &["runs", "--json"]).output().expect("gpumemctl runs");
        let runs: serde_json::Value = serde_json::from_slice(&runs.stdout).ok()?;
        (runs.as_array()?.len() >= covered).then_some(())
    });
}

/// Injected panics in every part of the agent that the program runs: in early and late callbacks of each kind, in every
/// PyTorch function it intercepts, while it holds a number, a row or a lock, in its own thread, and during start, fork
/// and end. Each with the program, and the source file that the daemon reports; `None` if there is no time for a
/// report.
const FAULTS: &[(&str, &str, Option<&str>)] = &[
    ("guard:1", "long", Some("guard.rs")),
    ("guard:2", "long", Some("guard.rs")),
    ("guard:3", "long", Some("guard.rs")),
    ("guard:10", "threads", None),
    ("guard:57", "long", Some("guard.rs")),
    ("guard:300", "long", Some("guard.rs")),
    ("guard:100", "handlers", None),
    ("cupti.enter:1", "long", Some("decode.rs")),
    ("cupti.enter:90", "long", Some("decode.rs")),
    ("cupti.exit:1", "long", Some("decode.rs")),
    ("cupti.exit:90", "long", Some("decode.rs")),
    ("cupti.resource:1", "long", Some("resource.rs")),
    ("cupti.resource:6", "long", Some("resource.rs")),
    ("record:50", "long", Some("recorder.rs")),
    ("record:50", "threads", None),
    ("kept:50", "long", Some("recorder.rs")),
    ("kept:50", "threads", None),
    ("api.push:7", "long", Some("lib.rs")),
    ("api.pop:7", "long", Some("lib.rs")),
    ("api.step:2", "long", Some("lib.rs")),
    ("api.mark:2", "long", Some("lib.rs")),
    ("api.block_alloc:20", "handlers", None),
    ("api.block_free:20", "handlers", None),
    ("counters:5", "fork-amid", None),
    ("nvtx.push:3", "nvtx", Some("calls.rs")),
    ("nvtx.pop:3", "nvtx", Some("calls.rs")),
    ("nvtx.mark:3", "nvtx", Some("calls.rs")),
    ("nvtx.start:3", "nvtx", Some("calls.rs")),
    ("nvtx.end:3", "nvtx", Some("calls.rs")),
    ("nvtx.register:3", "nvtx", Some("calls.rs")),
    ("nvtx.create:3", "nvtx", Some("calls.rs")),
    ("torch.report:100", "watched", Some("report.rs")),
    ("torch.recorded:2", "watched", Some("pending.rs")),
    ("torch.queried:2", "watched", Some("pending.rs")),
    ("torch.synchronized:2", "watched", Some("pending.rs")),
    ("torch.oom:2", "watched", Some("oom.rs")),
    ("torch.evaluate:100", "watched", Some("autograd.rs")),
    ("cupti.enter:9", "watched", Some("decode.rs")),
    ("cupti.exit:9", "watched", Some("decode.rs")),
    ("kept:500", "watched", Some("recorder.rs")),
    ("sender:1", "long", None),
    ("sender:3", "long", Some("mod.rs")),
    ("resync:1", "long", Some("resync.rs")),
    ("start:1", "long", None),
    ("fork:1", "fork", None),
    ("exit:1", "long", None),
];

#[test]
fn agent_fault_ends_only_the_agent() {
    faults_stay_ours(&rows());
}

/// Lane `privileged`.
mod privileged {
    use super::*;

    #[test]
    fn privileged_programs_behave_as_without_an_agent() {
        all_are_unchanged(&super::rows::of_root());
    }
}

/// Lane `torch`.
mod torch {
    use super::rows::{trainings, watched};
    use super::*;

    #[test]
    fn trainings_behave_as_without_an_agent() {
        all_are_unchanged(&trainings());
    }

    #[test]
    fn fault_in_a_pytorch_hook_ends_only_the_agent() {
        faults_stay_ours(&watched().into_iter().collect::<Vec<_>>());
    }
}

fn faults_stay_ours(rows: &[Row]) {
    let machine = Machine::new(&["devices=1", "memory=64G", "cuda.version=13990"]);
    machine.set(&["truth="]);
    let daemon = Daemon::start(&machine, "daemon", NVML);
    let row = |name: &str| rows.iter().find(|row| row.name == name);
    // The slowest ones begin first.
    let mut faults: Vec<_> = FAULTS.iter().filter(|fault| row(fault.1).is_some()).collect();
    faults.sort_by_key(|fault| fault.1 != "watched");
    let socket = daemon.runtime.join("agent.sock");
    let start = |mut command: Command, what: &str| {
        let folder = machine.dir.join(what.replace(':', "-"));
        std::fs::create_dir_all(&folder).expect("a folder");
        run(&mut command, &folder)
    };
    let names: Vec<&str> = faults.iter().map(|fault| fault.1).collect::<BTreeSet<_>>().into_iter().collect();
    let bare: Mutex<BTreeMap<&str, Outcome>> = Mutex::default();
    each(names.len(), |number| {
        let row = row(names[number]).expect("a row");
        let outcome = start(row.command(&machine), row.name);
        bare.lock().expect("no panic").insert(row.name, outcome);
    });
    let bare = bare.into_inner().expect("no panic");
    let told: Mutex<Vec<String>> = Mutex::default();
    let pids: Mutex<Vec<(usize, u32)>> = Mutex::default();
    each(faults.len(), |number| {
        let (fault, name, file) = *faults[number];
        let row = row(name).expect("a row");
        let mut command = row.covered(&machine, &socket);
        command.env("GPUMEM_FAULT", fault).env("GPUMEM_EXIT_WAIT_MS", "10000");
        let outcome = start(command, &format!("{name}-{fault}"));
        let different = outcome.differs_from(&bare[name], row.unordered);
        if !different.is_empty() {
            told.lock().expect("no panic").push(format!("{fault} in {name}: {different}"));
        }
        if file.is_some() {
            pids.lock().expect("no panic").push((number, outcome.pid));
        }
    });
    let mut told = told.into_inner().expect("no panic");
    for (number, pid) in pids.into_inner().expect("no panic") {
        let report = until(20, "a stored run", || {
            let report = daemon
                .ctl(&machine, &["report", "--verbose", &pid.to_string()])
                .output()
                .expect("gpumemctl runs");
            report.status.success().then(|| String::from_utf8_lossy(&report.stdout).into_owned())
        });
        let (fault, name, file) = *faults[number];
        // There is no such switch in a release.
        let why = format!("the agent has a fault ({}:", file.unwrap_or_default());
        if cfg!(debug_assertions) && !report.contains(&why) {
            told.push(format!("{fault} in {name}: the report lacks \"{why}\":\n{report}"));
        }
    }
    assert!(told.is_empty(), "{}", told.join("\n"));
}
