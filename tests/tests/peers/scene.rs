//! The honest program, and how the daemon is.

use gpumem_tests::live::hostile::{NOBODY, play};
use gpumem_tests::live::{Daemon, Job, Machine, Mixer, until};
use serde_json::Value;
use std::ffi::OsStr;
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;
/// Of the daemon, whatever anybody does: what it may remember (below), and the rest of it.
pub const MOST_RSS_MIB: u64 = 128;
const CONFIG: &str = "[agent]\nmemory_mib = 48\nmemory_mib_per_uid = 24\nconnections_per_uid = 256\n\
                      connections_without_hello = 128\n[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n\
                      [metrics]\nlisten = \"off\"\n";

/// The honest program, and how the daemon is.
pub struct Scene {
    pub machine: Machine,
    pub daemon: Daemon,
    pub mixer: Mixer,
    pub held: u64,
}

impl Scene {
    pub fn new() -> Self {
        let machine = Machine::new(&["devices=1", "memory=64G"]);
        let daemon = Daemon::start(&machine, "daemon", CONFIG);
        let mut mixer = Mixer::start(&machine, &daemon);
        mixer.ok("device 0; tag honest; alloc first 96M");
        let mut scene = Scene { machine, daemon, mixer, held: 96 * MIB };
        scene.is_exact("at the beginning");
        scene
    }

    pub fn status(&self, key: &str) -> u64 {
        let text =
            std::fs::read_to_string(format!("/proc/{}/status", self.daemon.job.pid())).expect("it lives");
        let line = text.lines().find_map(|line| line.strip_prefix(key)).expect("a line");
        line.split_whitespace().nth(0).and_then(|word| word.parse().ok()).expect("a number")
    }

    /// What it has had of a processor.
    pub fn cpu(&self) -> Duration {
        let path = format!("/proc/{}/stat", self.daemon.job.pid());
        let stat = std::fs::read_to_string(path).expect("it lives");
        let fields: Vec<&str> = stat.rsplit_once(')').expect("a name").1.split_ascii_whitespace().collect();
        let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().expect("a number")).sum();
        Duration::from_millis(ticks * 10)
    }

    /// How long an answer takes that is for somebody else: the middle of many, asked for in so much time.
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

    /// What the daemon shows of the honest program is what the machine holds, to the byte.
    pub fn is_exact(&mut self, when: &str) {
        let pid = self.mixer.pid();
        until(60, &format!("the honest program as it is {when}"), || {
            let row = self.row(pid)?;
            let truths = self.machine.latest_truth();
            let truth = truths.iter().rev().find(|truth| truth.pid == pid && !truth.is_end())?;
            let flags = row["flags"].as_array()?;
            let is_well = flags.iter().all(|flag| flag == "covered");
            let is_so = truth.tracked == self.held as i64
                && row["tracked_bytes"] == truth.tracked
                && row["used_bytes"] == truth.used;
            (is_well && is_so).then_some(())
        });
    }

    /// Whose process it is, and root, see that it is not to be believed.
    pub fn is_marked(&self, pid: u32, part: &str) {
        let doctor = self.doctor(&[&pid.to_string()]);
        let marks = ["process.limit", "process.odd", "process.lost"];
        assert!(marks.iter().any(|mark| doctor.contains(mark)), "{part}: {doctor}");
        // One that holds nothing, because all of its share went into names, is in no list.
        if let Some(row) = self.row(pid).filter(|row| row["tracked_bytes"] != 0) {
            let flags = row["flags"].as_array().expect("flags");
            assert!(flags.iter().any(|flag| flag == "partial"), "{part}: {row}");
        }
    }

    /// From an allocation to its being shown: the middle of several.
    pub fn latency(&mut self) -> Duration {
        let mut times = Vec::new();
        for n in 0..9 {
            let began = Instant::now();
            self.mixer.ok(&format!("alloc l{n} 1M"));
            self.held += MIB;
            let pid = self.mixer.pid();
            until(60, "an allocation to be shown", || {
                self.row(pid).filter(|row| row["tracked_bytes"] == self.held).map(drop)
            });
            times.push(began.elapsed());
        }
        for n in 0..9 {
            self.mixer.ok(&format!("free l{n}"));
        }
        self.held -= 9 * MIB;
        times.sort();
        times[4]
    }

    pub fn play(&self, part: &str) -> Job {
        let (agents, control) =
            (self.daemon.runtime.join("agent.sock"), self.daemon.runtime.join("control.sock"));
        let victim = self.mixer.pid().to_string();
        let environment: [(&str, &OsStr); 3] =
            [("SOCKET", agents.as_ref()), ("CONTROL", control.as_ref()), ("VICTIM", victim.as_ref())];
        play(NOBODY, part, &environment)
    }
}
