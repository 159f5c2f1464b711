//! Models of third-party libraries (transformers, peft, timm, torchvision, diffusers): at five moments of every step the bytes of each role
//! equal those of the program's objects, and parameters, gradients, optimizer state and buffers have the names of `named_modules()`.
//! Averages of weights are copies, caches of generating models are caches, and requests that fail name their module and phase.
//!
//! Only with torch 2.15.0: transformers and diffusers of libraries.txt need torch 2.6, torchvision 2.14.
use super::roles::differences;
use gpumem_report::advice::LIBRARY_FRAMES;
use gpumem_tests::live::attribution::{Attribution, Block, attribution};
use gpumem_tests::live::torch::{self, Moment};
use gpumem_tests::live::{Daemon, Job, replay};
use gpumem_wire::Role;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Version of PyTorch that all of these libraries support.
const VERSION: &str = "2.15.0";
const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";
/// Required percentage of a step's bytes inside modules with the right module's name. The rest are gradients of views that a
/// module makes of a part's result; these are named after the part.
const LEAST_RIGHT: f64 = 99.9;
const OWNED: [(&str, Role); 4] = [
    ("parameter", Role::Parameter),
    ("gradient", Role::Gradient),
    ("optimizer_state", Role::OptimizerState),
    ("buffer", Role::Buffer),
];

/// Compares one block's name and role with the program's objects; `None` if they are equal.
fn name_difference(row: &Value, block: Option<&Block>, is_loaded: bool) -> Option<String> {
    let [address, kind, module, own] = [0, 1, 2, 3].map(|at| row[at].as_str().expect("text"));
    let full = format!("{module}/{own}");
    let role = OWNED.iter().find(|(name, _)| *name == kind).expect(kind).1;
    let is_right = block.is_some_and(|block| {
        let is_named = match kind {
            // It gets its name with the next step.
            "optimizer_state" if is_loaded => true,
            _ => block.tag == full,
        };
        is_named && block.role == role
    });
    (!is_right).then(|| format!("{kind} {full} at {address} is {block:?}"))
}

/// Returns the differences between recorded names and the program's objects at one moment.
fn wrong_names(moment: &Moment, printed: &Value, names: &Attribution) -> Vec<String> {
    let (number, what) =
        moment.name.split_once('/').and_then(|(_, rest)| rest.split_once('/')).expect("a moment");
    let live = &names.live[&moment.name];
    let is_loaded = what == "loaded" || number == "4" && !matches!(what, "optimizer" | "between");
    let mut wrong = Vec::new();
    for row in printed["addresses"].as_array().expect("addresses") {
        if number == "0" && !matches!(what, "optimizer" | "between") {
            continue; // nothing was looked at before the first step
        }
        let address = row[0].as_str().expect("text");
        let address = u64::from_str_radix(address.trim_start_matches("0x"), 16).expect("an address");
        wrong.extend(name_difference(row, live.get(&address), is_loaded));
    }
    // Any other block with a module's name must belong to an existing module.
    let modules: BTreeSet<&str> =
        printed["modules"].as_array().expect("modules").iter().filter_map(Value::as_str).collect();
    let root = printed["modules"][0].as_str().expect("a root");
    for block in live.values().filter(|block| block.tag.starts_with(root)) {
        let owner = block.tag.rsplit_once('/').map_or("", |(owner, _)| owner);
        if !modules.contains(block.tag.as_str()) && !modules.contains(owner) {
            wrong.push(format!("no module {block:?}"));
        }
    }
    wrong
}

