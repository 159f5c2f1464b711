//! Bytes with the process's tag, inherited because their thread had none, are distinguished from bytes that a thread
//! tagged: in a running process, after a restart of the daemon, and in the stored run.
use gpumem_tests::live::{Daemon, Machine, Mixer, until};
use serde_json::Value;
use std::collections::BTreeMap;

const MIB: i64 = 1 << 20;
const CONFIG: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";

fn report(machine: &Machine, daemon: &Daemon, arguments: &[&str]) -> Option<String> {
    let output = daemon.ctl(machine, &[&["report"], arguments].concat()).output().expect("gpumemctl runs");
    output.status.success().then(|| String::from_utf8(output.stdout).expect("UTF-8"))
}

/// Returns bytes by tag and whether it is inherited, at the end.
fn held(report: &str) -> BTreeMap<(String, bool), i64> {
    let report: Value = serde_json::from_str(report).expect("JSON");
    let cells = report["devices"][0]["last"]["cells"].as_array().into_iter().flatten();
    let mut held = BTreeMap::new();
    for cell in cells {
        let tag = cell["tag"].as_str().unwrap_or_default().to_owned();
        let inherited = cell["inherited"].as_bool().unwrap_or_else(|| panic!("{cell}"));
        *held.entry((tag, inherited)).or_insert(0) += cell["bytes"].as_i64().expect("bytes");
    }
    held
}

#[test]
fn inherited_tags_are_distinguished_from_thread_tags() {
    let machine = Machine::new(&["devices=1"]);
    let mut daemon = Daemon::start(&machine, "daemon", CONFIG);
    let mut mixer = Mixer::start(&machine, &daemon);
    let pid = mixer.pid().to_string();
    mixer.ok("device 0; process-tag job; alloc before 3M; alloc moved 7M");
    mixer.ok("tag job; alloc own 5M; retag moved cache");
    let wanted = BTreeMap::from([
        (("job".to_owned(), true), 3 * MIB),
        (("job".to_owned(), false), 5 * MIB),
        (("cache".to_owned(), false), 7 * MIB),
    ]);
    let agrees = |daemon: &Daemon| {
        until(60, "the report", || {
            let report = report(&machine, daemon, &[&pid, "--json"])?;
            (held(&report) == wanted).then_some(())
        });
    };
    agrees(&daemon);
    let text = report(&machine, &daemon, &[&pid, "--verbose"]).expect("a report");
    let line = text.lines().find(|line| line.starts_with("inherited from the process"));
    assert!(line.is_some_and(|line| line.ends_with(": job 3,072.0")), "{text}");
    // The resent state has it, too.
    daemon.stop();
    let daemon = Daemon::start(&machine, "second", CONFIG);
    // Until then it answers with what the first one has stored.
    until(60, "the living process", || daemon.pids(&machine).contains(&u64::from(mixer.pid())).then_some(()));
    agrees(&daemon);
    mixer.end();
    daemon.wait_for_the_end_of(&machine, &[]);
    let stored = until(60, "the stored run", || report(&machine, &daemon, &["--json"]));
    assert_eq!(held(&stored), wanted);
}
