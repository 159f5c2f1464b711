//! A node whose sources send records with fixed times. The numbers of GPUs, processes and tags can be chosen.

use gpumem_ledger::{Origin, ProcessKey};
use gpumem_wire::{Absence, Body, DeviceIdKind, DriverEventKind, MemoryKind, Reading, Record, Stamp};
use gpumemd::aggregator::{Aggregator, AggregatorSettings, SnapshotReader};
use gpumemd::nvml_status::{DeviceStatus, NvmlStatus};
use gpumemd::run_writer::{RunWriter, Thread};
use gpumemd::source::Batch;
use gpumemd::stats::Stats;
use gpumemd::view::Health;
use gpumemd::view::{Sources, StartupInfo, ViewContext, ViewSettings};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Sources with a fixed health.
pub struct Told(pub Health);

impl Sources for Told {
    fn health(&self) -> Health {
        self.0.clone()
    }
    fn release(&self, _: Duration) {}
    fn send_command(&self, _: ProcessKey, _: gpumemd::view::AgentCommand) -> gpumemd::view::CommandResult {
        Box::pin(async { Err("there are no agents".to_owned()) })
    }
}

/// An aggregator without a daemon, and the state for views.
pub struct Node {
    pub core: Aggregator,
    pub context: ViewContext,
    pub thread: Thread,
}

pub const MIB: u64 = 1 << 20;

pub fn batch(origin: Origin, records: &[(Stamp, Body<'_>)]) -> Batch {
    let mut frames = Vec::new();
    records.iter().for_each(|&(stamp, body)| Record { stamp, body }.append_frame(&mut frames));
    Batch { origin, frames, slot: None }
}

pub fn key(device: usize, process: usize) -> ProcessKey {
    ProcessKey { pid: (1000 * (device + 1) + process) as u32, start_ticks: 7 }
}

fn device(index: usize) -> Body<'static> {
    Body::Device {
        uuid_high: 1,
        uuid_low: index as u64,
        total_bytes: Reading::of(81_920 * MIB),
        ordinal: index as u16,
        id: DeviceIdKind::Gpu,
        name: "H100 80GB",
    }
}

impl Node {
    pub fn new(store: PathBuf, devices: usize, max_series: usize) -> Self {
        let stats = Arc::new(Stats::new().expect("valid names"));
        let (run_writer, thread) =
            RunWriter::start(store, Default::default(), Arc::clone(&stats)).expect("a thread");
        let pace =
            AggregatorSettings { checkpoint: Duration::from_secs(3600), ..AggregatorSettings::default() };
        let (core, reader): (Aggregator, SnapshotReader) =
            Aggregator::new(Arc::clone(&stats), run_writer.clone(), pace);
        let known = |index: usize| {
            let name = gpumem_ledger::DeviceName::from_record(1, index as u64, 0, DeviceIdKind::Gpu);
            DeviceStatus::new(name, index as u8, index as u16)
        };
        let known = (0..devices).map(known).collect();
        let reason = "nvml: told".into();
        let nvml = NvmlStatus { up: true, reason, devices: known, ..NvmlStatus::default() };
        let health = Health { nvml, ..Health::default() };
        let shown = ViewSettings { max_series, ..ViewSettings::default() };
        let (queries, _) = tokio::sync::mpsc::channel(1);
        let sources = Box::new(Told(health));
        let context = ViewContext {
            reader,
            stats,
            run_writer,
            queries,
            sources,
            shown: shown.into(),
            is_reload_refused: false.into(),
            fixed: StartupInfo::default(),
            shares: Default::default(),
            rendered: Default::default(),
        };
        let mut node = Node { core, context, thread };
        for index in 0..devices {
            let stamp = Stamp { device: index as u8, time_ns: 1, ..Stamp::default() };
            node.core.take(batch(Origin::Host, &[(stamp, device(index))]));
        }
        node
    }

    /// Adds a process with an agent, with `tags` allocations of 1 MiB, 2 MiB, ..., and 8 MiB of pinned memory.
    pub fn covered(&mut self, on: usize, process: usize, tags: u64) {
        let key = key(on, process);
        let at = Stamp { device: 0, time_ns: 2, ..Stamp::default() };
        let facts = "comm=python\nuser=alice\ncommand=python train.py\ncgroup=/user.slice";
        let facts = Body::ProcessFacts { start_ticks: 7, uid: Reading::of(1000), parent_pid: 1, facts };
        self.core.take(batch(Origin::Host, &[(Stamp { thread: key.pid, ..at }, facts)]));
        let claims = "rank=3\njob=8812";
        let hello = Body::Hello { start_ticks: 7, versions: 1 << 16, capabilities: 0, instance: 1, claims };
        let mut records = vec![(at, hello), (at, device(on))];
        let names: Vec<_> = (1..=tags).map(|tag| format!("model/layers.{tag}/weight")).collect();
        for (tag, path) in (1..).zip(&names) {
            records.push((Stamp { tag, ..at }, Body::Tag { path }));
        }
        for seq in 1..=tags {
            let bytes = seq * MIB;
            let memory = MemoryKind::Device;
            let body = Body::AllocEnd { address: seq << 32, bytes, pool: 0, took_us: 1, memory };
            records.push((Stamp { seq, tag: seq as u32, ..at }, body));
        }
        let memory = MemoryKind::Pinned;
        let pinned = Body::AllocEnd { address: 1 << 60, bytes: 8 * MIB, pool: 0, took_us: 1, memory };
        records.push((Stamp { seq: tags + 1, ..at }, pinned));
        let context = Stamp { context: 1, ..at };
        records.push((Stamp { seq: tags + 2, ..context }, Body::ContextCreate { handle: 1 }));
        let event = DriverEventKind::ModuleLoaded;
        let module = Body::DriverEvent { bytes: 5 * MIB, value: 1, event };
        records.push((Stamp { seq: tags + 3, ..context }, module));
        let last_seq = tags + 3;
        let done = Stamp { time_ns: 1_000_000_000, ..at };
        records.push((done, Body::Watermark { last_seq, in_flight_since_ns: 0 }));
        self.core.take(batch(Origin::Process(key), &records));
    }

    /// Adds a reading of a device: its processes with their used bytes, or the reason why those are unknown.
    pub fn sample(&mut self, on: usize, t0: u64, listed: &[(ProcessKey, Result<u64, Absence>)]) {
        let at = Stamp { device: on as u8, time_ns: t0, ..Stamp::default() };
        let sum: u64 = listed.iter().filter_map(|(_, used)| used.ok()).sum();
        let used_bytes = sum + 64 * MIB;
        let free_bytes = 81_000 * MIB - used_bytes;
        let reserved_bytes = Reading::of(920 * MIB);
        let memory = Body::DeviceSample { used_bytes, free_bytes, reserved_bytes, unified: false };
        let mut records = vec![(at, Body::SampleBegin { number: t0 }), (at, memory)];
        for &(key, used) in listed {
            let body = Body::ProcessSample {
                start_ticks: key.start_ticks,
                used_bytes: Reading(used.ok()),
                absence: used.err().unwrap_or_default(),
                lists: 1,
            };
            records.push((Stamp { thread: key.pid, ..at }, body));
        }
        let end = Stamp { time_ns: t0 + 1_000_000, ..at };
        records.extend([(end, memory), (end, Body::SampleEnd { number: t0, result: 0 })]);
        self.core.take(batch(Origin::Host, &records));
    }
}