/// Runs these cases, and returns the recorded names; `None` without the libraries. `kinds`: what they have more than 100 tensors of.
fn train(cases: &[&str], kinds: &[&str]) -> Option<Attribution> {
    let (Some(wheel), Some(libraries)) = (torch::wheel(VERSION), torch::libraries(VERSION)) else {
        return None;
    };
    let machine = torch::machine(&[]);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let mut command = wheel.covered(&machine, &daemon.runtime, "libraries.py", cases);
    let mut job = Job::start(command.env("PYTHONPATH", libraries));
    let printed = torch::finished(&mut job);
    daemon.wait_for_the_end_of(&machine, &[&job]);
    daemon.stop();
    let moments = torch::moments(&daemon.recording, job.pid());
    let names = attribution(&daemon.recording, job.pid());
    let workspaces = printed.iter().find_map(|line| line["workspaces"].as_array()).expect("workspaces");
    let workspaces: Vec<&str> = workspaces.iter().filter_map(Value::as_str).collect();
    let (mut counts, mut wrong): (BTreeMap<String, usize>, _) = (BTreeMap::new(), Vec::new());
    for (moment, printed) in torch::beside(&moments, &printed) {
        torch::agree(&moment.name, moment, printed);
        let roles = differences(moment, printed, &workspaces);
        let found = wrong_names(moment, printed, &names);
        for row in printed["addresses"].as_array().expect("addresses") {
            *counts.entry(row[1].as_str().expect("text").to_owned()).or_default() += 1;
        }
        if !roles.is_empty() {
            wrong.push(format!("{}: {}", moment.name, roles.join(", ")));
        }
        if !found.is_empty() {
            wrong.push(format!(
                "{}: {} names: {:#?}",
                moment.name,
                found.len(),
                &found[..found.len().min(6)]
            ));
        }
    }
    for (key, share) in names.known.iter().filter(|(key, _)| key.contains(" truth ")) {
        println!("{key}: {:.2} % right of {} B", share.percent(), share.bytes);
        if share.percent() < LEAST_RIGHT {
            let some: Vec<_> = share.wrong.iter().take(12).collect();
            wrong.push(format!("{key}: {:.2} % right, {some:#?}", share.percent()));
        }
    }
    println!("{cases:?}: {} moments, {counts:?}, {} workspaces", moments.len(), workspaces.len());
    for line in &wrong {
        println!("{line}");
    }
    assert!(wrong.is_empty(), "{} differences", wrong.len());
    assert!(kinds.iter().all(|&what| counts[what] > 100), "{counts:?}");
    Some(names)
}

const TRAINED: [&str; 3] = ["parameter", "gradient", "optimizer_state"];

#[test]
fn transformers_models_are_named_and_classified() {
    train(&["gpt2", "gpt2_checkpointed", "llama", "t5", "accelerate_bf16"], &TRAINED);
}

/// Parameters of the base model have their current path, which includes its wrappers while they exist.
#[test]
fn peft_adapters_are_named_and_classified() {
    train(&["gpt2_lora", "gpt2_adapters", "gpt2_lora_checkpointed"], &TRAINED);
}

#[test]
fn timm_and_torchvision_models_are_named_and_classified() {
    train(
        &[
            "timm_resnet",
            "timm_vit",
            "timm_lamb",
            "torchvision_resnet",
            "torchvision_mobilenet",
            "torchvision_swin",
        ],
        &TRAINED,
    );
}

#[test]
fn diffusers_models_are_named_and_classified() {
    train(&["diffusers_unet", "diffusers_unet_checkpointed"], &TRAINED);
}

#[test]
fn averages_are_copies_beside_the_trained_model() {
    train(&["timm_ema", "diffusers_ema"], &TRAINED);
}

#[test]
fn replicas_of_data_parallel_leave_the_model_its_names_and_roles() {
    let names = train(&["data_parallel"], &["parameter", "optimizer_state"]);
    let live = names.map(|names| names.live["data_parallel/3/forward"].clone());
    let is_replica = |block: &Block| block.tag.starts_with("GPT2LMHeadModel replica/");
    assert!(live.is_none_or(|live| live.values().any(is_replica)));
}

#[test]
fn caches_of_generating_models_are_caches() {
    train(&["generate"], &["parameter"]);
}

