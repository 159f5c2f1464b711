//! Modules that move: after any change of a model's structure names follow `named_modules()` with the next step.
use gpumem_tests::live::attribution::attribution;
use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job, until};
use gpumem_wire::Role;
use serde_json::Value;
use std::collections::BTreeMap;

/// Random changes behind the usual ones.
const CHANGES: &str = "60";

/// `least`: compared rows of each kind.
fn operated(version: &str, seed: &str, changes: &str, least: usize) {
    let Some(wheel) = torch::wheel(version).filter(|_| torch::reads_frames(version)) else { return };
    let machine = torch::machine(&[]);
    let mut daemon = Daemon::start(&machine, "daemon", "");
    let mut job = Job::start(&mut wheel.covered(&machine, &daemon.runtime, "surgery.py", &[seed, changes]));
    // The daemon may be behind such a program.
    let pid = job.pid().to_string();
    until(300, "the last check is recorded", || {
        job.hear();
        let line = job.said.iter().find(|line| line.contains("\"holds\""));
        let last = line.and_then(|line| serde_json::from_str::<Value>(line).ok());
        let Some(last) = last else { return (!job.is_running()).then_some(()) };
        let output = daemon.ctl(&machine, &["report", &pid, "--json"]).output().ok()?;
        let name = format!("\"check {}\"", last["holds"].as_str()?);
        String::from_utf8_lossy(&output.stdout).contains(&name).then_some(())
    });
    job.signal("TERM");
    let printed = torch::finished(&mut job);
    daemon.wait_for_the_end_of(&machine, &[&job]);
    daemon.stop();
    let names = attribution(&daemon.recording, job.pid());
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for line in printed.iter().filter(|line| line["check"].is_string()) {
        let check = line["check"].as_str().unwrap_or_default();
        let mut parameters: BTreeMap<&str, &str> = BTreeMap::new();
        let mut wrong = Vec::new();
        for row in line["addresses"].as_array().expect("addresses") {
            let [address, what, module, own] = [0, 1, 2, 3].map(|at| row[at].as_str().expect("text"));
            let number = u64::from_str_radix(address.trim_start_matches("0x"), 16).expect("an address");
            let full = format!("{module}/{own}");
            let found = names.live[check].get(&number);
            let (tag, role) = found.map_or(("", Role::Unknown), |block| (&block.tag, block.role));
            let is_right = match what {
                "parameter" => tag == full && role == Role::Parameter,
                "optimizer_state" => tag == full && role == Role::OptimizerState,
                "gradient" => tag == full,
                _ => tag == module,
            };
            if !is_right {
                wrong.push(format!("{what} {full} is {tag:?}, {role:?}"));
            }
            if what == "parameter"
                && let Some(other) = parameters.insert(tag, address)
            {
                wrong.push(format!("two parameters are {tag:?}: {other}, {address}"));
            }
            *counts.entry(what).or_default() += 1;
        }
        assert!(wrong.is_empty(), "torch {version}, seed {seed}, after {check}: {wrong:#?}");
    }
    println!("torch {version}, seed {seed}: {counts:?}");
    assert!(counts.len() == 4 && counts.values().all(|&count| count > least), "{counts:?}");
}

#[test]
fn names_follow_the_structure_of_the_model() {
    for version in &torch::versions() {
        ["3", "4"].iter().for_each(|seed| operated(version, seed, CHANGES, 300));
    }
}

/// A model of 1,000 modules. No comparison of all modules is due, so every change must have been reported.
#[test]
fn names_follow_reported_changes_in_the_next_step() {
    for version in &torch::versions() {
        operated(version, "5", "busy", 200);
    }
}
