//! Measures the cost of a scrape of a full node, and of publishing: `cargo run --release -p gpumemd --example scrape_cost`.
//!
//! The node has 8 GPUs with 16 covered processes each, and 20 tags for each process. Each figure is shown with a lower bound: one
//! copy of the answer's bytes.

#[path = "../tests/suite/common/node.rs"]
mod node;

use node::{MIB, Node, key};
use std::hint::black_box;
use std::time::Instant;

fn quantiles(what: &str, mut run: impl FnMut()) {
    let mut times: Vec<f64> = (0..400)
        .map(|_| {
            let started = Instant::now();
            run();
            started.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[(times.len() as f64 * share) as usize];
    println!("{what:<28} p50 {:7.3} ms   p95 {:7.3} ms", at(0.5), at(0.95));
}

fn main() {
    let store = std::env::temp_dir().join(format!("gpumemd-scrape-cost-{}.sqlite", std::process::id()));
    let mut node = Node::new(store.clone(), 8, 100_000);
    for device in 0..8 {
        let keys: Vec<_> = (0..16).map(|process| key(device, process)).collect();
        for process in 0..16 {
            node.covered(device, process, 20);
        }
        let listed: Vec<_> = keys.into_iter().map(|key| (key, Ok(700 * MIB))).collect();
        node.sample(device, 500_000_000, &listed);
    }
    node.core.publish(1_000_000_000);
    let text = gpumemd::view::prometheus::scrape(&node.context);
    let series = text.lines().filter(|line| !line.starts_with('#')).count();
    println!("{series} series, {} bytes", text.len());
    quantiles("floor: copy of the answer", || drop(black_box(text.clone())));
    quantiles("scrape", || drop(black_box(gpumemd::view::prometheus::scrape(&node.context))));
    quantiles("publish", || node.core.publish(1_000_000_000));
    // From now on each tick writes all runs.
    node.core.set_pace(gpumemd::aggregator::AggregatorSettings {
        checkpoint: std::time::Duration::ZERO,
        ..Default::default()
    });
    let stats = std::sync::Arc::clone(&node.context.stats);
    let written = || stats.get(gpumemd::stats::Count::StoreWrites);
    for round in 0..5_u64 {
        let before = written();
        for device in 0..8 {
            let listed: Vec<_> = (0..16).map(|process| (key(device, process), Ok(700 * MIB))).collect();
            node.sample(device, (round + 2) * 1_000_000_000, &listed);
        }
        let started = Instant::now();
        node.core.tick((round + 2) * 1_000_000_000 + 500_000_000);
        let made = started.elapsed();
        while written() < before + 128 && started.elapsed().as_secs() < 20 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        println!("checkpoint of 128 runs: made in {made:?}, stored after {:?}", started.elapsed());
    }
    node.thread.end(std::time::Duration::from_secs(1));
    let _ = std::fs::remove_file(store);
}
