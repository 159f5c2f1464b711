//! Training in unmodified PyTorch wheels: a transformer, a ResNet, an LSTM, and reentrant and non-reentrant checkpointing,
//! with the agent and without it.
use gpumem_tests::live::attribution::{Owned, attribution, owned};
use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job, Machine, replay};
use gpumem_wire::Role;
use serde_json::Value;
use std::path::PathBuf;

/// A training takes a second or two.
const FAST: &str = "[nvml]\nlist_every_s = 0.02\nlist_budget = 1.0\n";
const MODELS: [&str; 5] = ["gpt", "resnet", "lstm", "reentrant", "non_reentrant"];

/// Percentage of a step's allocated bytes with a known owner in the ground truth. The rest is the loss, which is in no
/// module.
const LEAST_COVERED: f64 = 90.0;

/// Reported state of frames in a CPython without a GIL.
const NOT_READ: &str = "Failed CPython without a GIL (free-threaded) is not supported";

const ROLES: [(&str, Role); 4] = [
    ("parameter", Role::Parameter),
    ("gradient", Role::Gradient),
    ("optimizer_state", Role::OptimizerState),
    ("buffer", Role::Buffer),
];

/// An ended training with the agent.
struct Trained {
    version: String,
    pid: u32,
    printed: Vec<Value>,
    recording: PathBuf,
    machine: Machine,
}

fn train(version: &str, arguments: &[&str]) -> Option<Trained> {
    let wheel = torch::wheel(version)?;
    let machine = torch::machine(&[]);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let mut job = Job::start(&mut wheel.covered(&machine, &daemon.runtime, "training.py", arguments));
    let printed = torch::finished(&mut job);
    daemon.wait_for_the_end_of(&machine, &[&job]);
    daemon.stop();
    let (pid, recording) = (job.pid(), daemon.recording.clone());
    Some(Trained { version: wheel.version, pid, printed, recording, machine })
}

/// Returns its figures, without addresses.
fn numbers(printed: &[Value]) -> Vec<(String, Value)> {
    let checks =
        printed.iter().filter_map(|line| Some((line["check"].as_str()?.to_owned(), line["devices"].clone())));
    checks.collect()
}

#[test]
fn models_train_as_without_the_agent_and_every_segment_is_known() {
    for version in &torch::versions() {
        let Some(trained) = train(version, &MODELS) else { return };
        let seen = replay(&trained.recording);
        let compared = seen.compare_sums(&trained.machine.truth(), trained.pid, |_| true);
        println!("torch {}: {compared:?}", trained.version);
        assert!(compared.exact >= 20, "{compared:?}");
        let process = seen.process(trained.pid);
        assert_eq!(process.odd, Default::default(), "nothing odd");
        assert!(!process.coverage.partial_history && process.coverage.lost == 0, "{:?}", process.coverage);
        let moments = torch::moments(&trained.recording, trained.pid);
        for (moment, printed) in torch::beside(&moments, &trained.printed) {
            torch::agree(&format!("torch {version}, {}", moment.name), moment, printed);
        }
        // The same program on the same machine, alone.
        let wheel = torch::wheel(version).expect("had before");
        let mut alone = Job::start(&mut wheel.bare(&trained.machine, "training.py", &MODELS));
        assert_eq!(
            numbers(&torch::finished(&mut alone)),
            numbers(&trained.printed),
            "torch {version}: its own numbers"
        );
        names_are_right(&trained);
    }
}

/// Checks owners in the step with ground truth; in every step parameters, gradients and state.
fn names_are_right(trained: &Trained) {
    let names = attribution(&trained.recording, trained.pid);
    println!("torch {}: {:?}", trained.version, names.layers);
    assert_eq!(names.known.len(), 2 * MODELS.len(), "{:?}", names.known.keys());
    let is_read = torch::reads_frames(&trained.version);
    let module_path = names.layers["ModulePath"].as_str();
    assert!(module_path.starts_with(if is_read { "Active CPython 3." } else { NOT_READ }), "{module_path}");
    for (key, share) in &names.known {
        let (right, near, named) = (share.percent(), share.percent_near(), share.percent_named());
        println!(
            "{key}: {right:.2} % right, {near:.2} near, {named:.2} named of {} B in {}",
            share.bytes, share.count
        );
        let wrong: Vec<_> = share.wrong.iter().take(4).collect();
        if !is_read {
            // None, and none that is wrong.
            assert_eq!(share.named, 0, "{key}: {wrong:?}");
            continue;
        }
        assert!(named >= 99.0 && near >= 99.0 && right >= 99.0, "{key}: {wrong:?}");
        // Nearly all that the step allocates.
        let all = &names.all[key];
        let beyond: Vec<_> =
            all.wrong.iter().filter(|((of, found), _)| of.is_empty() && !found.is_empty()).collect();
        let covered = 100.0 * share.bytes as f64 / all.bytes as f64;
        println!("  that is {covered:.2} % of the step's");
        assert!(covered >= LEAST_COVERED && beyond.is_empty(), "{key}: {covered} {beyond:?}");
    }
    for printed in trained.printed.iter().filter(|line| line["addresses"].is_array()) {
        let check = printed["check"].as_str().unwrap_or_default();
        let of = |what, role| owned(&names.live[check], printed, what, role);
        let gradients = of("gradient", Role::Gradient);
        // From their accumulation on.
        let all = (gradients.count, gradients.count);
        assert!(!is_read || (gradients.named, gradients.known) == all, "{check}: {gradients:?}");
        if !check.ends_with("/optimizer") {
            continue;
        }
        for (what, role) in ROLES {
            let owned = of(what, role);
            let all =
                Owned { named: owned.count, known: owned.count, others: Vec::new(), count: owned.count };
            assert_eq!(owned, all, "{check}: {what}");
        }
    }
}

#[test]
fn newest_wheel_trains() {
    let Some(wheel) = torch::wheel("newest") else { return };
    if torch::versions().contains(&wheel.version) {
        println!("the newest is {}, which is trained with anyway", wheel.version);
        return;
    }
    let Some(trained) = train("newest", &MODELS) else { return };
    let moments = torch::moments(&trained.recording, trained.pid);
    for (moment, printed) in torch::beside(&moments, &trained.printed) {
        torch::agree(&format!("torch {}, {}", trained.version, moment.name), moment, printed);
    }
    names_are_right(&trained);
}
