//! config/kubernetes: kubectl's output is checked against Kubernetes' schemas and item by item. Its pods run as far as
//! the kernel alone can create them.
use gpumem_tests::golden;
use gpumem_tests::live::programs::programs;
use gpumem_tests::live::{Job, Machine, until};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const RENDERED: [&str; 4] = ["base", "monitoring", "injection/example", "injection/policy"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace")
}

fn output_of(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    out.into_owned()
}

fn skipped(what: &str) {
    gpumem_test_support::skip(&format!("there is no {what}"), "");
}

/// Returns a folder with kubectl's output for the configuration; `None` without kubectl, which no package index has.
fn rendered() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let make = || {
        if !Command::new("kubectl")
            .args(["version", "--client"])
            .output()
            .is_ok_and(|out| out.status.success())
        {
            gpumem_test_support::skip("there is no kubectl", "apt-get install kubernetes-client");
            return None;
        }
        let folder = tools()?.join("rendered");
        std::fs::create_dir_all(&folder).expect("a folder");
        for name in RENDERED {
            let text = output_of(
                Command::new("kubectl").arg("kustomize").arg(root().join("config/kubernetes").join(name)),
            );
            let file = Path::new(name).with_extension("yaml");
            std::fs::write(folder.join(file.file_name().expect("a name")), text).expect("written");
        }
        let cdi = root().join("config/kubernetes/injection/cdi/gpumem.json");
        std::fs::copy(cdi, folder.join("gpumem.json")).expect("copied");
        Some(folder)
    };
    FOLDER.get_or_init(make).as_deref()
}

/// target/tools/kubernetes.
fn tools() -> Option<PathBuf> {
    Some(std::env::current_exe().ok()?.ancestors().nth(3)?.join("tools/kubernetes"))
}

/// A Python with the validators, in a virtual environment.
fn python() -> Option<PathBuf> {
    static PYTHON: OnceLock<Option<PathBuf>> = OnceLock::new();
    PYTHON.get_or_init(venv).clone()
}

fn venv() -> Option<PathBuf> {
    let venv = tools()?.join("venv");
    let python = venv.join("bin/python");
    let works = || {
        let imports = "import celpy, jsonschema, kubernetes_validate, yaml";
        Command::new(&python).args(["-c", imports]).output().is_ok_and(|output| output.status.success())
    };
    if !works() {
        let made = Command::new("python3").args(["-m", "venv"]).arg(&venv).status();
        if made.is_ok_and(|status| status.success()) {
            let packages = ["kubernetes-validate==1.37.0", "cel-python==0.5.0"];
            let _ = Command::new(&python).args(["-m", "pip", "install", "-q"]).args(packages).status();
        }
    }
    works().then_some(python)
}

#[test]
fn manifests_are_valid_and_minimal() {
    let Some(python) = python() else { return skipped("kubernetes-validate") };
    let Some(folder) = rendered() else { return };
    let script = root().join("tests/fleet/manifests.py");
    let text = output_of(Command::new(python).arg(script).arg(folder));
    print!("{text}");
    assert!(text.ends_with("policy: right\n"), "{text}");
}

#[test]
fn daemon_accepts_the_configuration_of_its_pod() {
    let file = root().join("config/kubernetes/base/gpumemd.toml");
    let text =
        output_of(Command::new(programs().ours.join("gpumemd")).args(["--check", "--config"]).arg(file));
    assert!(text.contains("is valid"), "{text}");
}

/// `UPDATE_GOLDEN=1` updates it.
#[test]
fn prometheusrule_matches_the_prometheus_rules() {
    let rules = root().join("config/prometheus/gpumemd.rules.yml");
    let Ok(rules) = std::fs::read_to_string(rules) else {
        gpumem_test_support::skip("there is no config/prometheus/gpumemd.rules.yml", "");
        return;
    };
    let mut text = "# Made from config/prometheus/gpumemd.rules.yml: UPDATE_GOLDEN=1 make test-all LANES=fleet ONLY=kubernetes\n\
                    apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: gpumemd\n  labels:\n    \
                    app.kubernetes.io/name: gpumemd\nspec:\n"
        .to_owned();
    for line in rules.lines().filter(|line| !line.starts_with('#')) {
        let indent = if line.is_empty() { "" } else { "  " };
        text += &format!("{indent}{line}\n");
    }
    golden::check("../../config/kubernetes/monitoring/prometheusrule.yaml", &text);
}

/// Commands of the DaemonSet's init containers, as the manifest has them.
fn init_commands(folder: &Path, python: &Path) -> Vec<String> {
    let program = "import json, sys, yaml\n\
                   for document in yaml.safe_load_all(open(sys.argv[1])):\n\
                   \x20   if document['kind'] == 'DaemonSet':\n\
                   \x20       containers = document['spec']['template']['spec']['initContainers']\n\
                   \x20       print(json.dumps([container['command'][2] for container in containers]))\n";
    let text = output_of(Command::new(python).args(["-c", program]).arg(folder.join("base.yaml")));
    serde_json::from_str(&text).expect("a list")
}

