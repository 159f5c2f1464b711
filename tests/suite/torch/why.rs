//! The first advice of `gpumemctl why`, applied for real: each program of tests/torch/advised.py runs without and with the change,
//! and its peak falls by what was stated.

use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job, Machine, until};
use serde_json::Value;

const FAST: &str = "[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\n";
/// Largest difference between a replayed saving and the real one, as a share of it.
const REPLAYED_OFF: f64 = 0.05;

/// Waits for the end of a program, and returns the peaks that it printed.
fn peaks(job: &mut Job, program: &str) -> Value {
    until(300, program, || (!job.is_running()).then_some(()));
    job.end();
    let figures = job.said.iter().filter_map(|line| serde_json::from_str(line).ok()).next_back();
    figures.unwrap_or_else(|| panic!("{program}: {:#?}", job.said))
}

fn bytes(figures: &Value, name: &str) -> i64 {
    figures[name].as_i64().unwrap_or_else(|| panic!("{name} in {figures}"))
}

fn machine() -> Machine {
    torch::machine(&["devices=1"])
}

/// Returns the first advice on a program that a daemon watched, and the program's peaks.
fn watched(wheel: &torch::Wheel, program: &str, arguments: &[&str]) -> (Value, Value) {
    let machine = machine();
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let arguments = [&[program], arguments].concat();
    let mut command = wheel.covered(&machine, &daemon.runtime, "advised.py", &arguments);
    let mut job = Job::start(command.env_remove("GPUMEM_SITES"));
    let figures = peaks(&mut job, program);
    daemon.wait_for_the_end_of(&machine, &[&job]);
    let pid = job.pid().to_string();
    let why = daemon.ctl(&machine, &["why", &pid, "--json"]).output().expect("gpumemctl why");
    let why: Value = serde_json::from_slice(&why.stdout).expect("JSON");
    (why, figures)
}

/// Checks the first advice on a program, applies it, and compares the saving of allocated memory with the stated interval.
fn estimate_holds(wheel: &torch::Wheel, program: &str, kind: &str) {
    let (why, before) = watched(wheel, program, &[]);
    let (later, after) = watched(wheel, program, &["applied"]);
    let first = &why["advice"][0];
    let saved = bytes(&before, "allocated") - bytes(&after, "allocated");
    println!("{program}: saved {} MiB; {first}", saved >> 20);
    assert_eq!((&first["kind"], &first["basis"]), (&kind.into(), &"estimated".into()), "{program}: {why}");
    let (least, most) = (bytes(&first["saves_bytes"], "least"), bytes(&first["saves_bytes"], "most"));
    // The allocator rounds blocks.
    let rounding = most / 20;
    assert!(
        (least - rounding..=most + rounding).contains(&saved),
        "{program}: {least} to {most}, not {saved}"
    );
    assert_ne!(later["advice"][0]["kind"], kind, "{program}: it is in force: {later}");
}

#[test]
fn first_advice_on_memory_that_is_kept_saves_what_it_states() {
    let Some(wheel) = torch::wheel("2.15.0") else { return };
    estimate_holds(&wheel, "kept_outputs", "retained_tensors");
}

#[test]
fn first_advice_on_a_full_device_saves_what_it_states() {
    let Some(wheel) = torch::wheel("2.15.0") else { return };
    estimate_holds(&wheel, "activations", "checkpointing");
    estimate_holds(&wheel, "logits", "large_output");
    estimate_holds(&wheel, "kept_gradients", "kept_gradients");
    estimate_holds(&wheel, "large_evaluation", "evaluation_gradients");
}

#[test]
fn first_advice_on_tables_formulas_and_samples_saves_what_it_states() {
    let Some(wheel) = torch::wheel("2.15.0") else { return };
    estimate_holds(&wheel, "formula", "fused_operation");
    estimate_holds(&wheel, "tables", "sparse_gradients");
    estimate_holds(&wheel, "each_sample", "batch_size");
}

#[test]
fn evaluation_fits_without_gradients() {
    let Some(wheel) = torch::wheel("2.15.0") else { return };
    let (why, _) = watched(&wheel, "evaluation", &[]);
    let (later, _) = watched(&wheel, "evaluation", &["applied"]);
    assert_eq!(why["advice"][0]["kind"], "evaluation_gradients", "{why}");
    assert_eq!((&why["outcome"], &later["outcome"]), (&"out_of_memory".into(), &"ended".into()));
    assert_eq!(later["advice"], serde_json::json!([]));
}

/// Returns the peak of reserved memory of a program, and the first advice on its recording.
fn recorded(wheel: &torch::Wheel, program: &str, arguments: &[&str], setting: Option<&str>) -> (i64, Value) {
    let machine = machine();
    let file = machine.dir.join("run.gpumem");
    let arguments = [&[program], arguments].concat();
    let mut command = wheel.covered(&machine, &machine.dir, "advised.py", &arguments);
    command.env("GPUMEM_RECORD", &file);
    if let Some((name, value)) = setting.and_then(|setting| setting.split_once('=')) {
        command.env(name, value);
    }
    let reserved = bytes(&peaks(&mut Job::start(&mut command), program), "reserved");
    let ctl = gpumem_tests::live::programs::programs().ours.join("gpumemctl");
    let output = machine.command(ctl).args(["why", "--json"]).arg(&file).output().expect("gpumemctl why");
    let why = serde_json::from_slice(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    (reserved, why.unwrap_or_else(|error| panic!("{program}: {error}: {stderr}")))
}

#[test]
fn replayed_saving_is_that_of_a_real_run() {
    let Some(wheel) = torch::wheel("2.15.0") else { return };
    for (program, kind) in [("growing_sizes", "allocator_setting"), ("streams", "streams")] {
        let (before, why) = recorded(&wheel, program, &[], None);
        let first = &why["advice"][0];
        assert_eq!((&first["kind"], &first["basis"]), (&kind.into(), &"replayed".into()), "{program}: {why}");
        let setting = first["change"].as_str().and_then(|change| change.strip_prefix("Set "));
        let (after, later) = recorded(&wheel, program, &["applied"], setting);
        let (saved, stated) = (before - after, bytes(&first["saves_bytes"], "most"));
        println!("{program}: saved {} MiB, stated {} MiB; {first}", saved >> 20, stated >> 20);
        assert!(
            saved.abs_diff(stated) as f64 <= saved as f64 * REPLAYED_OFF,
            "{program}: {stated}, not {saved}"
        );
        assert_ne!(later["advice"][0]["change"], first["change"], "{program}: it is in force: {later}");
    }
}
