//! docs/troubleshooting.md: its table of checks is the program's, the ids that it names exist, and its commands run.
#![allow(missing_docs)]

use gpumem_tests::live::{Daemon, Job, Machine, until};
use gpumem_wire::checks::Check;
use std::path::{Path, PathBuf};

const FROM: &str = "<!-- checks: UPDATE_GOLDEN=1 writes this table from wire/src/checks.rs -->\n";
const TO: &str = "<!-- end -->";

fn document() -> (PathBuf, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/troubleshooting.md");
    let text = std::fs::read_to_string(&path).expect("docs/troubleshooting.md");
    (path, text)
}

#[test]
fn its_table_is_the_programs() {
    let (path, text) = document();
    let rows = Check::ALL.iter().map(|check| format!("| `{}` | {} |\n", check.id(), check.about()));
    let table = format!("| id | looks at |\n|---|---|\n{}", rows.collect::<String>());
    let (before, rest) = text.split_once(FROM).expect("a place for the table");
    let (shown, after) = rest.split_once(TO).expect("its end");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, format!("{before}{FROM}{table}{TO}{after}")).expect("written");
        return;
    }
    assert_eq!(shown, table, "UPDATE_GOLDEN=1 writes it");
}

#[test]
fn ids_that_it_names_exist() {
    let (_, text) = document();
    let families = [
        "agent",
        "daemon",
        "driver",
        "gpu",
        "metrics",
        "namespace",
        "nvml",
        "process",
        "processes",
        "sockets",
        "store",
    ];
    // Keys of the configuration look alike.
    let config = ["metrics.listen", "agent.rows_per_process"];
    for word in text.split('`').skip(1).step_by(2).filter(|word| !config.contains(word)) {
        let is_id = word.split_once('.').is_some_and(|(family, rest)| {
            families.contains(&family) && rest.bytes().all(|byte| byte.is_ascii_lowercase())
        });
        assert!(!is_id || Check::ALL.iter().any(|check| check.id() == word), "there is no check {word}");
    }
}

#[test]
fn its_commands_run() {
    let machine = Machine::new(&["devices=1"]);
    let daemon = Daemon::start(&machine, "daemon", "[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\n");
    let mut job = Job::start(
        &mut machine.trainer(&daemon.runtime, &["--devices", "0", "--steps", "2", "--hold", "600"]),
    );
    job.wait_for("holding");
    until(20, "its run", || daemon.pids(&machine).contains(&job.pid().into()).then_some(()));
    let (_, text) = document();
    let pid = job.pid().to_string();
    let store = machine.dir.join("runs.sqlite").to_string_lossy().into_owned();
    let commands: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("$ gpumemctl ")).collect();
    assert!(commands.len() >= 6, "{commands:?}");
    for command in commands {
        let words = command.split_whitespace().map(|word| match word {
            "PID" => pid.as_str(),
            "STORE" => store.as_str(),
            word => word,
        });
        let words: Vec<&str> = words.collect();
        let output = daemon.ctl(&machine, &words).current_dir(&machine.dir).output().expect("gpumemctl");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && !said.is_empty(), "{command}: {output:?}");
    }
    assert!(machine.dir.join("told.tar.gz").is_file());
}
