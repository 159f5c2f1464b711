//! Confidential computing: the protected part of a process's bytes.
use gpumem_tests::live::programs::programs;
use gpumem_tests::live::prometheus::{free_address, get};
use gpumem_tests::live::{Daemon, Job, Machine, until};
use serde_json::Value;

fn doctor_text(daemon: &Daemon, machine: &Machine) -> String {
    let output = daemon.ctl(machine, &["doctor", "--json"]).output().expect("gpumemctl runs");
    let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let findings = document["findings"].as_array().expect("findings");
    let found = findings.iter().find(|of| of["id"] == "nvml.confidential");
    found.and_then(|of| of["text"].as_str()).unwrap_or_else(|| panic!("{document:#}")).to_owned()
}

#[test]
fn protected_bytes_equal_the_drivers() {
    let machine = Machine::new(&["devices=1", "nvml.cc=1", "nvml.protected=40"]);
    let http = free_address();
    let config = format!("[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\n[metrics]\nlisten = \"{http}\"\n");
    let daemon = Daemon::start(&machine, "daemon", &config);
    let mut job = Job::start(
        &mut machine.trainer(&daemon.runtime, &["--devices", "0", "--steps", "5", "--hold", "600"]),
    );
    job.wait_for("holding");
    until(20, "protected bytes that belong to the used ones, in ps and in the metrics", || {
        let ps = daemon.asked("/v1/ps")?;
        let row = ps["processes"].as_array()?.iter().find(|row| row["pid"] == job.pid())?;
        let (used, protected) = (row["used_bytes"].as_u64()?, row["protected_bytes"].as_u64()?);
        // Either answer may contain a sample from before the program held memory.
        let metrics = get(http, "/metrics")?;
        let line = metrics.lines().find(|line| line.starts_with("gpumem_process_protected_bytes{"))?;
        let value: f64 = line.rsplit_once(' ')?.1.parse().ok()?;
        (protected == used / 100 * 40 && value == protected as f64).then_some(())
    });
    let output = daemon.ctl(&machine, &["ps"]).output().expect("gpumemctl runs");
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(table.contains("(protected "), "{table}");
    assert!(doctor_text(&daemon, &machine).contains("and so is their protected part"));
    let calls = machine.tool("show", &[]);
    assert!(!calls.contains("nvmlDeviceGetComputeRunningProcesses"), "each list is one call: {calls}");
}

#[test]
fn driver_without_the_detail_list_reports_no_protected_bytes() {
    let machine = Machine::new(&["devices=1", "nvml.cc=1", "nvml.protected=40"]);
    let library = programs().fake.join("lib-535/libnvidia-ml.so.1");
    let config = format!("[nvml]\nlist_every_s = 0.1\nlist_budget = 1.0\nlibrary = {library:?}\n");
    let daemon = Daemon::start(&machine, "daemon", &config);
    let mut job = Job::start(
        &mut machine.trainer(&daemon.runtime, &["--devices", "0", "--steps", "5", "--hold", "600"]),
    );
    job.wait_for("holding");
    until(20, "used bytes without protected ones", || {
        let ps = daemon.asked("/v1/ps")?;
        let row = ps["processes"].as_array()?.iter().find(|row| row["pid"] == job.pid())?;
        row["used_bytes"].as_u64().filter(|_| row["protected_bytes"].is_null())
    });
    assert!(doctor_text(&daemon, &machine).contains("this driver has no detail list"));
}
