//! Thousands of programs: many that end at once, and many that live at once.
//!
//! `GPUMEM_SOAK_PROGRAMS` sets the number (10,000 is the supported number); few by default. `GPUMEM_SOAK_RATE` sets how many start
//! in a second, for machines that cannot run 200. The daemon's resources are printed.

use gpumem_model::run::State;
use gpumem_runs::store::{RunSummary, Store};
use gpumem_tests::live::{Daemon, Machine, until};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const CROWD: &str = env!("CARGO_BIN_EXE_crowd");
fn number(variable: &str, default: usize) -> usize {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn programs(few: usize) -> usize {
    number("GPUMEM_SOAK_PROGRAMS", few)
}

/// Returns how many programs start in a second.
fn rate() -> String {
    number("GPUMEM_SOAK_RATE", 200).to_string()
}

/// Counts the runs in the store: all, and complete ones of ended processes.
fn stored(machine: &Machine) -> (usize, usize) {
    let Ok(store) = Store::open_read_only(machine.dir.join("runs.sqlite")) else { return (0, 0) };
    let runs = store.list().unwrap_or_default();
    let is_complete = |run: &&RunSummary| run.events > 0 && !matches!(run.state, State::Open);
    (runs.len(), runs.iter().filter(is_complete).count())
}

/// What the daemon has used: MiB of memory now and at most, seconds of processor time, descriptors.
fn used(daemon: &Daemon) -> String {
    let proc = |name: &str| format!("/proc/{}/{name}", daemon.job.pid());
    let status = std::fs::read_to_string(proc("status")).expect("it lives");
    let mib = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
        line.split_whitespace().next().and_then(|word| word.parse::<u64>().ok()).unwrap_or(0) >> 10
    };
    let stat = std::fs::read_to_string(proc("stat")).expect("it lives");
    let fields: Vec<&str> = stat.rsplit_once(')').expect("a name").1.split_ascii_whitespace().collect();
    let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().expect("a number")).sum();
    let files = std::fs::read_dir(proc("fd")).expect("it lives").count();
    let (now, most) = (mib("VmRSS:"), mib("VmHWM:"));
    format!("{now} MiB, {most} at most, {:.2} s of a processor, {files} descriptors", ticks as f64 / 100.0)
}

/// Metric series that count refused, dropped or late items, without zeros.
fn losses(daemon: &Daemon) -> Vec<String> {
    let text = daemon.asked("/v1/metrics").expect("an answer").to_string();
    let words = ["refused_total", "dropped_total", "late_total", "failures_total", "skipped_total"];
    let lines = text
        .split("\\n")
        .filter(|line| !line.starts_with('#') && words.iter().any(|word| line.contains(word)));
    lines.filter(|line| !line.ends_with(" 0")).map(str::to_owned).collect()
}

/// Starts `count` of `command`, and returns how many succeeded.
fn start(count: usize, command: &mut Command) -> usize {
    let output = command.stdin(Stdio::null()).output().expect("crowd runs");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    // The last line is crowd's.
    let printed = printed.lines().last().unwrap_or_default();
    println!("{printed}");
    assert!(output.status.success(), "{printed} {}", String::from_utf8_lossy(&output.stderr));
    let succeeded = printed.split(' ').next().and_then(|word| word.parse().ok());
    succeeded.unwrap_or_else(|| panic!("{printed} of {count}"))
}

/// Checks that each process has one run, and no other run exists. Ends the daemon.
fn each_has_a_run(machine: &Machine, daemon: &mut Daemon, printed: usize) {
    let mut last = (0, 0);
    // Thousands take minutes on a slow machine; no progress for a minute means that some are missing.
    let mut moved = Instant::now();
    while last.1 < printed && moved.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(100));
        let now = stored(machine);
        if now != last {
            (last, moved) = (now, Instant::now());
        }
    }
    println!("{} of {printed} have a run, {} an ended one; {}", last.0, last.1, used(daemon));
    println!("{:#?}", losses(daemon));
    assert_eq!(last, (printed, printed));
    // At its end the daemon also writes the runs of processes for whose agents it still waits.
    daemon.stop();
    assert_eq!(stored(machine), (printed, printed));
}

#[test]
fn every_short_program_whose_hello_was_sent_has_a_run() {
    let count = programs(400);
    let machine = Machine::new(&["devices=1"]);
    let mut daemon = Daemon::start(&machine, "daemon", "[nvml]\nlibrary = \"/nonexistent\"\n");
    let mut crowd = Command::new(CROWD);
    crowd.args(["run", &count.to_string(), &rate(), CROWD, "short"]);
    crowd.arg(daemon.runtime.join("agent.sock"));
    let printed = start(count, &mut crowd);
    assert_eq!(printed, count, "all could connect: {:#?}", losses(&daemon));
    each_has_a_run(&machine, &mut daemon, printed);
}

#[test]
fn every_short_program_with_the_agent_has_a_run() {
    let count = programs(200);
    let machine = Machine::new(&["devices=1"]);
    let mut daemon = Daemon::start(&machine, "daemon", "");
    let trainer = machine.trainer(&daemon.runtime, &[]);
    let mut crowd = Command::new(CROWD);
    crowd.args(["run", &count.to_string(), &rate()]).arg(trainer.get_program());
    crowd.args(["--steps", "1", "--threads", "0", "--step-ms", "0"]);
    for (name, value) in trainer.get_envs() {
        match value {
            Some(value) => crowd.env(name, value),
            None => crowd.env_remove(name),
        };
    }
    let printed = start(count, &mut crowd);
    each_has_a_run(&machine, &mut daemon, printed);
}

#[test]
fn all_concurrent_programs_are_stored() {
    let count = programs(600);
    let machine = Machine::new(&["devices=1"]);
    let config = format!(
        "[agent]\nconnections = {0}\nconnections_per_uid = {0}\n[nvml]\nlibrary = \"/nonexistent\"\n",
        count + 16
    );
    let mut daemon = Daemon::start(&machine, "daemon", &config);
    let mut crowd = Command::new(CROWD);
    crowd.args(["run", &count.to_string(), &rate(), CROWD, "live"]);
    crowd.arg(daemon.runtime.join("agent.sock")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut crowd = crowd.spawn().expect("crowd runs");
    let mut lines =
        BufReader::new(crowd.stdout.take().expect("piped")).lines().map(|line| line.expect("text"));
    let up = lines.by_ref().take(count).filter(|line| line == "up").count();
    assert_eq!(up, count, "all are welcomed: {:#?}", losses(&daemon));
    println!("{count} are up; {}", used(&daemon));
    let began = Instant::now();
    until(60, "a run of each", || (stored(&machine).0 >= count).then_some(()));
    println!("all are stored after {:?}; {}", began.elapsed(), used(&daemon));
    println!("{:#?}", losses(&daemon));
    drop(crowd.stdin.take()); // all end at once
    lines.for_each(|line| println!("{line}"));
    assert!(crowd.wait().expect("its end").success());
    each_has_a_run(&machine, &mut daemon, count);
}