/// Beside a model that trains, tensors of no module have their source line. Failed requests have the phase, and the module in which
/// the program's own traceback ends.
#[test]
fn failed_requests_and_plain_tensors_have_their_place() {
    let (Some(wheel), Some(libraries)) = (torch::wheel(VERSION), torch::libraries(VERSION)) else { return };
    let machine = torch::machine(&[]);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let mut command = wheel.covered(&machine, &daemon.runtime, "libraries.py", &["exhausted"]);
    let mut job = Job::start(command.env("PYTHONPATH", libraries).env_remove("GPUMEM_SITES"));
    let printed = torch::finished(&mut job);
    daemon.wait_for_the_end_of(&machine, &[&job]);
    daemon.stop();
    let process = replay(&daemon.recording).process(job.pid()).clone();
    let found: Vec<_> =
        process.ooms.iter().map(|(_, oom)| (oom.phase.as_deref(), oom.tag.as_deref())).collect();
    let expected: Vec<_> = printed
        .iter()
        .filter(|line| line["oom"].is_string())
        .map(|line| (line["oom"].as_str(), line["module"].as_str()))
        .collect();
    assert_eq!(found, expected);
    assert_eq!(expected.len(), 3);
    let names = attribution(&daemon.recording, job.pid());
    let live = &names.live["exhausted/plain"];
    let plain = printed.iter().find_map(|line| line["lines"].as_array()).expect("lines");
    let wrong: Vec<_> = plain
        .iter()
        .filter_map(|row| {
            let address = row[0].as_str().expect("an address").trim_start_matches("0x");
            let block = live.get(&u64::from_str_radix(address, 16).expect("an address"));
            let is_right = block.is_some_and(|block| Some(block.tag.as_str()) == row[1].as_str());
            (!is_right).then(|| format!("{row} is {block:?}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(plain.len() > 50, "{plain:?}");
}

/// Returns the Python files that are in a folder or below it: path and text.
fn sources(folder: &Path) -> Vec<(String, String)> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let source = |path: PathBuf| match path.extension() {
        _ if path.is_dir() => sources(&path),
        Some(kind) if kind == "py" => {
            let text = fs::read_to_string(&path).ok();
            text.map(|text| (path.to_string_lossy().into_owned(), text)).into_iter().collect()
        }
        _ => Vec::new(),
    };
    paths.flat_map(source).collect()
}

/// Advice names settings of libraries by functions in stacks, and the files of these. A release in which a function is in no such
/// file needs another row in the table. The functions that they call may be in any file of the folder.
#[test]
fn functions_that_advice_recognises_exist_in_their_files() {
    let (Some(wheel), Some(libraries)) = (torch::wheel(VERSION), torch::libraries(VERSION)) else { return };
    let versions = fs::read_dir(wheel.dir.join("venv/lib")).expect("a virtual environment");
    let packages = versions.map(|version| version.expect("an entry").path().join("site-packages"));
    let roots: Vec<PathBuf> = packages.chain([libraries]).collect();
    for frame in &LIBRARY_FRAMES {
        let folder = frame.file.rsplit_once('/').expect("a folder").0;
        let folder = roots.iter().map(|root| root.join(folder)).find(|folder| folder.is_dir());
        let all = sources(&folder.unwrap_or_else(|| panic!("no folder of {}", frame.file)));
        let (start, end) = frame.file.split_once('*').unwrap_or(("", frame.file));
        let is_in_file = |path: &str| path.contains(start) && path.ends_with(end);
        let functions = frame.functions.iter().map(|function| (function, true));
        for (function, is_in) in functions.chain(frame.called.iter().map(|function| (function, false))) {
            let (class, name) = function.rsplit_once('.').unwrap_or(("", function));
            let has = |(path, text): &(String, String)| {
                (!is_in || is_in_file(path))
                    && text.contains(&format!("def {name}("))
                    && (class.is_empty() || text.contains(&format!("class {class}")))
            };
            assert!(all.iter().any(has), "{}: {function}", frame.file);
        }
    }
}
