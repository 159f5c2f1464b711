//! Out of memory in unmodified PyTorch wheels. Three kinds are distinguished, with the request and torch's own totals:
//! a limit of the pool without a driver call, a driver failure that the pool survives, and a final one.
use gpumem_ledger::{Class, OomKind};
use gpumem_model::run::Named;
use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job, replay, until};
use gpumem_wire::{Phase, Role};
use serde_json::Value;

/// Places where phases.py runs out of memory.
const PLACES: usize = 17;
/// The version of the programs that end with the error.
const VERSION: &str = "2.15.0";
const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";

#[test]
fn three_kinds_of_out_of_memory() {
    for version in &torch::versions() {
        let Some(wheel) = torch::wheel(version) else { return };
        let machine = torch::machine(&[]);
        let mut daemon = Daemon::start(&machine, "daemon", FAST);
        let mut job = Job::start(&mut wheel.covered(&machine, &daemon.runtime, "ooms.py", &[]));
        let printed = torch::finished(&mut job);
        daemon.wait_for_the_end_of(&machine, &[&job]);
        daemon.stop();
        let checks: Vec<_> = printed.iter().filter(|line| line["check"].is_string()).collect();
        let counts = |index: usize, key: &str| checks[index][key].as_i64().expect("a count");
        let outcomes: Vec<_> =
            (0..3).map(|index| (counts(index, "got"), counts(index, "num_ooms"))).collect();
        assert_eq!(outcomes, [(1, 0), (0, 1), (0, 1)], "torch {version}: {checks:?}");

        let process = replay(&daemon.recording).process(job.pid()).clone();
        let ooms: Vec<_> = process.ooms.iter().map(|(_, oom)| oom).collect();
        let kinds: Vec<_> = ooms.iter().map(|oom| (oom.kind, oom.refusals)).collect();
        let want = [(OomKind::Pressure, 1), (OomKind::Device, 2), (OomKind::Pool, 0)];
        assert_eq!(kinds, want, "torch {version}: {ooms:#?}");
        for (oom, printed) in ooms.iter().zip(&checks) {
            let of = |key: &str| printed["devices"][0][key].as_u64();
            if oom.kind != OomKind::Pressure {
                assert_eq!(Some(oom.asked_bytes), printed["asked"].as_u64(), "torch {version}: {oom:?}");
                assert_eq!(oom.pool_used_bytes, of("allocated"), "torch {version}: {oom:?}");
                let is_its = |stack: &str| stack.starts_with("Greedy.forward\t") && stack.contains("ooms.py");
                if torch::reads_frames(version) {
                    assert!(oom.stack.as_deref().is_some_and(is_its), "torch {version}: {oom:?}");
                    assert_eq!(oom.tag.as_deref(), Some("Greedy"), "torch {version}: {oom:?}");
                } else {
                    assert_eq!((&oom.stack, &oom.tag), (&None, &None), "torch {version}: {oom:?}");
                }
            }
            // The held memory is recorded in parts, which equal torch's of that moment: blocks and idle memory.
            let held = |is_idle: bool| -> i64 {
                let cells = oom.amounts.iter().map(|(cell, bytes)| (&process.cells[*cell as usize], bytes));
                cells.filter(|(cell, _)| cell.is_idle() == is_idle).map(|(_, bytes)| bytes).sum()
            };
            let parts = (held(false), held(false) + held(true));
            assert_eq!(parts.1, oom.tracked_bytes, "torch {version}: {oom:?}");
            if oom.kind != OomKind::Pressure {
                let of = |key: &str| printed["devices"][0][key].as_i64().expect("a number");
                assert_eq!(parts, (of("allocated"), of("reserved")), "torch {version}: {oom:?}");
            }
        }
    }
}

