//! The daemon as a program, and programs with a hand-made agent: both can be killed.

use crate::common::peer::{Memory, Peer, allocation, device, record, resync, tag, watermark};
use crate::common::{Scratch, free_port, http, metric, wait_for};
use gpumem_runs::store::{RunSummary, Store};
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

/// Socket of the daemon; set for the copy of this program that is an agent.
const AGENT: &str = "GPUMEM_TEST_AGENT";

/// A daemon, killed when dropped.
pub struct Program {
    pub child: Child,
    pub folder: PathBuf,
    pub metrics: SocketAddr,
}

impl Program {
    /// Starts a daemon in `scratch`, with these `[runs]` keys and environment variables.
    pub fn start(scratch: &Scratch, runs: &str, variables: &[(&str, &Path)]) -> Self {
        let (folder, metrics) = (scratch.0.clone(), free_port());
        let dir = folder.display();
        let config = format!(
            "runtime_dir = \"{dir}/run\"\n[runs]\nstore = \"{dir}/runs.sqlite\"\n{runs}\n\
             [metrics]\nlisten = \"{metrics}\"\n[nvml]\nlibrary = \"/nonexistent/libnvidia-ml.so.1\"\n"
        );
        let file = folder.join("gpumemd.toml");
        std::fs::write(&file, config).expect("a file");
        let log = std::fs::File::options().create(true).append(true).open(folder.join("log")).expect("a log");
        let child = Command::new(env!("CARGO_BIN_EXE_gpumemd"))
            .arg("--config")
            .arg(&file)
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log)
            .spawn()
            .expect("a daemon");
        let program = Program { child, folder, metrics };
        wait_for("the daemon", || UnixStream::connect(program.folder.join("run/control.sock")).ok());
        program
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Returns the value of a series.
    pub fn metric(&self, series: &str) -> Option<f64> {
        let (status, body) = http(TcpStream::connect(self.metrics).ok()?, "GET", "/metrics");
        assert_eq!(status, 200, "{body}");
        metric(&body, series)
    }

    /// Returns doctor's findings about the store: level and text.
    pub fn doctor(&self) -> Vec<(String, String)> {
        let stream = UnixStream::connect(self.folder.join("run/control.sock")).expect("a daemon");
        let (_, body) = http(stream, "GET", "/v1/doctor");
        let value: serde_json::Value = serde_json::from_str(&body).expect("JSON");
        let findings = value["findings"].as_array().expect("findings").iter();
        let of_store = findings.filter(|finding| finding["subject"] == "store");
        of_store
            .map(|finding| {
                let text = |key: &str| finding[key].as_str().unwrap_or_default().to_owned();
                (text("state"), text("text"))
            })
            .collect()
    }

    /// Returns the ids of the runs of ended processes that `ps` shows.
    pub fn ended(&self) -> Vec<String> {
        let stream = UnixStream::connect(self.folder.join("run/control.sock")).expect("a daemon");
        let value: serde_json::Value = serde_json::from_str(&http(stream, "GET", "/v1/ps").1).expect("JSON");
        let ended = value["ended"].as_array().expect("ended processes").iter();
        ended.map(|row| row["run"].as_str().unwrap_or_default().to_owned()).collect()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    pub fn agent(&self) -> Agent {
        Agent::start(&self.folder)
    }

    /// Returns the runs in the store, newest first; none while there is no store.
    pub fn list(&self) -> Vec<RunSummary> {
        list(&self.folder)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn list(folder: &Path) -> Vec<RunSummary> {
    let store = Store::open_read_only(folder.join("runs.sqlite"));
    store.and_then(|store| store.list()).unwrap_or_default()
}

/// A process with an agent, which allocates 1 MiB for each request.
pub struct Agent {
    pub child: Child,
    said: Lines<BufReader<ChildStdout>>,
    pub allocations: u64,
}

impl Agent {
    fn start(folder: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "store::program::agent", "--nocapture"])
            .env(AGENT, folder.join("run/agent.sock"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("an agent");
        let said = BufReader::new(child.stdout.take().expect("its words")).lines();
        let mut agent = Agent { child, said, allocations: 0 };
        agent.hear();
        agent
    }

    /// Waits for its next output line. Returns false if it has ended.
    fn hear(&mut self) -> bool {
        self.said.by_ref().any(|line| line.is_ok_and(|line| line.ends_with("agent: done")))
    }

    /// Has it allocate and send the record. Returns false if the daemon is gone.
    pub fn allocate(&mut self) -> bool {
        let told = self.child.stdin.as_mut().is_some_and(|stdin| stdin.write_all(b"x").is_ok());
        let sent = told && self.hear();
        self.allocations += u64::from(sent);
        sent
    }

    /// Has it make `count` allocations with different names, and send the records.
    pub fn allocate_named(&mut self, count: usize) {
        let told = self.child.stdin.as_mut().is_some_and(|stdin| stdin.write_all(&vec![b'n'; count]).is_ok());
        assert!(told && (0..count).all(|_| self.hear()));
        self.allocations += count as u64;
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn end(mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The agent's side; as a test it does nothing.
#[test]
fn agent() {
    let Some(socket) = std::env::var_os(AGENT).map(PathBuf::from) else { return };
    let (peer, epoch) = Peer::welcomed(&socket, &Memory::new());
    assert!(peer.send(&[device(), resync(epoch, 0, &[])].concat()));
    let (mut seq, mut byte) = (0, [0]);
    // The test harness may have begun a line.
    println!("\nagent: done");
    while std::io::stdin().read(&mut byte).is_ok_and(|read| read == 1) {
        seq += 1;
        let number = if byte == *b"n" { seq as u32 } else { 0 };
        let name =
            if number > 0 { tag(number, &format!("{number}/{}", "n".repeat(240))) } else { Vec::new() };
        let (stamp, body) = allocation(seq, 1 << 20, number);
        if !peer.send(&[name, record(stamp, body), watermark(seq)].concat()) {
            // The daemon is gone: this process sends nothing more, and lives on.
            while std::io::stdin().read(&mut byte).is_ok_and(|read| read == 1) {}
            std::process::exit(0);
        }
        println!("agent: done");
    }
    // Exit instead of a return, because the harness would print.
    std::process::exit(0);
}
