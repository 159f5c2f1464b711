//! A process that records when somebody else says so: gpumemctl, the daemon, the agent.
#![allow(missing_docs)]

use gpumem_tests::live::{Daemon, Job, Machine, replay, until};
use std::path::Path;
use std::process::Output;

fn ctl(machine: &Machine, daemon: &Daemon, arguments: &[&str]) -> Output {
    daemon.ctl(machine, arguments).current_dir(&machine.dir).output().expect("gpumemctl runs")
}

fn done(machine: &Machine, daemon: &Daemon, arguments: &[&str]) -> String {
    let output = ctl(machine, daemon, arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {} {said}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What a recording's own report says is tracked at its end, and its tags.
fn told(machine: &Machine, daemon: &Daemon, file: &Path) -> (i64, String) {
    let file = file.to_str().expect("UTF-8");
    let report: serde_json::Value =
        serde_json::from_str(&done(machine, daemon, &["report", file, "--json"])).expect("JSON");
    let text = report.to_string();
    let tracked = report["devices"][0]["moments"]["end"]["tracked_bytes"].as_i64();
    (tracked.or_else(|| find(&report, "tracked_bytes")).unwrap_or_else(|| panic!("{text}")), text)
}

/// The last number of that name, wherever it is.
fn find(value: &serde_json::Value, name: &str) -> Option<i64> {
    match value {
        serde_json::Value::Object(map) => {
            let deeper = map.values().filter_map(|value| find(value, name)).next_back();
            map.get(name).and_then(serde_json::Value::as_i64).or(deeper)
        }
        serde_json::Value::Array(values) => values.iter().filter_map(|value| find(value, name)).next_back(),
        _ => None,
    }
}

#[test]
fn a_running_process_records_when_it_is_told_to() {
    let machine = Machine::new(&["devices=1", "memory=16G"]);
    let mut daemon = Daemon::start(&machine, "daemon", "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n");
    let mut trainer = Job::start(
        machine.trainer(&daemon.runtime, &["--steps", "1000000", "--step-ms", "20"]).env("RANK", "5"),
    );
    trainer.wait_for("ready");
    let pid = trainer.pid().to_string();
    until(20, "the process", || daemon.pids(&machine).contains(&u64::from(trainer.pid())).then_some(()));

    let recording = machine.dir.join("on request.gpumem");
    let output = recording.to_str().expect("UTF-8");
    let said = done(&machine, &daemon, &["record", &pid, "start", "--output", output]);
    assert_eq!(said, format!("pid {pid} records to {output}\n"));
    let grown = |bytes: u64| {
        until(20, "a longer recording", || (std::fs::metadata(&recording).ok()?.len() > bytes).then_some(()))
    };
    grown(50_000);
    assert!(told(&machine, &daemon, &recording).0 > 0, "it can be read while it goes on");
    let again = ctl(&machine, &daemon, &["record", &pid, "start", "--output", "other.gpumem"]);
    assert!(
        !again.status.success() && String::from_utf8_lossy(&again.stderr).contains("goes on already"),
        "{again:?}"
    );
    let said = done(&machine, &daemon, &["record", &pid, "stop"]);
    assert!(said.contains(output), "{said}");
    assert!(told(&machine, &daemon, &recording).0 > 0);
    let replayed = replay(&recording);
    assert_eq!(replayed.rejected, 0);
    assert_eq!(replayed.process(trainer.pid()).odd, Default::default());

    // What it holds, in a file with rank and pid in its name.
    let said = done(&machine, &daemon, &["record", &pid, "dump", "-o", "."]);
    let file = said.rsplit(' ').next().expect("a file").trim().to_owned();
    assert!(file.ends_with(&format!("-r5-p{pid}-1.gpumem")) && Path::new(&file).exists(), "{said}");
    assert!(told(&machine, &daemon, Path::new(&file)).0 > 0);
    let refused = ctl(&machine, &daemon, &["record", &pid, "dump", "-o", &file]);
    assert!(
        !refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("exists"),
        "{refused:?}"
    );

    done(&machine, &daemon, &["record", &pid, "pause"]);
    std::thread::sleep(std::time::Duration::from_millis(300)); // a while in which nothing is told
    done(&machine, &daemon, &["record", &pid, "resume"]);
    let lists = || machine.truth().iter().filter(|truth| truth.pid == trainer.pid()).count();
    let goal = lists() + 15;
    until(60, "lists", || (lists() >= goal).then_some(()));
    assert_eq!(done(&machine, &daemon, &["record", &pid, "stop"]), format!("pid {pid} was not recording\n"));
    let nobody = ctl(&machine, &daemon, &["record", "1", "start"]);
    assert!(!nobody.status.success(), "{nobody:?}");

    trainer.enough();
    daemon.wait_for_the_end_of(&machine, &[&trainer]);
    daemon.stop();
    let compared = replay(&daemon.recording).compare(&machine.truth(), Some(trainer.pid()));
    println!("{compared:?}");
    assert!(compared.exact >= 10, "exact again after the pause: {compared:?}");
    let process = replay(&daemon.recording).process(trainer.pid()).clone();
    assert!(process.coverage.partial.is_some_and(|partial| !partial.state), "{:?}", process.coverage);
}
