//! Clients that query the daemon all the time, or disconnect in the middle of a reply.

use super::Random;
use crate::live::machine::Machine;
use crate::live::programs::programs;
use crate::live::prometheus::get;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

#[derive(Debug)]
struct Shared {
    machine: PathBuf,
    sim: PathBuf,
    runtime: PathBuf,
    http: SocketAddr,
    pids: Mutex<Vec<u32>>,
    /// Odd while requests may fail.
    doubt: AtomicU64,
    over: AtomicBool,
    asked: AtomicU64,
    vanished: AtomicU64,
    longest_us: AtomicU64,
    wrong: Mutex<Vec<String>>,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads that send requests.
#[derive(Debug)]
pub struct Clients {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Clients {
    /// Starts two clients, each with about this pause between requests.
    pub fn start(machine: &Machine, runtime: PathBuf, http: SocketAddr, seed: u64, pause: Duration) -> Self {
        let shared = Arc::new(Shared {
            machine: machine.dir.clone(),
            sim: machine.sim(),
            runtime,
            http,
            pids: Mutex::default(),
            doubt: AtomicU64::new(0),
            over: AtomicBool::new(false),
            asked: AtomicU64::new(0),
            vanished: AtomicU64::new(0),
            longest_us: AtomicU64::new(0),
            wrong: Mutex::default(),
        });
        let thread = |number| {
            let (shared, mut random) = (Arc::clone(&shared), Random::new(seed ^ number));
            std::thread::spawn(move || {
                while !shared.over.load(Ordering::Acquire) {
                    shared.once(&mut random);
                    std::thread::sleep(pause);
                }
            })
        };
        let threads = (1..=2).map(thread).collect();
        Clients { shared, threads }
    }

    /// Sets the processes that clients may query.
    pub fn know(&self, pids: Vec<u32>) {
        *lock(&self.shared.pids) = pids;
    }

    /// Begins or ends an interval in which requests may fail.
    pub fn doubt(&self, doubt: bool) {
        let old = self.shared.doubt.fetch_add(1, Ordering::AcqRel);
        assert_eq!(old.is_multiple_of(2), doubt);
    }

    /// Returns the errors found so far.
    pub fn wrong(&self) -> Vec<String> {
        lock(&self.shared.wrong).clone()
    }

    /// Returns the number of replies, the number of disconnected requests, and the longest scrape.
    pub fn counts(&self) -> (u64, u64, Duration) {
        let shared = &self.shared;
        let longest = Duration::from_micros(shared.longest_us.load(Ordering::Acquire));
        (shared.asked.load(Ordering::Acquire), shared.vanished.load(Ordering::Acquire), longest)
    }

    /// Stops the clients.
    ///
    /// # Panics
    /// If a client panicked.
    pub fn end(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        self.threads.drain(..).for_each(|thread| thread.join().expect("a client ends well"));
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
    }
}

impl Shared {
    fn once(&self, random: &mut Random) {
        let pid = {
            let pids = lock(&self.pids);
            if pids.is_empty() { 1 } else { random.one_of(&pids) }
        };
        let pid = pid.to_string();
        // Allowed exit codes: success, process gone, a problem found.
        let (fine, gone, sick): (&[i32], &[i32], &[i32]) = (&[0], &[0, 1, 3], &[0, 10]);
        match random.below(20) {
            0..5 => self.scrape(),
            5 => self.ask("/healthz", || get(self.http, "/healthz").map(drop)),
            6 => self.ask("the page", || get(self.http, "/").map(drop)),
            7 => self.ctl(&["ps"], fine),
            8 => self.ctl(&["ps", "--json"], fine),
            9 => self.ctl(&["report", &pid], gone),
            10 => self.ctl(&["report", &pid, "--json"], gone),
            11 => self.ctl(&["explain", "untrackable", &pid], gone),
            12 => self.ctl(&["runs"], fine),
            13 => self.ctl(&["doctor", "--json"], sick),
            14 => self.ctl(&["doctor", &pid], &[0, 1, 3, 10]),
            15 => self.record(&pid),
            16 => self.ctl(&["mark", "soak"], gone),
            17 => self.vanish(random),
            18 => self.vanish_from_agents(random),
            _ => self.leave_a_command(random, &pid),
        }
    }

    /// Sends a request. A missing reply is an error, unless requests may fail.
    fn ask(&self, what: &str, ask: impl Fn() -> Option<()>) {
        let before = self.doubt.load(Ordering::Acquire);
        let since = Instant::now();
        let answer = ask();
        let certain = before.is_multiple_of(2) && self.doubt.load(Ordering::Acquire) == before;
        self.asked.fetch_add(1, Ordering::AcqRel);
        if certain {
            let took = u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX);
            if what == "/metrics" {
                self.longest_us.fetch_max(took, Ordering::AcqRel);
            }
            if answer.is_none() {
                lock(&self.wrong).push(format!("{what}: no answer after {:?}", since.elapsed()));
            }
        }
    }

