//! Environment for the commands of the documents: a node with four GPUs, a daemon, running and ended trainings, and a
//! folder that looks like a checkout.

use super::root;
use gpumem_tests::live::programs::{programs, write_script};
use gpumem_tests::live::{Daemon, Job, Machine, until};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const CONFIG: &str = "[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\n";
/// A training that runs out of memory. Its steps are longer than the sample interval, so that a sample shows the full
/// GPU.
const FATAL: [&str; 7] = ["--steps", "40", "--step-ms", "200", "--leak", "2000", "--oom-fatal"];

/// The node.
pub struct Stage {
    machine: Machine,
    daemon: Daemon,
    live: Job,
    _bare: Job,
    /// Pids of the processes that ran out of memory, with and without an agent.
    fatal: [u32; 2],
    /// The folder of the documents' commands.
    dir: PathBuf,
}

impl Stage {
    pub fn new() -> Self {
        let machine = Machine::new(&["devices=4", "memory=16G"]);
        let daemon = Daemon::start(&machine, "daemon", CONFIG);
        let covered = |words: &[&str]| machine.trainer(&daemon.runtime, words);
        let hold = ["--devices", "0", "--steps", "14", "--hold", "600"];
        let mut live = Job::start(covered(&hold).env("GPUMEM_JOB", "bert"));
        let hold = ["--devices", "1", "--steps", "2", "--hold", "600"];
        let mut bare = Job::start(&mut machine.bare_trainer(&hold));
        let mut ended = ["4", "9"].map(|steps| Job::start(&mut covered(&["--steps", steps])));
        ended.iter_mut().for_each(Job::finish);
        let fatal = [("3", true), ("2", false)].map(|(device, has_agent)| {
            let words = [&["--devices", device], &FATAL[..]].concat();
            let mut command = if has_agent { covered(&words) } else { machine.bare_trainer(&words) };
            Job::start(command.stderr(Stdio::null()))
        });
        let fatal = fatal.map(|mut job| {
            assert_eq!(job.end().code(), Some(1), "it runs out of memory");
            daemon.wait_for_the_end_of(&machine, &[&job]);
            job.pid()
        });
        for job in [&mut live, &mut bare] {
            job.wait_for("holding");
            until(20, "its row", || daemon.pids(&machine).contains(&job.pid().into()).then_some(()));
        }
        let dir = machine.dir.join("checkout");
        checkout(&dir);
        let stage = Stage { machine, daemon, live, _bare: bare, fatal, dir };
        stage.files();
        stage
    }

    /// Creates the files that the documents assume: the reader's programs, recordings, a baseline.
    fn files(&self) {
        fs::copy(root().join("examples/train.py"), self.file("train.py")).expect("copied");
        fs::create_dir(self.file("logs")).expect("a folder");
        for name in ["a.log", "b.log", "c.log", "logs/a.log", "run.log"] {
            fs::copy(root().join("tests/data/small-train.log"), self.file(name)).expect("copied");
        }
        symlink(self.machine.dir.join("runs.sqlite"), self.file("runs.sqlite")).expect("a link");
        let trainer = programs().fake.join("bin/trainer");
        let fatal = format!(
            "import os\nwords = {FATAL:?}\nos.execv({trainer:?}, [{trainer:?}, '--quiet', '--devices', '3'] + words)\n"
        );
        fs::write(self.file("fatal.py"), fatal).expect("written");
        let pickle = "import pickle\n\
            block = dict(address=1 << 30, size=1 << 20, requested_size=1 << 20, state='active_allocated', frames=[])\n\
            segment = dict(device=0, address=1 << 30, total_size=2 << 20, stream=0, segment_type='small', blocks=[block])\n\
            with open('memory.pickle', 'wb') as file:\n    \
            pickle.dump(dict(segments=[segment], device_traces=[]), file)\n";
        fs::write(self.file("snapshot.py"), pickle).expect("written");
        for line in [
            "gpumemctl run --quiet --record release.gpumem -- python train.py",
            "gpumemctl export release.gpumem -o release.gpumem-run",
            "python snapshot.py && rm snapshot.py",
        ] {
            let output = self.run("node", line);
            assert!(output.status.success(), "{line}: {output:?}");
        }
    }

