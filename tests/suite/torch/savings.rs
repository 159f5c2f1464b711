//! The saving that the first advice of `gpumemctl why` states, beside the saving of a real run with the change: programs of
//! tests/torch that have the change as a switch.

use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job, until};
use serde_json::Value;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const DAEMON: &str = "[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\n";
const REQUESTS: &str = "[runs]\nkeep_requests = true\n";
/// Largest distance of the measured saving from the stated interval, as a share of the measured saving.
const OFF: f64 = 0.05;
/// Largest upper end of a stated interval, as a factor of its lower end.
const WIDEST: f64 = 1.25;
/// Device on which each program fits.
const LARGE: &str = "320G";
/// Variable that makes measured.py count the places of a program, or end it at one.
const PLACES: &str = "MEASURED_PLACES";

/// The run without the change from whose peak that of the run with the change is subtracted.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Before {
    /// The one with the advice: what it held at its peak, or when memory ran out.
    Held,
    /// The same, and the run with the change ends at the place where memory ran out: later, it needs more.
    UntilThere,
    /// One on a large device: the advice is about what the program needs.
    Needed,
}

/// Whether a stated interval may be wide, with the reason.
type Width = Option<&'static str>;

/// A program of causes.py, or a file of planted_by_others.
#[derive(Debug, Clone, Copy)]
struct Planted {
    name: &'static str,
    /// Size of the device.
    memory: &'static str,
    /// Kind of the first advice.
    kind: &'static str,
    before: Before,
    /// Name of the peak in the output of measured.py.
    figure: &'static str,
    /// Why the stated interval may be wide.
    width: Width,
    /// Whether the daemon keeps the requests, so that the advice is replayed.
    has_requests: bool,
    /// Variable that is the change, with its value before and after it; empty for none.
    variable: (&'static str, &'static str, &'static str),
    /// Other keys of the machine.
    keys: &'static [&'static str],
}

const fn planted(name: &'static str, kind: &'static str) -> Planted {
    Planted {
        name,
        memory: "16G",
        kind,
        before: Before::Held,
        figure: "allocated",
        width: None,
        has_requests: false,
        variable: ("", "", ""),
        keys: &[],
    }
}

const fn kept(name: &'static str) -> Planted {
    planted(name, "retained_tensors")
}

/// A file of planted_by_others, on a device of the size that the test of its advice has.
const fn file(name: &'static str, memory: &'static str, kind: &'static str) -> Planted {
    Planted { memory, variable: ("APPLIED", "", "1"), ..planted(name, kind) }
}

const THROUGH: Width =
    Some("gradients for an earlier model may pass through this one, which then needs its activations");
const INPUTS: Width =
    Some("the sizes of single blocks are not kept, so the inputs of the modules have an upper bound only");

