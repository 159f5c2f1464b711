//! Cost of gpumemd while it watches 8 GPUs with 16 processes each, on the simulated machine. The floor is a bare loop in C over
//! the same NVML, with one memory call and one list for each GPU (nvml_floor.c).

use super::cost::{cpu, cpu_of_thread, pss_mib, resident_mib};
use super::node::{Node, get, machine, processes};
use super::rounds::{Contestant, Per, median, print_table};
use crate::live::{Job, Machine, programs::programs};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// Number of GPUs.
pub const GPUS: u32 = 8;
/// Processes on each GPU.
pub const PROCESSES: u32 = 16;
/// Compared rates: full samples per second, seconds of a round, and rounds.
const RATES: [(u32, u64, usize); 3] = [(1, 4, 3), (10, 2, 5), (100, 2, 3)];
const STARTS: usize = 9;
/// Processes on each GPU of a crowded machine: 2,000 in all.
const CROWD: u32 = 250;
/// The daemon's default interval for storing runs, in seconds.
const CHECKPOINT_S: f64 = 5.0;

fn compiled_floor() -> PathBuf {
    let path = programs().fake.join("nvml_floor");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/bench/nvml_floor.c");
    let status = Command::new("cc").args(["-O2", "-o"]).arg(&path).args([source, "-ldl"]).status();
    assert!(status.is_ok_and(|status| status.success()), "cc {source}");
    path
}

/// Returns the CPU time of the bare loop for each full sample.
fn bare(machine: &Machine, floor: &PathBuf, hz: u32, seconds: u64) -> Duration {
    let mut command = machine.command(floor);
    let output = command.args([seconds.to_string(), hz.to_string()]).output().expect("the bare loop");
    let text = String::from_utf8_lossy(&output.stdout);
    let us: f64 = text.split(' ').next().and_then(|us| us.parse().ok()).expect("microseconds");
    Duration::from_secs_f64(us / 1e6)
}

/// CPU time of an idle wake-up in us: the cost for any program that wakes several times for each sample.
fn wake_up_us() -> f64 {
    const WAKES: u32 = 25;
    let before = cpu_of_thread();
    (0..WAKES).for_each(|_| std::thread::sleep(Duration::from_millis(40)));
    (cpu_of_thread() - before).div_f64(f64::from(WAKES)).as_secs_f64() * 1e6
}

fn sleepers(machine: &Machine, each: u32) -> Vec<Job> {
    processes(machine, GPUS, each, |_| {
        let mut command = Command::new("sleep");
        command.arg("1000");
        command
    })
}

fn range(values: &[f64]) -> String {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(0.0, f64::max);
    format!("{low:.1} .. {high:.1}")
}

fn start_and_memory(machine: &Machine) {
    let mut ready = Vec::new();
    for _ in 0..STARTS {
        let node = Node::start(machine, "");
        ready.push(node.ready.as_secs_f64() * 1e3);
        node.stop();
    }
    println!("ready: {:.1} ms ({}); target 50 ms", median(ready.clone()), range(&ready));
}

fn full_samples(machine: &Machine, (hz, seconds, rounds): (u32, u64, usize)) {
    let floor = compiled_floor();
    let config = format!(
        "[nvml]\nmemory_hz = {hz}\nlist_every_s = {}\nlist_budget = 1.0\nextra_lists_every_s = 3600.0",
        1.0 / f64::from(hz)
    );
    let node = Node::start(machine, &config);
    std::thread::sleep(Duration::from_secs(2));
    let names = ["gpumemd and its poller", "  the same, watched", "  its poller alone", "bare loop in C"];
    let [mut both, mut watched, mut poller, mut least] = names.map(Contestant::new);
    let window = |of: &mut Contestant, poller: Option<&mut Contestant>| {
        let (before, lists_before) = (node.cpu(), machine.lists());
        std::thread::sleep(Duration::from_secs(seconds));
        let (after, lists_after) = (node.cpu(), machine.lists());
        let full = (lists_after - lists_before) as f64 / f64::from(GPUS);
        assert!(full > 0.7 * f64::from(hz) * seconds as f64, "{full} full samples in {seconds} s at {hz} Hz");
        let each = |index: usize| (after[index] - before[index]).div_f64(full);
        of.took(1, each(0) + each(1));
        if let Some(poller) = poller {
            poller.took(1, each(1));
        }
    };
    for _ in 0..rounds {
        least.took(1, bare(machine, &floor, hz, seconds));
        window(&mut both, Some(&mut poller));
    }
    if hz == 10 {
        println!(
            "resident: daemon {:.1} MiB, its poller {:.1} MiB; target 12 MiB. Pss of both: {:.1} MiB; target 8 MiB\n",
            resident_mib(node.pid()),
            resident_mib(node.poller()),
            pss_mib(node.pid()) + pss_mib(node.poller())
        );
    }
    for _ in 0..rounds {
        // After a scrape the daemon publishes its state ten times a second, for ten seconds.
        node.scrape();
        window(&mut watched, None);
    }
    let title = format!("CPU time of a full sample at {hz} Hz, no latency");
    print_table(&title, Per::Event, &[&both, &watched, &poller, &least]);
    println!("target: at 1 Hz 300,000 ns; at 10 Hz 0.4 % of a core, 400,000 ns");
    println!("an idle wake-up takes {:.0} us here; the bare loop does it once a sample\n", wake_up_us());
}

