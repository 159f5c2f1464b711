//! Pool owners that report their blocks: examples/pool_owner.c, stop by stop, against the ledger.
use gpumem_ledger::ProcessView;
use gpumem_tests::live::examples::build;
use gpumem_tests::live::programs::programs;
use gpumem_tests::live::{Daemon, Machine, replay, until};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

const MIB: i64 = 1 << 20;

/// Returns MiB by class and tag, at the latest moment with complete data.
fn held(machine: &Machine, daemon: &Daemon, pid: u32) -> Option<BTreeMap<String, i64>> {
    let output = daemon.ctl(machine, &["report", &pid.to_string(), "--json"]).output().ok()?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    let device = &report["devices"][0];
    let mut held = BTreeMap::new();
    for cell in device["last"]["cells"].as_array()? {
        let name = format!("{}:{}", cell["class"].as_str()?, cell["tag"].as_str().unwrap_or_default());
        *held.entry(name.trim_end_matches(':').to_owned()).or_insert(0) += cell["bytes"].as_i64()?;
    }
    held.insert("beside".to_owned(), device["beside"]["unbooked_block_bytes"].as_i64().unwrap_or(0));
    held.retain(|_, bytes| *bytes != 0);
    held.values_mut().for_each(|bytes| *bytes /= MIB);
    Some(held)
}

fn pools(process: &ProcessView) -> BTreeMap<String, (u64, u64, bool)> {
    let pools = process.accounts.iter().flat_map(|account| &account.pools);
    let name = |name: &Option<String>| name.as_deref().unwrap_or_default().to_owned();
    pools.map(|pool| (name(&pool.name), (pool.segment_bytes, pool.block_bytes, pool.opaque))).collect()
}

#[test]
fn server_that_sleeps_and_wakes() {
    let machine = Machine::new(&["devices=1", "memory=16G"]);
    let mut daemon = Daemon::start(&machine, "daemon", "[nvml]\nlist_every_s = 0.05\nlist_budget = 1.0\n");
    let flags = ["-std=c99", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror"];
    let program = build(&machine, "cc", &flags, "pool_owner.c");
    let mut command = machine.command(&program);
    command.arg("stops").env("CUDA_INJECTION64_PATH", programs().ours.join("libgpumem.so"));
    command.env("GPUMEM_SOCKET", daemon.runtime.join("agent.sock"));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    let mut input = child.stdin.take().expect("piped");
    let pid = child.id();
    let mut stop = |name: &str, wanted: &[(&str, i64)]| {
        let mut line = String::new();
        out.read_line(&mut line).expect("a line");
        assert_eq!(line.trim_end(), name);
        let wanted: BTreeMap<String, i64> =
            wanted.iter().map(|&(name, mib)| (name.to_owned(), mib)).collect();
        let mut last = None;
        until(20, &format!("{name}: {wanted:?}"), || {
            last = held(&machine, &daemon, pid);
            if last.as_ref() != Some(&wanted) {
                eprintln!("{name}: {last:?}");
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
            (last.as_ref() == Some(&wanted)).then_some(())
        });
        input.write_all(b"\n").expect("it reads");
    };
    // The inner pool counts instead of the block that it carves from; a pool without blocks is opaque.
    stop(
        "awake",
        &[("block:weights", 24), ("block:kv-cache/request.7", 2), ("pool_idle", 38), ("opaque", 8)],
    );
    // The memory is gone, the weights keep their block; the cache was dropped.
    stop("asleep", &[("beside", 24), ("opaque", 8)]);
    stop("woken", &[("block:weights", 24), ("pool_idle", 40), ("opaque", 8)]);
    let mut line = String::new();
    out.read_line(&mut line).expect("a line");
    assert_eq!(line.trim_end(), "gone");
    // It is killed here and its pools are gone: their records are in the recording.
    drop(input);
    assert!(child.wait().expect("it ends").success());
    until(20, "a closed run", || daemon.pids(&machine).is_empty().then_some(()));
    daemon.stop();
    let seen = replay(&daemon.recording);
    assert_eq!(seen.rejected, 0);
    let process = seen.process(pid);
    assert_eq!(process.odd, Default::default());
    assert!(!process.coverage.partial_history, "{:?}", process.coverage);
    assert_eq!(pools(process), BTreeMap::new(), "all pools were destroyed");
    assert_eq!(process.accounts[0].tracked_bytes, 0);
}
