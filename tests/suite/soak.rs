//! Long random tests with the simulated machine as oracle: a program's driver calls on a node, and a node over an hour.
//!
//! # The plan of the node (`node_with_random_programs_and_faults`)
//!
//! **Actors.** A real daemon on a simulated machine of two GPUs, 64 slots for programs, two threads of clients, and a
//! manager that keeps the daemon's sockets and connections as systemd does (or does not). Of the programs (tests/mixer,
//! tests/trainer) most have the agent. Some have a ring of 64 records, which fills at once; some have no agent.
//!
//! **Actions.** In each turn one slot acts. An empty slot starts a program. A program allocates or frees memory of some
//! kind (direct, of the driver's pool, mapped, segment and block, managed, pinned, registered, a module), under a name,
//! another name, or none; fails to allocate; allocates and frees hundreds of times; forks (a child that tries to use
//! CUDA, one that outlives it); starts a short program; executes itself again in the same process; or ends: by exit, by
//! _exit, by SIGSEGV, abort and other signals, by SIGKILL, by SIGKILL in the middle of a call.
//!
//! **Faults.** One fault at a time, each once before any repeats (tests/src/live/soak/fault.rs). The daemon ends (asked
//! or killed; with everything kept or nothing), is stopped, reads a good and a bad configuration. Its disk is full; a
//! call of NVML hangs, a GPU is lost, NVML is released, its reader is killed; 24 programs are killed at once; 8 are
//! stopped. The turns continue meanwhile. All the time clients scrape, load the page, and call gpumemctl (ps, report,
//! explain, runs, doctor, record, mark). Some disconnect in the middle: half a request, a killed command, garbage on
//! the agents' socket.
//!
//! **Checks.** After each fault everything pauses. Then, for each process on each device: `used`, `tracked`, its names,
//! idle memory, the gap and memory outside the sum equal the machine's, to the byte, in the runs and in a scrape.
//! Records booked and lost add up to the number that the agent issued, and the agent's losses are counted (exactly,
//! unless a daemon was killed or kept nothing). The daemon's memory stays below a limit, its children are not zombies,
//! and its log has only warnings that a fault explains. Every client got a reply while there was a daemon, and no call
//! waited.
//!
//! At the end, when all programs are gone: the daemon has as many descriptors as before the first, the runtime
//! directory is empty, and each process has its run in the store. Every run is readable and ends as its process did,
//! and the machine reports no violation of its rules. Over an hour: the daemon's memory grows by less than 1 MiB an
//! hour in the second half, in which one daemon runs.
//!
//! **Forms.** A minute in CI. `make soak` is ten, `make soak HOURS=1` or `SOAK_SECONDS=3600` an hour. The seed is
//! printed; the same `SOAK_SEED` gives the same script of decisions, as far as timing allows.
//!
//! # Calls
//!
//! The other two tests: one program with four threads that allocate, free each other's memory, fail, lose contexts and
//! whole devices, while the daemon is listening. After every round the books equal the machine's, in sum and by name;
//! in between, no sample is wrong. `make soak` makes ten million calls; `GPUMEM_SOAK_CALLS` sets the number.
//!
//! # Crowds (`crowd`)
//!
//! Programs that end within milliseconds, started at 200 a second, hand-made and with the agent; and programs
//! that all live at once. Each has a run. `GPUMEM_SOAK_PROGRAMS=10000` sets the number; 10,000 live ones need 30,300
//! open files (`ulimit -n`).
mod crowd;

use gpumem_ledger::ClosedSample;
use gpumem_tests::live::mixer::{compare_still, now_ns};
use gpumem_tests::live::prometheus::free_address;
use gpumem_tests::live::soak::look::{Looked, look};
use gpumem_tests::live::soak::manager::{Manager, Start};
use gpumem_tests::live::soak::{Clients, Fault, Health, Injector, Random, Troupe, end, health};
use gpumem_tests::live::{Compared, Daemon, Machine, Mixer, replay, until};
use std::net::SocketAddr;
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
    /// Intervals without any change: from, to, place.
    still: Vec<(u64, u64, String)>,
    /// Times at which the driver's pools grew or shrank: their reserved bytes are read a moment later.
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

    /// Ends it and returns the comparison. The test decides whether records may be lost.
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
            assert!(!process.coverage.partial_state, "healed");
        } else {
            assert!(
                process.coverage.lost == 0 && !process.coverage.partial_history,
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
        "{made} calls, {failed} failed, {rounds} rounds in {ran:?}; compared in {:?}",
        since.elapsed() - ran
    );
    assert!(made >= calls && failed > made / 100);
    assert!(compared.exact >= rounds, "{compared:?}");
}

