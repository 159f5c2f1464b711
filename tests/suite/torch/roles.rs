//! Roles of blocks in the ledger at moments of trainings in unmodified PyTorch wheels, compared with the program's own
//! (tests/torch/roles.py).
use gpumem_tests::live::torch::{self, Moment};
use gpumem_tests::live::{Daemon, Job};
use gpumem_wire::Role;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";
const NAMES: [(&str, Role); 11] = [
    ("parameter", Role::Parameter),
    ("gradient", Role::Gradient),
    ("optimizer_state", Role::OptimizerState),
    ("activation", Role::Activation),
    ("input", Role::Input),
    ("temporary", Role::Temporary),
    ("workspace", Role::Workspace),
    ("buffer", Role::Buffer),
    ("kv_cache", Role::KvCache),
    ("parameter_copy", Role::ParameterCopy),
    ("unknown", Role::Unknown),
];
/// Steps after which a workspace is recognised.
const OLD: u32 = 3;
/// A few times the size of a small tensor, in bytes.
const SMALL: i64 = 2048;

/// Bytes by role.
type Roles = BTreeMap<&'static str, i64>;

/// A check, by the name that the program gave it.
struct Check<'a> {
    number: u32,
    what: &'a str,
    /// Whether the program uses a GradScaler.
    is_scaled: bool,
}

impl<'a> Check<'a> {
    fn new(name: &'a str) -> Self {
        let mut parts = name.split('/').skip(1);
        let number = parts.next().and_then(|number| number.parse().ok()).expect(name);
        Check { number, what: parts.next().expect(name), is_scaled: name.starts_with("scaled/") }
    }

    /// Whether the check is before the first optimizer step of this model.
    fn is_first_pass(&self) -> bool {
        self.number == 0 && !matches!(self.what, "optimizer" | "between")
    }

    /// Whether the check is after a backward pass and before the optimizer.
    fn has_fresh_gradients(&self) -> bool {
        self.what.starts_with("backward") || matches!(self.what, "retained" | "clipped" | "unscaled" | "hook")
    }

    /// Roles that ledger/src/rules/derive.rs cannot distinguish yet: their sum is compared.
    fn open(&self, has_workspaces: bool, has_copies: bool) -> Vec<&'static str> {
        let mut open = Vec::new();
        if has_copies && self.number < OLD {
            open.extend(["parameter", "parameter_copy"]);
        }
        if has_workspaces && self.number < OLD {
            open.extend(["activation", "workspace"]);
        }
        if self.is_scaled && self.number < OLD {
            open.extend(["activation", "unknown"]); // the scaler's own tensors, made in the first forward pass
        }
        if has_workspaces && self.number == 0 {
            // One that is made in the backward pass, until the parameters are known.
            open.push(if self.has_fresh_gradients() { "temporary" } else { "gradient" });
        }
        if self.number == 0 {
            open.extend(["input", "unknown"]); // memory from before the training
        }
        if self.what == "retained" {
            open.push("temporary"); // its pass may go on
        }
        open
    }
}

fn expected_roles(printed: &Value, workspaces: &[&str]) -> Roles {
    let mut roles: Roles = NAMES.map(|(name, _)| (name, printed["roles"][name].as_i64().unwrap_or(0))).into();
    for row in printed["rest"].as_array().expect("rest") {
        let is_workspace = row[0].as_str().is_some_and(|address| workspaces.contains(&address));
        let name = if is_workspace { "workspace" } else { "unknown" };
        *roles.entry(name).or_default() += row[1].as_i64().expect("bytes");
    }
    roles
}

fn held(moment: &Moment) -> Roles {
    NAMES.map(|(name, role)| (name, moment.devices[0].roles[usize::from(role.to_code())])).into()
}

