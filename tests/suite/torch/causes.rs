//! Programs with one planted cause (tests/torch/causes.py): the first finding of the report names it, and the first advice of
//! `gpumemctl why` changes it. Healthy programs have neither.

use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job, until};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Write;
use std::process::Output;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const FAST: &str = "[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\n";

/// A program of tests/torch on a device of its own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Program<'p> {
    pub name: &'p str,
    /// File, and its argument unless that is empty.
    pub command: (&'p str, &'p str),
    /// Size of the device, such as `16G`.
    pub memory: &'p str,
    /// Size of memory that another process holds meanwhile; empty for none.
    pub held: &'p str,
    /// Value of PYTHONPATH, for third-party libraries.
    pub libraries: &'p str,
    /// Other keys of the machine.
    pub keys: &'p [&'p str],
    /// Other variables of the environment.
    pub variables: &'p [(&'p str, &'p str)],
}

/// Returns the program `name` of causes.py.
fn of_causes(name: &str) -> Program<'_> {
    // Modules of a size as in builds for several architectures, of which the driver loads a half at first.
    let (keys, variables): (&[&str], &[(&str, &str)]) = match name {
        "modules_loaded_at_once" => {
            (&["cuda.lazy=1", "cuda.module_bytes=300M"], &[("CUDA_MODULE_LOADING", "EAGER")])
        }
        "healthy_modules" => (&["cuda.lazy=1", "cuda.module_bytes=300M"], &[]),
        _ => (&[], &[]),
    };
    Program { name, command: ("causes.py", name), memory: "16G", held: "", libraries: "", keys, variables }
}

/// A program, the kind of its first finding, a part of the sentence, and the kind of the first advice (or several).
const PLANTED: [(&str, &str, &str, &str); 30] = [
    ("outputs_kept", "growth", "Net/head", "retained_tensors"),
    ("losses_kept", "growth", "Net", "retained_tensors"),
    ("hooks_keep", "growth", "Net/blocks.2/up", "retained_tensors"),
    ("gradients_kept", "growth", "gradients_kept", "retained_tensors"),
    ("gradients_kept_by_a_closure", "growth", "on_after_backward", "retained_tensors"),
    ("optimizers_kept", "growth", "optimizer state", "retained_tensors"),
    ("tracebacks_kept", "growth", "Net", "retained_tensors"),
    ("embeddings_kept", "growth", "Net/blocks.0", "retained_tensors"),
    ("cache_without_limit", "growth", "answer", "retained_tensors"),
    ("logits_kept_in_evaluation", "growth", "retained forward outputs of Net/head", "retained_tensors"),
    ("graphs_kept", "fragmentation", "CUDA graphs", "graph_pools|streams"),
    ("state_too_large", "too_large", "optimizer state", "optimizer_state"),
    ("temporaries_too_large", "too_large", "optimizer state", "optimizer_temporaries"),
    ("losses_added_up", "growth", "Net", "retained_tensors"),
    ("communicators_kept", "growth", "libnccl", "communication"),
    ("models_kept", "growth", "gradients + parameters", "retained_tensors"),
    ("teacher_with_gradients", "too_large", "activations of Teacher", "evaluation_gradients"),
    ("data_on_the_device", "too_large", "data_on_the_device", "retained_tensors"),
    ("hooks_of_gradients_keep", "growth", "gradients of Net:", "retained_tensors"),
    ("evaluation_with_gradients", "no_backward", "training step", "evaluation_gradients"),
    ("batch_too_large", "too_large", "activations", "checkpointing"),
    ("long_batch_too_large", "too_large", "activations", "outlier_batch"),
    ("model_too_large", "too_large", "__init__", "parameter_precision"),
    ("logits_too_large", "too_large", "activations", "large_output"),
    ("second_optimizer", "too_large", "optimizer state", "optimizer_state"),
    ("one_huge_request", "large_request", "38,1", "large_request"),
    ("buckets_too_large", "too_large", "gradients", "gradient_buckets"),
    ("fraction_too_small", "pool_limit", "limit", "pool_limit"),
    ("fragmentation", "fragmentation", "unused", "allocator_setting"),
    ("other_tenant", "other_processes", "other processes", "other_process"),
];

