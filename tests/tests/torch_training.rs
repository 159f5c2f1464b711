//! Training in unmodified PyTorch wheels: a transformer, a ResNet, an LSTM, and reentrant and non-reentrant checkpointing,
//! with the agent and without it.
#![allow(missing_docs)]

use gpumem_tests::live::attribution::{attribution, owned};
use gpumem_tests::live::torch::{self, VERSIONS};
use gpumem_tests::live::{Daemon, Job, Machine, replay};
use serde_json::Value;
use std::path::PathBuf;

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";
const MODELS: [&str; 5] = ["gpt", "resnet", "lstm", "reentrant", "non_reentrant"];

/// A training with the agent, over.
struct Trained {
    version: String,
    pid: u32,
    said: Vec<Value>,
    recording: PathBuf,
    machine: Machine,
}

fn train(version: &str, arguments: &[&str]) -> Option<Trained> {
    let wheel = torch::wheel(version)?;
    let machine = torch::machine(&[]);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let mut job = Job::start(&mut wheel.covered(&machine, &daemon.runtime, "training.py", arguments));
    let said = torch::finished(&mut job);
    daemon.wait_for_the_end_of(&machine, &[&job]);
    daemon.stop();
    let (pid, recording) = (job.pid(), daemon.recording.clone());
    Some(Trained { version: wheel.version, pid, said, recording, machine })
}

/// Its numbers, without addresses.
fn numbers(said: &[Value]) -> Vec<(String, Value)> {
    let checks =
        said.iter().filter_map(|line| Some((line["check"].as_str()?.to_owned(), line["devices"].clone())));
    checks.collect()
}

#[test]
fn every_model_trains_as_without_us_and_every_segment_is_known() {
    for version in VERSIONS {
        let Some(trained) = train(version, &MODELS) else { return };
        let seen = replay(&trained.recording);
        let compared = seen.compare_sums(&trained.machine.truth(), trained.pid, |_| true);
        println!("torch {}: {compared:?}", trained.version);
        assert!(compared.exact >= 20, "{compared:?}");
        let process = seen.process(trained.pid);
        assert_eq!(process.odd, Default::default(), "nothing odd");
        assert!(process.coverage.partial.is_none() && process.coverage.lost == 0, "{:?}", process.coverage);
        let moments = torch::moments(&trained.recording, trained.pid);
        for (moment, said) in torch::beside(&moments, &trained.said) {
            torch::agree(&format!("torch {version}, {}", moment.name), moment, said);
        }
        // The same program on the same machine, alone.
        let wheel = torch::wheel(version).expect("had before");
        let mut alone = Job::start(&mut wheel.bare(&trained.machine, "training.py", &MODELS));
        assert_eq!(
            numbers(&torch::finished(&mut alone)),
            numbers(&trained.said),
            "torch {version}: its own numbers"
        );
        let names = attribution(&trained.recording, trained.pid);
        for (key, share) in &names.known {
            let (right, near, named) = (share.percent(), share.percent_near(), share.percent_named());
            println!(
                "{key}: {right:.2} % right, {near:.2} near, {named:.2} named of {} B, {}",
                share.bytes, share.count
            );
            println!("    {:?}", share.wrong.iter().take(5).collect::<Vec<_>>());
        }
        for said in trained.said.iter().filter(|line| line["addresses"].is_array()) {
            let check = said["check"].as_str().unwrap_or_default();
            for what in ["parameter", "gradient", "optimizer_state", "buffer"] {
                let (right, all, others) = owned(&names.live[check], said, what);
                println!("{check}: {what} {right}/{all} {others:?}");
            }
        }
    }
}
