//! The saving that the first advice of `gpumemctl why` states, beside the saving of a real run with the change: programs of
//! tests/torch that have the change as a switch.

use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job, until};
use serde_json::Value;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const FAST: &str = "[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\n";
/// Largest distance of the measured saving from the stated interval, as a share of the measured saving.
const OFF: f64 = 0.05;
/// Largest upper end of a stated interval, as a factor of its lower end.
const WIDEST: f64 = 1.25;
/// Device on which each program fits with the change.
const LARGE: &str = "320G";

/// Whether a stated interval may be wide, with the reason.
type Width = Option<&'static str>;

/// A program of causes.py, the size of its device, the kind of the first advice, and why its
/// interval may be wide.
const PLANTED: [(&str, &str, &str, Width); 8] = [
    ("outputs_kept", "16G", "retained_tensors", None),
    ("losses_kept", "16G", "retained_tensors", None),
    ("gradients_kept", "16G", "retained_tensors", None),
    ("optimizers_kept", "16G", "retained_tensors", None),
    ("features_kept", "16G", "retained_tensors", None),
    ("embeddings_with_graphs", "8G", "evaluation_gradients", None),
    ("checkpoint_stays", "8G", "loaded_checkpoint", None),
    (
        "gradients_cleared_late",
        "8G",
        "kept_gradients",
        Some("the memory of later phases at their highest moments is unknown"),
    ),
];

/// Runs a program to its end, and returns the peak of allocated memory that it printed.
fn peak(command: &mut Command, what: &str) -> (Job, i64) {
    let mut job = Job::start(command.env_remove("GPUMEM_SITES"));
    until(300, what, || (!job.is_running()).then_some(()));
    job.end();
    let figures = job.said.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let figures = figures.filter_map(|figures| figures["allocated"].as_i64()).next_back();
    let bytes = figures.unwrap_or_else(|| panic!("{what}: {:#?}", job.said));
    (job, bytes)
}

/// Returns the peak of a program on a large device, without observation.
fn peak_on_a_large_device(wheel: &torch::Wheel, arguments: &[&str]) -> i64 {
    let machine = torch::machine(&["devices=1", &format!("memory={LARGE}")]);
    peak(&mut wheel.bare(&machine, "measured.py", arguments), arguments[1]).1
}

/// Returns the first advice on a program that a daemon watches, and the peak of the program.
fn watched(wheel: &torch::Wheel, memory: &str, arguments: &[&str]) -> (Value, i64) {
    let machine = torch::machine(&["devices=1", &format!("memory={memory}")]);
    let daemon = Daemon::start(&machine, "daemon", FAST);
    let mut command = wheel.covered(&machine, &daemon.runtime, "measured.py", arguments);
    let (job, bytes) = peak(&mut command, arguments[1]);
    daemon.wait_for_the_end_of(&machine, &[&job]);
    let pid = job.pid().to_string();
    let why = daemon.ctl(&machine, &["why", &pid, "--json"]).output().expect("gpumemctl why");
    let why: Value = serde_json::from_slice(&why.stdout).expect("JSON");
    (why["advice"][0].clone(), bytes)
}

/// Returns what is wrong with the saving that the first advice on a program states; `None` if it is right.
fn fault(wheel: &torch::Wheel, planted: (&str, &str, &str, Width)) -> Option<String> {
    let (program, memory, kind, width) = planted;
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/torch/causes.py");
    let (first, before) = watched(wheel, memory, &[file, program]);
    let saved = before - peak_on_a_large_device(wheel, &[file, program, "applied"]);
    let end = |name: &str| first["saves_bytes"][name].as_i64();
    let Some((least, most)) = end("least").zip(end("most")) else {
        return Some(format!("{program}: no saving is stated: {first}"));
    };
    let stated =
        format!("{program}: {} to {} MiB stated, {} MiB measured", least >> 20, most >> 20, saved >> 20);
    println!("{stated}; {}", first["formula"]);
    let tolerance = (saved.abs() as f64 * OFF) as i64;
    let is_wide = most as f64 > least as f64 * WIDEST && width.is_none();
    let is_right = first["kind"] == kind && (least - tolerance..=most + tolerance).contains(&saved);
    (!is_right || is_wide).then(|| format!("{stated}; {first}"))
}

#[test]
fn first_advice_saves_what_it_states() {
    let Some(wheel) = torch::wheel("2.15.0") else { return };
    let only = std::env::var("GPUMEM_TEST_SAVINGS").unwrap_or_default();
    let planted: Vec<_> = PLANTED.into_iter().filter(|(program, ..)| program.contains(&only)).collect();
    let (next, faults) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(planted) = planted.get(next.fetch_add(1, Ordering::Relaxed)) {
                    faults.lock().expect("faults").extend(fault(&wheel, *planted));
                }
            });
        }
    });
    let faults = faults.into_inner().expect("faults");
    assert!(faults.is_empty(), "{faults:#?}");
}
