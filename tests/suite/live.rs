//! The daemon, the agent and NVML on the simulated machine, sample by sample compared with the machine's own truth.
use gpumem_tests::live::daemon::ask;
use gpumem_tests::live::hostile::{Peer, Shared, ordered, record, unordered};
use gpumem_tests::live::programs::programs;
use gpumem_tests::live::{Daemon, Job, Machine, Mixer, replay, try_replay, until};
use gpumem_wire::{Body, DeviceIdKind, MemoryKind, Reading, Stamp};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const TWO: &[&str] = &["devices=2", "gpu0.memory=16G", "gpu1.memory=16G"];

/// Waits until NVML has listed the process `times` more.
fn listed(machine: &Machine, job: &Job, times: usize) {
    let count = || machine.truth().iter().filter(|truth| truth.pid == job.pid() && !truth.is_end()).count();
    let goal = count() + times;
    until(60, "lists of processes", || (count() >= goal).then_some(()));
}

/// Waits until the daemon's recording has this many exact samples of the process. On a busy machine many wait for the agent.
fn exact(machine: &Machine, daemon: &Daemon, job: &Job, samples: u64) {
    until(60, "exact samples", || {
        listed(machine, job, 10); // a replay takes the time of many samples
        let seen = try_replay(&daemon.recording).ok()?;
        let compared = seen.compare(&machine.truth(), Some(job.pid()));
        (compared.exact >= samples).then_some(())
    });
}

/// A trainer that runs until it is signalled to finish, slowly enough for an unoptimised daemon on a busy machine:
/// records that the daemon cannot read in time are lost and counted.
const LONG: &[&str] = &["--steps", "1000000", "--step-ms", "20"];

fn training(machine: &Machine, daemon: &Daemon, arguments: &[&str]) -> Job {
    let mut trainer = Job::start(&mut machine.trainer(&daemon.runtime, arguments));
    trainer.wait_for("ready");
    trainer
}

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";

#[test]
fn unknown_devices_are_one_log_line_for_each_process() {
    let machine = Machine::new(TWO);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let ps = || daemon.asked("/v1/ps").unwrap_or_default();
    let count = |ps: &serde_json::Value, list: &str| ps[list].as_array().map_or(0, Vec::len);
    until(20, "the devices", || (count(&ps(), "devices") == 2).then_some(()));
    let shared = Shared::small();
    let peer = Peer::welcomed(&daemon.runtime.join("agent.sock"), &shared).expect("a welcome");
    let mut packet = Vec::new();
    for slot in 0..20_u8 {
        let (uuid_high, uuid_low, id) = (99, u64::from(slot), DeviceIdKind::Gpu);
        let total_bytes = Reading::of(1 << 40);
        let device = Body::Device { uuid_high, uuid_low, total_bytes, ordinal: 0, id, name: "invented" };
        packet.extend(record(Stamp { device: slot, ..unordered() }, device));
        let address = u64::from(slot + 1) << 32;
        let memory = MemoryKind::Device;
        let body = Body::AllocEnd { address, bytes: 4096, pool: 0, took_us: 1, memory };
        packet.extend(record(Stamp { device: slot, ..ordered(u64::from(slot) + 1) }, body));
    }
    packet.extend(record(unordered(), Body::Watermark { last_seq: 20, in_flight_since_ns: 0 }));
    assert!(peer.send(&packet));
    let ps = until(20, "its claims", || {
        let ps = ps();
        (ps["claims"][0]["tracked_bytes"] == 20 * 4096).then_some(ps)
    });
    assert_eq!((count(&ps, "devices"), count(&ps, "processes"), count(&ps, "claims")), (2, 0, 1), "{ps}");
    let claim = &ps["claims"][0];
    assert_eq!((&claim["pid"], &claim["devices"]), (&std::process::id().into(), &20.into()), "{ps}");
    let text = daemon.ctl(&machine, &["ps"]).output().expect("gpumemctl runs").stdout;
    let text = String::from_utf8_lossy(&text).into_owned();
    let lines =
        text.lines().filter(|line| line.contains("reports 20 devices that NVML does not have")).count();
    assert_eq!((lines, text.contains("1,048,576")), (1, false), "{text}");
}

