//! Lane `nvidia`: NVIDIA's own libcuda, libcupti and libnvidia-ml, fetched by tests/tools/nvidia.sh, on a machine without a GPU. There
//! cuInit returns 100 and libcupti refuses to start; neither may be noticed by a program under the agent, nor end the daemon.

use crate::starts::{Case, Node, STARTS};
use cupti_sys::ids;
use gpumem_test_support::{skip, wait_for};
use gpumem_tests::live::programs::target;
use gpumem_tests::live::{Daemon, Machine};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const DRIVERS: [&str; 2] = ["535", "550"];
const CUPTIS: [&str; 7] = ["11.8.87", "12.1.105", "12.4.127", "12.9.79", "13.0.85", "13.2.86", "13.5.25"];

/// The folder with the real libraries; `None`, with a reason, where they cannot be fetched.
fn fetch(kind: &str, version: &str) -> Option<PathBuf> {
    let folder = target().join("nvidia");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/nvidia.sh");
    let output = Command::new(script).arg(&folder).args([kind, version]).output().expect("nvidia.sh runs");
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        skip(&reason, "make test-all LANES=nvidia, with PyPI and Debian's registry in reach");
        return None;
    }
    Some(folder.join(format!("{kind}-{version}")))
}

fn case(driver: &Path, cupti: &Path, start: &'static str) -> Case {
    let mut files = std::fs::read_dir(cupti).expect("a folder").map(|entry| entry.expect("an entry").path());
    let file = files.next().expect("a libcupti");
    Case { libraries: vec![driver.to_owned(), cupti.to_owned()], cupti: file, start }
}

#[test]
fn program_ends_as_without_the_agent() {
    let drivers: Option<Vec<_>> = DRIVERS.iter().map(|version| fetch("driver", version)).collect();
    let cuptis: Option<Vec<_>> = CUPTIS.iter().map(|version| fetch("cupti", version)).collect();
    let (Some(drivers), Some(cuptis)) = (drivers, cuptis) else { return };
    let of_driver = |driver: &PathBuf| -> Vec<Case> {
        cuptis.iter().flat_map(|cupti| STARTS.map(|start| case(driver, cupti, start))).collect()
    };
    let cases: Vec<Case> = drivers.iter().flat_map(of_driver).collect();
    let node = Node::new(&[]);
    let no_gpu = |bare: &std::process::Output| String::from_utf8_lossy(&bare.stdout).contains("cuInit 100");
    let differences = node.differences(&cases, no_gpu);
    println!("{} programs, {} differ", cases.len(), differences.len());
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
fn doctor_reports_why_a_process_is_not_covered() {
    let (Some(driver), Some(cupti)) = (fetch("driver", "550"), fetch("cupti", "12.4.127")) else { return };
    let node = Node::new(&[]);
    // Lives until its input is closed, at the end of the test.
    let mut command = node.covered(&case(&driver, &cupti, "lives"));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("starts runs");
    let pid = child.id().to_string();
    let finding = wait_for("doctor's finding", || {
        let output =
            node.daemon.ctl(&node.machine, &["doctor", "--json", &pid]).output().expect("gpumemctl runs");
        let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let mut findings = document["findings"].as_array()?.iter().map(ToString::to_string);
        findings.find(|text| text.contains("process.blocked") && text.contains("code 100"))
    });
    assert!(finding.contains("cuInit found no GPU") && finding.contains("CUDA_VISIBLE_DEVICES"), "{finding}");
    drop(child.stdin.take());
    assert!(child.wait().expect("ended").success());
}

#[test]
fn the_daemon_survives_a_driver_without_a_gpu() {
    for version in DRIVERS {
        let Some(driver) = fetch("driver", version) else { return };
        let machine = Machine::new(&["devices=1"]);
        let library = driver.join("libnvidia-ml.so.1");
        let mut daemon = Daemon::start(&machine, "daemon", &format!("[nvml]\nlibrary = {library:?}\n"));
        let text = wait_for("doctor's finding about NVML", || {
            let output = daemon.ctl(&machine, &["doctor"]).output().expect("gpumemctl runs");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            text.lines()
                .any(|line| line.contains(" nvml ") && line.contains("driver is not loaded"))
                .then_some(text)
        });
        println!("{version}: {text}");
        assert!(daemon.job.is_running(), "{text}");
        daemon.stop();
    }
}

/// Ids are numbers that the headers give to functions: a library that knows an id has the same name for it.
#[test]
fn callback_ids_match_the_librarys_names() {
    let Some(driver) = fetch("driver", "550") else { return };
    let program = target().join("nvidia/names");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("suite/nvidia/names.c");
    let built = Command::new("cc").arg("-o").arg(&program).arg(source).arg("-ldl").status().expect("cc runs");
    assert!(built.success());
    let mut known = std::collections::BTreeSet::new();
    for version in CUPTIS {
        let Some(cupti) = fetch("cupti", version) else { return };
        let mut command = Command::new(&program);
        command.arg(&case(&driver, &cupti, "main").cupti).env("LD_LIBRARY_PATH", &driver);
        let output =
            command.args(ids::DRIVER.iter().map(|(_, id)| id.to_string())).output().expect("names runs");
        assert!(output.status.success(), "{version}: {output:?}");
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let mut words = line.split(' ');
            let mut word = || words.next().expect("three words");
            let (id, result, name) = (word(), word(), word());
            let ours =
                ids::DRIVER.iter().find(|(_, number)| number.to_string() == id).expect("one of ours").0;
            // An id beyond the last one of this release has no name.
            if result == "0" && name != "INVALID" {
                assert_eq!(name, ours, "{version}: {id}");
                known.insert(ours);
            }
        }
    }
    let unknown: Vec<_> = ids::DRIVER.iter().filter(|(name, _)| !known.contains(name)).collect();
    assert!(unknown.is_empty(), "no release has {unknown:?}");
}
