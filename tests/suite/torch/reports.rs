//! `gpumemctl report` on unmodified PyTorch while it runs, compared with torch and the machine: the bridge from
//! memory_allocated to nvidia-smi, and the sources of names.
use gpumem_tests::live::torch;
use gpumem_tests::live::{Daemon, Job, until};
use serde_json::Value;

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";
/// torch's allocator.
#[derive(Debug, Clone, Copy)]
enum Mode {
    Caching,
    Driver,
    None,
}

/// Each allocator with its variable, and the source of its figures.
const ALLOCATORS: [(Mode, &str, &str, &str); 3] = [
    (Mode::Caching, "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", "pool"),
    (Mode::Driver, "PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "driver"),
    (Mode::None, "PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "driver"),
];

#[test]
fn bridge_from_torchs_figures_to_the_machines() {
    for version in &torch::versions() {
        for (mode, variable, value, source) in ALLOCATORS {
            let what = format!("torch {version} {variable}={value}");
            let Some(wheel) = torch::wheel(version) else { return };
            let machine = torch::machine(&[]);
            let daemon = Daemon::start(&machine, "daemon", FAST);
            let mut command = wheel.covered(&machine, &daemon.runtime, "holding.py", &[]);
            let mut job = Job::start(command.env(variable, value));
            let held: Value = serde_json::from_str(&job.wait_for("holding")).expect("JSON");
            let pid = job.pid();
            let report = || -> Option<Value> {
                let output = daemon.ctl(&machine, &["report", &pid.to_string(), "--json"]).output().ok()?;
                serde_json::from_slice(&output.stdout).ok()
            };
            let truth = || {
                let mut truths = machine.latest_truth().into_iter();
                truths.rfind(|truth| truth.pid == pid && !truth.is_end())
            };
            let torch_said = |key: &str| held["device"][key].as_i64().expect("a number");
            // It is idle: once all records have arrived, the figures equal torch's and the machine's.
            let (report, bridge, truth) = until(20, &what, || {
                let (report, truth) = (report()?, truth()?);
                let last = report["devices"][0]["last"].clone();
                let bridge = last["bridge"].clone();
                let above = torch_said("allocated") - bridge["memory_allocated_bytes"].as_i64()?;
                let is_said = match mode {
                    Mode::Caching => above == 0,
                    // torch asks the driver, which rounds each piece up to 512 bytes.
                    Mode::Driver => (0..512 * 200).contains(&above),
                    // torch counts nothing: each tensor is an allocation of the driver's.
                    Mode::None => true,
                };
                let is_known = last["tracked_bytes"] == truth.tracked && bridge["used_bytes"].is_i64();
                println!("{what}: {bridge}");
                (is_said && is_known).then_some((report, bridge, truth))
            });
            let of = |key: &str| bridge[key].as_i64().unwrap_or_else(|| panic!("{what}: {key}: {bridge}"));
            assert_eq!(bridge["source"], source, "{what}: {bridge}");
            let (allocated, reserved) = (of("memory_allocated_bytes"), of("memory_reserved_bytes"));
            match mode {
                Mode::Caching | Mode::Driver => {
                    assert_eq!(reserved, torch_said("reserved"), "{what}: {bridge}")
                }
                Mode::None => assert!(allocated > 1 << 20 && of("idle_bytes") == 0, "{what}: {bridge}"),
            }
            assert_eq!(reserved, allocated + of("idle_bytes"), "{what}: {bridge}");
            assert_eq!(reserved + of("outside_bytes"), truth.tracked, "{what}: {bridge}");
            assert_eq!(of("used_bytes") as u64, truth.used, "{what}: {bridge} {truth:?}");
            assert_eq!(of("untrackable_bytes"), truth.parts(), "{what}: {bridge} {truth:?}");
            let names = if torch::reads_frames(version) { "module path" } else { "calling library" };
            assert_eq!(report["names"], names, "{what}: {}", report["coverage"]);
            let text = daemon
                .ctl(&machine, &["report", "--verbose", &pid.to_string()])
                .output()
                .expect("a report")
                .stdout;
            let text = String::from_utf8_lossy(&text).into_owned();
            assert!(text.contains("why nvidia-smi shows more than torch"), "{what}: {text}");
            job.enough();
        }
    }
}
