//! Cost that the agent adds to a training step of PyTorch, compared with torch's own memory history and profiler.
//!
//! Three processes train the same CPU-bound model on the simulated machine, in turns of a few steps: without the agent,
//! with everything on, and without the agent again. Kernels take no time, so a step is only Python and the framework: the
//! worst case. Each turn is compared with the mean of the neighbouring turns without the agent. These turns are also
//! compared with each other, which gives the precision. Several such trios average out differences between processes,
//! such as memory layout.

use super::rounds::median;
use crate::live::torch::{Wheel, machine, wheel};
use crate::live::{Daemon, Machine};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Without --release the benchmark only checks that it works.
const QUICK: bool = cfg!(debug_assertions);
const TRIOS: usize = if QUICK { 1 } else { 4 };
const TURNS: usize = if QUICK { 4 } else { 60 };
const STEPS: usize = 5;
/// Rounds of history and profiler in each trio.
const OTHERS: usize = if QUICK { 2 } else { 12 };

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

    /// Returns its next reply; torch's profiler prints other lines in between.
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

    /// Runs steps. Returns their median elapsed and CPU time, in ns.
    fn steps(&mut self, what: &str) -> [f64; 2] {
        self.stdin.write_all(format!("{what} {STEPS}\n").as_bytes()).expect("written");
        let answer = self.hear();
        [0, 1].map(|at| answer[at].as_f64().unwrap_or_else(|| panic!("{what}: {answer}")))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Percent above the floor in each round, for elapsed time and for CPU time, which other programs disturb less.
#[derive(Default)]
struct Row {
    over: [Vec<f64>; 2],
    ns: [Vec<f64>; 2],
}

impl Row {
    fn add(&mut self, ns: [f64; 2], one: [f64; 2], other: [f64; 2]) {
        for at in 0..2 {
            self.ns[at].push(ns[at]);
            self.over[at].push(100.0 * (2.0 * ns[at] / (one[at] + other[at]) - 1.0));
        }
    }

    fn print(&self, name: &str, events: f64, floor: &Row) {
        for (at, what) in [(0, name), (1, "    its CPU time")] {
            let mut over = self.over[at].clone();
            over.sort_by(f64::total_cmp);
            let quartile = |part: usize| over[(over.len() - 1) * part / 4];
            let per_event = median(floor.ns[at].clone()) * quartile(2) / 100.0 / events;
            println!(
                "{what:<36} {:>9.2} {:>+8.2} % {:>+8.2} .. {:<+8.2} {per_event:>9.0} {:>6}",
                median(self.ns[at].clone()) / 1e6,
                quartile(2),
                quartile(1),
                quartile(3),
                over.len(),
            );
        }
    }
}

/// Starts four processes: without, with, without, and one for torch's own history and profiler, which may leave state behind.
fn workers(wheel: &Wheel, machine: &Machine, runtime: &Path) -> [Worker; 4] {
    let package =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join("agent-lib/python");
    let bare = || Worker::start(&mut wheel.bare(machine, "paces.py", &[]));
    let mut covered = wheel.covered(machine, runtime, "paces.py", &[]);
    [bare(), Worker::start(covered.env("PYTHONPATH", package)), bare(), bare()]
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
        let [mut before, mut with, mut after, mut other] = workers(&wheel, &machine, &daemon.runtime);
        events = with.ready["events"].as_f64().unwrap_or(1.0);
        for turn in 0..TURNS {
            let (first, ours, last) = (before.steps("step"), with.steps("step"), after.steps("step"));
            on.add(ours, first, last);
            control.add(last, first, first);
            if turn < OTHERS {
                // In one process, between two rounds without them.
                let mut first = other.steps("step");
                for (row, what) in [(&mut none, "none"), (&mut python, "python"), (&mut profile, "profile")] {
                    let times = other.steps(what);
                    let last = other.steps("step");
                    row.add(times, first, last);
                    first = last;
                }
            }
        }
        pairs.extend(with.ask("pair", 200));
        floor_pairs.extend(before.ask("pair", 200));
        scopes.extend(with.ask("scope", 100));
    }
    println!(
        "torch {}: a step with {events} block events, {TRIOS} x {TURNS} turns of {STEPS} steps",
        wheel.version
    );
    println!("{:<36} {:>9} {:>10} {:>20} {:>9} {:>6}", "", "ms", "over", "quartiles", "ns/event", "turns");
    on.print("the agent, everything on", events, &control);
    control.print("without, beside without", events, &control);
    none.print("_record_memory_history, no context", events, &control);
    python.print("_record_memory_history, Python", events, &control);
    profile.print("torch.profiler, profile_memory", events, &control);
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