    fn scrape(&self) {
        self.ask("/metrics", || {
            let text = get(self.http, "/metrics")?;
            text.ends_with('\n').then_some(())
        });
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(programs().ours.join("gpumemctl"));
        command.args(arguments).env("GPUMEM_CONTROL", self.runtime.join("control.sock"));
        command.env("GPUMEM_STORE", self.machine.join("runs.sqlite")).env("HOME", &self.machine);
        command.env("GPUMEM_SIM", &self.sim).env("LD_LIBRARY_PATH", programs().fake.join("lib"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn ctl(&self, arguments: &[&str], fine: &[i32]) {
        let before = self.doubt.load(Ordering::Acquire);
        let output = self.command(arguments).output().expect("gpumemctl runs");
        let certain = before.is_multiple_of(2) && self.doubt.load(Ordering::Acquire) == before;
        self.asked.fetch_add(1, Ordering::AcqRel);
        let said = String::from_utf8_lossy(&output.stderr);
        let code = output.status.code();
        let is_fine = code.is_some_and(|code| fine.contains(&code));
        if said.contains("panicked") || code.is_none() || certain && !is_fine {
            lock(&self.wrong).push(format!("gpumemctl {arguments:?}: {}: {}", output.status, said.trim()));
        }
    }

    /// Mutes and unmutes a process, or lets it write a short recording.
    fn record(&self, pid: &str) {
        let file = self.machine.join(format!("on-request-{pid}.gpumem"));
        let _ = std::fs::remove_file(&file);
        let out = file.display().to_string();
        self.ctl(&["record", pid, "start", "--output", &out, "--for", "1s"], &[0, 1, 3, 6, 7]);
        std::thread::sleep(Duration::from_millis(200));
        self.ctl(&["record", pid, "stop"], &[0, 1, 3, 6, 7]);
        let _ = std::fs::remove_file(&file);
    }

    /// Sends half a request, or disconnects before the reply.
    fn vanish(&self, random: &mut Random) {
        let words = [
            "GET /v1/ps HTTP/1.1\r\nhost: g\r\n\r\n",
            "GET /v1/runs HTTP/1.1\r\nhost: g\r\n\r\n",
            "GET /metr",
            "",
        ];
        let words = random.one_of(&words);
        let part = random.below(64);
        if random.below(2) == 0 {
            if let Ok(mut stream) = UnixStream::connect(self.runtime.join("control.sock")) {
                let _ = stream.write_all(words.as_bytes());
                let _ = stream.set_read_timeout(Some(Duration::from_millis(1 + part)));
                let _ = stream.read(&mut vec![0; part as usize]);
            }
        } else if let Ok(mut stream) = TcpStream::connect_timeout(&self.http, Duration::from_secs(5)) {
            let words = words.replace("/v1/ps", "/metrics").replace("/v1/runs", "/");
            let _ = stream.write_all(words.as_bytes());
            let _ = stream.set_read_timeout(Some(Duration::from_millis(1 + part)));
            let _ = stream.read(&mut vec![0; part as usize]);
        }
        self.vanished.fetch_add(1, Ordering::AcqRel);
    }

    /// Connects like an agent, and sends nothing or garbage.
    fn vanish_from_agents(&self, random: &mut Random) {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let address = SocketAddrUnix::new(self.runtime.join("agent/agent.sock"));
        let (Ok(socket), Ok(address)) = (socket, address) else { return };
        if connect(&socket, &address).is_ok() {
            let rubbish: Vec<u8> = (0..random.below(200)).map(|_| random.below(256) as u8).collect();
            if !rubbish.is_empty() {
                let _ = rustix::io::write(&socket, &rubbish);
            }
            std::thread::sleep(Duration::from_millis(random.below(20)));
        }
        self.vanished.fetch_add(1, Ordering::AcqRel);
    }

    /// Starts a command and kills it before its output.
    fn leave_a_command(&self, random: &mut Random, pid: &str) {
        let commands: [&[&str]; 4] = [&["ps"], &["report", pid], &["runs"], &["doctor"]];
        let arguments = random.one_of(&commands);
        let mut child = self.command(arguments).spawn().expect("gpumemctl runs");
        std::thread::sleep(Duration::from_millis(random.below(30)));
        let _ = child.kill();
        let status = child.wait().expect("waited for");
        assert!(status.signal().is_none_or(|signal| signal == 9), "{status}");
        self.vanished.fetch_add(1, Ordering::AcqRel);
    }
}
