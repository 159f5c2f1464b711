//! Parts and steps of the gap on the simulated machine, compared with the machine's own truth.
use gpumem_model::run::UntrackableChange;
use gpumem_tests::live::{Daemon, Job, Machine, replay, until};

const MIB: i64 = 1 << 20;
const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";

/// Waits until NVML has listed the process `times` more.
fn listed(machine: &Machine, job: &Job, times: usize) {
    let count = || machine.truth().iter().filter(|truth| truth.pid == job.pid() && !truth.is_end()).count();
    let goal = count() + times;
    until(60, "lists of processes", || (count() >= goal).then_some(()));
}

/// Makes the program's next change, and waits until NVML has listed it.
fn next(machine: &Machine, job: &mut Job, name: &str) {
    job.signal("USR1");
    job.wait_for(&format!("did {name}"));
    listed(machine, job, 4);
}

fn summary(step: &UntrackableChange) -> (&str, &str, Option<&str>, [i64; 5]) {
    let parts = &step.parts;
    let parts = [
        parts.context_bytes,
        parts.modules_bytes,
        parts.local_memory_bytes,
        parts.heaps_bytes,
        parts.unexplained_bytes,
    ];
    (step.cause.as_str(), step.kind.as_str(), step.tag.as_deref(), parts.map(|bytes| bytes / MIB))
}

#[test]
fn every_gap_step_has_its_cause_and_every_part_is_exact() {
    steps_and_parts(&[]);
}

/// libcudart may make its context through a private table of the driver's, so that no callback of cuDevicePrimaryCtxRetain comes.
#[test]
fn context_from_an_unknown_call_has_a_cause() {
    steps_and_parts(&["cuda.muted=386"]);
}

fn steps_and_parts(keys: &[&str]) {
    let machine = Machine::new(&[&["devices=1", "memory=16G"], keys].concat());
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let mut job = Job::start(&mut machine.gap(&daemon.runtime));
    job.wait_for("ready");
    for stage in [
        "init",
        "model/first",
        "model/second",
        "run/launch",
        "run/stack",
        "run/allocate",
        "run/library",
        "run/heap",
        "quiet",
    ] {
        next(&machine, &mut job, stage);
    }
    machine.tool("grow", &[&job.pid().to_string(), "0", &(178 << 20).to_string()]);
    listed(&machine, &job, 4);
    for stage in ["end/unload", "end/unstack", "end/free"] {
        next(&machine, &mut job, stage);
    }
    job.signal("USR1");
    job.finish();
    daemon.wait_for_the_end_of(&machine, &[&job]);
    daemon.stop();

    let (seen, truth) = (replay(&daemon.recording), machine.truth());
    let process = seen.process(job.pid());
    let account = &process.accounts[0];
    let steps: Vec<_> = account.steps.iter().map(summary).collect();
    println!("{steps:#?}");
    let stacks = 3 * 264;
    let expected = [
        ("context created", "measured", Some("init"), [498, 0, 0, 0, 0]),
        ("module loaded", "upper_bound", Some("model/first"), [0, 6, 0, 0, 0]),
        ("module loaded", "upper_bound", Some("model/second"), [0, 10, 0, 0, 0]),
        ("stack limit", "measured", Some("run/stack"), [0, 0, stacks, 0, 0]),
        ("heap limit", "measured", Some("run/heap"), [0, 0, 0, 56, 0]),
        ("between events", "none", Some("run/heap"), [0, 0, 0, 0, 178]),
        ("module unloaded", "upper_bound", Some("end/unload"), [0, -6, 0, 0, 0]),
        ("stack limit", "measured", Some("end/unstack"), [0, 0, -stacks, 0, 0]),
    ];
    assert_eq!(steps, expected);
    // A call without a callback has no caller, whatever library has left return addresses on the stack.
    let caller = |step: &UntrackableChange| match step.cause.as_str() {
        "context created" if !keys.is_empty() => None,
        _ => Some("gap"),
    };
    let events = account.steps.iter().filter(|step| step.kind != "none");
    let is_right = |step: &UntrackableChange| step.library.as_deref() == caller(step);
    assert!(events.clone().all(is_right), "{:?}", events.map(|step| &step.library).collect::<Vec<_>>());
    let cell = process.cells.iter().position(|cell| cell.tag.as_deref() == Some("run/library"));
    let library = cell.and_then(|cell| process.cells[cell].library.as_deref());
    assert!(library.is_some_and(|path| path.ends_with("/libgaplib.so")), "{library:?}");
    assert_eq!(cell.map(|cell| account.peak.amounts[cell] / MIB), Some(64), "tracked, by that library");
    assert!(seen.compare_parts(&truth, job.pid()) >= 24, "samples between the stages");
    let last = account.complete.as_ref().expect("a sample");
    let sum: i64 = account.steps.iter().map(|step| step.bytes).sum();
    let parts = last.parts.expect("parts");
    assert_eq!(sum, parts.sum() - parts.rounding_bytes, "all steps make the gap");
    assert_eq!(process.odd, Default::default(), "nothing odd");
}

#[test]
fn lazily_loaded_code_is_reported_as_a_bound() {
    let machine = Machine::new(&["devices=1", "memory=16G", "cuda.lazy=1"]);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let mut job = Job::start(&mut machine.gap(&daemon.runtime));
    job.wait_for("ready");
    for stage in ["init", "model/first", "model/second", "run/launch"] {
        next(&machine, &mut job, stage);
    }
    job.signal("KILL");
    job.end();
    daemon.wait_for_the_end_of(&machine, &[&job]);
    daemon.stop();
    let seen = replay(&daemon.recording);
    let account = &seen.process(job.pid()).accounts[0];
    let (last, before) = account.steps.split_last().expect("steps");
    let code: i64 = before.iter().map(|step| step.parts.modules_bytes).sum();
    assert!((6 * MIB..=10 * MIB).contains(&code), "half of the modules: {before:?}");
    assert_eq!(summary(last), ("between events", "none", Some("model/second"), [0, 0, 0, 0, 4]));
    let note = format!("modules with {} bytes not yet seen are loaded: may be lazy loading", 16 * MIB - code);
    assert_eq!(last.note, Some(note), "the remaining modules");
}