/// Returns the share of a core, in percent, that the daemon and its poller use: the median of rounds of `seconds`.
fn share(node: &Node, seconds: u64, rounds: usize) -> f64 {
    let of_round = |_| {
        let (before, start) = (node.cpu(), Instant::now());
        std::thread::sleep(Duration::from_secs(seconds));
        let used: Duration = node.cpu().into_iter().zip(before).map(|(after, before)| after - before).sum();
        used.as_secs_f64() / start.elapsed().as_secs_f64() * 100.0
    };
    median((0..rounds).map(of_round).collect())
}

/// The default rates with the store on: memory at 10 Hz, lists at 1 Hz.
fn stored_samples(machine: &Machine) {
    let node = Node::start_with_store(machine, CHECKPOINT_S, "[nvml]\nlist_budget = 1.0");
    std::thread::sleep(Duration::from_secs(5));
    println!("store on, memory at 10 Hz, lists at 1 Hz, the poller included");
    println!("  {:.2} % of a core; target 0.4 %\n", share(&node, 15, 3));
}

/// A machine with 2,000 processes.
fn crowd() {
    const SCRAPES: usize = 30;
    let machine = machine(GPUS);
    let _sleepers = sleepers(&machine, CROWD);
    let node = Node::start_with_store(&machine, CHECKPOINT_S, "[nvml]\nlist_budget = 1.0");
    std::thread::sleep(Duration::from_secs(20));
    let used = share(&node, 15, 3);
    let mut times = Vec::new();
    for _ in 0..SCRAPES {
        let start = Instant::now();
        std::hint::black_box(get(node.http, "/metrics"));
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    println!("{} processes on {GPUS} GPUs, store on, lists at 1 Hz", GPUS * CROWD);
    println!(
        "  {used:.2} % of a core; target 3 %\n  {:.0} MiB of both (Pss); target 60 MiB\n  scrape {:.1} ms ({}); target 20 ms\n",
        pss_mib(node.pid()) + pss_mib(node.poller()),
        median(times.clone()),
        range(&times)
    );
}

fn stated_latency(machine: &Machine) {
    machine.set(&["nvml.memory_us=12", "nvml.list_us=300", "nvml.list_per_process_us=50"]);
    let node = Node::start(machine, "[nvml]\nmemory_hz = 100");
    std::thread::sleep(Duration::from_secs(2));
    let calls = || node.number("gpumemd_nvml_memory_calls_total");
    let (calls_before, before, start) = (calls(), node.cpu(), Instant::now());
    let mut shares = Vec::new();
    for _ in 0..4 {
        let (before, start) = (node.cpu(), Instant::now());
        std::thread::sleep(Duration::from_secs(2));
        let used: Duration = node.cpu().into_iter().zip(before).map(|(after, before)| after - before).sum();
        shares.push(used.as_secs_f64() / start.elapsed().as_secs_f64() * 100.0);
    }
    let seconds = start.elapsed().as_secs_f64();
    let poller = (cpu(node.poller()) - before[1]).as_secs_f64() / seconds * 100.0;
    let hz = (calls() - calls_before) as f64 / f64::from(GPUS) / seconds;
    println!("12 us a memory info, 0.3 ms + 50 us per process a list; memory at 100 Hz, defaults else");
    println!(
        "  {:.2} % of a core ({}; the poller {poller:.2}, calls included), memory at {hz:.1} Hz; target 3 %\n",
        median(shares.clone()),
        range(&shares)
    );
    machine.set(&["nvml.memory_us=0", "nvml.list_us=0", "nvml.list_per_process_us=0"]);
}

/// Runs the whole benchmark.
pub fn run() {
    let machine = machine(GPUS);
    let _sleepers = sleepers(&machine, PROCESSES);
    start_and_memory(&machine);
    stored_samples(&machine);
    RATES.into_iter().for_each(|rate| full_samples(&machine, rate));
    stated_latency(&machine);
    crowd();
}