/// The same for programs that end well.
const KEPT: [(&str, &str, &str, &str); 9] = [
    ("optimizers_for_each_step_kept", "growth", "MiB per step", "retained_tensors"),
    ("schedulers_keep_optimizers", "growth", "optimizer state", "retained_tensors"),
    ("weights_kept", "growth", "weights_kept", "retained_tensors"),
    ("averages_kept", "growth", "per step", "retained_tensors"),
    ("features_kept", "growth", "Net/head", "retained_tensors"),
    ("sessions_kept", "growth", "sessions_kept", "retained_tensors"),
    ("a_stream_for_each_request", "unused_pool", "MiB per forward pass", "streams"),
    ("modules_loaded_at_once", "untrackable", "CUDA_MODULE_LOADING=EAGER", "eager_modules"),
    ("pinned_kept", "growth", "pinned host memory of causes.py:", "pinned_memory"),
];

/// Programs that end well and have no finding, with the kind of the first advice, and a part of it. The change costs nothing.
const FREE: [(&str, &str, &str); 6] = [
    ("embeddings_with_graphs", "evaluation_gradients", "no_grad()"),
    ("gradients_cleared_late", "kept_gradients", "zero_grad()"),
    ("teacher_fits", "evaluation_gradients", "no_grad()"),
    ("checkpoint_stays", "loaded_checkpoint", "map_location"),
    ("backbone_with_gradients", "evaluation_gradients", "requires_grad_(False)"),
    ("rollouts_with_gradients", "evaluation_gradients", "no_grad()"),
];

/// The same with a change that has a small price, or a condition.
const PRICED: [(&str, &str, &str); 4] = [
    ("base_is_trained", "unfrozen_base", "Freeze the base"),
    ("double_by_numpy", "parameter_precision", "float32"),
    ("losses_of_micro_batches", "graphs_at_once", "call backward() in each"),
    ("answers_in_float32", "parameter_precision", "bfloat16"),
];

const HEALTHY: [&str; 12] = [
    "healthy_training",
    "healthy_distributed",
    "healthy_evaluation",
    "healthy_inference",
    "healthy_accumulation",
    "healthy_lengths",
    "healthy_adversaries",
    "healthy_restarts",
    "healthy_server",
    "healthy_generation",
    "healthy_growing_answers",
    "healthy_modules",
];

/// Runs a program to its end, and returns its report, with its text and the advice on it.
fn report_of(wheel: &torch::Wheel, of: Program<'_>) -> Value {
    let (program, (file, argument)) = (of.name, of.command);
    let memory = format!("memory={}", of.memory);
    let machine = torch::machine(&[&["devices=1", memory.as_str()], of.keys].concat());
    if !of.held.is_empty() {
        machine.tool("hold", &["1", "0", of.held]);
    }
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let mut holder = None;
    if program == "other_tenant" {
        let mut job = Job::start(&mut wheel.bare(&machine, "causes.py", &["holder"]));
        job.wait_for("holding");
        holder = Some(job);
    }
    let arguments = [argument];
    let arguments = if argument.is_empty() { &[][..] } else { &arguments };
    let mut command = wheel.covered(&machine, &daemon.runtime, file, arguments);
    if !of.libraries.is_empty() {
        command.env("PYTHONPATH", of.libraries);
    }
    command.envs(of.variables.iter().copied());
    // Processes that the program starts belong to its job, as under `gpumemctl run`.
    let mut job = Job::start(command.env("GPUMEM_JOB", program).env_remove("GPUMEM_SITES"));
    until(300, program, || (!job.is_running()).then_some(()));
    daemon.wait_for_the_end_of(&machine, &[&job]);
    let pid = job.pid().to_string();
    let output = daemon.ctl(&machine, &["report", &pid, "--json"]).output().expect("gpumemctl report");
    let text = daemon.ctl(&machine, &["report", &pid]).output().expect("gpumemctl report");
    let text = String::from_utf8_lossy(&text.stdout);
    println!("{program}:\n{text}");
    assert!(text.lines().count() <= 25, "{program}: {text}");
    assert!(!text.contains("allocations of") && !text.contains("made in forward"), "{program}: {text}");
    let why = daemon.ctl(&machine, &["why", &pid]).output().expect("gpumemctl why");
    let why = String::from_utf8_lossy(&why.stdout);
    println!("{why}");
    assert!(why.lines().count() <= 15, "{program}: {why}");
    drop(holder);
    let parsed = |output: &Output| -> Value {
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
            let _ = std::io::stderr().write_all(&output.stderr);
            panic!("{program}: {error}")
        })
    };
    let mut report = parsed(&output);
    let why = daemon.ctl(&machine, &["why", &pid, "--json"]).output().expect("gpumemctl why");
    assert!(why.stdout.len() < 4096, "{program}: {} bytes", why.stdout.len());
    report["why"] = parsed(&why);
    report["text"] = text.into();
    report
}

