//! Memory without a name is labelled with the function that requested it.
use gpumem_tests::live::programs::programs;
use gpumem_tests::live::{Daemon, Machine, until};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Returns MiB by tag of a program that has made all its allocations.
fn held(
    machine: &Machine,
    daemon: &Daemon,
    program: &Path,
    is_done: impl Fn(&BTreeMap<String, i64>) -> bool,
) -> BTreeMap<String, i64> {
    let mut command = machine.command(program);
    command.env("CUDA_INJECTION64_PATH", programs().ours.join("libgpumem.so")).env_remove("GPUMEM_SITES");
    command.env("GPUMEM_SOCKET", daemon.runtime.join("agent.sock"));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    let pid = child.id().to_string();
    let held = until(60, "a report of all that it holds", || {
        let output = daemon.ctl(machine, &["report", &pid, "--json"]).output().ok()?;
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        let mut held = BTreeMap::new();
        for cell in report["devices"][0]["last"]["cells"].as_array()? {
            let tag = cell["tag"].as_str().unwrap_or("(no tag)").to_owned();
            *held.entry(tag).or_insert(0) += cell["bytes"].as_i64()? >> 20;
        }
        (held.values().sum::<i64>() == 22 && is_done(&held)).then_some(held)
    });
    drop(child.stdin.take());
    assert!(child.wait().expect("it ends").success());
    held
}

fn built(machine: &Machine, stripped: bool) -> PathBuf {
    let program = machine.dir.join(if stripped { "stripped" } else { "asks" });
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("sites/asks.cpp");
    let mut compiler = Command::new("c++");
    compiler
        .args(["-O2", "-Wall", "-Wextra", "-Werror"])
        .args(stripped.then_some("-s"))
        .arg("-o")
        .arg(&program);
    assert!(compiler.arg(source).arg("-ldl").status().expect("a C++ compiler").success());
    program
}

#[test]
fn untagged_memory_is_named_after_the_calling_function() {
    if !gpumem_test_support::has_cxx() {
        return;
    }
    let machine = Machine::new(&["devices=1", "memory=16G"]);
    let mut daemon = Daemon::start(&machine, "daemon", "");
    let named = |held: &BTreeMap<String, i64>| !held.contains_key("(no tag)");
    let program = built(&machine, false);
    let expected = [("asks/model::Cache::grow", 4), ("asks/model::load", 16), ("asks/scratch", 2)];
    let expected: BTreeMap<String, i64> = expected.map(|(tag, mib)| (tag.to_owned(), mib)).into();
    assert_eq!(held(&machine, &daemon, &program, named), expected);
    // A file without function symbols.
    let stripped = built(&machine, true);
    let expected = BTreeMap::from([("(no tag)".to_owned(), 22)]);
    assert_eq!(held(&machine, &daemon, &stripped, |_| true), expected);
    daemon.stop();
}
