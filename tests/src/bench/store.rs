//! Cost of the run store: checkpoints a second, and disk space for an hour of training. The floor writes the run as
//! JSON to a file, which a crash would truncate and no reader could list.

use super::rounds::{Contestant, Per, print_table};
use gpumem_ledger::{Origin, ProcessKey};
use gpumem_model::run::{Run, Source};
use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_runs::store::{Store, StoreError};
use gpumem_wire::{Absence, Body, DeviceIdKind, MemoryKind, Phase, Reading, Record, Role, Stamp};
use std::path::Path;
use std::time::{Duration, Instant};

const KEY: ProcessKey = ProcessKey { pid: 4242, start_ticks: 99 };
const TAGS: u64 = 1000;
const SECOND_NS: u64 = 1_000_000_000;
const HOUR_S: u64 = 3600;
/// The daemon's default.
const CHECKPOINT_S: u64 = 5;
const ROUNDS: usize = 30;

pub fn run() {
    let folder = std::env::temp_dir().join(format!("gpumem-bench-store-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    hour(&folder);
    rates(&folder);
    let _ = std::fs::remove_dir_all(&folder);
}

/// One process on one GPU: weights that stay, a step of 40 activations a second, a sample a second.
struct Training {
    builder: RunBuilder,
    seq: u64,
    second: u64,
}

impl Training {
    fn new() -> Self {
        let source = Source { kind: "daemon".into(), origin: "bench".into(), preset: None };
        let mut training = Training { builder: RunBuilder::new(source), seq: 0, second: 1 };
        let device = Body::Device {
            uuid_high: 1,
            uuid_low: 2,
            total_bytes: Reading::of(80 << 30),
            ordinal: 0,
            id: DeviceIdKind::Gpu,
            name: "bench",
        };
        training.say(Origin::Host, 0, 0, device);
        training.say(Origin::Process(KEY), 0, 0, device);
        for tag in 1..=TAGS {
            let path = format!("model/layers.{}/self_attn.{}", tag / 10, tag % 10);
            training.say(Origin::Process(KEY), 0, tag, Body::Tag { path: &path });
        }
        for tag in 1..=TAGS {
            training.alloc(tag << 32, 4 << 20, tag, Role::Parameter);
        }
        training
    }

    fn say(&mut self, origin: Origin, at_ns: u64, tag: u64, body: Body<'_>) {
        let ordered = matches!(
            body,
            Body::AllocEnd { .. } | Body::Step { .. } | Body::FreeBegin { .. } | Body::FreeEnd { .. }
        );
        self.seq += u64::from(ordered);
        let stamp = Stamp {
            seq: if ordered { self.seq } else { 0 },
            time_ns: self.second * SECOND_NS + at_ns,
            tag: tag as u32,
            device: 0,
            ..Stamp::default()
        };
        let thread = if matches!(body, Body::ProcessSample { .. }) { KEY.pid } else { 0 };
        self.builder.observe(origin, &Record { stamp: Stamp { thread, ..stamp }, body });
    }

    fn alloc(&mut self, address: u64, bytes: u64, tag: u64, role: Role) {
        let body = Body::AllocEnd { address, bytes, pool: 0, took_us: 0, memory: MemoryKind::Device };
        self.say(Origin::Process(KEY), 0, tag, body);
        let retag = Body::Retag { address, block_seq: self.seq, pool: 0, use_as: (role, Phase::Unknown) };
        self.say(Origin::Process(KEY), 0, tag, retag);
    }

    /// Runs one second.
    fn step(&mut self) {
        let ours = Origin::Process(KEY);
        self.second += 1;
        self.say(ours, 0, 0, Body::Step { number: self.second });
        let address = |slot: u64| (TAGS + 1 + slot) << 32;
        for slot in 0..40 {
            let tag = (self.second * 7 + slot * 13) % TAGS + 1;
            // Batches differ in size, as in real training.
            let bytes = (8 << 20) + (((self.second * 31 + slot * 17) % 97) << 16);
            self.alloc(address(slot), bytes, tag, Role::Activation);
        }
        for slot in 0..40 {
            self.say(ours, SECOND_NS / 2, 0, Body::FreeBegin { address: address(slot) });
            self.say(ours, SECOND_NS / 2, 0, Body::FreeEnd { begin_seq: self.seq, result: 0 });
        }
        let at = SECOND_NS * 3 / 4;
        self.say(ours, at, 0, Body::Watermark { last_seq: self.seq, in_flight_since_ns: 0 });
        self.say(Origin::Host, at, 0, Body::SampleBegin { number: self.second });
        let used_bytes = Reading::of((TAGS * 4 + 600) << 20);
        let absence = Absence::Unknown;
        let listed = Body::ProcessSample { start_ticks: KEY.start_ticks, used_bytes, absence, lists: 1 };
        self.say(Origin::Host, at, 0, listed);
        self.say(Origin::Host, at, 0, Body::SampleEnd { number: self.second, result: 0 });
    }

    fn run(&mut self) -> Run {
        self.builder.runs(true).remove(0)
    }
}

/// Returns the bytes that this process has passed to write calls.
fn written() -> u64 {
    let io = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let line = io.lines().find_map(|line| line.strip_prefix("wchar: "));
    line.and_then(|bytes| bytes.parse().ok()).unwrap_or(0)
}

fn hour(folder: &Path) {
    let path = folder.join("hour.sqlite");
    let mut store = Store::open(&path).expect("a store");
    let mut training = Training::new();
    let id = store.begin(&training.run(), "bench").expect("begun");
    let (before, mut most, mut spent) = (written(), 0, Duration::ZERO);
    for _ in 0..HOUR_S / CHECKPOINT_S {
        (0..CHECKPOINT_S).for_each(|_| training.step());
        let run = training.run();
        let (bytes, started) = (written(), Instant::now());
        store.checkpoint(id, &run).expect("written");
        spent += started.elapsed();
        most = most.max(written() - bytes);
    }
    let run = training.run();
    store.close(id, &run).expect("closed");
    let bytes = written() - before;
    assert_eq!(run.coverage.lost + run.coverage.odd, 0);
    let loaded = store.load(id).expect("a run");
    assert_eq!(
        (loaded.cells, loaded.devices),
        (run.cells, run.devices),
        "the stored run is loaded unchanged"
    );
    let file = store.room().expect("a size").used_bytes();
    let checkpoints = HOUR_S / CHECKPOINT_S;
    println!(
        "an hour of a run with {TAGS} tags, a step of 40 allocations a second, a checkpoint every {CHECKPOINT_S} s"
    );
    println!("  bytes in the store for the hour      {file:>12}");
    println!(
        "  bytes written for it, log included   {bytes:>12}   {} a checkpoint, {most} at most; target 2,000,000",
        bytes / checkpoints
    );
    println!(
        "  time of a checkpoint, mean           {:>12.2} ms\n",
        spent.as_secs_f64() * 1e3 / checkpoints as f64
    );
}

fn rates(folder: &Path) {
    let mut training = Training::new();
    (0..HOUR_S).for_each(|_| training.step());
    let mut store = Store::open(folder.join("rates.sqlite")).expect("a store");
    let id = store.begin(&training.run(), "bench").expect("begun");
    let mut same = Contestant::new("checkpoint, nothing changed");
    let mut later = Contestant::new("checkpoint, 5 s later");
    let mut new = Contestant::new("a new run");
    let mut load = Contestant::new("load");
    let mut floor = Contestant::new("as JSON to a file");
    let checked = |result: Result<(), StoreError>| result.expect("written");
    for round in 0..=ROUNDS {
        (0..CHECKPOINT_S).for_each(|_| training.step());
        let run = training.run();
        later.round(1, || checked(store.checkpoint(id, &run)));
        same.round(1, || checked(store.checkpoint(id, &run)));
        new.round(1, || assert!(store.insert(&run, &round.to_string()).expect("written").1));
        load.round(1, || assert_eq!(store.load(id).expect("a run").cells.len(), run.cells.len()));
        floor.round(1, || {
            let text = serde_json::to_vec(&run).expect("JSON");
            std::fs::write(folder.join("run.json"), text).expect("written");
        });
    }
    let mut contestants = [later, same, new, load, floor];
    contestants.iter_mut().for_each(Contestant::forget_warm_up);
    print_table("the run store, one run", Per::Round, &contestants.iter().collect::<Vec<_>>());
    println!();
}
