//! A program that initialises CUDA in many ways (starts.c) ends as it does without the agent: the same exit status and output.

use gpumem_tests::live::programs::programs;
use gpumem_tests::live::{Daemon, Machine};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Words for starts.c; `hidden` is `main` with an empty CUDA_VISIBLE_DEVICES.
pub const STARTS: [&str; 6] = ["main", "worker", "lives", "fork", "early", "hidden"];
/// Longer than the agent waits before it tries to subscribe again.
const LIFE: Duration = Duration::from_secs(3);

/// One run of the program.
#[derive(Debug, Clone)]
pub struct Case {
    /// Folders for LD_LIBRARY_PATH, with a libcuda.so.1 and a libcupti.
    pub libraries: Vec<PathBuf>,
    /// The libcupti that `early` loads.
    pub cupti: PathBuf,
    /// One of [`STARTS`].
    pub start: &'static str,
}

/// A simulated machine with a daemon, and the program.
pub struct Node {
    pub machine: Machine,
    pub daemon: Daemon,
    program: PathBuf,
}

impl Node {
    pub fn new(keys: &[&str]) -> Node {
        let machine = Machine::new(&[&["devices=1"], keys].concat());
        let daemon = Daemon::start(&machine, "daemon", "[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\n");
        let program = machine.dir.join("starts");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("suite/starts/starts.c");
        let mut cc = Command::new("cc");
        let built =
            cc.arg("-o").arg(&program).arg(source).args(["-ldl", "-pthread"]).output().expect("cc runs");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        Node { machine, daemon, program }
    }

    /// The program without the agent.
    pub fn bare(&self, case: &Case) -> Command {
        bare(&self.machine, &self.program, case)
    }

    /// The program under the agent, reporting to the daemon.
    pub fn covered(&self, case: &Case) -> Command {
        covered(self.bare(case), &self.daemon.runtime)
    }

    /// Runs each case with and without the agent and returns a line for each that differs. `is_meant` checks the run without it.
    pub fn differences(&self, cases: &[Case], is_meant: impl Fn(&Output) -> bool + Sync) -> Vec<String> {
        let (machine, program, runtime) = (&self.machine, &*self.program, &*self.daemon.runtime);
        let (next, differences) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let without = finished(bare(machine, program, case), case.start);
                        let with = finished(covered(bare(machine, program, case), runtime), case.start);
                        assert!(is_meant(&without), "{case:?}: {without:?}");
                        if without != with {
                            let line = format!("{case:?}: {without:?}\n  with the agent: {with:?}");
                            differences.lock().expect("unpoisoned").push(line);
                        }
                    }
                });
            }
        });
        differences.into_inner().expect("unpoisoned")
    }
}

fn bare(machine: &Machine, program: &Path, case: &Case) -> Command {
    let mut command = machine.command(program);
    command.env("LD_LIBRARY_PATH", std::env::join_paths(&case.libraries).expect("paths"));
    command.env("EARLY", &case.cupti).env_remove("CUDA_VISIBLE_DEVICES");
    match case.start {
        "hidden" => command.env("CUDA_VISIBLE_DEVICES", "").arg("main"),
        start => command.arg(start),
    };
    command
}

fn covered(mut command: Command, runtime: &Path) -> Command {
    command.env("CUDA_INJECTION64_PATH", programs().ours.join("libgpumem.so"));
    command.env("GPUMEM_SOCKET", runtime.join("agent.sock"));
    command
}

/// Runs it to its end. A program that lives until its input ends is given [`LIFE`].
fn finished(mut command: Command, start: &str) -> Output {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("starts runs");
    if start == "lives" {
        std::thread::sleep(LIFE);
    }
    drop(child.stdin.take());
    child.wait_with_output().expect("its output")
}

/// On the simulated machine, whose libcupti leaves thread-specific data behind, as NVIDIA's does.
fn ends_alike(keys: &[&str]) {
    let node = Node::new(keys);
    let lib = programs().fake.join("lib");
    let case = |start| Case { libraries: vec![lib.clone()], cupti: lib.join("libcupti.so.12"), start };
    let differences = node.differences(&STARTS.map(case), |bare| bare.status.success());
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
fn compatible_libcupti() {
    ends_alike(&[]);
}

#[test]
fn incompatible_libcupti() {
    ends_alike(&["cupti.subscribe=15"]);
}

#[test]
fn libcupti_without_support_for_the_gpu() {
    ends_alike(&["cupti.subscribe=2"]);
}

#[test]
fn another_client_holds_cupti() {
    ends_alike(&["cupti.subscribe=39"]);
}

#[test]
fn no_gpu() {
    ends_alike(&["nvml.driver=absent"]);
}
