//! Each example works as shown: built with the commands in its first lines, run by `gpumemctl run` on the simulated
//! machine, and compared with the report of its run.
use gpumem_tests::live::examples::{build, folder};
use gpumem_tests::live::{Daemon, Machine, until};
use std::collections::BTreeMap;
use std::process::Command;

const MIB: i64 = 1 << 20;
const WARN: [&str; 4] = ["-Wall", "-Wextra", "-Werror", "-pedantic"];
type Cells = BTreeMap<(String, String), i64>;

fn scene() -> (Machine, Daemon) {
    let machine = Machine::new(&["devices=1", "memory=16G"]);
    let daemon = Daemon::start(&machine, "daemon", "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n");
    (machine, daemon)
}

/// Runs it to its end and returns its output.
fn run(machine: &Machine, daemon: &Daemon, command: &[&str]) -> String {
    let mut ctl = daemon.ctl(machine, &[&["run", "--quiet", "--"], command].concat());
    ctl.current_dir(&machine.dir).env("PYTHONDONTWRITEBYTECODE", "1");
    ctl.env("PYTHONPATH", folder().join("../agent-lib/python"));
    let output = ctl.output().expect("gpumemctl runs");
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && error.is_empty(), "{command:?}: {} {out} {error}", output.status);
    out.into_owned()
}

