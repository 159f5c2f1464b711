//! Unmodified PyTorch wheels in every mode of their allocators. At each moment that the program marked, the recording is
//! compared with torch's own figures and the machine's truth.
use gpumem_tests::live::torch::{self, Held, Moment};
use gpumem_tests::live::{Daemon, Job, replay};
use serde_json::Value;

const FAST: &str = "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n";

/// Runs tests/torch/allocators.py with these modes, and compares the whole recording with the machine's truth.
fn run(version: &str, modes: &[&str], environment: &[(&str, &str)]) -> Option<(Vec<Moment>, Vec<Value>)> {
    let wheel = torch::wheel(version)?;
    let machine = torch::machine(&[]);
    let mut daemon = Daemon::start(&machine, "daemon", FAST);
    let mut command = wheel.covered(&machine, &daemon.runtime, "allocators.py", modes);
    let mut job = Job::start(command.envs(environment.iter().copied()));
    let printed = torch::finished(&mut job);
    daemon.wait_for_the_end_of(&machine, &[&job]);
    daemon.stop();
    let seen = replay(&daemon.recording);
    assert_eq!(seen.rejected, 0);
    let process = seen.process(job.pid());
    let truths = machine.truth();
    // The reservation of a driver's pool is polled, so the known value lags.
    let is_polled = modes.contains(&"asynchronous");
    if !is_polled {
        let compared = seen.compare_sums(&truths, job.pid(), |_| true);
        println!("torch {version} {modes:?}: {compared:?}");
    }
    let held: i64 = process.accounts.iter().map(|account| account.tracked_bytes).sum();
    let ends = truths.iter().filter(|truth| truth.is_end() && truth.pid == job.pid());
    let ends: Vec<i64> = ends.map(|end| end.tracked).collect();
    assert!(!ends.is_empty(), "the machine saw its end");
    let end = ends.iter().sum::<i64>();
    assert!(held == end || is_polled && held > end, "at its end: {held}, in truth {end}");
    assert_eq!(process.odd, Default::default(), "nothing odd");
    assert!(process.coverage.covered && !process.coverage.partial_history, "{:?}", process.coverage);
    assert_eq!(process.coverage.lost, 0);
    let shown = machine.tool("show", &[]);
    assert!(shown.contains("\nviolations=0\n"), "{shown}");
    Some((torch::moments(&daemon.recording, job.pid()), printed))
}

/// Calls `see` for each device at each moment, with torch's figures.
fn each(moments: &[Moment], printed: &[Value], mut see: impl FnMut(&str, &Held, &dyn Fn(&str) -> i64)) {
    let mut seen = 0;
    for (moment, printed) in torch::beside(moments, printed) {
        for (ordinal, numbers) in printed["devices"].as_array().expect("devices").iter().enumerate() {
            let of = |name: &str| numbers[name].as_i64().unwrap_or_else(|| panic!("{name} of {printed}"));
            see(&format!("{} on device {ordinal}", moment.name), &moment.devices[ordinal], &of);
            seen += 1;
        }
    }
    assert!(seen > 0, "no moment");
}

#[test]
fn caching_allocator_in_all_modes() {
    let modes =
        ["native", "two_devices", "expandable", "graph", "mempool", "pluggable_pool", "record_stream"];
    for version in &torch::versions() {
        let Some((moments, printed)) = run(version, &modes, &[]) else { return };
        for (moment, printed) in torch::beside(&moments, &printed) {
            torch::agree(&format!("torch {version}, {}", moment.name), moment, printed);
        }
    }
}

#[test]
fn asynchronous_driver_pool() {
    for version in &torch::versions() {
        let environment = [("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")];
        let Some((moments, printed)) = run(version, &["asynchronous"], &environment) else { return };
        each(&moments, &printed, |what, held, of| {
            // torch does not count in this mode, it asks the driver, which rounds each piece up to 512 bytes.
            let rounding = of("allocated") - held.blocks;
            assert!((0..512 * 200).contains(&rounding), "torch {version}, {what}: {held:?}, {rounding}");
            assert_eq!(held.tracked, held.blocks + held.idle, "torch {version}, {what}: {held:?}");
        });
    }
}

#[test]
fn disabled_caching() {
    for version in &torch::versions() {
        let environment = [("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")];
        let Some((moments, _)) = run(version, &["uncached"], &environment) else { return };
        // torch counts nothing in this mode, so `run` compares only with the machine's truth.
        let most = moments.iter().map(|moment| moment.devices[0].direct).max();
        assert!(most > Some(1 << 20), "{moments:?}");
        assert!(moments.iter().all(|moment| moment.devices[0].blocks == 0), "{moments:?}");
    }
}

#[test]
fn third_party_allocator() {
    for version in &torch::versions() {
        let Some((moments, printed)) = run(version, &["pluggable"], &[]) else { return };
        for (moment, printed) in torch::beside(&moments, &printed) {
            let held = printed["devices"][0]["held"].as_i64();
            assert_eq!(Some(moment.devices[0].direct), held, "torch {version}, {}", moment.name);
        }
    }
}
