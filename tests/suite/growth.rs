//! Leaks and drift on the simulated machine: verdicts and rates for programs with known behaviour.
use gpumem_import::read_file;
use gpumem_model::run::Run;
use gpumem_report::rules::Groupings;
use gpumem_report::text::{Layout, text};
use gpumem_report::{Report, growth, json};
use gpumem_tests::live::{Daemon, Job, Machine};

const MIB: f64 = 1_048_576.0;
const STEPS: f64 = 250.0;

/// Growth verdicts of a trainer's run, from the store; the recording must give the same.
struct Ended {
    json: serde_json::Value,
    table: String,
    line: String,
}

fn train(extra: &[&str]) -> Ended {
    let machine = Machine::new(&["devices=1", "gpu0.memory=16G", "cuda.module_bytes=4M"]);
    let fast = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";
    let mut daemon = Daemon::start(&machine, "daemon", fast);
    let steps = STEPS.to_string();
    let arguments = [&["--steps", &steps, "--step-ms", "12", "--no-cache", "--quiet"], extra].concat();
    let mut trainer = Job::start(&mut machine.trainer(&daemon.runtime, &arguments));
    trainer.finish();
    daemon.wait_for_the_end_of(&machine, &[&trainer]);
    let printed = |form: &str| {
        let output = daemon.ctl(&machine, &["report", &trainer.pid().to_string(), form]).output();
        let output = output.expect("gpumemctl runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let (stored, table, short) = (printed("--json"), printed("--growth"), printed("--all"));
    daemon.stop();
    let document: serde_json::Value = serde_json::from_str(&stored).expect("JSON");
    let line = short.lines().find(|line| line.starts_with("growth: ")).expect(&short).to_owned();
    println!("{line}\n{table}");

    let runs = read_file(&daemon.recording, None).expect("a recording");
    let run: &Run = runs.iter().find(|run| run.process.pid == trainer.pid()).expect("its run");
    let report = Report::new(run, Groupings::preset(None).clone(), None);
    assert_eq!(
        growth::line(&report, &run.devices[0]).as_deref(),
        Some(line.as_str()),
        "a replay gives the same"
    );
    assert!(text(&report, Layout::default()).contains(&line));
    let growth = document["devices"][0]["growth"].clone();
    let replayed: serde_json::Value = serde_json::from_str(&json::json(&report)).expect("JSON");
    // On a busy machine, records can arrive after a sample was closed without them, and it is uncertain; a recording has them in time.
    let certain = |document: &serde_json::Value| {
        ["samples", "torn_samples", "stale_samples"].map(|count| document["coverage"][count].clone())
    };
    if certain(&document) == certain(&replayed) {
        assert_eq!(replayed["devices"][0]["growth"], growth, "with the same numbers");
    } else {
        println!("not compared: {:?} and {:?} samples are uncertain", certain(&document), certain(&replayed));
    }
    Ended { json: growth, table, line }
}

/// Returns the verdict of a tag; `None` for a constant one.
fn tag<'j>(growth: &'j serde_json::Value, name: &str) -> Option<&'j serde_json::Value> {
    growth["tags"].as_array().expect("tags").iter().find(|tag| tag["name"] == name)
}

#[track_caller]
fn grows(judgement: &serde_json::Value, rate: f64) {
    assert_eq!(judgement["verdict"], "growing", "{judgement}");
    let reported = judgement["bytes_per_unit"].as_f64().expect("a rate");
    assert!((reported - rate).abs() <= 0.05 * rate, "{reported} is not {rate}: {judgement}");
    assert!(judgement["confidence"].as_f64().is_some_and(|sure| sure >= 0.99), "{judgement}");
}

#[test]
fn leaking_tag_is_reported_with_its_rate() {
    let Ended { json, table, line } = train(&["--leak", "4"]);
    assert_eq!(json["per"], "step");
    grows(&json["tracked"], 4.0 * MIB);
    grows(tag(&json, "history").expect("it changed"), 4.0 * MIB);
    assert_eq!(json["gap"]["verdict"], "flat", "{}", json["gap"]);
    let moving = json["tags"].as_array().expect("tags").iter().filter(|tag| tag["verdict"] != "flat");
    assert_eq!(moving.count(), 1, "no other tag is blamed: {}", json["tags"]);
    let structures = json["structures"].as_array().expect("structures");
    assert_eq!(structures.iter().filter(|name| name["verdict"] == "growing").count(), 1, "{structures:?}");
    assert!(line.starts_with("growth: tracked +4.0 MiB per step over 2"), "{line}");
    assert!(line.ends_with("% sure): history +4.0; Untrackable flat"), "{line}");
    let row = table.lines().find(|line| line.trim_start().starts_with("history ")).expect("a row");
    assert!(row.contains(" +4.0  growing "), "{row}");
}

#[test]
fn gap_drift_is_distinguished_from_tracked_growth() {
    let Ended { json, line, .. } = train(&["--leak-modules"]);
    grows(&json["gap"], 4.0 * MIB);
    assert_eq!(json["tracked"]["verdict"], "flat", "{}", json["tracked"]);
    assert!(line.starts_with("growth: tracked flat over 2"), "{line}");
    assert!(line.contains(" steps; Untrackable +4.0 MiB per step ("), "{line}");
}

#[test]
fn large_temporary_activations_are_not_growth() {
    let Ended { json, line, .. } = train(&["--threads", "3"]);
    for amount in ["tracked", "gap", "pool_slack"] {
        assert!(json[amount]["verdict"] == "flat" || json[amount]["verdict"] == "one_jump", "{json}");
    }
    assert_eq!(json["tracked"]["verdict"], "flat", "{json}");
    assert!(json["tags"].as_array().expect("tags").iter().all(|tag| tag["verdict"] == "flat"), "{json}");
    assert!(
        line.starts_with("growth: tracked flat over 2") && line.ends_with("; Untrackable flat"),
        "{line}"
    );
}
