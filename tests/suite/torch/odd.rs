//! Unusual PyTorch programs with the agent: errors in the backward pass, worker processes, a profiler, threads on two
//! devices, models that die, three kinds of out-of-memory errors, and disabled layers.
use gpumem_ledger::Origin;
use gpumem_runs::builder::Sink;
use gpumem_runs::input::Input;
use gpumem_runs::recording;
use gpumem_tests::live::attribution::attribution;
use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job, Machine, replay};
use gpumem_wire::{Body, Record};
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";

/// An ended program of tests/torch with the agent.
struct Over {
    pid: u32,
    printed: Vec<Value>,
    recording: PathBuf,
    machine: Machine,
}

fn run(version: &str, program: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Option<Over> {
    let wheel = torch::wheel(version)?;
    let machine = torch::machine(&[]);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let mut command = wheel.covered(&machine, &daemon.runtime, program, arguments);
    let mut job = Job::start(command.envs(environment.iter().copied()));
    let printed = torch::finished(&mut job);
    daemon.wait_for_the_end_of(&machine, &[&job]);
    daemon.stop();
    let (pid, recording) = (job.pid(), daemon.recording.clone());
    Some(Over { pid, printed, recording, machine })
}

#[test]
fn figures_stay_exact_for_unusual_programs() {
    let what = ["error", "workers", "profiler", "threads", "models_die", "out_of_memory"];
    for version in &torch::versions() {
        let Some(over) = run(version, "odd.py", &what, &[]) else { return };
        let moments = torch::moments(&over.recording, over.pid);
        for (moment, printed) in torch::beside(&moments, &over.printed) {
            torch::agree(&format!("torch {version}, {}", moment.name), moment, printed);
        }
        let seen = replay(&over.recording);
        let compared = seen.compare_sums(&over.machine.truth(), over.pid, |_| true);
        println!("torch {version}: {compared:?}");
        let process = seen.process(over.pid);
        assert_eq!(process.odd, Default::default(), "nothing odd");
        assert!(!process.coverage.partial_history && process.coverage.lost == 0, "{:?}", process.coverage);
        // Workers are forked, or never start CUDA: their agents send nothing, and no process was invented for them.
        let others: Vec<_> =
            seen.snapshot.processes.iter().filter(|other| other.key.pid != over.pid).collect();
        assert!(others.is_empty(), "{others:?}");
        assert_eq!(
            running_out(&over.recording, over.pid),
            [("mended", 1, 0), ("true", 1, 1), ("limit", 0, 1)].map(|(name, pressure, ooms)| (
                name.to_owned(),
                pressure > 0,
                ooms
            )),
            "torch {version}: which, whether the driver refused, ends"
        );
    }
}

/// Returns, for each mark of out_of_memory, whether there was pressure, and the number of OOMs.
fn running_out(path: &Path, pid: u32) -> Vec<(String, bool, usize)> {
    struct Reader {
        pid: u32,
        names: HashMap<u32, String>,
        pressure: bool,
        ooms: usize,
        found: Vec<(String, bool, usize)>,
    }
    impl Sink for Reader {
        fn observe(&mut self, origin: Origin, record: &Record<'_>) {
            let Origin::Process(key) = origin else { return };
            if key.pid != self.pid {
                return;
            }
            match record.body {
                Body::Tag { path } => {
                    self.names.insert(record.stamp.tag, path.to_owned());
                }
                Body::Pressure { .. } => self.pressure = true,
                Body::Oom { .. } => self.ooms += 1,
                Body::Marker {} => {
                    let name = self.names.get(&record.stamp.tag).map_or("", String::as_str);
                    let name = name.strip_prefix("check oom/").filter(|name| *name != "after");
                    if let Some(name) = name {
                        self.found.push((name.to_owned(), self.pressure, self.ooms));
                        (self.pressure, self.ooms) = (false, 0);
                    }
                }
                _ => {}
            }
        }
    }
    let mut reader = Reader { pid, names: HashMap::new(), pressure: false, ooms: 0, found: Vec::new() };
    let input = Input::open(path).unwrap_or_else(|error| panic!("{error}"));
    recording::read(input, &mut reader).unwrap_or_else(|error| panic!("{error}"));
    reader.found
}

#[test]
fn each_naming_layer_can_be_disabled() {
    let off = [
        ("GPUMEM_TORCH", "Blocks"),
        ("GPUMEM_FRAMES", "ModulePath"),
        ("GPUMEM_AUTOGRAD", "Autograd"),
        ("GPUMEM_PYTHON", "Roles"),
    ];
    for (name, layer) in off {
        let Some(over) = run("2.15.0", "training.py", &["lstm"], &[(name, "0")]) else { return };
        let names = attribution(&over.recording, over.pid);
        println!("{name}=0: {:?}", names.layers);
        let state = names.layers.get(layer).map(String::as_str).unwrap_or_default();
        assert!(!state.starts_with("Active"), "{name}=0: {layer} is {state}");
        let moments = torch::moments(&over.recording, over.pid);
        for (moment, printed) in torch::beside(&moments, &over.printed) {
            if layer == "Blocks" {
                let held = moment.devices[0];
                assert_eq!(Some(held.tracked), printed["devices"][0]["reserved"].as_i64(), "{held:?}");
                assert_eq!((held.blocks, held.direct), (0, held.tracked), "{held:?}");
            } else {
                torch::agree(&format!("{name}=0, {}", moment.name), moment, printed);
            }
        }
    }
}
