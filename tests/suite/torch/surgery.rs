//! Modules that move: after any change of a model's structure names follow `named_modules()` with the next step.
use gpumem_tests::live::attribution::attribution;
use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job};
use gpumem_wire::Role;
use std::collections::BTreeMap;

/// Random changes behind the usual ones.
const CHANGES: &str = "60";

fn operated(version: &str, seed: &str) {
    let Some(wheel) = torch::wheel(version).filter(|_| torch::reads_frames(version)) else { return };
    let machine = torch::machine(&[]);
    let mut daemon = Daemon::start(&machine, "daemon", "");
    let mut job = Job::start(&mut wheel.covered(&machine, &daemon.runtime, "surgery.py", &[seed, CHANGES]));
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
                "gradient" => tag == full || tag == module,
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
    assert!(counts.len() == 4 && counts.values().all(|&count| count > 300), "{counts:?}");
}

#[test]
fn names_follow_the_structure_of_the_model() {
    for version in &torch::versions() {
        ["3", "4"].iter().for_each(|seed| operated(version, seed));
    }
}
