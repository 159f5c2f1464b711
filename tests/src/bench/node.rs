//! A daemon on a simulated machine, as a user would run it: its sockets, its replies, its cost.

use super::cost;
use crate::live::{Job, Machine, programs::programs, until};
use gpumem_model::run::Run;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// Creates a machine whose NVML writes no journal.
pub fn machine(devices: u32) -> Machine {
    let machine = Machine::new(&[&format!("devices={devices}")]);
    machine.set(&["truth="]);
    machine
}

/// Returns the UUID of each device of a machine.
pub fn uuids(machine: &Machine) -> Vec<String> {
    let shown = machine.tool("show", &[]);
    shown.lines().filter_map(|line| line.split_once(".uuid=")).map(|(_, uuid)| uuid.to_owned()).collect()
}

/// Starts this many processes on each device with `program`, each with memory that NVML reports.
pub fn processes(
    machine: &Machine,
    devices: u32,
    each: u32,
    mut program: impl FnMut(u32) -> Command,
) -> Vec<Job> {
    let start = |number: u32| {
        let device = number / each;
        let job = Job::start(&mut program(device));
        let bytes = u64::from(number + 1) << 21;
        machine.tool("hold", &[&job.pid().to_string(), &device.to_string(), &bytes.to_string()]);
        job
    };
    (0..devices * each).map(start).collect()
}

/// A running daemon; killed on drop.
#[derive(Debug)]
pub struct Node {
    job: Job,
    /// Directory of its sockets.
    pub runtime: PathBuf,
    /// Address of its metrics.
    pub http: SocketAddr,
    /// Time from its start to its first reply.
    pub ready: Duration,
}

impl Node {
    /// Starts a daemon; `config` is appended to its configuration. Runs are stored only at its end.
    ///
    /// # Panics
    /// If it does not answer.
    pub fn start(machine: &Machine, config: &str) -> Self {
        Self::start_with_store(machine, 3600.0, config)
    }

    /// Starts a daemon that stores changes of runs in this interval.
    ///
    /// # Panics
    /// If it does not answer.
    pub fn start_with_store(machine: &Machine, checkpoint_s: f64, config: &str) -> Self {
        let http = crate::live::prometheus::free_address();
        let runtime = machine.dir.join("run");
        let file = machine.dir.join("gpumemd.toml");
        let store = machine.dir.join("runs.sqlite");
        let text = format!(
            "runtime_dir = {runtime:?}\n[runs]\nstore = {store:?}\ncheckpoint_every_s = {checkpoint_s:?}\n\
             [metrics]\nlisten = \"{http}\"\nfold_younger_s = 0.0\n{config}\n"
        );
        std::fs::write(&file, text).expect("written");
        let mut command = machine.command(programs().ours.join("gpumemd"));
        command.arg("--config").arg(&file);
        command.stderr(std::fs::File::create(machine.dir.join("gpumemd.log")).expect("a log"));
        let _ = std::fs::remove_file(runtime.join("control.sock"));
        let started = Instant::now();
        let job = Job::start(&mut command);
        while UnixStream::connect(runtime.join("control.sock")).is_err() {
            assert!(started.elapsed().as_secs() < 10, "the daemon does not answer: {:?}", machine.dir);
            std::thread::sleep(Duration::from_micros(200));
        }
        let ready = started.elapsed();
        Node { job, runtime, http, ready }
    }

    /// Returns the daemon's pid.
    pub fn pid(&self) -> u32 {
        self.job.pid()
    }

    /// Returns the pid of the child that calls NVML.
    ///
    /// # Panics
    /// If there is none.
    pub fn poller(&self) -> u32 {
        until(10, "a poller", || cost::children(self.pid()).first().copied())
    }

    /// Returns the CPU times of the daemon and its poller.
    pub fn cpu(&self) -> [Duration; 2] {
        [cost::cpu(self.pid()), cost::cpu(self.poller())]
    }

    /// Stops it and waits for its end.
    pub fn stop(mut self) {
        self.job.signal("TERM");
        self.job.finish();
    }

    /// Returns the metrics.
    pub fn scrape(&self) -> String {
        get(self.http, "/metrics")
    }

    /// Returns the sum of a metric of the daemon over all its labels.
    pub fn number(&self, name: &str) -> u64 {
        let text = self.scrape();
        let of_name = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']));
        let values = text.lines().filter(of_name).filter_map(|line| line.rsplit_once(' '));
        values.filter_map(|(_, value)| value.parse::<f64>().ok()).sum::<f64>() as u64
    }

    /// Returns the runs of a process, over the control socket.
    ///
    /// # Panics
    /// If the daemon does not answer.
    pub fn runs(&self, pid: u32) -> Vec<Run> {
        let mut stream = UnixStream::connect(self.runtime.join("control.sock")).expect("a daemon");
        write!(stream, "GET /v1/runs?pid={pid} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            .expect("asked");
        let body = body(read(&mut stream));
        serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"))
    }
}

/// Returns the body of a GET.
///
/// # Panics
/// If the reply is not 200.
pub fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("a server");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").expect("asked");
    body(read(&mut stream))
}

fn read(stream: &mut impl Read) -> String {
    let mut answer = Vec::with_capacity(1 << 20);
    stream.read_to_end(&mut answer).expect("an answer");
    String::from_utf8(answer).expect("text")
}

fn body(mut answer: String) -> String {
    let end = answer.find("\r\n\r\n").expect("a head");
    assert!(answer.starts_with("HTTP/1.1 200"), "{}", &answer[..end]);
    answer.split_off(end + 4)
}