#[test]
fn pods_report_through_one_directory_and_across_a_new_daemon() {
    let Some(python) = python() else { return skipped("kubernetes-validate") };
    let Some(folder) = rendered() else { return };
    let may = Command::new("unshare").args(["--mount", "--net", "--pid", "--fork", "true"]).status();
    if !may.is_ok_and(|status| status.success()) {
        gpumem_test_support::skip(
            "no mount namespace can be created here (root is needed)",
            "sudo make test-all LANES=fleet",
        );
        return;
    }
    let machine = Machine::new(&["devices=1"]);
    // The simulated machine's files stand for device nodes, which all users may access.
    for path in [machine.dir.clone(), machine.sim(), machine.dir.join("truth")] {
        if path.exists() {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).expect("a mode");
        }
    }
    let node = machine.dir.join("node");
    std::fs::create_dir(&node).expect("a folder");
    let config = root().join("config/kubernetes/base/gpumemd.toml");
    std::fs::copy(config, node.join("gpumemd.toml")).expect("copied");
    let pod = |kind: &str, arguments: &[String]| {
        let mut command = machine.command(root().join("tests/fleet/pod.sh"));
        command.arg(&node).arg(&programs().ours).arg(&programs().fake).arg(kind).args(arguments);
        for name in ["GPUMEM_STORE", "LD_LIBRARY_PATH"] {
            command.env_remove(name);
        }
        command
    };
    // The image's places, as pod.sh mounts them.
    let inits: Vec<String> = init_commands(folder, &python)
        .iter()
        .map(|line| line.replace("/usr/lib/gpumem/", "/mnt/image/").replace("/node/", "/mnt/node/"))
        .collect();
    assert_eq!(inits.len(), 2);
    let control = node.join("run/control.sock");
    let ps = || {
        let mut command = machine.command(programs().ours.join("gpumemctl"));
        let output =
            command.args(["ps", "--json", "--socket"]).arg(&control).output().expect("gpumemctl runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };

    // Training starts first: it must not wait for the daemon, and is reported once the daemon starts.
    let mut train =
        pod("train", &["/mnt/fake/bin/trainer", "--steps", "1000000", "--step-ms", "5"].map(str::to_owned));
    train.env("CUDA_INJECTION64_PATH", "/opt/gpumem/libgpumem.so");
    std::fs::create_dir_all(node.join("library")).expect("a folder");
    let library = programs().ours.join("libgpumem.so");
    std::fs::copy(&library, node.join("library/libgpumem.so")).expect("of an earlier daemon");
    let mut early = Job::start(&mut train);
    early.wait_for("ready");
    assert!(
        !early.said.iter().any(|line| line.contains("sock") || line.contains("written")),
        "{:?}",
        early.said
    );

    let mut daemon = Job::start(&mut pod("daemon", &inits));
    until(30, "a covered process", || {
        assert!(daemon.is_running(), "the daemon ended");
        ps().contains("\"covered\"").then_some(())
    });
    let uid =
        |path: &Path| std::os::unix::fs::MetadataExt::uid(&path.symlink_metadata().expect("it is there"));
    assert_eq!(uid(&control), 60837, "{}", ps());
    assert_eq!(uid(&node.join("library/libgpumem.so")), 0, "the daemon cannot change what training loads");
    // Its listener, in its own network, as a probe reaches it.
    let pid = daemon.pid().to_string();
    let enter = ["-t", &pid, "-n", "curl", "-sS", "http://127.0.0.1:9837/"];
    let get = |path: &str| {
        let mut command = Command::new("nsenter");
        let url = format!("{}{path}", enter[5]);
        output_of(command.args(&enter[..5]).arg(url))
    };
    assert_eq!(get("healthz"), "ok\n");
    assert!(
        get("metrics").contains("gpumem_process_tracked_bytes{"),
        "it sees processes of other namespaces"
    );

    // A new pod, and a new daemon for both pods: the mounted directory stays valid.
    let mut late = Job::start(&mut train);
    late.wait_for("ready");
    assert_eq!(late.said.first().map(String::as_str), Some("agent.sock"), "and nothing else");
    assert!(!late.said.iter().any(|line| line.contains("written")), "{:?}", late.said);
    let covered = |count: usize| {
        let mut last = String::new();
        let deadline = Instant::now() + Duration::from_secs(30);
        while Instant::now() < deadline {
            last = ps();
            let found: serde_json::Value = serde_json::from_str(&last).unwrap_or_default();
            let rows = found["processes"].as_array().cloned().unwrap_or_default();
            let is_covered = |row: &&serde_json::Value| {
                row["flags"].as_array().is_some_and(|flags| flags.iter().any(|flag| flag == "covered"))
            };
            if rows.iter().filter(is_covered).count() == count {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("not {count} covered processes: {last}");
    };
    covered(2);
    daemon.signal("KILL");
    daemon.end();
    let mut next = Job::start(&mut pod("daemon", &inits));
    covered(2);
    early.signal("KILL");
    late.signal("KILL");
    next.signal("TERM");
    assert!(next.end().success());
}