/// The daemon is stopped again and again, until unread records overflow the ring.
#[test]
fn lost_records_are_repaired_by_a_resync() {
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

const PLACES: usize = 64;
/// Memory limit of a daemon with 64 agents, under any fault.
const CEILING_KIB: u64 = 96 << 10;
/// Memory limit of the process that reads NVML. Most is the program's own code, which is three times as large in a
/// debug build.
const CHILD_CEILING_KIB: u64 = if cfg!(debug_assertions) { 24 << 10 } else { 16 << 10 };
const CHILD_FDS: usize = 16;
/// Allowed growth in an hour.
const GROWTH_MIB: f64 = 1.0;
/// In the second half of a long soak all programs end at this interval.
const EMPTY_EVERY: Duration = Duration::from_secs(200);
const NODE: &str =
    "[nvml]\nlist_every_s = 0.25\nlist_budget = 0.5\ncall_timeout_s = 1.5\nhang_retry_s = 1.0\n";

struct Node {
    machine: Machine,
    manager: Manager,
    troupe: Troupe,
    clients: Clients,
    injector: Injector,
    health: Health,
    looked: Looked,
    random: Random,
    http: SocketAddr,
}

impl Node {
    fn turns(&mut self, from: u64, more: u64) {
        for _ in 0..from + self.random.below(more) {
            self.troupe.act(&self.machine, &mut self.random);
            std::thread::sleep(Duration::from_millis(4));
        }
        self.troupe.tell(&self.clients);
    }

    /// Ends all programs, reads the daemon's memory without any process, and starts others.
    fn change_all(&mut self) {
        self.troupe.end_all(&mut self.random);
        self.looked.hear_of_ends(&self.machine);
        end::wait_until_nobody_is_known(&self.manager);
        println!("no process: {:?}", self.health.read_alone(&self.manager, self.http));
        self.troupe.fill(&self.machine, &mut self.random);
    }

    /// Injects a fault, runs turns around it, and checks everything.
    fn round(&mut self) {
        let fault = self.injector.draw(&mut self.random);
        let since = Instant::now();
        self.turns(20, 40);
        let world = (&self.machine, &mut self.manager, &self.clients);
        self.injector.begin(fault, world, (&mut self.troupe, &mut self.random));
        self.turns(40, 160);
        self.injector.end(fault, &self.machine, &mut self.manager, &self.clients);
        self.turns(5, 40);
        let moved = since.elapsed();
        look(&self.machine, &self.manager, &mut self.troupe, self.http, &mut self.looked);
        let reading = self.health.read(&self.manager, self.http);
        println!("{fault:?}: {moved:.1?}, known after {:.1?}; {reading:?}", since.elapsed() - moved);
        assert!(reading.rss_kib[0] < CEILING_KIB && reading.rss_kib[1] < CHILD_CEILING_KIB, "{reading:?}");
        assert!(reading.fds[1] <= CHILD_FDS, "{reading:?}");
        let daemon = self.manager.daemon().job.pid();
        until(10, "a daemon without zombies", || {
            health::children(daemon).iter().all(|(_, is_zombie)| !is_zombie).then_some(())
        });
        assert_eq!(self.clients.wrong(), [] as [String; 0]);
        assert_eq!(health::unexplained(&self.manager, &self.injector.injected), [] as [String; 0]);
    }
}

fn setting(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

#[test]
fn node_with_random_programs_and_faults() {
    let (seed, seconds) = (setting("SOAK_SEED", 1), setting("SOAK_SECONDS", 60));
    println!("SOAK_SEED={seed} SOAK_SECONDS={seconds}");
    let machine = Machine::new(&["devices=2"]);
    let http = free_address();
    let mut manager = Manager::new(&machine, NODE, http);
    manager.start(&machine, Start::Kept);
    let began = Instant::now(); // whatever had to be built is there
    let daemon = manager.daemon().job.pid();
    let mut health = Health::default();
    std::thread::sleep(Duration::from_secs(1)); // the descriptors that it opens anyway
    let base = health.read(&manager, http);
    println!("alone: {base:?} {:?}", health::fds(daemon));
    let clients = Clients::start(&machine, manager.runtime(), http, seed, Duration::from_millis(150));
    let troupe = Troupe::new(PLACES, DEVICES, manager.socket());
    let injector = Injector::new(&manager, http);
    let (looked, random) = (Looked::default(), Random::new(seed));
    let mut node = Node { machine, manager, troupe, clients, injector, health, looked, random, http };
    node.troupe.fill(&node.machine, &mut node.random);
    println!("{PLACES} programs after {:.1?}", began.elapsed());
    look(&node.machine, &node.manager, &mut node.troupe, http, &mut node.looked);

    let (half, whole) = (Duration::from_secs(seconds / 2), Duration::from_secs(seconds));
    let mut rounds = 0;
    let is_long = seconds >= 1800;
    while began.elapsed() < whole || rounds < node.injector.pack() {
        if is_long && began.elapsed() > half && node.injector.pack() > Fault::REST.len() {
            node.injector.spare_the_daemon();
        }
        if is_long && began.elapsed() > half + EMPTY_EVERY * (node.health.alone.len() as u32 + 1) {
            node.change_all();
        }
        node.round();
        rounds += 1;
    }
    let Looked { times, rows, counted, lost, longest, .. } = node.looked;
    println!(
        "{rounds} rounds in {:.1?}: {times} moments of rest, {rows} rows, records of {counted} processes counted one by one, \
         {lost} lost by those that live, known after {longest:.1?} at most",
        began.elapsed()
    );
    println!("clients: answered, gone before, longest scrape: {:?}", node.clients.counts());
    node.clients.end();
    node.troupe.end_all(&mut node.random);
    node.looked.hear_of_ends(&node.machine);
    end::wait_until_nobody_is_known(&node.manager);
    println!("no process: {:?}", node.health.read_alone(&node.manager, node.http));
    end::check(&node.machine, &mut node.manager, (&node.troupe, &node.looked.ends), &base);
    assert_eq!(node.clients.wrong(), [] as [String; 0]);
    assert_eq!(health::unexplained(&node.manager, &node.injector.injected), [] as [String; 0]);
    let slope = node.health.slope_mib_per_h();
    println!(
        "{} processes, {} lives of the daemon, heap {slope:?} MiB an hour, all in {:.1?}",
        node.troupe.lives.len(),
        node.manager.lives,
        began.elapsed()
    );
    assert!(!is_long || slope.is_some_and(|slope| slope < GROWTH_MIB), "{slope:?}");
}
