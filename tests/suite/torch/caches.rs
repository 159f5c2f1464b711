//! KV caches and copies of parameters, compared with the program's own figures (tests/torch/caches.py).
use gpumem_ledger::Origin;
use gpumem_runs::builder::Sink;
use gpumem_runs::input::Input;
use gpumem_runs::recording;
use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job, until};
use gpumem_wire::{Body, Record, Role};
use serde_json::Value;

/// Time in which an idle program's memory gets its roles, as docs/frameworks.md promises.
const WITHIN_NS: u64 = 1_000_000_000;
const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";

fn role(name: &str) -> Role {
    match name {
        "kv_cache" => Role::KvCache,
        "parameter" => Role::Parameter,
        "parameter_copy" => Role::ParameterCopy,
        "activation" => Role::Activation,
        _ => panic!("{name}"),
    }
}

/// Runs one part of the program, and compares each check. Of activations the program names some.
fn compare(what: &str) {
    for version in torch::versions().iter().filter(|version| torch::reads_frames(version)) {
        let Some(wheel) = torch::wheel(version) else { return };
        let machine = torch::machine(&[]);
        let mut daemon = Daemon::start(&machine, "daemon", FAST);
        let mut job = Job::start(&mut wheel.covered(&machine, &daemon.runtime, "caches.py", &[what]));
        let printed = torch::finished(&mut job);
        daemon.wait_for_the_end_of(&machine, &[&job]);
        daemon.stop();
        let moments = torch::moments(&daemon.recording, job.pid());
        let mut compared = 0;
        for (moment, printed) in torch::beside(&moments, &printed) {
            for (name, bytes) in printed["roles"].as_object().expect("roles") {
                let (held, bytes) =
                    (moment.devices[0].roles[usize::from(role(name).to_code())], bytes.as_i64());
                let is_right = if name == "activation" { Some(held) >= bytes } else { Some(held) == bytes };
                assert!(is_right, "torch {version}, {}: {name} {held} for {bytes:?}", moment.name);
                compared += 1;
            }
        }
        assert!(compared >= 2, "torch {version}, {what}: {compared}");
    }
}

#[test]
fn growing_cache_has_its_role_token_by_token() {
    compare("generate");
}

#[test]
fn engine_cache_has_its_role_at_allocation_or_by_retag() {
    compare("engine");
}

#[test]
fn static_cache_has_its_role_independent_of_load_order() {
    compare("static");
}

#[test]
fn tuples_of_a_models_output_are_a_cache() {
    compare("tuples");
}

#[test]
fn cache_in_a_training_counts_as_activation() {
    compare("trained");
}

#[test]
fn untrained_modules_with_the_structure_of_trained_ones_are_copies() {
    compare("copies");
}

#[test]
fn program_that_trains_nothing_has_no_copies() {
    compare("inference");
}

/// Times of a process's records, in nanoseconds.
#[derive(Default)]
struct Times {
    pid: u32,
    last_allocation: u64,
    last_role: u64,
}

impl Sink for Times {
    fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        if !matches!(origin, Origin::Process(key) if key.pid == self.pid) {
            return;
        }
        match record.body {
            Body::BlockAlloc { .. } => self.last_allocation = record.stamp.time_ns,
            Body::Retag { use_as: (Role::KvCache | Role::Parameter, _), .. } => {
                self.last_role = record.stamp.time_ns;
            }
            _ => {}
        }
    }
    fn reject(&mut self, count: u64) {
        assert_eq!(count, 0, "rejected records");
    }
}

/// Runs the idle program until a report has the right roles. Returns the nanoseconds from its last allocation to its last role, by its
/// own clock.
fn time_of_roles(version: &str, wheel: &torch::Wheel) -> u64 {
    let machine = torch::machine(&[]);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let mut job = Job::start(&mut wheel.covered(&machine, &daemon.runtime, "caches.py", &["idle"]));
    let printed: Value = serde_json::from_str(&job.wait_for("waits")).expect("JSON");
    let pid = job.pid().to_string();
    until(20, &format!("torch {version}: the roles of an idle program"), || {
        let output = daemon.ctl(&machine, &["report", &pid, "--json"]).output().ok()?;
        let report: Value = serde_json::from_slice(&output.stdout).ok()?;
        let cells = report["devices"][0]["last"]["cells"].as_array()?;
        let sum = |role: &str| -> i64 {
            cells
                .iter()
                .filter(|cell| cell["role"] == role)
                .map(|cell| cell["bytes"].as_i64().unwrap_or(0))
                .sum()
        };
        let (cache, parameters) = (sum("kv cache"), sum("parameter"));
        (Some(cache) == printed["waits"]["kv_cache"].as_i64()
            && Some(parameters) == printed["waits"]["parameter"].as_i64())
        .then_some(())
    });
    job.enough();
    daemon.wait_for_the_end_of(&machine, &[&job]);
    daemon.stop();
    let mut times = Times { pid: job.pid(), ..Times::default() };
    let input = Input::open(&daemon.recording).expect("the recording");
    recording::read(input, &mut times).expect("records");
    let took = times.last_role.checked_sub(times.last_allocation);
    took.expect("roles are set after the last allocation")
}

/// The main thread runs no statement, so its last allocations and its cache need a scan from another thread, within a second.
#[test]
fn idle_program_is_scanned_while_its_main_thread_waits() {
    for version in torch::versions().iter().filter(|version| torch::reads_frames(version)) {
        let Some(wheel) = torch::wheel(version) else { return };
        // The program may wait for a processor on a busy machine, so one of three runs must be in time.
        let times: Vec<u64> = (0..3).map(|_| time_of_roles(version, &wheel)).collect();
        println!("torch {version}: {times:?} ns");
        assert!(times.iter().any(|took| *took <= WITHIN_NS), "torch {version}: {times:?} ns");
    }
}