/// Returns the differences between a moment and the program's own roles.
pub(super) fn differences(moment: &Moment, printed: &Value, workspaces: &[&str]) -> Vec<String> {
    let check = Check::new(&moment.name);
    let (reported, held) = (expected_roles(printed, workspaces), held(moment));
    let parts = printed["parts"].as_array();
    let open = check.open(!workspaces.is_empty(), reported["parameter_copy"] > 0);
    let is_open = |name: &str| open.contains(&name);
    let mut found = Vec::new();
    for (name, bytes) in &held {
        let is_right = match parts {
            // Exact from the first pass on, unless a workspace counts as a gradient.
            _ if *name == "gradient" && check.has_fresh_gradients() => {
                *bytes == reported[name]
                    || check.number == 0 && is_open("workspace") && *bytes > reported[name]
            }
            Some(parts) => {
                !parts.iter().any(|part| part == name) || check.number == 0 || *bytes == reported[name]
            }
            // Each block's role is unknown or right.
            None if check.is_first_pass() => is_open(name) || *bytes <= reported[name],
            None => is_open(name) || *bytes == reported[name],
        };
        if !is_right {
            found.push(format!("{name}: {bytes} for {}", reported[name]));
        }
    }
    let sum =
        |roles: &Roles| roles.iter().filter(|(name, _)| is_open(name)).map(|(_, bytes)| bytes).sum::<i64>();
    if parts.is_none() && !check.is_first_pass() && sum(&held) != sum(&reported) {
        found.push(format!("ambiguous roles: {} for {}", sum(&held), sum(&reported)));
    }
    found
}

/// Trains with these features in one process, and compares every check.
fn train(version: &str, features: &[&str]) {
    let Some(wheel) = torch::wheel(version) else { return };
    let machine = torch::machine(&[]);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let mut job = Job::start(&mut wheel.covered(&machine, &daemon.runtime, "roles.py", features));
    let printed = torch::finished(&mut job);
    daemon.wait_for_the_end_of(&machine, &[&job]);
    daemon.stop();
    let moments = torch::moments(&daemon.recording, job.pid());
    let workspaces = printed.iter().find_map(|line| line["workspaces"].as_array()).expect("workspaces");
    let workspaces: Vec<&str> = workspaces.iter().filter_map(Value::as_str).collect();
    let (mut exact, mut wrong) = (BTreeMap::new(), Vec::new());
    for (moment, printed) in torch::beside(&moments, &printed) {
        let found = differences(moment, printed, &workspaces);
        if !found.is_empty() {
            wrong.push(format!("{}: {}", moment.name, found.join(", ")));
        }
        let check = Check::new(&moment.name);
        if check.open(!workspaces.is_empty(), false).is_empty() {
            *exact.entry(moment.name.split('/').next().unwrap_or_default()).or_insert(0) += 1;
        }
    }
    println!("torch {version}: {} checks, exact: {exact:?}, {} workspaces", moments.len(), workspaces.len());
    assert!(wrong.is_empty(), "torch {version}: {wrong:#?}");
    assert_eq!(exact.keys().copied().collect::<BTreeSet<_>>(), features.iter().copied().collect());
    for bytes in printed.iter().filter_map(|line| line["temporaries"].as_i64()) {
        let rows = torch::iterations(&daemon.recording, job.pid());
        for row in &rows[1..4] {
            assert_eq!(row.temporaries.peak_bytes, bytes, "{row:?}");
            let beside = row.intermediate_gradients.peak_bytes - bytes;
            assert!((0..=SMALL).contains(&beside), "{row:?}: the gradient of the loss is there, too");
        }
    }
}

fn train_each(features: &[&str]) {
    for version in &torch::versions() {
        if torch::reads_frames(version) {
            train(version, features);
        } else {
            gpumem_test_support::skip(
                &format!("torch {version} needs frames, which are not read"),
                "pip install torch",
            );
        }
    }
}

#[test]
fn roles_equal_the_programs() {
    let features = [
        "temporaries",
        "plain",
        "kept",
        "accumulated",
        "clipped",
        "scaled",
        "hooked_gradients",
        "retained",
        "several",
        "buffers",
    ];
    train_each(&[&features[..], &["reentrant", "non_reentrant", "compiled", "graphed"]].concat());
}

/// A process each: DDP's and FSDP's models live on.
#[test]
fn gradients_in_buckets_are_gradients() {
    for feature in ["ddp", "ddp_views"] {
        train_each(&[feature]);
    }
}

#[test]
fn unsharded_parameters_are_parameters_like_shards() {
    for feature in ["fsdp", "fsdp_kept", "fsdp_mixed", "fsdp_accumulated"] {
        train_each(&[feature]);
    }
}
