//! What the agent adds to a training step of PyTorch, beside torch's own memory history and profiler.
//!
//! Three processes train the same CPU-bound model on the simulated machine (kernels take no time, so all of it is Python
//! and the framework: the worst case), in turns of a few steps: without us, with everything on, without us again. Each
//! turn is compared with the mean of its neighbours without us, and those with each other: that is how much these numbers
//! say at all. What differs between processes (where things lie in memory) is met by several such trios.

use super::rounds::median;
use crate::live::torch::{Wheel, machine, wheel};
use crate::live::{Daemon, Machine};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const TRIOS: usize = 4;
const TURNS: usize = 60;
const STEPS: usize = 5;
/// Turns of history and profiler per trio.
const OTHERS: usize = 12;

struct Worker {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    ready: Value,
}

impl Worker {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started");
        let stdin = child.stdin.take().expect("piped");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut worker = Worker { child, stdin, stdout, ready: Value::Null };
        worker.ready = worker.hear();
        worker
    }

    /// Its next answer; torch's profiler says things in between.
    fn hear(&mut self) -> Value {
        loop {
            let mut line = String::new();
            let count = self.stdout.read_line(&mut line).expect("read");
            assert!(count > 0, "it ended: {:?}", self.child.wait());
            if let Ok(answer) = serde_json::from_str(&line) {
                return answer;
            }
        }
    }

    fn ask(&mut self, what: &str, count: usize) -> Option<f64> {
        self.stdin.write_all(format!("{what} {count}\n").as_bytes()).expect("written");
        self.hear().as_f64()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Percent above the floor, turn by turn.
#[derive(Default)]
struct Row {
    over: Vec<f64>,
    ns: Vec<f64>,
}

impl Row {
    fn add(&mut self, ns: f64, floor: f64) {
        self.ns.push(ns);
        self.over.push(100.0 * (ns / floor - 1.0));
    }

    fn print(&self, name: &str, events: f64, floor_ns: f64) {
        let mut over = self.over.clone();
        over.sort_by(f64::total_cmp);
        let at = |part: usize| over[(over.len() - 1) * part / 4];
        let per_event = floor_ns * at(2) / 100.0 / events;
        println!(
            "{name:<36} {:>9.2} {:>+8.2} % {:>+8.2} .. {:<+8.2} {per_event:>9.0} {:>6}",
            median(self.ns.clone()) / 1e6,
            at(2),
            at(1),
            at(3),
            over.len(),
        );
    }
}

fn trio(wheel: &Wheel, machine: &Machine, runtime: &Path) -> [Worker; 3] {
    let package =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join("agent-lib/python");
    let bare = || Worker::start(&mut wheel.bare(machine, "paces.py", &[]));
    let mut covered = wheel.covered(machine, runtime, "paces.py", &[]);
    [bare(), Worker::start(covered.env("PYTHONPATH", package)), bare()]
}

fn of_version(version: &str) {
    let Some(wheel) = wheel(version) else {
        println!("torch {version} cannot be had\n");
        return;
    };
    let machine = machine(&[]);
    let daemon = Daemon::start(&machine, "daemon", "");
    let (mut on, mut control, mut none, mut python, mut profile) =
        (Row::default(), Row::default(), Row::default(), Row::default(), Row::default());
    let (mut pairs, mut floor_pairs, mut scopes, mut events) = (Vec::new(), Vec::new(), Vec::new(), 0.0);
    for _ in 0..TRIOS {
        let [mut before, mut with, mut after] = trio(&wheel, &machine, &daemon.runtime);
        events = with.ready["events"].as_f64().unwrap_or(1.0);
        for turn in 0..TURNS {
            let time = |worker: &mut Worker| worker.ask("step", STEPS).expect("a time");
            let (first, ours, last) = (time(&mut before), time(&mut with), time(&mut after));
            on.add(ours, (first + last) / 2.0);
            control.add(last, first);
            if turn < OTHERS {
                // In one process, between two turns without.
                let first = time(&mut before);
                for (row, what) in [(&mut none, "none"), (&mut python, "python"), (&mut profile, "profile")] {
                    let ns = before.ask(what, STEPS).expect("a time");
                    row.add(ns, (first + time(&mut before)) / 2.0);
                }
            }
        }
        pairs.extend(with.ask("pair", 200));
        floor_pairs.extend(before.ask("pair", 200));
        scopes.extend(with.ask("scope", 100));
    }
    let floor_ns = median(control.ns.clone());
    println!(
        "torch {}: a step with {events} block events, {TRIOS} x {TURNS} turns of {STEPS} steps",
        wheel.version
    );
    println!("{:<36} {:>9} {:>10} {:>20} {:>9} {:>6}", "", "ms", "over", "quartiles", "ns/event", "turns");
    on.print("the agent, everything on", events, floor_ns);
    control.print("without, beside without", events, floor_ns);
    none.print("_record_memory_history, no context", events, floor_ns);
    python.print("_record_memory_history, Python", events, floor_ns);
    profile.print("torch.profiler, profile_memory", events, floor_ns);
    let (pair, floor) = (median(pairs), median(floor_pairs));
    println!(
        "a tensor made and gone, hot: {floor:.0} ns, with the agent {:+.0} ns per block event",
        (pair - floor) / 2.0
    );
    if !scopes.is_empty() {
        println!("gpumem.scope, in and out: {:.0} ns", median(scopes));
    }
    println!();
}

pub(super) fn run() {
    for version in crate::live::torch::versions() {
        of_version(&version);
    }
}
