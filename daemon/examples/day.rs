//! Simulates a day of 128 processes without an agent in some minutes, and prints memory and written bytes by hour:
//! `cargo run --release -p gpumemd --example day [HOURS]`. The memory of each process changes every second.

#[path = "../tests/suite/common/node.rs"]
#[allow(dead_code, reason = "the other programs also use it")]
mod node;

use gpumemd::aggregator::AggregatorSettings;
use gpumemd::os::{heap_bytes_in_use, trim_heap};
use node::{MIB, Node, key};
use std::time::Duration;

const SECOND_NS: u64 = 1_000_000_000;
const HOUR_S: u64 = 3600;

/// Returns a number of the kernel's statistics about this process.
fn of_kernel(file: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse().unwrap_or(0)
}

fn main() {
    let hours = std::env::args().nth(1).and_then(|hours| hours.parse().ok()).unwrap_or(24);
    let folder = std::env::temp_dir().join(format!("gpumemd-day-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the store");
    let mut node = Node::new(folder.join("runs.sqlite"), 8, 100_000);
    node.core.set_pace(AggregatorSettings::default());
    // Times of records are later than the daemon's start, as in a real daemon.
    let start_s = node.context.stats.started_ns / SECOND_NS + 1;
    println!("{:>6} {:>12} {:>12} {:>16}", "hour", "heap MiB", "RSS MiB", "written bytes/s");
    let mut written = of_kernel("io", "wchar:");
    for second in 1..=hours * HOUR_S {
        let t0 = (start_s + second) * SECOND_NS;
        for device in 0..8 {
            let used = |process: usize| (64 + (second * 7 + process as u64 * 5) % 13) * 2 * MIB;
            let listed: Vec<_> = (0..16).map(|process| (key(device, process), Ok(used(process)))).collect();
            node.sample(device, t0 + device as u64, &listed);
        }
        node.core.tick(t0 + SECOND_NS / 2);
        while node.context.run_writer.status().waiting > 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
        if second % HOUR_S == 0 {
            trim_heap();
            let heap = heap_bytes_in_use().unwrap_or(0);
            let all = of_kernel("io", "wchar:");
            println!(
                "{:>6} {:>12.2} {:>12.2} {:>16.0}",
                second / HOUR_S,
                heap as f64 / MIB as f64,
                of_kernel("status", "VmRSS:") as f64 / 1024.0,
                (all - written) as f64 / HOUR_S as f64,
            );
            written = all;
        }
    }
    println!("targets: heap flat from hour 3 on, 15,000 written bytes/s");
    node.thread.end(Duration::from_secs(1));
    let _ = std::fs::remove_dir_all(folder);
}