/// Each failed request has the phase of the thread that made it, also in `gpumemctl oom --json`. Gradients that a pass has
/// accumulated by then are gradients.
#[test]
fn failed_request_has_its_phase_and_gradients() {
    for version in &torch::versions() {
        let Some(wheel) = torch::wheel(version) else { return };
        if !torch::reads_frames(version) {
            continue; // reported by roles.rs
        }
        let machine = torch::machine(&[]);
        let mut daemon = Daemon::start(&machine, "daemon", FAST);
        let mut job = Job::start(&mut wheel.covered(&machine, &daemon.runtime, "phases.py", &[]));
        let printed = torch::finished(&mut job);
        daemon.wait_for_the_end_of(&machine, &[&job]);
        let pid = job.pid().to_string();
        let listed = until(20, "the report has every failed request", || {
            let output = daemon.ctl(&machine, &["oom", &pid, "--json"]).output().ok()?;
            let report: Value = serde_json::from_slice(&output.stdout).ok()?;
            report["ooms"].as_array().filter(|ooms| ooms.len() == PLACES).cloned()
        });
        daemon.stop();
        let process = replay(&daemon.recording).process(job.pid()).clone();
        let checks: Vec<_> = printed.iter().filter(|line| line["check"].is_string()).collect();
        assert_eq!(checks.len(), PLACES, "torch {version}");
        let mut wrong = Vec::new();
        for printed in checks {
            let asked = printed["asked"].as_u64();
            let oom = process.ooms.iter().map(|(_, oom)| oom).find(|oom| Some(oom.asked_bytes) == asked);
            let oom = oom.unwrap_or_else(|| panic!("torch {version}: no record of {printed}"));
            let phase = match printed["phase"].as_str().expect("a phase") {
                "forward" => Phase::Forward,
                "backward" => Phase::Backward,
                "optimizer" => Phase::Optimizer,
                "evaluation" => Phase::Evaluation,
                _ => Phase::Between,
            };
            let cells = oom.amounts.iter().map(|(cell, bytes)| (&process.cells[*cell as usize], bytes));
            let blocks = cells.filter(|(cell, _)| cell.class == Class::Block && cell.role == Role::Gradient);
            let gradients = blocks.map(|(_, bytes)| bytes).sum::<i64>();
            let of_command = listed.iter().find(|oom| oom["asked_bytes"].as_u64() == asked);
            let of_command = of_command.map(|oom| oom["phase"].as_str());
            if oom.phase.as_deref() != phase.name()
                || of_command != Some(phase.name())
                || Some(gradients) != printed["gradients"].as_i64()
            {
                wrong.push(format!(
                    "{}: {:?}, by the command {of_command:?}, {gradients} for {}",
                    printed["check"], oom.phase, printed["gradients"]
                ));
            }
        }
        assert!(wrong.is_empty(), "torch {version}: {wrong:#?}");
    }
}

/// Programs of places.py, the phase of the failed request, and a part of the first line about it.
const FATAL_PLACES: [(&str, Option<&str>); 4] = [
    ("backward", Some("backward")),
    ("library", None),
    ("extension", None),
    ("optimizer", Some("optimizer")),
];

/// A request that ends the program is named by the program's own line, with its phase and the composition of the memory.
#[test]
fn fatal_request_has_the_programs_line_and_its_composition() {
    let version = VERSION;
    let Some(wheel) = torch::wheel(version) else { return };
    let machine = torch::machine(&["devices=1"]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let mut wrong = Vec::new();
    for (place, phase) in FATAL_PLACES {
        let mut command = wheel.covered(&machine, &daemon.runtime, "places.py", &[place]);
        let mut job = Job::start(command.env_remove("GPUMEM_SITES"));
        assert_eq!(job.end().code(), Some(1), "{place}");
        let line = job.said.iter().find_map(|line| line.parse::<u32>().ok()).expect("the line's number");
        daemon.wait_for_the_end_of(&machine, &[&job]);
        let pid = job.pid().to_string();
        let of = |options: &[&str]| {
            let arguments = [&["oom", &pid], options].concat();
            let output = daemon.ctl(&machine, &arguments).output().expect("gpumemctl oom");
            String::from_utf8(output.stdout).expect("UTF-8")
        };
        let text = of(&[]);
        println!("{text}");
        let json: Value = serde_json::from_str(&of(&["--json"])).expect("JSON");
        let ooms = json["ooms"].as_array().expect("entries");
        let Some(oom) = ooms.iter().rfind(|oom| oom["what"] == "oom") else {
            wrong.push(format!("{place}: not out of memory: {text}"));
            continue;
        };
        let second = text.lines().nth(1).unwrap_or_default();
        let is_right = text.starts_with("OUT OF MEMORY  ")
            && second.contains(&format!("(places.py:{line} in {place})"))
            && json["outcome"] == "out_of_memory"
            && phase.is_none_or(|phase| oom["phase"] == phase)
            && oom["held"].as_array().is_some_and(|held| !held.is_empty())
            && oom["is_partial"] == false;
        let tag = format!("places.py:{line} extension");
        if !is_right || place == "extension" && oom["tag"] != tag {
            wrong.push(format!("{place}, line {line}: {oom} {text}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
