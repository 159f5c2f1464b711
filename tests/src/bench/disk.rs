//! Bytes that gpumemd writes to the disk for 8 GPUs with 16 processes each and no agent. Only the thread of the run store writes
//! files, so the kernel's count of bytes that it passed to write calls is counted.

use super::daemon::{GPUS, PROCESSES};
use super::node::{Node, machine, processes};
use super::rounds::median;
use crate::live::{Job, Machine, until};
use std::process::Command;
use std::time::{Duration, Instant};

/// The daemon's default.
const CHECKPOINT_S: f64 = 5.0;
/// Length of a window, in which all runs are written twice, and number of windows.
const WINDOW: Duration = Duration::from_secs(30);
const WINDOWS: usize = 3;
/// Time without a change; a heartbeat takes place in each minute.
const STILL: Duration = Duration::from_secs(130);

/// Returns the bytes and the number of write calls of the store's thread.
fn written(pid: u32) -> [u64; 2] {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process").flatten();
    let is_store = |task: &std::path::Path| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim_end() == "keeper")
    };
    let task = tasks.map(|task| task.path()).find(|task| is_store(task)).expect("the store's thread");
    let io = std::fs::read_to_string(task.join("io")).expect("its counts");
    let count = |name: &str| io.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    ["wchar:", "syscw:"].map(|name| count(name).expect("a count"))
}

/// Changes the memory of each process by a few MiB once a second, for the length of a window.
fn move_memory(machine: &Machine, jobs: &[Job]) {
    let began = Instant::now();
    let mut second = 0;
    while began.elapsed() < WINDOW {
        for (number, job) in (0..).zip(jobs) {
            let bytes = (u64::from(number) + 64 + (second * 7 + u64::from(number) * 5) % 13) << 21;
            let device = number / PROCESSES;
            machine.tool("hold", &[&job.pid().to_string(), &device.to_string(), &bytes.to_string()]);
        }
        second += 1;
        std::thread::sleep(Duration::from_secs(second).saturating_sub(began.elapsed()));
    }
}

/// Runs the whole benchmark.
pub fn run() {
    let machine = machine(GPUS);
    let node =
        Node::start_with_store(&machine, CHECKPOINT_S, "[nvml]\nlist_every_s = 1.0\nlist_budget = 1.0");
    let jobs = processes(&machine, GPUS, PROCESSES, |_| {
        let mut command = Command::new("sleep");
        command.arg("10000");
        command
    });
    let all = u64::from(GPUS * PROCESSES);
    until(60, "all runs in the store", || (node.number("gpumemd_store_writes_total") >= all).then_some(()));
    move_memory(&machine, &jobs);
    let mut rates = Vec::new();
    for _ in 0..WINDOWS {
        let (before, began) = (written(node.pid()), Instant::now());
        move_memory(&machine, &jobs);
        let bytes = written(node.pid())[0] - before[0];
        rates.push(bytes as f64 / began.elapsed().as_secs_f64());
    }
    println!(
        "{GPUS} GPUs x {PROCESSES} processes without an agent, a list a second, checkpoints of {CHECKPOINT_S} s"
    );
    println!("  memory of each moves every second   {:>10.0} bytes/s; target 15,000", median(rates));
    // Until the last changes are written.
    std::thread::sleep(WINDOW);
    let before = written(node.pid());
    std::thread::sleep(STILL);
    let after = written(node.pid());
    println!(
        "  nothing moves for {} s             {:>10} bytes, {} writes; target: a heartbeat a minute",
        STILL.as_secs(),
        after[0] - before[0],
        after[1] - before[1]
    );
    println!();
}