const PLANTED: [Planted; 53] = [
    file("stateful.py", "6G", "retained_tensors"),
    file("accumulate.py", "18G", "retained_tensors"),
    Planted { before: Before::Needed, ..file("adam_temp.py", "24G", "optimizer_temporaries") },
    Planted {
        width: Some("the outputs of two modules may be needed"),
        ..file("eval_grad.py", "12G", "evaluation_gradients")
    },
    file("feature_hooks.py", "80G", "retained_tensors"),
    file("preds.py", "80G", "retained_tensors"),
    file("restarts.py", "80G", "retained_tensors"),
    file("string_cache.py", "80G", "retained_tensors"),
    file("swa.py", "80G", "retained_tensors"),
    kept("outputs_kept"),
    kept("losses_kept"),
    kept("hooks_keep"),
    kept("gradients_kept"),
    kept("gradients_kept_by_a_closure"),
    kept("optimizers_kept"),
    kept("tracebacks_kept"),
    kept("embeddings_kept"),
    kept("cache_without_limit"),
    kept("logits_kept_in_evaluation"),
    kept("losses_added_up"),
    kept("models_kept"),
    kept("hooks_of_gradients_keep"),
    kept("optimizers_for_each_step_kept"),
    kept("schedulers_keep_optimizers"),
    kept("weights_kept"),
    kept("averages_kept"),
    kept("features_kept"),
    kept("sessions_kept"),
    Planted {
        before: Before::Needed,
        width: Some("whether a step uses the whole tensor or a part is unknown"),
        ..kept("data_on_the_device")
    },
    Planted { figure: "pinned", ..planted("pinned_kept", "pinned_memory") },
    Planted { figure: "used", ..planted("communicators_kept", "communication") },
    planted("evaluation_with_gradients", "evaluation_gradients"),
    Planted { memory: "8G", ..planted("embeddings_with_graphs", "evaluation_gradients") },
    Planted { width: THROUGH, ..planted("teacher_with_gradients", "evaluation_gradients") },
    Planted { width: THROUGH, memory: "8G", ..planted("teacher_fits", "evaluation_gradients") },
    Planted { memory: "8G", ..planted("checkpoint_stays", "loaded_checkpoint") },
    Planted {
        memory: "8G",
        width: Some("the memory of later phases at their highest moments is unknown"),
        ..planted("gradients_cleared_late", "kept_gradients")
    },
    Planted { before: Before::UntilThere, width: INPUTS, ..planted("batch_too_large", "checkpointing") },
    Planted { before: Before::UntilThere, ..planted("long_batch_too_large", "outlier_batch") },
    Planted {
        before: Before::UntilThere,
        width: Some("before the first forward pass, the type of the elements is unknown"),
        ..planted("model_too_large", "parameter_precision")
    },
    Planted {
        before: Before::UntilThere,
        width: Some("which temporaries have the size of the output is unknown"),
        ..planted("logits_too_large", "large_output")
    },
    Planted { before: Before::Needed, ..planted("second_optimizer", "optimizer_state") },
    Planted {
        before: Before::Needed,
        width: Some("whether the optimizer makes temporaries is unknown before the end of its first step"),
        ..planted("state_too_large", "optimizer_state")
    },
    Planted { before: Before::Needed, ..planted("temporaries_too_large", "optimizer_temporaries") },
    Planted {
        before: Before::UntilThere,
        figure: "reserved",
        has_requests: true,
        ..planted("graphs_kept", "graph_pools")
    },
    Planted { figure: "reserved", has_requests: true, ..planted("a_stream_for_each_request", "streams") },
    Planted {
        before: Before::Needed,
        figure: "reserved",
        has_requests: true,
        variable: ("PYTORCH_CUDA_ALLOC_CONF", "", "expandable_segments:True"),
        ..planted("fragmentation", "allocator_setting")
    },
    Planted {
        figure: "used",
        variable: ("CUDA_MODULE_LOADING", "EAGER", "LAZY"),
        keys: &["cuda.lazy=1", "cuda.module_bytes=300M"],
        width: Some("which kernels the program uses is unknown"),
        ..planted("modules_loaded_at_once", "eager_modules")
    },
    Planted { memory: "8G", ..planted("backbone_with_gradients", "evaluation_gradients") },
    Planted {
        memory: "8G",
        width: Some("the outputs of the largest module may be needed"),
        ..planted("rollouts_with_gradients", "evaluation_gradients")
    },
    Planted { memory: "8G", ..planted("base_is_trained", "unfrozen_base") },
    Planted {
        memory: "8G",
        width: Some("masks and indices have other types"),
        ..planted("double_by_numpy", "parameter_precision")
    },
    Planted { memory: "8G", ..planted("answers_in_float32", "parameter_precision") },
];

impl Planted {
    fn machine(self, memory: &str) -> gpumem_tests::live::Machine {
        let memory = format!("memory={memory}");
        torch::machine(&[&["devices=1", memory.as_str()], self.keys].concat())
    }

    /// Runs a program to its end, and returns the figures that it printed.
    fn figures(self, mut command: Command, is_applied: bool, place: i64) -> (Job, Value) {
        command.env_remove("GPUMEM_SITES");
        let (name, without, with) = self.variable;
        let value = if is_applied { with } else { without };
        if !value.is_empty() {
            command.env(name, value);
        }
        if self.before == Before::UntilThere {
            command.env(PLACES, place.to_string());
        }
        let mut job = Job::start(&mut command);
        until(300, self.name, || (!job.is_running()).then_some(()));
        job.end();
        let mut figures = job.said.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let figures = figures.rfind(|figures| figures["allocated"].is_i64());
        let figures = figures.unwrap_or_else(|| panic!("{}: {:#?}", self.name, job.said));
        (job, figures)
    }

