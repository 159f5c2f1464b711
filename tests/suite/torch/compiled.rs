//! Compiled models in unmodified PyTorch wheels: whole, and part by part. Compiled code has no frames of modules, so its
//! allocations belong to the compiled module.
use gpumem_tests::live::attribution::attribution;
use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job};
use serde_json::Value;

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";
const MODELS: [&str; 5] = ["gpt", "resnet", "lstm", "reentrant", "non_reentrant"];

/// Required percentage of correctly named bytes, among those with an owner in the ground truth.
const LEAST_RIGHT: f64 = 95.0;
/// Required percentage of a pass's bytes with an owner in the ground truth. The rest is the loss, which is in no module.
const LEAST_COVERED: f64 = 90.0;

/// Compiles, trains and checks the models. Returns whether the wheel was available.
fn are_named(version: &str, how: &str, models: &[&str]) -> bool {
    let Some(wheel) = torch::wheel(version) else { return false };
    let machine = torch::machine(&[]);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let arguments = [&[how, "aot_eager"], models].concat();
    let mut job = Job::start(&mut wheel.covered(&machine, &daemon.runtime, "training.py", &arguments));
    let printed = torch::finished(&mut job);
    daemon.wait_for_the_end_of(&machine, &[&job]);
    daemon.stop();
    let moments = torch::moments(&daemon.recording, job.pid());
    for (moment, printed) in torch::beside(&moments, &printed) {
        torch::agree(&format!("torch {version} {how}, {}", moment.name), moment, printed);
    }
    let names = attribution(&daemon.recording, job.pid());
    for model in models {
        let what = format!("torch {version} {how} {model}");
        let compiled = compiled(&printed, model);
        println!("{what}: {compiled}");
        // Dynamo never traces into an LSTM.
        let breaks = i64::from(*model == "lstm");
        assert!(compiled["breaks"].as_i64() <= Some(breaks), "{compiled}");
        assert!(how != "--compiled" || *model == "lstm" || compiled["graphs"] == 1, "{compiled}");
        for pass in ["forward", "backward"] {
            let key = format!("{model} truth {pass}");
            let (known, all) = (&names.known[&key], &names.all[&key]);
            let covered = 100.0 * known.bytes as f64 / all.bytes as f64;
            let (named, right) = (known.percent_named(), known.percent());
            println!(
                "  {pass}: {right:.2} % right, {named:.2} named of {} B, {covered:.2} % of all",
                known.bytes
            );
            let wrong: Vec<_> = known.wrong.iter().take(4).collect();
            assert!(right >= LEAST_RIGHT && named >= LEAST_RIGHT, "{what} {pass}: {wrong:?}");
            assert!(covered >= LEAST_COVERED, "{what} {pass}: {covered}");
            // The earlier steps, without the test's ground truth in the program.
            let before = names.all[&format!("{model} {pass}")].percent_named();
            assert!(before >= LEAST_COVERED, "{what} {pass}: {before}");
        }
    }
    true
}

/// Returns the program's compiler figures: graphs and breaks before and with the ground truth.
fn compiled<'a>(printed: &'a [Value], model: &str) -> &'a Value {
    let line = printed.iter().find(|line| line["graphs"].is_number() && line["model"] == model);
    line.unwrap_or_else(|| panic!("{model} has no compiler line"))
}

#[test]
fn compiled_model_keeps_its_name() {
    for version in &torch::versions() {
        if !are_named(version, "--compiled", &MODELS) {
            return;
        }
    }
}

#[test]
fn compiled_parts_keep_their_names() {
    for version in &torch::versions() {
        // 2.4.1 cannot compile random number generation inside a checkpoint of this kind.
        let models = if version == "2.4.1" { &MODELS[..4] } else { &MODELS };
        if !are_named(version, "--parts", models) {
            return;
        }
    }
}
