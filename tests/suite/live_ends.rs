//! Processes that crash, live in other namespaces or in families, and their metrics in Prometheus.
use gpumem_tests::live::prometheus::{Server, check_metrics, free_address, get, tool};
use gpumem_tests::live::{Daemon, Job, Machine, replay, until};
use std::process::Command;

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";

#[test]
fn program_ends_with_its_last_thread_after_main_exits() {
    let machine = Machine::new(&["devices=1"]);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let arguments = ["--steps", "2", "--threads", "0", "--leave"];
    let mut trainer = Job::start(&mut machine.trainer(&daemon.runtime, &arguments));
    trainer.wait_for("ready");
    // Without the agent it ends at once. The agent's thread checks for other threads every second.
    until(20, "the trainer's end", || (!trainer.is_running()).then_some(()));
    assert!(trainer.end().success());
    daemon.wait_for_the_end_of(&machine, &[&trainer]);
    daemon.stop();
}

/// More programs start and end while the daemon is stopped than may wait without a hello. All are read from the socket's queue.
#[test]
fn programs_of_a_stopped_daemons_time_have_runs() {
    runs_of_a_stopped_daemons_time("connections_without_hello = 8");
}

#[test]
fn ended_programs_wait_for_a_connection_slot() {
    runs_of_a_stopped_daemons_time("connections_per_uid = 4");
}

/// Checks the runs of a dozen programs that start and end while the daemon is stopped. Each has one run, with its events, although
/// several lists name it before and after its hello is read.
fn runs_of_a_stopped_daemons_time(limit: &str) {
    const PROGRAMS: usize = 12;
    let machine = Machine::new(&["devices=1"]);
    let config = format!("[agent]\n{limit}\n{FAST}");
    let mut daemon = Daemon::start(&machine, "daemon", &config);
    daemon.job.signal("STOP");
    let trainers: Vec<(u32, bool)> = (0..PROGRAMS)
        .map(|_| {
            let mut trainer = Job::start(&mut machine.trainer(&daemon.runtime, &["--steps", "2"]));
            (trainer.pid(), trainer.end().success())
        })
        .collect();
    daemon.job.signal("CONT");
    let store = format!("--store={}", machine.dir.join("runs.sqlite").display());
    let list = |daemon: &Daemon| {
        let output = daemon.ctl(&machine, &["runs", "--json", &store]).output().expect("gpumemctl runs");
        // Nothing is printed while there is no store.
        let runs: Option<serde_json::Value> = serde_json::from_slice(&output.stdout).ok();
        runs.as_ref().and_then(serde_json::Value::as_array).cloned().unwrap_or_default()
    };
    until(30, "a run of each", || {
        let runs = list(&daemon);
        let is_there = |pid: u32| {
            runs.iter().any(|run| run["pid"] == pid && run["state"] == "ended" && run["events"] != 0)
        };
        trainers.iter().all(|(pid, _)| is_there(*pid)).then_some(())
    });
    // At its end the daemon also writes the runs of processes whose agents it still waits for.
    daemon.stop();
    let runs = list(&daemon);
    for (pid, is_well) in trainers {
        let of: Vec<_> = runs.iter().filter(|run| run["pid"] == pid).collect();
        assert!(is_well && of.len() == 1 && of[0]["events"] != 0, "{of:?}");
        assert_eq!(of[0]["label"], "trainer", "{of:?}");
        assert!(of[0]["peak_tracked_bytes"].as_i64().is_some_and(|peak| peak > 0), "{of:?}");
    }
}