#[test]
fn three_covered_and_one_uncovered_process_on_two_devices() {
    let machine = Machine::new(TWO);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let with = |extra: &[&'static str]| [LONG, extra].concat();
    let mut covered = [
        training(&machine, &daemon, &with(&["--seed", "1", "--devices", "0"])),
        training(&machine, &daemon, &with(&["--seed", "2", "--devices", "1", "--threads", "3"])),
        training(&machine, &daemon, &with(&["--seed", "3", "--devices", "0,1"])),
    ];
    let mut uncovered = Job::start(&mut machine.bare_trainer(&with(&["--seed", "4", "--devices", "0"])));
    uncovered.wait_for("ready");
    covered.iter().for_each(|job| listed(&machine, job, 25));
    covered.iter().for_each(|job| exact(&machine, &daemon, job, 10));
    listed(&machine, &uncovered, 10);
    covered.iter_mut().for_each(Job::enough);
    uncovered.enough();
    daemon.wait_for_the_end_of(&machine, &[&covered[0], &covered[1], &covered[2], &uncovered]);
    daemon.stop();

    let (seen, truth) = (replay(&daemon.recording), machine.truth());
    assert_eq!(seen.rejected, 0);
    for job in &covered {
        let compared = seen.compare(&truth, Some(job.pid()));
        println!("{}: {compared:?}", job.pid());
        assert!(compared.exact >= 10, "{compared:?}");
        // A sample without recent data from the agent is excused: on a busy machine many are.
        // NVML may list a process before its agent's Hello, and after its Bye.
        for device in 0..2 {
            let samples = seen.samples.iter().filter(|(key, on, _)| key.pid == job.pid() && *on == device);
            let covered: Vec<bool> = samples.map(|(.., sample)| sample.tracked_bytes.is_some()).collect();
            let edges = covered.windows(2).filter(|pair| pair[0] != pair[1]).count();
            let ends_bare = |end: Option<&bool>| usize::from(end == Some(&false));
            let bare_ends = ends_bare(covered.first()) + ends_bare(covered.last());
            assert!(covered.is_empty() || edges == bare_ends, "uncovered in between: {covered:?}");
        }
        let process = seen.process(job.pid());
        assert_eq!(process.odd, Default::default(), "nothing odd");
        let coverage = &process.coverage;
        assert!(coverage.covered && !coverage.partial_history && coverage.lost == 0, "{coverage:?}");
        assert!(process.ended.is_some(), "its end was seen");
    }
    let compared = seen.compare(&truth, Some(uncovered.pid()));
    println!("{}: {compared:?}", uncovered.pid());
    assert!(compared.uncovered >= 5 && compared.exact + compared.torn == 0, "{compared:?}");
    assert!(!seen.process(uncovered.pid()).coverage.covered);
}

#[test]
fn successor_of_a_killed_daemon_recovers_all_state() {
    let machine = Machine::new(TWO);
    let mut first = Daemon::start(&machine, "first", FAST);
    let mut trainer = training(&machine, &first, LONG);
    exact(&machine, &first, &trainer, 3);
    first.job.signal("KILL");
    first.job.end();
    std::thread::sleep(Duration::from_millis(300)); // the trainer goes on without one
    let mut second = Daemon::start(&machine, "second", FAST);
    exact(&machine, &second, &trainer, 10);
    trainer.enough();
    second.wait_for_the_end_of(&machine, &[&trainer]);
    second.stop();
    let truth = machine.truth();
    for (daemon, at_least) in [(&first, 3), (&second, 10)] {
        let compared = replay(&daemon.recording).compare(&truth, Some(trainer.pid()));
        println!("{compared:?}");
        assert!(compared.exact >= at_least, "{compared:?}");
    }
}

#[test]
fn full_ring_loses_history_but_no_state() {
    let machine = Machine::new(TWO);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let mut trainer = Job::start(machine.trainer(&daemon.runtime, LONG).env("GPUMEM_RING_SLOTS", "2048"));
    trainer.wait_for("ready");
    listed(&machine, &trainer, 5);
    daemon.job.signal("STOP");
    // Until its socket and the ring are full.
    std::thread::sleep(Duration::from_millis(1500));
    daemon.job.signal("CONT");
    exact(&machine, &daemon, &trainer, 5);
    listed(&machine, &trainer, 60);
    trainer.enough();
    daemon.wait_for_the_end_of(&machine, &[&trainer]);
    daemon.stop();
    let seen = replay(&daemon.recording);
    let compared = seen.compare(&machine.truth(), Some(trainer.pid()));
    println!("{compared:?}");
    let process = seen.process(trainer.pid());
    assert!(process.coverage.lost > 0, "the ring was never full: {:?}", process.coverage);
    assert!(process.coverage.partial_history && !process.coverage.partial_state, "{:?}", process.coverage);
    assert!(compared.exact >= 5, "{compared:?}");
}

#[test]
fn stopped_daemon_does_not_stall_the_training() {
    let machine = Machine::new(TWO);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let mut trainer = training(&machine, &daemon, LONG);
    // The reference on a machine whose processors are in use.
    let other = Machine::new(TWO);
    let mut alone = Job::start(&mut other.bare_trainer(LONG));
    alone.wait_for("ready");
    listed(&machine, &trainer, 10);
    daemon.job.signal("STOP");
    std::thread::sleep(Duration::from_secs(10));
    daemon.job.signal("CONT");
    listed(&machine, &trainer, 240); // the first one before queued records are processed
    exact(&machine, &daemon, &trainer, 10);
    trainer.enough();
    alone.enough();
    daemon.wait_for_the_end_of(&machine, &[&trainer]);
    daemon.stop();
    let longest = |job: &mut Job| -> f64 {
        let printed = job.wait_for("max_us=");
        println!("{printed}");
        let value =
            printed.split("max_us=").nth(1).and_then(|text| text.split_whitespace().next()?.parse().ok());
        value.unwrap_or_else(|| panic!("{printed}"))
    };
    let (worst, bare) = (longest(&mut trainer), longest(&mut alone));
    let micros = |us: f64| Duration::from_secs_f64(us / 1e6);
    gpumem_test_support::bar(
        "the longest step beside a stopped daemon",
        micros(worst),
        micros(200_000.0 + 2.0 * bare),
    );
    let compared = replay(&daemon.recording).compare(&machine.truth(), Some(trainer.pid()));
    println!("{compared:?}");
    assert!(compared.exact >= 10, "{compared:?}");
}

#[test]
fn racing_threads_that_reuse_addresses_are_counted_exactly() {
    let machine = Machine::new(TWO);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let mut trainer =
        Job::start(&mut machine.trainer(&daemon.runtime, &["--race", "4", "--steps", "50", "--hold", "600"]));
    trainer.wait_for("holding");
    exact(&machine, &daemon, &trainer, 5);
    trainer.enough();
    daemon.stop();
    let seen = replay(&daemon.recording);
    let compared = seen.compare(&machine.truth(), Some(trainer.pid()));
    println!("{compared:?}");
    let process = seen.process(trainer.pid());
    println!("{:?} {:?}", process.coverage, process.odd);
    assert!(compared.exact + compared.torn >= 5, "{compared:?}");
    if process.coverage.lost == 0 {
        assert_eq!(process.odd, Default::default(), "nothing odd without a loss");
    }
}

#[test]
fn trainer_runs_without_daemon_and_agent() {
    let machine = Machine::new(TWO);
    let nowhere = machine.dir.join("nowhere");
    let steps = ["--steps", "20", "--step-ms", "1", "--seed", "9", "--quiet"];
    let mut alone = Job::start(&mut machine.bare_trainer(&steps));
    alone.finish();
    let mut with_agent = Job::start(&mut machine.trainer(&nowhere, &steps));
    with_agent.finish();
    let timeless = |job: &Job| -> Vec<String> {
        let of = |line: &&String| !line.starts_with("steps=") && !line.starts_with("ready ");
        job.said.iter().filter(of).cloned().collect()
    };
    assert!(!timeless(&alone).is_empty());
    assert_eq!(timeless(&alone), timeless(&with_agent), "the agent changes nothing that the program prints");
}

/// Ends a private daemon, which would otherwise wait until it is idle for some time.
struct PrivateDaemon(u64);

impl Drop for PrivateDaemon {
    fn drop(&mut self) {
        let _ = std::process::Command::new("kill").arg(self.0.to_string()).status();
    }
}

#[test]
fn report_without_a_name_is_of_my_last_run_under_a_private_daemon() {
    let machine = Machine::new(&["devices=1"]);
    let runtime = machine.dir.join("user");
    std::fs::create_dir(&runtime).expect("a folder");
    let ctl = |arguments: &[&str]| {
        let mut ctl = machine.command(programs().ours.join("gpumemctl"));
        ctl.args(arguments).env("XDG_RUNTIME_DIR", &runtime);
        ctl.env_remove("GPUMEM_STORE").env_remove("XDG_STATE_HOME");
        let output = ctl.output().expect("gpumemctl runs");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        let (printed, complaint) = (text(output.stdout), text(output.stderr));
        assert!(output.status.success(), "{arguments:?}: {complaint}");
        (printed, complaint)
    };
    let trainer = programs().fake.join("bin/trainer");
    let script = format!("echo pid $$.; exec '{}' --steps 20 --step-ms 1", trainer.display());
    // On a busy machine the daemon may take longer than `run` waits for it.
    ctl(&["run", "--quiet", "--", "true"]);
    let doctor = until(60, "a private daemon", || ask(&runtime.join("gpumem/control.sock"), "/v1/doctor"));
    let _daemon = PrivateDaemon(doctor["pid"].as_u64().expect("its pid"));
    for _ in 0..3 {
        let (printed, _) = ctl(&["run", "--quiet", "--", "sh", "-c", &script]);
        let pid = printed.split(['.', '\n']).find(|line| line.starts_with("pid ")).expect("its pid");
        let (report, chosen) = ctl(&["report"]);
        assert!(report.contains(&format!("  {pid} ")), "{pid}: {chosen}{report}");
        assert!(chosen.starts_with("your newest run: ") && chosen.contains(pid), "{pid}: {chosen}");
    }
}

/// Returns the line of a report that begins with `start`, with its continuation lines.
fn line(text: &str, start: &str) -> String {
    let mut lines = text.lines().skip_while(|line| !line.starts_with(start));
    let first = lines.next().unwrap_or_else(|| panic!("{start}: {text}"));
    lines.take_while(|line| line.starts_with(' ')).fold(first.to_owned(), |all, line| all + " " + line.trim())
}

/// Returns the number at the begin of a text such as `81,920 free`.
fn number(text: &str) -> i64 {
    let word = text.trim().split([' ', ';']).next().unwrap_or_default().replace(',', "");
    word.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn device_line_of_a_growing_process_has_its_tenant_and_adds_up() {
    let machine = Machine::new(&["devices=1", "memory=80G"]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let (mut tenant, mut growing) = (Mixer::start(&machine, &daemon), Mixer::start(&machine, &daemon));
    tenant.ok("device 0");
    growing.ok("device 0");
    let (pid, tenant) = (growing.pid().to_string(), tenant);
    let held = format!(" + 498 pid {}", tenant.pid());
    let report = || {
        let output = daemon.ctl(&machine, &["report", &pid]).output().expect("gpumemctl runs");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    until(60, "the tenant in the report", || report().contains(&held).then_some(()));
    let is_over = AtomicBool::new(false);
    let (mut reports, mut sums) = (0, std::collections::BTreeSet::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                (0..64).for_each(|block| drop(growing.ok(&format!("alloc a{block} 1G"))));
                (0..64).for_each(|block| drop(growing.ok(&format!("free a{block}"))));
            }
        });
        // Ends the other thread also if an assertion fails.
        struct Over<'a>(&'a AtomicBool);
        impl Drop for Over<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _over = Over(&is_over);
        let since = Instant::now();
        while since.elapsed() < Duration::from_secs(20) {
            let text = report();
            let line = line(&text, "device (MiB): ");
            reports += 1;
            if line.ends_with("not when the process was read: unaccounted is unknown") {
                continue;
            }
            let (parts, sum) = line["device (MiB): ".len()..].split_once(" = ").expect("a sum");
            // A part that was read earlier than the process may be negative.
            let parts = parts.replace(" - ", " + -");
            assert_eq!(parts.split(" + ").map(number).sum::<i64>(), number(sum), "{line}");
            assert_eq!(number(sum), 80 << 10, "{line}");
            assert!(line.contains(&held), "{line}");
            sums.insert(number(&parts));
        }
    });
    println!("{reports} reports, {} sizes of the growing process", sums.len());
    assert!(sums.len() > 3, "it grew: {sums:?}");
}
