//! What the NVML source costs, beside a bare loop: CPU per full sample of 8 GPUs with 16 processes each, on the
//! simulated machine (tests/fake-gpu) without latency; then with a stated latency, memory at 100 Hz.
//!
//! `cargo run --release -p gpumemd --example nvml_cost`, after `cargo build --release -p gpumemd`
#![allow(missing_docs)]

use anyhow::{Context, Result, ensure};
use gpumem_ledger::Ledger;
use gpumem_wire::Body;
use gpumem_wire::frame::records;
use gpumemd::source::nvml::{Nvml, Settings};
use gpumemd::source::process::Processes;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

const GPUS: u32 = 8;
const PROCESSES: u32 = 16;
const SECONDS: u64 = 8;

fn run(program: impl AsRef<std::ffi::OsStr>, args: &[&str]) -> Result<String> {
    let output = Command::new(program).args(args).output()?;
    ensure!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// Processes that hold memory; killed at the end.
struct Holders(Vec<Child>);

impl Drop for Holders {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// CPU time of a process in us, and its resident memory in KiB.
fn cost(pid: u32) -> Result<(f64, u64)> {
    let ns: f64 = std::fs::read_to_string(format!("/proc/{pid}/schedstat"))?
        .split(' ')
        .next()
        .context("schedstat")?
        .parse()?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("VmRSS")?;
    Ok((ns / 1e3, rss.trim().trim_end_matches(" kB").parse()?))
}

fn here(path: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path).display().to_string()
}

#[derive(Debug, Default)]
struct Heard {
    memory: u64,
    readings: u64,
    rows: u64,
}

/// CPU in us of poller and daemon over the time, and what came.
async fn measure(program: PathBuf, settings: Settings) -> Result<([f64; 2], Heard, Nvml)> {
    let (out, mut batches) = mpsc::channel(64);
    let nvml = Nvml::start(Settings { program: Some(program), ..settings }, Processes::new(), out);
    let mut ledger = Ledger::new();
    let mut heard = Heard::default();
    let warm = Instant::now() + Duration::from_secs(2);
    let (mut before, mut begun) = ([0.0; 2], None);
    loop {
        let batch = batches.recv().await.context("the source ended")?;
        for record in records(&batch.frames).flatten().flatten() {
            ledger.observe(batch.origin, &record);
            match record.body {
                Body::DeviceSample { .. } => heard.memory += 1,
                Body::ProcessSample { .. } => heard.rows += 1,
                Body::SampleEnd { .. } => heard.readings += 1,
                _ => {}
            }
        }
        ledger.take_samples();
        let pid = nvml.status().poller_pid.context("no poller")?;
        match begun {
            None if Instant::now() >= warm => {
                before = [cost(pid)?.0, cost(std::process::id())?.0];
                (heard, begun) = (Heard::default(), Some(Instant::now()));
            }
            Some(since) if since.elapsed() >= Duration::from_secs(SECONDS) => {
                let after = [cost(pid)?, cost(std::process::id())?];
                let used = [after[0].0 - before[0], after[1].0 - before[1]];
                println!("  resident: poller {} KiB, this program {} KiB", after[0].1, after[1].1);
                return Ok((used, heard, nvml));
            }
            _ => {}
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let me = std::env::current_exe()?;
    let target = me.parent().and_then(Path::parent).context("target folder")?;
    let out = target.join("fake-gpu");
    let out_text = format!("OUT={}", out.display());
    run("make", &["--silent", "-C", &here("../tests/fake-gpu"), &out_text])?;
    let (lib, tool) = (out.join("lib").display().to_string(), out.join("bin/fake-gpu"));
    let floor = out.join("nvml_floor").display().to_string();
    run("cc", &["-O2", "-o", &floor, &here("examples/nvml_floor.c"), "-ldl"])?;
    let sim = out.join("cost.sim").display().to_string();
    let _ = std::fs::remove_file(&sim);
    run(&tool, &["init", &sim, &format!("devices={GPUS}")])?;
    let mut holders = Holders(Vec::new());
    for gpu in 0..GPUS {
        for _ in 0..PROCESSES {
            let child = Command::new("sleep").arg("1000").spawn()?;
            let bytes = u64::from(holders.0.len() as u32 + 1) << 21;
            run(&tool, &["hold", &sim, &child.id().to_string(), &gpu.to_string(), &bytes.to_string()])?;
            holders.0.push(child);
        }
    }
    let program = out.join("gpumemd-on-sim");
    let daemon = target.join("gpumemd").display().to_string();
    let script = format!("#!/bin/sh\nGPUMEM_SIM='{sim}' LD_LIBRARY_PATH='{lib}' exec '{daemon}' \"$@\"\n");
    std::fs::write(&program, script)?;
    run("chmod", &["755", &program.display().to_string()])?;

    println!("{GPUS} GPUs x {PROCESSES} processes, no latency, a full sample 10 times a second, {SECONDS} s");
    let bare = |hz: &str| -> Result<f64> {
        let seconds = SECONDS.to_string();
        let script = format!("GPUMEM_SIM='{sim}' LD_LIBRARY_PATH='{lib}' '{floor}' {seconds} {hz}");
        Ok(run("sh", &["-c", &script])?.split(' ').next().context("a number")?.parse()?)
    };
    let floor_us = bare("10")?;
    println!("  bare loop: {floor_us:.1} us of CPU per full sample");
    let settings = Settings {
        memory_hz: 10,
        list_interval: Duration::from_millis(100),
        list_budget: 1.0,
        ..Settings::default()
    };
    let (used, heard, nvml) = measure(program.clone(), settings).await?;
    drop(nvml);
    let full = heard.rows as f64 / f64::from(GPUS * PROCESSES);
    println!(
        "  gpumemd: {:.1} us = poller {:.1} + daemon with ledger {:.1}; {:.2} x the bare loop; {:.1} full samples/s",
        (used[0] + used[1]) / full,
        used[0] / full,
        used[1] / full,
        (used[0] + used[1]) / full / floor_us,
        full / SECONDS as f64,
    );

    run(&tool, &["set", &sim, "nvml.memory_us=12", "nvml.list_us=300", "nvml.list_per_process_us=50"])?;
    println!(
        "with latency (12 us memory info, 0.3 ms + 50 us per process a list), memory at 100 Hz, defaults else"
    );
    let settings = Settings { memory_hz: 100, ..Settings::default() };
    let (used, heard, nvml) = measure(program, settings).await?;
    let seconds = SECONDS as f64;
    println!(
        "  {:.2} % of a core (poller {:.2}, daemon {:.2}); memory {:.1} Hz, {:.1} readings/s, list share {:.2} %",
        (used[0] + used[1]) / 1e4 / seconds,
        used[0] / 1e4 / seconds,
        used[1] / 1e4 / seconds,
        (heard.memory as f64 - 2.0 * heard.readings as f64) / f64::from(GPUS) / seconds,
        heard.readings as f64 / seconds,
        nvml.status().counters.list_share * 100.0,
    );
    Ok(())
}
