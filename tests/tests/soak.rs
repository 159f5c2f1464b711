//! Everything at random, for long: threads that allocate, free what others made, fail, lose contexts and whole devices,
//! while the daemon listens. After every round the books are the machine's own, in sum and by name; in between, no sample
//! says what was not so.
//!
//! `make soak`, or `GPUMEM_SOAK_CALLS=10000000 cargo test -p gpumem-tests --release --test soak`, makes it long.
#![allow(missing_docs)]

use gpumem_ledger::ClosedSample;
use gpumem_tests::live::mixer::{compare_still, now_ns};
use gpumem_tests::live::{Compared, Daemon, Machine, Mixer, replay, until};
use std::time::{Duration, Instant};

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";
const DEVICES: usize = 2;
const THREADS: u64 = 4;

fn calls(few: u64) -> u64 {
    std::env::var("GPUMEM_SOAK_CALLS").ok().and_then(|text| text.parse().ok()).unwrap_or(few)
}

struct Soak {
    machine: Machine,
    daemon: Daemon,
    mixer: Mixer,
    /// When everything stood still: from, to, where.
    still: Vec<(u64, u64, String)>,
    /// When the driver's pools grew and shrank: what they reserve is asked for a moment later.
    pools: Vec<(u64, u64)>,
}

impl Soak {
    fn start(seed: u64, calls: u64, rounds: u64, slots: Option<&str>) -> Self {
        let keys = ["devices=2", "memory=6G", "cuda.fail_percent=2"];
        let machine = Machine::new(&keys);
        let daemon = Daemon::start(&machine, "daemon", FAST);
        let mut command = Mixer::command(&machine, &daemon);
        command.args(["soak", &seed.to_string(), &calls.to_string(), &THREADS.to_string()]);
        command.args([DEVICES.to_string(), rounds.to_string()]);
        if let Some(slots) = slots {
            command.env("GPUMEM_RING_SLOTS", slots);
        }
        let mixer = Mixer::run(&mut command);
        Soak { machine, daemon, mixer, still: Vec::new(), pools: Vec::new() }
    }

    /// The next line: calls so far, and those that failed.
    fn round(&mut self) -> (u64, u64) {
        let line = self.mixer.hear();
        let after_ns = self.mixer.looked_at(&self.machine, &self.daemon, DEVICES);
        // Again: the daemon may not have known by then that something was lost.
        self.mixer.looked_at(&self.machine, &self.daemon, DEVICES);
        self.still.push((after_ns, now_ns(), line.clone()));
        self.mixer.send("go on");
        let number = |at| -> u64 {
            let word = line.split(' ').nth(at).and_then(|word| word.parse().ok());
            word.unwrap_or_else(|| panic!("{line:?}"))
        };
        self.pools.push((number(4), number(5)));
        (number(2), number(3))
    }

    /// Its end, and what was seen. Whether records may be lost is the test's to say.
    fn end(mut self, may_lose: bool) -> Compared {
        self.mixer.end();
        until(30, "a closed run", || {
            (!self.daemon.pids(&self.machine).contains(&u64::from(self.mixer.pid()))).then_some(())
        });
        self.daemon.stop();
        let (seen, truths, pid) = (replay(&self.daemon.recording), self.machine.truth(), self.mixer.pid());
        assert_eq!(seen.rejected, 0);
        for (after_ns, before_ns, what) in &self.still {
            for ordinal in 0..DEVICES {
                compare_still(&seen, &truths, (pid, ordinal), (*after_ns, *before_ns), what);
            }
        }
        let lags = |sample: &ClosedSample| {
            self.pools.iter().any(|&(from_ns, to_ns)| sample.t1_ns > from_ns && sample.t0_ns < to_ns)
        };
        let began_ns = self.pools.first().map_or(0, |&(from_ns, _)| from_ns);
        let compared = seen.compare_sums(&truths, pid, |sample| sample.t0_ns > began_ns && !lags(sample));
        let process = seen.process(pid);
        println!("{compared:?}\n{:?}\n{:?}", process.coverage, process.odd);
        assert!(process.ended.is_some() && process.coverage.covered);
        assert_eq!(process.odd.impossible + process.odd.overflowed + process.odd.devices_beyond, 0);
        if may_lose {
            assert!(!process.coverage.partial.is_some_and(|partial| partial.state), "healed");
        } else {
            assert!(
                process.coverage.lost == 0 && process.coverage.partial.is_none(),
                "{:?}",
                process.coverage
            );
            assert_eq!(process.odd.replaced + process.odd.duplicates + process.odd.unknown_ends, 0);
        }
        let shown = self.machine.tool("show", &[]);
        assert!(shown.contains("\nviolations=0\n") && shown.contains("\nstrays=0\n"), "{shown}");
        compared
    }
}

#[test]
fn books_do_not_drift() {
    let (calls, since) = (calls(300_000), Instant::now());
    let rounds = (calls / 20_000).clamp(16, 200);
    let mut soak = Soak::start(1, calls, rounds, None);
    let (mut made, mut failed) = (0, 0);
    for _ in 0..=rounds {
        (made, failed) = soak.round();
    }
    let ran = since.elapsed();
    let compared = soak.end(calls > 1_000_000);
    println!(
        "{made} calls, {failed} of them failed, {rounds} rounds in {ran:?}; compared in {:?}",
        since.elapsed() - ran
    );
    assert!(made >= calls && failed > made / 100);
    assert!(compared.exact >= rounds, "{compared:?}");
}

/// The daemon is stopped again and again, until what it was not told does not fit into the ring any more.
#[test]
fn what_was_lost_is_made_good() {
    let (calls, rounds) = (calls(200_000), 12);
    let mut soak = Soak::start(2, calls, rounds, Some("4096"));
    for round in 0..=rounds {
        let is_stopped = round % 3 == 1;
        if is_stopped {
            soak.daemon.job.signal("STOP");
            std::thread::sleep(Duration::from_millis(400));
            soak.daemon.job.signal("CONT");
        }
        soak.round();
    }
    let compared = soak.end(true);
    assert!(compared.exact >= rounds, "{compared:?}");
}
