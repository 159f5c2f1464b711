//! The well-behaved programs, and measurements of the daemon.

use gpumem_tests::live::hostile::{NOBODY, play};
use gpumem_tests::live::{Daemon, Job, Machine, Mixer, until};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;
/// Limit of the daemon's memory under any load: its limited state (below), and the rest.
pub const MOST_RSS_MIB: u64 = 128;
const CONFIG: &str = "[agent]\nmemory_mib = 48\nmemory_mib_per_uid = 24\nconnections_per_uid = 256\n\
                      connections_without_hello = 128\n[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n\
                      [metrics]\nlisten = \"off\"\n";

/// Any other user of the machine, neither root nor in the group.
pub const ANYBODY: u32 = 60_001;
/// Bytes that a new program holds.
const NEW: u64 = 32 * MIB;

/// Delays that others observed under load.
#[derive(Debug, Default, Clone)]
pub struct Times {
    /// From an allocation of the well-behaved program to its being shown to root.
    pub shown: Vec<Duration>,
    /// From another user's request to its reply.
    pub answers: Vec<Duration>,
    /// From the start of another user's program until it is shown correctly.
    pub take_new: Vec<Duration>,
    /// The daemon's share of a processor.
    pub share: f64,
}

impl Times {
    /// Combines two measurements.
    pub fn with(&self, other: &Times) -> Times {
        let both = |one: &[Duration], other: &[Duration]| [one, other].concat();
        Times {
            shown: both(&self.shown, &other.shown),
            answers: both(&self.answers, &other.answers),
            take_new: both(&self.take_new, &other.take_new),
            share: self.share.max(other.share),
        }
    }
}

/// Only one in a hundred took longer; of fewer than that, none but the longest.
pub fn p99(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort();
    times[(times.len() - 1) * 99 / 100]
}

/// Returns the CPU time of a process.
pub fn cpu(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
    let fields: Vec<&str> = stat.rsplit_once(')').expect("a name").1.split_ascii_whitespace().collect();
    let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().expect("a number")).sum();
    Duration::from_millis(ticks * 10)
}