/// Runs programs, two at a time, and returns their reports by name.
pub(super) fn reports_of<'p>(wheel: &torch::Wheel, programs: &[Program<'p>]) -> BTreeMap<&'p str, Value> {
    let next = AtomicUsize::new(0);
    let reports = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(program) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let report = report_of(wheel, *program);
                    reports.lock().expect("reports").insert(program.name, report);
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
    let programs: Vec<Program<'_>> = planted.iter().map(|((program, ..), _)| of_causes(program)).collect();
    let reports = reports_of(&wheel, &programs);
    for ((program, kind, part, change), outcome) in planted {
        let report = &reports[program];
        let first = &report["findings"][0];
        let what = first["what"].as_str().unwrap_or_default();
        println!("{program}: {} {}: {what}", report["outcome"], first["kind"]);
        if first["kind"] != kind || !what.contains(part) || report["outcome"] != outcome {
            wrong.push(format!("{program}: {} {first}", report["outcome"]));
        }
        let advice = &report["why"]["advice"][0];
        if !change.split('|').any(|kind| advice["kind"] == kind) {
            wrong.push(format!("{program}: {change} is expected, not {advice}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Asserts the first advice on programs that fit, and the report's line on it, which begins with `heading`.
fn assert_savings(heading: &str, expected: &[(&'static str, &str, &str)]) {
    let Some(wheel) = torch::wheel("2.15.0") else { return };
    let programs: Vec<_> =
        expected.iter().map(|(name, ..)| Program { memory: "8G", ..of_causes(name) }).collect();
    let reports = reports_of(&wheel, &programs);
    let mut wrong = Vec::new();
    for (program, kind, part) in expected {
        let report = &reports[program];
        let first = &report["why"]["advice"][0];
        let has_part = |text: &Value| text.as_str().is_some_and(|text| text.contains(part));
        let lines = report["text"].as_str().unwrap_or_default().lines();
        let line = lines.into_iter().find(|line| line.starts_with(heading));
        let is_right = first["kind"] == *kind
            && has_part(&first["change"])
            && line.is_some_and(|line| line.contains(part));
        if !is_right || report["outcome"] != "ended" || report["findings"] != serde_json::json!([]) {
            wrong.push(format!(
                "{program}: {kind} is expected, not {first}; {line:?}; {}",
                report["findings"]
            ));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn savings_that_cost_nothing_are_advised_to_programs_that_fit() {
    assert_savings("free to save: ", &FREE);
}

#[test]
fn savings_with_a_small_price_are_advised_to_programs_that_fit() {
    assert_savings("could save: ", &PRICED);
}

#[test]
fn workspaces_of_many_threads_and_streams_are_no_outputs() {
    for version in ["2.4.1", "2.12.1"] {
        let Some(wheel) = torch::wheel(version) else { return };
        let report = report_of(&wheel, of_causes("workspaces_kept"));
        let first = &report["findings"][0];
        assert_eq!((&report["outcome"], &first["kind"]), (&"out_of_memory".into(), &"growth".into()));
        let what = first["what"].as_str().unwrap_or_default();
        assert!(what.starts_with("workspace (cuBLAS etc.) of "), "{version}: {what}");
        assert_eq!(report["why"]["advice"][0]["kind"], "workspace", "{}", report["why"]);
    }
}

#[test]
fn healthy_programs_have_no_finding() {
    let Some(wheel) = torch::wheel("2.15.0") else { return };
    for (program, report) in reports_of(&wheel, &HEALTHY.map(of_causes)) {
        assert_eq!(report["outcome"], "ended", "{program}");
        assert_eq!(report["findings"], serde_json::json!([]), "{program}");
        assert_eq!(report["why"]["advice"], serde_json::json!([]), "{program}");
    }
}
