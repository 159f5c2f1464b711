//! Programs with one planted cause (tests/torch/causes.py): the first finding of the report names it. Healthy programs have none.

use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job, until};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const FAST: &str = "[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\n";

/// A program, the kind of its first finding, and a part of the sentence.
const PLANTED: [(&str, &str, &str); 21] = [
    ("outputs_kept", "growth", "Net/head"),
    ("losses_kept", "growth", "Net"),
    ("hooks_keep", "growth", "Net/blocks.2/up"),
    ("gradients_kept", "growth", "gradients_kept"),
    ("optimizers_kept", "growth", "optimizer state"),
    ("tracebacks_kept", "growth", "Net"),
    ("embeddings_kept", "growth", "Net/blocks.0"),
    ("cache_without_limit", "growth", "answer"),
    ("logits_kept_in_evaluation", "growth", "retained forward outputs of Net/head"),
    ("graphs_kept", "fragmentation", "CUDA graphs"),
    ("state_too_large", "too_large", "optimizer state"),
    ("evaluation_with_gradients", "no_backward", "training step"),
    ("batch_too_large", "too_large", "activations"),
    ("long_batch_too_large", "too_large", "activations"),
    ("model_too_large", "too_large", "__init__"),
    ("logits_too_large", "too_large", "activations"),
    ("second_optimizer", "too_large", "optimizer state"),
    ("one_huge_request", "large_request", "38,1"),
    ("fraction_too_small", "pool_limit", "limit"),
    ("fragmentation", "fragmentation", "unused"),
    ("other_tenant", "other_processes", "other processes"),
];

/// The same for programs that end well.
const KEPT: [(&str, &str, &str); 8] = [
    ("optimizers_for_each_step_kept", "growth", "MiB per step"),
    ("schedulers_keep_optimizers", "growth", "optimizer state"),
    ("weights_kept", "growth", "weights_kept"),
    ("averages_kept", "growth", "per step"),
    ("features_kept", "growth", "Net/head"),
    ("sessions_kept", "growth", "sessions_kept"),
    ("a_stream_for_each_request", "unused_pool", "cached by the allocator"),
    ("pinned_kept", "growth", "pinned host memory"),
];

const HEALTHY: [&str; 10] = [
    "healthy_training",
    "healthy_evaluation",
    "healthy_inference",
    "healthy_accumulation",
    "healthy_lengths",
    "healthy_adversaries",
    "healthy_restarts",
    "healthy_server",
    "healthy_generation",
    "healthy_growing_answers",
];

/// Runs a program of causes.py to its end, and returns its report.
fn report_of(wheel: &torch::Wheel, program: &str) -> Value {
    let machine = torch::machine(&["devices=1"]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let mut holder = None;
    if program == "other_tenant" {
        let mut job = Job::start(&mut wheel.bare(&machine, "causes.py", &["holder"]));
        job.wait_for("holding");
        holder = Some(job);
    }
    let mut command = wheel.covered(&machine, &daemon.runtime, "causes.py", &[program]);
    let mut job = Job::start(command.env_remove("GPUMEM_SITES"));
    until(300, program, || (!job.is_running()).then_some(()));
    daemon.wait_for_the_end_of(&machine, &[&job]);
    let pid = job.pid().to_string();
    let output = daemon.ctl(&machine, &["report", &pid, "--json"]).output().expect("gpumemctl report");
    let text = daemon.ctl(&machine, &["report", &pid]).output().expect("gpumemctl report");
    let text = String::from_utf8_lossy(&text.stdout);
    println!("{program}:\n{text}");
    assert!(text.lines().count() <= 25, "{program}: {text}");
    assert!(!text.contains("allocations of") && !text.contains("made in forward"), "{program}: {text}");
    drop(holder);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        let _ = std::io::stderr().write_all(&output.stderr);
        panic!("{program}: {error}")
    })
}

/// Runs programs, two at a time, and returns their reports by name.
fn reports_of<'p>(wheel: &torch::Wheel, programs: &[&'p str]) -> BTreeMap<&'p str, Value> {
    let next = AtomicUsize::new(0);
    let reports = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(program) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let report = report_of(wheel, program);
                    reports.lock().expect("reports").insert(*program, report);
                }
            });
        }
    });
    reports.into_inner().expect("reports")
}

#[test]
fn first_finding_names_the_planted_cause() {
    let Some(wheel) = torch::wheel("2.15.0") else { return };
    let mut wrong = Vec::new();
    let planted = PLANTED.map(|planted| (planted, "out_of_memory")).into_iter();
    let planted: Vec<_> = planted.chain(KEPT.map(|kept| (kept, "ended"))).collect();
    let programs: Vec<&str> = planted.iter().map(|((program, ..), _)| *program).collect();
    let reports = reports_of(&wheel, &programs);
    for ((program, kind, part), outcome) in planted {
        let report = &reports[program];
        let first = &report["findings"][0];
        let what = first["what"].as_str().unwrap_or_default();
        println!("{program}: {} {}: {what}", report["outcome"], first["kind"]);
        if first["kind"] != kind || !what.contains(part) || report["outcome"] != outcome {
            wrong.push(format!("{program}: {} {first}", report["outcome"]));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn healthy_programs_have_no_finding() {
    let Some(wheel) = torch::wheel("2.15.0") else { return };
    for (program, report) in reports_of(&wheel, &HEALTHY) {
        assert_eq!(report["outcome"], "ended", "{program}");
        assert_eq!(report["findings"], serde_json::json!([]), "{program}");
    }
}
