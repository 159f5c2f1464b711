//! What the run store costs: time and bytes written per checkpoint of a run with 1,000 cells and 1,024
//! buckets on one device.
//!
//!     cargo run --release -p gpumem-runs --example store_cost

use gpumem_runs::growth::Growth;
use gpumem_runs::run::*;
use gpumem_runs::series::{Bucket, Extremes, MAX_BUCKETS, Series};
use gpumem_runs::store::Store;
use gpumem_runs::timeline::{Point, Timeline};
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
    // A quarter of the cells changes from point to point, as a training run sampled over hours would.
    let bytes = |cell: u64, at: u64| {
        (1 << 30) + ((cell * 7919 + if cell % 4 == 0 { at * 104_729 } else { 0 }) << 9) as i64
    };
    let point = |at: u64| Point {
        time_ns: at * 14_000_000_000,
        amounts: (0..64).map(|cell| (cell as u32 * 3, bytes(cell, at))).collect(),
        rest_bytes: bytes(99, at),
    };
    let timeline = Timeline { width_ns: 14_000_000_000, points: (0..256).map(point).collect() };
    let growth = Growth {
        points: (0..64).map(|at| (at, at * 1_000_000_000)).collect(),
        cells: (0..64).map(|cell| (cell, (0..64).map(|at| bytes(cell.into(), at)).collect())).collect(),
        ..Growth::default()
    };
    let level = Level { peak_bytes: 40 << 30, last_bytes: 39 << 30 };
    let row = |n: u64| Iteration {
        first: n,
        last: n,
        count: 1,
        start_ns: n * 300_000_000,
        end_ns: (n + 1) * 300_000_000,
        tracked: level,
        pool_reserved: level,
        parameters: level,
        gradients: level,
        optimizer_state: level,
        activations: level,
        ..Iteration::default()
    };
    let iterations = Iterations { rows: (0..256).map(row).collect(), open: Some(row(256)) };
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
        details: Details { timeline, growth, iterations, ..Details::default() },
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
    measure("checkpoint, a point of the timeline", |round| {
        run.devices[0].details.timeline.points[255].rest_bytes += round as i64 + 1;
        checked(store.checkpoint(id, &run));
    });
    measure("checkpoint, all columns of growth", |round| {
        let columns = run.devices[0].details.growth.cells.iter_mut();
        columns.for_each(|(_, values)| values[63] += round as i64 + 1);
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
    let timeline = serde_json::to_string(&run.devices[0].details.timeline).map_or(0, |text| text.len());
    println!("the timeline as JSON: {timeline} bytes");
    let db = rusqlite::Connection::open(&path).expect("a store");
    let sql = "SELECT name, count(*), sum(length(body)) FROM detail WHERE run = 1 GROUP BY name";
    let mut names = db.prepare(sql).expect("details");
    let mut names = names.query([]).expect("details");
    while let Some(row) = names.next().expect("a row") {
        let (name, rows, bytes): (String, i64, i64) =
            (row.get(0).expect("a name"), row.get(1).expect("a count"), row.get(2).expect("a sum"));
        println!("{name:12} {rows:4} rows {bytes:7} bytes");
    }
    let size = std::fs::metadata(&path).map_or(0, |file| file.len());
    println!("file: {} bytes per run", size / (ROUNDS + 1));
    let _ = std::fs::remove_dir_all(dir);
}