/// Requests the list of processes again and again as any user, and prints the duration of each.
pub fn asks_now_and_then(control: &Path) -> ! {
    loop {
        let began = Instant::now();
        let mut answer = String::new();
        if let Ok(mut stream) = UnixStream::connect(control) {
            let _ = stream.write_all(b"GET /v1/ps HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
            let _ = stream.read_to_string(&mut answer);
        }
        let is_answered = answer.starts_with("HTTP/1.1 200") && answer.contains("\"processes\"");
        println!(
            "asked {} {}",
            began.elapsed().as_micros(),
            if is_answered { "and told" } else { "in vain" }
        );
        std::thread::sleep(Duration::from_millis(25));
    }
}

/// The well-behaved programs and the daemon.
pub struct Scene {
    pub machine: Machine,
    pub daemon: Daemon,
    /// Root's well-behaved program.
    pub mixer: Mixer,
    /// Address of its first allocation.
    pub address: u64,
    pub held: u64,
    asks: Job,
}

impl Scene {
    pub fn new() -> Self {
        Scene::with(CONFIG)
    }

    pub fn with(config: &str) -> Self {
        let machine = Machine::new(&["devices=1", "memory=64G"]);
        let daemon = Daemon::start(&machine, "daemon", config);
        Scene::on(machine, daemon)
    }

    pub fn on(machine: Machine, daemon: Daemon) -> Self {
        // The machine is everybody's.
        for path in [machine.sim(), machine.dir.join("truth")] {
            drop(File::options().append(true).create(true).open(&path).expect("a file"));
            std::fs::set_permissions(&path, Permissions::from_mode(0o666)).expect("root may");
        }
        let mut mixer = Mixer::start(&machine, &daemon);
        let address = mixer.ok("device 0; tag honest; alloc first 96M").number;
        let control = daemon.runtime.join("control.sock");
        let asks = play(ANYBODY, "asks now and then", &[("CONTROL", control.as_ref())]);
        let scene = Scene { machine, daemon, mixer, address, held: 96 * MIB, asks };
        scene.is_exact("at the beginning");
        scene
    }

    pub fn status(&self, key: &str) -> u64 {
        let text =
            std::fs::read_to_string(format!("/proc/{}/status", self.daemon.job.pid())).expect("it lives");
        let line = text.lines().find_map(|line| line.strip_prefix(key)).expect("a line");
        line.split_whitespace().nth(0).and_then(|word| word.parse().ok()).expect("a number")
    }

    pub fn cpu(&self) -> Duration {
        cpu(self.daemon.job.pid())
    }

    /// Returns the median duration of another user's requests, over this time.
    pub fn answer_time(&self, time: Duration) -> Duration {
        let (began, mut times) = (Instant::now(), Vec::new());
        while began.elapsed() < time {
            let asked = Instant::now();
            self.daemon.asked("/v1/ps").expect("an answer");
            times.push(asked.elapsed());
            std::thread::sleep(Duration::from_millis(10));
        }
        times.sort();
        times[times.len() / 2]
    }

    pub fn fds(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.daemon.job.pid())).expect("it lives").count()
    }

    pub fn metric(&self, series: &str) -> f64 {
        let text = self.daemon.asked("/v1/metrics").expect("metrics");
        let text = text.as_str().expect("a text");
        let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {series}"))
    }

    pub fn row(&self, pid: u32) -> Option<Value> {
        let ps = self.daemon.asked("/v1/ps")?;
        ps["processes"].as_array()?.iter().find(|row| row["pid"] == pid).cloned()
    }

    pub fn doctor(&self, arguments: &[&str]) -> String {
        let output =
            self.daemon.ctl(&self.machine, &[&["doctor"], arguments].concat()).output().expect("it runs");
        String::from_utf8_lossy(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// Asserts that the daemon's figures of the well-behaved program equal the machine's, to the byte.
    pub fn is_exact(&self, when: &str) {
        self.shows(self.mixer.pid(), self.held, &format!("the well-behaved program as it is {when}"));
    }

    fn shows(&self, pid: u32, held: u64, what: &str) {
        until(60, what, || {
            let row = self.row(pid)?;
            let truths = self.machine.latest_truth();
            let truth = truths.iter().rev().find(|truth| truth.pid == pid && !truth.is_end())?;
            let flags = row["flags"].as_array()?;
            let is_well = flags.iter().all(|flag| flag == "covered");
            let is_so = truth.tracked == held as i64
                && row["tracked_bytes"] == truth.tracked
                && row["used_bytes"] == truth.used;
            (is_well && is_so).then_some(())
        });
    }

    /// Starts another user's program, waits until the daemon shows its exact bytes, and returns the duration.
    fn newcomer(&self) -> Duration {
        let began = Instant::now();
        let mut command = Mixer::command(&self.machine, &self.daemon);
        let mut mixer = Mixer::run(command.uid(ANYBODY).gid(ANYBODY));
        mixer.ok(&format!("device 0; tag newcomer; alloc mine {NEW}"));
        self.shows(mixer.pid(), NEW, "a newcomer as it is");
        let took = began.elapsed();
        mixer.end();
        took
    }

    /// Asserts that the process's owner and root see its data marked as unreliable.
    pub fn is_marked(&self, pid: u32, is_partial: bool, part: &str) {
        let doctor = self.doctor(&[&pid.to_string()]);
        let marks = ["process.limit", "process.odd", "process.lost"];
        assert!(marks.iter().any(|mark| doctor.contains(mark)), "{part}: {doctor}");
        // A process without memory, because names took its whole share, is in no list.
        if let Some(row) = self.row(pid).filter(|row| is_partial && row["tracked_bytes"] != 0) {
            let flags = row["flags"].as_array().expect("flags");
            assert!(flags.iter().any(|flag| flag == "partial"), "{part}: {row}");
        }
    }

    /// Measures delays: this many allocations of the well-behaved program, two new programs, and concurrent requests.
    pub fn measured(&mut self, count: u64) -> Times {
        let mut times = Times::default();
        let (began_at, before) = (Instant::now(), self.cpu());
        self.asks.hear();
        times.take_new.extend([self.newcomer(), self.newcomer()]);
        let pid = self.mixer.pid();
        for n in 0..count {
            let began = Instant::now();
            self.mixer.ok(&format!("alloc l{n} 1M"));
            self.held += MIB;
            until(60, "an allocation to be shown", || {
                self.row(pid).filter(|row| row["tracked_bytes"] == self.held).map(drop)
            });
            times.shown.push(began.elapsed());
        }
        let asked = self.asks.hear();
        times.share = (self.cpu() - before).as_secs_f64() / began_at.elapsed().as_secs_f64();
        (0..count).for_each(|n| drop(self.mixer.ok(&format!("free l{n}"))));
        self.held -= count * MIB;
        for line in asked.iter().filter_map(|line| line.strip_prefix("asked ")) {
            let took = line.strip_suffix(" and told").and_then(|took| took.parse().ok());
            times
                .answers
                .push(Duration::from_micros(took.unwrap_or_else(|| panic!("a client printed {line}"))));
        }
        times
    }

    /// Starts a hostile peer that plays a part repeatedly.
    pub fn play(&self, part: &str) -> Job {
        self.play_as(NOBODY, part, &[])
    }

    /// Plays it once and stays.
    pub fn play_once(&self, part: &str) -> Job {
        let mut liar = self.play_as(NOBODY, part, &[("ONCE", "1".as_ref())]);
        liar.wait_for("done");
        liar
    }

    pub fn play_as(&self, uid: u32, part: &str, more: &[(&str, &OsStr)]) -> Job {
        let (agents, control) =
            (self.daemon.runtime.join("agent.sock"), self.daemon.runtime.join("control.sock"));
        let victim = [self.mixer.pid().to_string(), self.address.to_string()];
        let environment: [(&str, &OsStr); 4] = [
            ("SOCKET", agents.as_ref()),
            ("CONTROL", control.as_ref()),
            ("VICTIM", victim[0].as_ref()),
            ("ADDRESS", victim[1].as_ref()),
        ];
        play(uid, part, &[&environment, more].concat())
    }
}