#[test]
fn killed_trainer_leaves_a_run_with_its_memory() {
    let machine = Machine::new(&["devices=1"]);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let mut trainer =
        Job::start(&mut machine.trainer(&daemon.runtime, &["--steps", "100000", "--step-ms", "0"]));
    trainer.wait_for("ready");
    let pid = trainer.pid();
    until(20, "a covered row", || {
        let output = daemon.ctl(&machine, &["ps"]).output().expect("gpumemctl runs");
        String::from_utf8_lossy(&output.stdout).contains(" covered ").then_some(())
    });
    // The agent's last records are still in its ring: its daemon does not listen.
    daemon.job.signal("STOP");
    std::thread::sleep(std::time::Duration::from_millis(50));
    trainer.signal("KILL");
    trainer.end();
    daemon.job.signal("CONT");
    daemon.wait_for_the_end_of(&machine, &[&trainer]);
    let report = daemon.ctl(&machine, &["report", "--verbose"]).output().expect("gpumemctl runs");
    println!("{}", String::from_utf8_lossy(&report.stdout));
    assert!(report.status.success());
    daemon.stop();
    let held = machine.truth().into_iter().find(|truth| truth.is_end() && truth.pid == pid).expect("its end");
    let seen = replay(&daemon.recording);
    let process = seen.process(pid);
    let account = process.accounts.iter().find(|account| account.device.is_some());
    let tracked = account.expect("on a device").tracked_bytes;
    println!("at its end: {} held, {tracked} tracked, {:?}", held.tracked, process.coverage);
    assert!(process.ended.is_some(), "its end was seen");
    assert!(!process.coverage.partial_state, "{:?}", process.coverage);
    // Each of its three threads can have been inside one call, whose record was never made.
    let in_calls = 3 * (64 << 20);
    assert!((held.tracked - tracked).abs() <= in_calls, "{} held, {tracked} tracked", held.tracked);
    if held.tracked != tracked {
        println!("a call was in flight");
    }
}

/// A command that starts a shell in new namespaces, with the /proc of the new pid namespace.
fn unshared(machine: &Machine, flags: &[&str], script: &str) -> Option<Command> {
    let mut probe = Command::new("unshare");
    let works = probe.args(flags).arg("true").status().is_ok_and(|status| status.success());
    if !works {
        gpumem_test_support::skip(&format!("unshare {flags:?} is not permitted here"), "sudo make test-all");
        return None;
    }
    let mut command = machine.command("unshare");
    command.args(flags).args(["sh", "-c", script]);
    Some(command)
}

