//! Programs that keep tensors in a variable (tests/torch/keepers.py): the report names it. Programs that need too much at once
//! have no such name. The program itself sees nothing of the search.

use super::causes::{Program, reports_of};
use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job};

const FAST: &str = "[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\n";

/// A program, kind and name of what keeps its tensors, its class, and a part of the first advice.
const KEPT: [(&str, &str, &str, &str, &str); 9] = [
    ("local_list", "local", "losses", "list", "keep .item()"),
    ("attribute", "attribute", "ReplayBuffer.items", "deque", "keep .cpu()"),
    ("global_list", "global", "HISTORY", "list", "keep .cpu()"),
    ("objects", "local", "samples", "list", "keep .cpu()"),
    ("exceptions", "local", "errors", "list", "text of the exceptions"),
    ("exceptions_of_passes", "local", "errors", "list", "text of the exceptions"),
    ("closure", "local", "seen", "list", "keep .cpu()"),
    ("cycles", "cycle", "Request", "", "gc.collect()"),
    ("running_sum", "local", "total", "Tensor", "Add .item()"),
];

fn program(name: &str) -> Program<'_> {
    Program {
        name,
        command: ("keepers.py", name),
        memory: "4G",
        held: "",
        libraries: "",
        keys: &[],
        variables: &[],
    }
}

#[test]
fn variable_that_keeps_the_tensors_is_named() {
    for version in ["2.4.1", "2.15.0"] {
        let Some(wheel) = torch::wheel(version) else { return };
        let reports = reports_of(&wheel, &KEPT.map(|(name, ..)| program(name)));
        let mut wrong = Vec::new();
        for (name, kind, keeper, class, change) in KEPT {
            let report = &reports[name];
            let first = &report["findings"][0];
            let found = &first["keeper"];
            let what = first["what"].as_str().unwrap_or_default();
            let advice = &report["why"]["advice"][0];
            let is_right = found["kind"] == kind && found["name"] == keeper && found["class"] == class;
            let is_said = what.contains(keeper) && what.contains("kept by");
            let is_advised = advice["change"].as_str().is_some_and(|text| text.contains(change));
            if !is_right || !is_said || !is_advised {
                wrong.push(format!("torch {version}, {name}: {first}; {advice}"));
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}

#[test]
fn nothing_is_named_if_nothing_is_kept() {
    let Some(wheel) = torch::wheel("2.15.0") else { return };
    let names = ["large_batch", "large_model"];
    let reports = reports_of(&wheel, &names.map(program));
    for name in names {
        let report = &reports[name];
        assert_eq!(report["outcome"], "out_of_memory", "{name}: {report}");
        let named =
            report["findings"].as_array().is_some_and(|all| all.iter().any(|one| one["keeper"].is_object()));
        assert!(!named, "{name}: {}", report["findings"]);
    }
}

#[test]
fn program_sees_nothing_of_the_search() {
    for version in ["2.4.1", "2.15.0"] {
        let Some(wheel) = torch::wheel(version) else { return };
        let machine = torch::machine(&[]);
        let daemon = Daemon::start(&machine, "daemon", FAST);
        let arguments = ["global_list", "seen"];
        let mut bare = Job::start(&mut wheel.bare(&machine, "keepers.py", &arguments));
        let expected = torch::finished(&mut bare);
        assert_eq!(expected[0]["observed"], 1, "torch {version}: {expected:?}");
        let mut covered = wheel.covered(&machine, &daemon.runtime, "keepers.py", &arguments);
        let mut job = Job::start(&mut covered);
        assert_eq!(torch::finished(&mut job), expected, "torch {version}");
        let mut job = Job::start(covered.env("GPUMEM_KEEPERS", "0"));
        assert_eq!(torch::finished(&mut job), expected, "torch {version}");
    }
}
