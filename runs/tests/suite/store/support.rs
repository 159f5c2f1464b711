//! Temporary directories, and runs generated from a single number.

use gpumem_model::growth::Growth;
use gpumem_model::run::{
    Caveat, Cell, Class, Clock, Coverage, Details, Device, DeviceReading, Moment, Process, ProgramData, Run,
    SideMemory, Source, State, UntrackableParts,
};
use gpumem_model::series::{Bucket, Extremes, Series};
use gpumem_model::timeline::{Point, Timeline};
use gpumem_runs::store::{Store, StoreError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory that is deleted when dropped.
pub struct TempDir(PathBuf);

impl TempDir {
    pub fn new() -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let name = format!("gpumem-store-{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        TempDir::at(std::env::temp_dir().join(name))
    }

    pub fn at(path: PathBuf) -> Self {
        std::fs::create_dir(&path).unwrap();
        TempDir(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Where the tests put their store.
    pub fn store(&self) -> PathBuf {
        self.0.join("runs.db")
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns the run of checkpoint number `n`: cells, amounts and buckets grow and change with `n`, and all sums are right.
/// `coverage.events` is `n`.
pub fn run_at(n: u64) -> Run {
    let cells: Vec<Cell> = (0..20 + n % 40)
        .map(|cell| Cell {
            class: [Class::Direct, Class::Block, Class::PoolIdle, Class::Opaque][cell as usize % 4],
            tag: (cell % 3 != 0).then(|| format!("model/layer{cell}/weight")),
            origin: (cell % 7 == 0).then(|| format!("load/{cell}")),
            role: (cell + n).is_multiple_of(2).then(|| "parameter".to_owned()),
            phase: (cell % 5 == 0).then(|| "setup".to_owned()),
            library: Some("libtorch".to_owned()),
            pool: (cell % 4 == 1).then(|| "torch".to_owned()),
            pending: cell % 8 == 2,
            inherited: cell % 8 == 3,
        })
        .collect();
    let moment = |time_ns: u64, factor: i64| {
        let amounts: Vec<(u32, i64)> =
            (0..cells.len() as u32).map(|cell| (cell, factor * (i64::from(cell) + 1) + n as i64)).collect();
        Moment {
            time_ns,
            tracked_bytes: Some(amounts.iter().map(|(_, bytes)| bytes).sum()),
            amounts: amounts.into(),
            predates_bytes: (!n.is_multiple_of(3)).then_some(n as i64),
            untrackable_bytes: Some(n as i64 - 50),
            parts: (!n.is_multiple_of(5)).then(|| UntrackableParts {
                context_bytes: n as i64,
                unexplained_bytes: -50,
                ..UntrackableParts::default()
            }),
            used_absence: n.is_multiple_of(2).then(|| "timeout".to_owned()),
            ..Moment::default()
        }
    };
    let mut series = Series::new(10);
    for bucket in 0..n.min(300) {
        let at = Extremes::at(bucket as i64);
        let tracked = if bucket + 1 == n { Extremes { max: 1 << 40, ..at } } else { at };
        let bucket = Bucket { time_ns: bucket * 10, tracked: Some(tracked), samples: 1, ..Bucket::default() };
        series.buckets.push(bucket);
    }
    let at = |point: u64, cells: u64| Point {
        time_ns: point * 10,
        amounts: (0..cells as u32).map(|cell| (cell, i64::from(cell) + 1 + point as i64 / 7)).collect(),
        rest_bytes: point as i64 % 3,
    };
    let device = |ordinal: u16| Device {
        name: format!("GPU-{ordinal}"),
        ordinal,
        model: "H100".into(),
        total_bytes: Some(80 << 30),
        last: moment(n, 1),
        peak: moment(n / 2, 2),
        peak_used: Some((n, n)),
        beside: SideMemory { pinned_bytes: n as i64, ..SideMemory::default() },
        reading: Some(DeviceReading {
            time_ns: n,
            used_bytes: n,
            free_bytes: 1,
            system_reserved_bytes: None,
            unified: false,
        }),
        unaccounted_bytes: Some(-1),
        tenants: vec![(7, Some(n)), (8, None)],
        other_tenants: (n as u32, n),
        series: series.clone(),
        details: Details {
            accounted_peak_bytes: Some(n),
            growth: Growth { stride: n, named: vec![n as i64; (n % 64) as usize], ..Growth::default() },
            timeline: Timeline {
                width_ns: 10,
                points: (0..n.min(256)).map(|point| at(point, cells.len() as u64)).collect(),
            },
            ..Details::default()
        },
    };
    Run {
        source: Source { kind: "daemon".into(), origin: "node1".into(), preset: None },
        clock: Clock::Monotonic { wall_offset_ns: Some(1_700_000_000_000_000_000) },
        process: Process {
            pid: 4242,
            start_ticks: 99,
            uid: Some(1000),
            facts: [("command".to_owned(), "python train.py".to_owned())].into(),
            claims: [("rank".to_owned(), "3".to_owned())].into(),
        },
        state: State::Open,
        coverage: Coverage { covered: true, events: n, ..Coverage::default() },
        caveats: vec![Caveat { code: "late".into(), text: "The agent came late.".into() }],
        devices: (0..=(n % 2) as u16).map(device).collect(),
        cells,
        own: own(n),
    }
}

fn own(n: u64) -> ProgramData {
    let counter = |at: u64| gpumem_model::program_data::Counter {
        name: Some(format!("counter {at}")),
        value: n as i64,
        area: i128::from(n) << 64,
        points: (0..n % 128).map(|point| (point, n as i64)).collect(),
        ..Default::default()
    };
    let range = |at: u64| gpumem_model::program_data::Range {
        name: Some(format!("range {at}")),
        ..Default::default()
    };
    ProgramData {
        counters: (0..n % 3).map(counter).collect(),
        ranges: (0..n % 40).map(range).collect(),
        spans: (0..n % 600).map(|at| gpumem_model::program_data::Span(0, 7, at, n)).collect(),
        spans_dropped: n,
        ..ProgramData::default()
    }
}

/// Checks all invariants of a run's numbers.
#[track_caller]
pub fn assert_consistent(run: &Run) {
    for device in &run.devices {
        for moment in [&device.last, &device.peak] {
            let sum: i64 = moment.amounts.iter().map(|(_, bytes)| bytes).sum();
            assert_eq!(moment.tracked_bytes, Some(sum));
            assert!(moment.amounts.iter().all(|&(cell, _)| (cell as usize) < run.cells.len()));
        }
        assert!(device.series.buckets.is_sorted_by(|a, b| a.time_ns < b.time_ns));
    }
}

/// Returns the error, which must occur.
#[track_caller]
pub fn refused(result: Result<Store, StoreError>) -> StoreError {
    match result {
        Ok(_) => panic!("it was opened"),
        Err(error) => error,
    }
}

/// Returns a pseudo-random number.
pub fn scatter(n: u64) -> u64 {
    let mixed = (n ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 17
}
