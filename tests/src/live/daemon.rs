//! A daemon on a simulated machine, with a folder for its sockets and a recording of everything that it receives.

use super::machine::{Job, Machine};
use super::programs::programs;
use super::until;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A running daemon; killed on drop.
#[derive(Debug)]
pub struct Daemon {
    /// Its process.
    pub job: Job,
    /// Directory of its sockets.
    pub runtime: PathBuf,
    /// Path of its recording.
    pub recording: PathBuf,
}

impl Daemon {
    /// Starts a daemon called `name`, and returns once it replies. `config` is appended to its configuration. Keys
    /// before the first table go to the top level, where they may set another recording.
    ///
    /// # Panics
    /// If it does not reply.
    pub fn start(machine: &Machine, name: &str, config: &str) -> Self {
        let program = programs().ours.join("gpumemd");
        Daemon::start_as(machine, name, config, machine.command(program))
    }

    /// Starts it in a separate PID namespace; `None` if that cannot be created.
    pub fn start_elsewhere(machine: &Machine, name: &str, config: &str) -> Option<Self> {
        let unshare = ["--pid", "--fork", "--kill-child", "--mount-proc"];
        let works = Command::new("unshare").args(unshare).arg("true").status();
        if !works.is_ok_and(|status| status.success()) {
            return None;
        }
        let mut command = machine.command("unshare");
        command.args(unshare).arg(programs().ours.join("gpumemd"));
        Some(Daemon::start_as(machine, name, config, command))
    }

    /// Starts it by another program that gets its command line as arguments, such as `ip netns exec NAME`.
    ///
    /// # Panics
    /// If it does not answer.
    pub fn start_by(machine: &Machine, by: &[&str], config: &str) -> Self {
        let (program, arguments) = by.split_first().expect("a program");
        let mut command = machine.command(program);
        command.args(arguments).arg(programs().ours.join("gpumemd"));
        Daemon::start_as(machine, "daemon", config, command)
    }

    fn start_as(machine: &Machine, name: &str, config: &str, mut command: Command) -> Self {
        let runtime = machine.dir.join("run");
        let recording = machine.dir.join(format!("{name}.gpumem"));
        let file = machine.dir.join(format!("{name}.toml"));
        let store = machine.dir.join("runs.sqlite");
        let metrics = if config.contains("[metrics]") { "" } else { "[metrics]\nlisten = \"off\"\n" };
        // Processes get metric series at once, unless the test sets the delay.
        let config = match config.contains("fold_younger_s") {
            true => config.to_owned(),
            false => config.replace("[metrics]\n", "[metrics]\nfold_younger_s = 0.0\n"),
        };
        let (top, tables) = config.split_at(config.find('[').unwrap_or(0));
        let record =
            if top.contains("record =") { String::new() } else { format!("record = {recording:?}\n") };
        let runs =
            if tables.contains("store =") { String::new() } else { format!("[runs]\nstore = {store:?}\n") };
        let tables = if runs.is_empty() { tables.to_owned() } else { tables.replacen("[runs]\n", &runs, 1) };
        let runs = if tables.contains("[runs]") { "" } else { runs.as_str() };
        let text = format!("runtime_dir = {runtime:?}\n{record}{top}{runs}{metrics}{tables}\n");
        std::fs::write(&file, text).expect("written");
        command.arg("--config").arg(&file);
        command.stderr(std::fs::File::create(machine.dir.join(format!("{name}.log"))).expect("a log"));
        let mut job = Job::start(&mut command);
        until(10, "an answering daemon", || {
            assert!(job.is_running(), "the daemon ended: see {name}.log");
            UnixStream::connect(runtime.join("control.sock")).ok()
        });
        Daemon { job, runtime, recording }
    }

    /// Returns a gpumemctl command that queries this daemon.
    pub fn ctl(&self, machine: &Machine, arguments: &[&str]) -> Command {
        let mut command = machine.command(programs().ours.join("gpumemctl"));
        command.args(arguments).env("GPUMEM_CONTROL", self.runtime.join("control.sock"));
        command.env("GPUMEM_LIBRARY", programs().ours.join("libgpumem.so"));
        command
    }

    /// Returns the reply of its control socket to GET `path`; `None` if the reply is not valid.
    pub fn asked(&self, path: &str) -> Option<serde_json::Value> {
        ask(&self.runtime.join("control.sock"), path)
    }

    /// Returns the processes that it currently knows.
    ///
    /// # Panics
    /// If it does not reply.
    pub fn pids(&self, machine: &Machine) -> Vec<u64> {
        let output = self.ctl(machine, &["ps", "--json"]).output().expect("gpumemctl runs");
        let ps: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let rows = ps["processes"].as_array().expect("rows");
        rows.iter().filter_map(|row| row["pid"].as_u64()).collect()
    }

    /// Waits until it has closed the runs of all these processes.
    pub fn wait_for_the_end_of(&self, machine: &Machine, jobs: &[&Job]) {
        until(20, "closed runs", || {
            let known = self.pids(machine);
            jobs.iter().all(|job| !known.contains(&u64::from(job.pid()))).then_some(())
        });
    }

    /// Stops it as systemd would, so that its recording is complete.
    pub fn stop(&mut self) {
        self.job.signal("TERM");
        self.job.finish();
    }
}

/// Returns the reply of the daemon behind this control socket to GET `path`; `None` if the reply is not valid.
pub fn ask(socket: &Path, path: &str) -> Option<serde_json::Value> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: gpumemd\r\nconnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (_, body) = answer.split_once("\r\n\r\n")?;
    serde_json::from_str(body).ok()
}