    fn arguments(self, is_applied: bool) -> Vec<String> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/torch");
        if self.name.ends_with(".py") {
            return vec![format!("{folder}/planted_by_others/{}", self.name)];
        }
        // A change that is a variable is none in the program.
        let switch = (is_applied && self.variable.0.is_empty()).then(|| "applied".to_owned());
        [format!("{folder}/causes.py"), self.name.to_owned()].into_iter().chain(switch).collect()
    }

    /// Returns the figures of the program on a large device, without observation.
    fn on_a_large_device(self, wheel: &torch::Wheel, is_applied: bool, place: i64) -> Value {
        let machine = self.machine(LARGE);
        let arguments = self.arguments(is_applied);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let command = wheel.bare(&machine, "measured.py", &arguments);
        self.figures(command, is_applied, place).1
    }

    /// Returns the first advice on the program that a daemon watches, and its figures.
    fn watched(self, wheel: &torch::Wheel) -> (Value, Value) {
        let machine = self.machine(self.memory);
        let config = if self.has_requests { REQUESTS } else { "" };
        let daemon = Daemon::start(&machine, "daemon", &format!("{DAEMON}{config}"));
        let arguments = self.arguments(false);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let command = wheel.covered(&machine, &daemon.runtime, "measured.py", &arguments);
        let (job, figures) = self.figures(command, false, 0);
        daemon.wait_for_the_end_of(&machine, &[&job]);
        let pid = job.pid().to_string();
        let why = daemon.ctl(&machine, &["why", &pid, "--json"]).output().expect("gpumemctl why");
        let why: Value = serde_json::from_slice(&why.stdout).expect("JSON");
        (why["advice"][0].clone(), figures)
    }

    /// Returns what is wrong with the saving that the first advice states; `None` if it is right.
    fn fault(self, wheel: &torch::Wheel) -> Option<String> {
        let (first, own) = self.watched(wheel);
        let place = own["places"].as_i64().expect("a place");
        let after = self.on_a_large_device(wheel, true, place);
        let before = match self.before {
            Before::Needed => self.on_a_large_device(wheel, false, 0),
            Before::Held | Before::UntilThere => own,
        };
        let bytes = |figures: &Value| figures[self.figure].as_i64().expect("bytes");
        let saved = bytes(&before) - bytes(&after);
        let end = |name: &str| first["saves_bytes"][name].as_i64();
        let Some((least, most)) = end("least").zip(end("most")) else {
            return Some(format!("{}: no saving is stated: {first}", self.name));
        };
        let stated = format!(
            "{}: {} to {} MiB stated, {} MiB measured",
            self.name,
            least >> 20,
            most >> 20,
            saved >> 20
        );
        println!("{stated}; {}", first["formula"]);
        let tolerance = (saved.abs() as f64 * OFF) as i64;
        let is_wide = most as f64 > least as f64 * WIDEST && self.width.is_none();
        let is_right = first["kind"] == self.kind && (least - tolerance..=most + tolerance).contains(&saved);
        (!is_right || is_wide).then(|| format!("{stated}; {first}"))
    }
}

#[test]
fn first_advice_saves_what_it_states() {
    let Some(wheel) = torch::wheel("2.15.0") else { return };
    let only = std::env::var("GPUMEM_TEST_SAVINGS").unwrap_or_default();
    let is_chosen = |name: &str| only.is_empty() || only.split(',').any(|only| name.contains(only));
    let planted: Vec<Planted> = PLANTED.into_iter().filter(|planted| is_chosen(planted.name)).collect();
    let (next, faults) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(planted) = planted.get(next.fetch_add(1, Ordering::Relaxed)) {
                    faults.lock().expect("faults").extend(planted.fault(&wheel));
                }
            });
        }
    });
    let faults = faults.into_inner().expect("faults");
    assert!(faults.is_empty(), "{faults:#?}");
}