#[test]
fn children_of_a_launcher_are_one_job() {
    let machine = Machine::new(&["devices=2"]);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let trainer = machine.bare_trainer(&[]);
    let trainer = trainer.get_program().to_string_lossy().into_owned();
    let rank = |rank: u32| {
        format!(
            "RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 '{trainer}' --devices {rank} --steps 400 --step-ms 5"
        )
    };
    let script = format!("{} & {} & wait", rank(0), rank(1));
    let mut command = daemon.ctl(&machine, &["run", "--", "sh", "-c", &script]);
    command.stderr(std::fs::File::create(machine.dir.join("run.log")).expect("a log"));
    let mut job = Job::start(&mut command);
    let pid = job.pid().to_string();
    job.wait_for("ready");
    until(20, "a table of two children", || {
        let output = daemon.ctl(&machine, &["report", "--verbose", &pid]).output().expect("gpumemctl runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let rank = |rank: u32| text.lines().any(|line| line.starts_with(&format!("{rank} ")));
        let whole = text.contains("2 processes started by") && rank(0) && rank(1) && text.contains("sum");
        whole.then(|| println!("{text}"))
    });
    job.finish();
    let farewell = std::fs::read_to_string(machine.dir.join("run.log")).expect("what it said");
    println!("{farewell}");
    assert!(farewell.contains("2 processes on 2 GPUs"), "{farewell}");
    // The number of processes, at most one finding of each, a line for each, and the next command.
    assert!(farewell.lines().count() <= 6, "{farewell}");
    daemon.stop();
    let seen = replay(&daemon.recording);
    let truth = machine.truth();
    for process in seen.snapshot.processes.iter() {
        assert_eq!(
            process.facts.claims.get("world_size").map(String::as_str),
            Some("2"),
            "{:?}",
            process.facts
        );
        assert!(seen.compare(&truth, Some(process.key.pid)).exact >= 5);
    }
    assert_eq!(seen.snapshot.processes.len(), 2);
}

/// Lane `prometheus`.
mod prometheus {
    use super::*;

    #[test]
    fn prometheus_series_end_with_their_process() {
        let (Some(prometheus), Some(promtool)) = (tool("prometheus"), tool("promtool")) else { return };
        let machine = Machine::new(&["devices=2"]);
        let metrics = free_address();
        let config = format!("{FAST}[metrics]\nlisten = \"{metrics}\"\n");
        let mut daemon = Daemon::start(&machine, "daemon", &config);
        let server = Server::start(&prometheus, &machine.dir, metrics);
        let mut covered =
            Job::start(&mut machine.trainer(&daemon.runtime, &["--steps", "20", "--hold", "600"]));
        let mut bare =
            Job::start(&mut machine.bare_trainer(&["--steps", "20", "--hold", "600", "--devices", "1"]));
        covered.wait_for("holding");
        bare.wait_for("holding");
        let value = |query: &str| server.query(query).first().map(|(_, value)| *value);
        let of = |name: &str, job: &Job| format!("{name}{{pid=\"{}\"}}", job.pid());
        until(30, "a scrape of both", || {
            value(&of("gpumem_process_tracked_bytes", &covered))
                .and(value(&of("gpumem_process_used_bytes", &bare)))
        });
        let truth = machine.truth();
        let last = |job: &Job| truth.iter().rfind(|truth| truth.pid == job.pid()).expect("listed").clone();
        assert_eq!(value(&of("gpumem_process_used_bytes", &covered)), Some(last(&covered).used as f64));
        assert_eq!(value(&of("gpumem_process_tracked_bytes", &covered)), Some(last(&covered).tracked as f64));
        assert_eq!(value(&of("gpumem_process_used_bytes", &bare)), Some(last(&bare).used as f64));
        assert_eq!(value(&of("gpumem_process_tracked_bytes", &bare)), None, "unknown is absent, not 0");

        let text = get(metrics, "/metrics").expect("an exposition");
        assert_eq!(check_metrics(&promtool, &text), "", "promtool has no complaints");
        assert!(!text.lines().any(|line| line.contains("NaN")), "nothing unknown has a value");

        covered.signal("KILL");
        covered.end();
        until(30, "the series to go", || {
            value(&of("gpumem_process_used_bytes", &covered)).is_none().then_some(())
        });
        assert!(
            server.query(&format!("{{pid=\"{}\"}}", covered.pid())).is_empty(),
            "all its series are gone"
        );
        assert!(value(&of("gpumem_process_used_bytes", &bare)).is_some(), "and only those");
        assert_eq!(value("up"), Some(1.0));
        daemon.stop();
    }
}

/// Lane `privileged`.
mod privileged {
    use super::*;

    #[test]
    fn process_in_another_namespace_is_matched_with_its_pid() {
        for flags in [
            &["--pid", "--fork", "--mount-proc"][..],
            &["--user", "--map-root-user", "--pid", "--fork", "--mount-proc"],
        ] {
            let machine = Machine::new(&["devices=1"]);
            let mut daemon = Daemon::start(&machine, "daemon", FAST);
            // Its pid in its own namespace: 1 or 2.
            let trainer = machine.trainer(&daemon.runtime, &["--steps", "1000000", "--step-ms", "5"]);
            let words: Vec<String> = std::iter::once(trainer.get_program())
                .chain(trainer.get_args())
                .map(|word| word.to_string_lossy().into_owned())
                .collect();
            let Some(mut command) = unshared(&machine, flags, &words.join(" ")) else { continue };
            for (name, value) in trainer.get_envs() {
                if let Some(value) = value {
                    command.env(name, value);
                }
            }
            let mut job = Job::start(&mut command);
            let ready = job.wait_for("ready");
            println!("{flags:?}: {ready}");
            let lists = || machine.truth().iter().filter(|truth| !truth.is_end()).count();
            until(60, "lists of it", || (lists() >= 40).then_some(()));
            let pids = daemon.pids(&machine);
            assert_eq!(pids.len(), 1, "one process, known by one pid: {pids:?}");
            assert!(
                Command::new("kill").arg(pids[0].to_string()).status().is_ok_and(|status| status.success())
            );
            job.finish();
            until(20, "an empty table", || daemon.pids(&machine).is_empty().then_some(()));
            daemon.stop();
            let seen = replay(&daemon.recording);
            let covered: Vec<_> =
                seen.snapshot.processes.iter().filter(|process| process.coverage.covered).collect();
            assert_eq!(covered.len(), 1, "one process, known by one pid");
            let process = covered[0];
            assert!(!ready.ends_with(&format!("pid={}", process.key.pid)), "its own pid is another: {ready}");
            let compared = seen.compare(&machine.truth(), Some(process.key.pid));
            println!("{compared:?}");
            assert!(compared.exact >= 5, "{compared:?}");
            assert!(seen.snapshot.processes.iter().all(|other| other.coverage.covered), "no other process");
        }
    }
}
