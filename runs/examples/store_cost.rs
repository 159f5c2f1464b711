//! What the run store costs: time and bytes written per checkpoint of a run with 1,000 cells and 1,024
//! buckets on one device.
//!
//!     cargo run --release -p gpumem-runs --example store_cost

use gpumem_runs::run::*;
use gpumem_runs::series::{Bucket, Extremes, MAX_BUCKETS, Series};
use gpumem_runs::store::Store;
use std::time::Instant;

const CELLS: u32 = 1000;
const ROUNDS: u64 = 300;

fn bucket(time_ns: u64) -> Bucket {
    let at = Some(Extremes::at((40 << 30) + time_ns as i64));
    Bucket { time_ns, used: at, tracked: at, untrackable: at, samples: 10, doubtful: 0 }
}

fn run() -> Run {
    let cell = |cell| Cell {
        class: Class::Block,
        tag: Some(format!("model/layers/{cell}/self_attn/q_proj/weight")),
        role: Some("parameter".into()),
        phase: Some("setup".into()),
        ..Cell::default()
    };
    let moment = Moment {
        tracked_bytes: Some(i64::from(CELLS) << 20),
        amounts: (0..CELLS).map(|cell| (cell, 1 << 20)).collect(),
        untrackable_bytes: Some(500 << 20),
        ..Moment::default()
    };
    let width_ns = 10_000_000;
    let buckets = (0..MAX_BUCKETS as u64).map(|at| bucket(at * width_ns)).collect();
    let device = Device {
        name: "GPU-00000000-0000-0000-0000-000000000000".into(),
        ordinal: 0,
        model: "NVIDIA H100 80GB HBM3".into(),
        total_bytes: Some(80 << 30),
        last: moment.clone(),
        peak: moment,
        peak_used: Some((60 << 30, 1)),
        beside: Beside::default(),
        reading: None,
        unaccounted_bytes: None,
        tenants: vec![],
        other_tenants: (0, 0),
        series: Series { width_ns, buckets },
        details: Default::default(),
    };
    Run {
        source: Source { kind: "daemon".into(), origin: "node".into(), preset: None },
        clock: Clock::Monotonic { wall_offset_ns: Some(0) },
        process: Process::default(),
        state: State::Open,
        coverage: Coverage::default(),
        caveats: vec![],
        cells: (0..CELLS).map(cell).collect(),
        devices: vec![device],
    }
}

/// Bytes this process gave to write calls so far.
fn written() -> u64 {
    let io = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let line = io.lines().find_map(|line| line.strip_prefix("wchar: "));
    line.and_then(|bytes| bytes.parse().ok()).unwrap_or(0)
}

fn measure(what: &str, mut work: impl FnMut(u64)) {
    let before = written();
    let mut micros: Vec<u128> = (0..ROUNDS)
        .map(|round| {
            let start = Instant::now();
            work(round);
            start.elapsed().as_micros()
        })
        .collect();
    micros.sort_unstable();
    let at = |part: usize| micros[(micros.len() - 1) * part / 100];
    let bytes = (written() - before) / ROUNDS;
    println!("{what:44} p50 {:6} us  p99 {:6} us  {:7} bytes written", at(50), at(99), bytes);
}

fn main() {
    let dir = std::env::temp_dir().join(format!("gpumem-store-cost-{}", std::process::id()));
    let path = dir.join("runs.db");
    let mut store = Store::open(&path).expect("a store in the temporary directory");
    let mut run = run();
    let id = store.begin(&run, "cost").expect("begin");
    let checked = |result: Result<(), _>| result.expect("checkpoint");

    measure("checkpoint, nothing changed", |_| checked(store.checkpoint(id, &run)));
    measure("checkpoint, 10 amounts and the last bucket", |round| {
        let device = &mut run.devices[0];
        (0..10).for_each(|cell| device.last.amounts[cell].1 += 512);
        device.series.buckets[MAX_BUCKETS - 1].samples = round as u32;
        checked(store.checkpoint(id, &run));
    });
    measure("checkpoint, all amounts of last and peak", |round| {
        let device = &mut run.devices[0];
        let amounts = device.last.amounts.iter_mut().chain(&mut device.peak.amounts);
        amounts.for_each(|(_, bytes)| *bytes += round as i64 + 1);
        checked(store.checkpoint(id, &run));
    });
    measure("checkpoint, all buckets", |round| {
        run.devices[0].series.buckets[0].samples = round as u32 + 1_000_000;
        checked(store.checkpoint(id, &run));
    });
    measure("checkpoint, all cells", |round| {
        run.cells.iter_mut().for_each(|cell| cell.library = Some(round.to_string()));
        checked(store.checkpoint(id, &run));
    });
    measure("insert of a new run", |round| {
        let (_, new) = store.insert(&run, &round.to_string()).expect("insert");
        assert!(new);
    });
    measure("load", |_| drop(store.load(id).expect("load")));
    measure(&format!("list of {} runs", ROUNDS + 1), |_| drop(store.list().expect("list")));
    drop(store);
    let size = std::fs::metadata(&path).map_or(0, |file| file.len());
    println!("file: {} bytes per run", size / (ROUNDS + 1));
    let _ = std::fs::remove_dir_all(dir);
}