    /// Runs shell lines as typed. `on` selects the place: `node`, the `oom` of a process with an agent or of a `bare`
    /// one, or a machine with `nothing` listening.
    pub fn run(&self, on: &str, lines: &str) -> Output {
        let output = self.shell(on, &self.meant(on, lines));
        if on == "nothing" {
            // `gpumemctl run` has started a daemon, which would wait for minutes.
            let health = self.shell(on, "gpumemctl doctor --json || true").stdout;
            let health: serde_json::Value = serde_json::from_slice(&health).expect("JSON");
            if let Some(pid) = health["daemon"]["pid"].as_u64() {
                let _ = Command::new("kill").arg(pid.to_string()).status();
            }
        }
        output
    }

    fn shell(&self, on: &str, lines: &str) -> Output {
        let mut command = self.machine.command("bash");
        command.args(["-e", "-u", "-o", "pipefail", "-c", lines]).current_dir(&self.dir).stdin(Stdio::null());
        let path = std::env::var_os("PATH").unwrap_or_default();
        let first = std::iter::once(self.file("bin"));
        let path = std::env::join_paths(first.chain(std::env::split_paths(&path))).expect("a path");
        command.env("PATH", path).env("PYTHONPATH", root().join("agent-lib/python"));
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        command.env("GPUMEM_LIBRARY", programs().ours.join("libgpumem.so"));
        if on == "nothing" {
            command.env("XDG_RUNTIME_DIR", &self.machine.dir).env_remove("GPUMEM_STORE");
            command.env("XDG_STATE_HOME", self.machine.dir.join("state"));
        } else {
            command.env("GPUMEM_CONTROL", self.daemon.runtime.join("control.sock"));
        }
        command.output().expect("bash runs")
    }

    /// Returns the lines with existing pids, runs and files filled in.
    fn meant(&self, on: &str, lines: &str) -> String {
        let pid = match on {
            "oom" => self.fatal[0],
            "bare oom" => self.fatal[1],
            _ => self.live.pid(),
        };
        let pid = pid.to_string();
        let user = rustix::process::getuid().as_raw().to_string();
        let program = if on.ends_with("oom") { "fatal.py" } else { "train.py" };
        let meant = |word: &str| match word {
            "PID" | "41873" | "4711" => pid.clone(),
            "RUN" | "r7" => "r1".into(),
            "r9" => "r2".into(),
            "FILE" => "tests/data/small-train.log".into(),
            "STORE" => "runs.sqlite".into(),
            "ID" | "8812" => "bert".into(),
            "alice" => user.clone(),
            "train.py" => program.into(),
            word => word.into(),
        };
        let is_part = |letter: char| letter.is_ascii_alphanumeric() || "_-./".contains(letter);
        let (mut out, mut rest) = (String::new(), lines);
        while let Some(first) = rest.chars().next() {
            let length = rest.find(|letter| !is_part(letter)).unwrap_or(rest.len()).max(first.len_utf8());
            let (word, after) = rest.split_at(length);
            out += &meant(word);
            rest = after;
        }
        out
    }

    /// Path of a file in the working folder of the commands.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The daemon's program, there.
    pub fn gpumemd(&self) -> Command {
        let mut command = self.machine.command(programs().ours.join("gpumemd"));
        command.current_dir(&self.dir);
        command
    }
}

/// Creates a folder with the files of a checkout, and a `bin` with the programs that the commands call.
fn checkout(dir: &Path) {
    let bin = dir.join("bin");
    fs::create_dir_all(&bin).expect("a folder");
    for entry in fs::read_dir(root()).expect("the workspace").flatten() {
        let name = entry.file_name();
        if name != "target" && !name.to_string_lossy().starts_with('.') {
            symlink(entry.path(), dir.join(name)).expect("a link");
        }
    }
    fs::create_dir(dir.join("target")).expect("a folder");
    symlink(&programs().ours, dir.join("target/demo")).expect("a link");
    for name in ["gpumemctl", "gpumemd"] {
        symlink(programs().ours.join(name), bin.join(name)).expect("a link");
    }
    // Nothing is built again: only the target's existence is checked.
    let make = format!("exec /usr/bin/make -s -n -C '{}' \"$@\" > /dev/null", root().display());
    write_script(bin.join("make"), &make);
    write_script(bin.join("python"), "exec python3 \"$@\"");
}