fn report(machine: &Machine, daemon: &Daemon, of: &[&str]) -> serde_json::Value {
    let output = daemon.ctl(machine, &[&["report", "--json"], of].concat()).output().expect("gpumemctl runs");
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Tag and role -> bytes of a moment.
fn cells(moment: &serde_json::Value) -> Cells {
    let mut cells = Cells::new();
    for cell in moment["cells"].as_array().unwrap_or_else(|| panic!("{moment}")) {
        let word = |name: &str| cell[name].as_str().unwrap_or_default().to_owned();
        *cells.entry((word("tag"), word("role"))).or_insert(0) += cell["bytes"].as_i64().expect("bytes");
    }
    cells.retain(|_, bytes| *bytes != 0);
    cells
}

fn expected(cells: &[(&str, &str, i64)]) -> Cells {
    cells.iter().map(|&(tag, role, mib)| ((tag.to_owned(), role.to_owned()), mib * MIB)).collect()
}

/// Returns the peak of the only run.
fn peak(machine: &Machine, daemon: &Daemon) -> Cells {
    until(20, "a closed run", || daemon.pids(machine).is_empty().then_some(()));
    cells(&report(machine, daemon, &[])["devices"][0]["peak"])
}

fn three_layers() -> Cells {
    expected(&[
        ("activations", "", 6),
        ("model/layer.0", "parameter", 8),
        ("model/layer.1", "parameter", 8),
        ("model/layer.2", "parameter", 8),
    ])
}

/// Name -> value, changes, minimum and maximum of each counter; name -> number of each range.
fn own(report: &serde_json::Value) -> (BTreeMap<&str, [i64; 4]>, BTreeMap<&str, u64>) {
    let list = |name: &str| report[name].as_array().unwrap_or_else(|| panic!("{report}"));
    let counters = list("counters").iter().map(|counter| {
        let amount = |name: &str| counter[name].as_i64().expect("a number");
        (counter["name"].as_str().expect("a name"), ["value", "changes", "min", "max"].map(amount))
    });
    let ranges = list("ranges").iter().map(|range| {
        let [count, total, min, max, mean] = ["count", "total_ns", "min_ns", "max_ns", "mean_ns"]
            .map(|name| range[name].as_u64().unwrap_or_else(|| panic!("{name} of {range}")));
        assert!(min <= mean && mean <= max && max <= total && total >= count * min, "{range}");
        (range["name"].as_str().unwrap_or("(steps)"), count)
    });
    (counters.collect(), ranges.collect())
}

/// Both examples' annotations: four steps, three of which are complete when the last one begins.
fn said_beside(activations: u64) -> (BTreeMap<&'static str, [i64; 4]>, BTreeMap<&'static str, u64>) {
    let layers = ["model", "model/layer.0", "model/layer.1", "model/layer.2"].map(|name| (name, 1));
    let ranges = layers.into_iter().chain([("activations", activations), ("(steps)", 3)]);
    ([("samples", [128, 4, 32, 128])].into(), ranges.collect())
}

#[test]
fn c() {
    let (machine, daemon) = scene();
    let flags = [&["-std=c99", "-D_DEFAULT_SOURCE"], &WARN[..]].concat();
    let program = build(&machine, "cc", &flags, "train.c");
    let printed = run(&machine, &daemon, &[program.to_str().expect("UTF-8")]);
    assert!(
        printed.starts_with("steps: at most 54 MiB\ndevice 0: ") && printed.contains(" MiB free\n"),
        "{printed}"
    );
    assert!(
        printed.contains("Parameters") || printed.contains("parameter") || printed.contains("model"),
        "{printed}"
    );
    let mut wanted = expected(&[("activations", "", 6)]);
    for layer in 0..3 {
        for role in ["parameter", "gradient"] {
            wanted.insert((format!("model/layer.{layer}"), role.to_owned()), 8 * MIB);
        }
    }
    assert_eq!(peak(&machine, &daemon), wanted);
    let stored = report(&machine, &daemon, &[]);
    assert_eq!(own(&stored), said_beside(12), "{stored}");
    // The recording that it made of its loop.
    let files = std::fs::read_dir(&machine.dir).expect("a folder").flatten();
    let file = files.map(|file| file.path()).find(|path| {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        name.starts_with("gpumem-") && name.ends_with("-1.gpumem")
    });
    let file = file.expect("a recording");
    let recorded = report(&machine, &daemon, &[file.to_str().expect("UTF-8")]);
    assert_eq!(cells(&recorded["devices"][0]["peak"]), wanted, "{recorded}");
    assert_eq!(recorded["coverage"]["steps"], 4);
    // The recording has the events of the loop, and as a trace each of the events.
    let (counters, ranges) = own(&recorded);
    assert_eq!((&counters["samples"], ranges.len()), (&[128, 4, 32, 128], 2), "{recorded}");
    let mut ctl = daemon.ctl(&machine, &["report", "--chrome-trace", file.to_str().expect("UTF-8")]);
    let trace = ctl.output().expect("gpumemctl runs").stdout;
    let trace: serde_json::Value = serde_json::from_slice(&trace).expect("JSON");
    let events = |phase: &str, name: &str| {
        let events = trace["traceEvents"].as_array().expect("events").iter();
        events.filter(|event| event["ph"] == phase && event["name"] == name).cloned().collect::<Vec<_>>()
    };
    let samples = events("C", "counter samples");
    let values: Vec<i64> = samples.iter().filter_map(|event| event["args"]["value"].as_i64()).collect();
    assert_eq!(values.get(..4), Some(&[32, 64, 96, 128][..]), "{samples:?}");
    assert_eq!(events("X", "activations").len(), 12);

    // Without an agent it does the same and prints nothing about gpumem.
    let mut alone = machine.command(&program);
    let output = alone.current_dir(&machine.dir).output().expect("it runs");
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
}

#[test]
fn cpp() {
    if !gpumem_test_support::has_cxx() {
        return;
    }
    let (machine, daemon) = scene();
    let program = build(&machine, "c++", &[&["-std=c++11"], &WARN[..]].concat(), "train.cpp");
    let mut printed = run(&machine, &daemon, &[program.to_str().expect("UTF-8")]);
    // However short its life, its scopes are what names its memory: unless the machine is so busy that the 50 ms of its exit were over first.
    for _ in 0..10 {
        if report(&machine, &daemon, &[])["names"] == "scopes" {
            break;
        }
        printed = run(&machine, &daemon, &[program.to_str().expect("UTF-8")]);
    }
    let own: serde_json::Value = serde_json::from_str(&printed).expect("the report that it asked for");
    assert_eq!((&own["schema"], &own["coverage"]["steps"]), (&"gpumem.report".into(), &4.into()), "{own}");
    assert_eq!(cells(&own["devices"][0]["peak"]), three_layers(), "{own}");
    assert_eq!(peak(&machine, &daemon), three_layers());
    assert_eq!(report(&machine, &daemon, &[])["names"], "scopes");
}

#[test]
fn rust() {
    let (machine, daemon) = scene();
    let program = build(&machine, "rustc", &["-O", "--edition=2024", "-Dwarnings"], "train.rs");
    let printed = run(&machine, &daemon, &[program.to_str().expect("UTF-8")]);
    assert!(printed.contains("model/layer.2") && printed.contains("activations"), "{printed}");
    assert_eq!(peak(&machine, &daemon), three_layers());
}

#[test]
fn python() {
    let (machine, daemon) = scene();
    if !Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success()) {
        gpumem_test_support::skip("there is no python3 here", "apt-get install python3");
        return;
    }
    let program = folder().join("train.py");
    let printed = run(&machine, &daemon, &["python3", program.to_str().expect("UTF-8")]);
    assert!(printed.contains("model/layer.2"), "{printed}");
    assert_eq!(peak(&machine, &daemon), three_layers());
    let stored = report(&machine, &daemon, &[]);
    assert_eq!(own(&stored), said_beside(4), "{stored}");
}
