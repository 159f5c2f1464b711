//! Receives the source's records, and keeps what tests check.

use super::machine::Machine;
use gpumem_ledger::Origin;
use gpumem_wire::frame::records;
use gpumem_wire::{Absence, Body, NONE_DEVICE, Record};
use gpumemd::config::NvmlSettings;
use gpumemd::source::Batch;
use gpumemd::source::nvml::Nvml;
use gpumemd::source::process::Processes;
use gpumemd::stats::Stats;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Pid, bytes or the reason for their absence, lists.
pub type Row = (u32, Result<u64, Absence>, u8);

#[derive(Debug, Default)]
pub struct Seen {
    rows: HashMap<u8, Vec<Row>>,
    readings: HashMap<u8, usize>,
    memory_reads: HashMap<u8, usize>,
    used: HashMap<u8, u64>,
    /// Open readings: number and rows so far.
    pub open: HashMap<u8, (u64, Vec<Row>)>,
    /// `start_ticks` of each pid.
    pub started: HashMap<u32, u64>,
    pub facts: HashMap<u32, String>,
    pub facts_came_late: bool,
    pub source: Option<(bool, String)>,
    pub problems: HashMap<u8, Option<String>>,
    pub devices: HashMap<u8, String>,
    /// When memory was last read, and the longest gap between two reads.
    memory_times: HashMap<u8, (u64, u64)>,
    pub failed_readings: usize,
    pub reserved: Option<u64>,
    pub number_fell: bool,
    /// Peaks reported by accounting mode, in order, by device and pid.
    pub accounted: HashMap<(u8, u32), Vec<u64>>,
    pub faults: Vec<(u8, u64)>,
    /// Number of readings that named only the processes with other bytes than before.
    pub repeats: usize,
    /// When each reading of a device began.
    pub begun: HashMap<u8, Vec<u64>>,
    last_number: u64,
}

impl Seen {
    /// Returns the rows of the last reading that ended.
    pub fn rows(&self, device: u8) -> Vec<Row> {
        self.rows.get(&device).cloned().unwrap_or_default()
    }
    pub fn readings(&self, device: u8) -> usize {
        self.readings.get(&device).copied().unwrap_or(0)
    }
    pub fn memory_reads(&self, device: u8) -> usize {
        self.memory_reads.get(&device).copied().unwrap_or(0)
    }
    /// Returns the longest gap between two memory reads since the last call.
    pub fn take_longest_gap(&mut self, device: u8) -> Duration {
        let (_, longest) = self.memory_times.entry(device).or_default();
        Duration::from_nanos(std::mem::take(longest))
    }
    pub fn used(&self, device: u8) -> u64 {
        self.used.get(&device).copied().unwrap_or(0)
    }

    fn take(&mut self, record: &Record<'_>) {
        let (device, pid) = (record.stamp.device, record.stamp.thread);
        match record.body {
            Body::Device { name, .. } => {
                self.devices.insert(device, name.to_owned());
            }
            Body::SampleBegin { number } => {
                assert!(self.devices.contains_key(&device), "devices are named first");
                self.number_fell |= number <= self.last_number;
                self.last_number = number;
                self.begun.entry(device).or_default().push(record.stamp.time_ns);
                assert!(self.open.insert(device, (number, Vec::new())).is_none(), "one reading at a time");
            }
            Body::DeviceSample { used_bytes, reserved_bytes, .. } => {
                *self.memory_reads.entry(device).or_default() += 1;
                self.used.insert(device, used_bytes);
                let (last, longest) = self.memory_times.entry(device).or_insert((record.stamp.time_ns, 0));
                *longest = (*longest).max(record.stamp.time_ns.saturating_sub(*last));
                *last = record.stamp.time_ns;
                self.reserved = reserved_bytes.0;
            }
            Body::ProcessSample { start_ticks, used_bytes, absence, lists } => {
                self.facts_came_late |= start_ticks != 0 && !self.facts.contains_key(&pid);
                self.started.insert(pid, start_ticks);
                let rows = &mut self.open.get_mut(&device).expect("in a reading").1;
                rows.push((pid, used_bytes.0.ok_or(absence), lists));
            }
            Body::SameProcesses {} => {
                let rows = &mut self.open.get_mut(&device).expect("in a reading").1;
                let last = self.rows[&device].iter();
                let others: Vec<Row> =
                    last.filter(|row| rows.iter().all(|named| named.0 != row.0)).copied().collect();
                rows.extend(others);
                self.repeats += 1;
            }
            Body::SampleEnd { number, result } => {
                let (begun, mut rows) = self.open.remove(&device).expect("it had begun");
                assert_eq!(begun, number);
                rows.sort_unstable_by_key(|row| row.0);
                self.rows.insert(device, rows);
                self.failed_readings += usize::from(result != 0);
                *self.readings.entry(device).or_default() += usize::from(result == 0);
            }
            Body::ProcessFacts { facts, .. } => {
                self.facts.insert(pid, facts.to_owned());
            }
            Body::Source { up, reason } if device == NONE_DEVICE => {
                self.source = Some((up, reason.to_owned()));
            }
            Body::Source { up, reason } => {
                self.problems.insert(device, (!up).then(|| reason.to_owned()));
            }
            Body::AccountedPeak { start_ticks, peak_bytes } => {
                let peaks = self.accounted.entry((device, pid)).or_default();
                assert!(start_ticks == self.started[&pid], "of a process that was seen");
                peaks.push(peak_bytes);
            }
            Body::DeviceFault { xid } => self.faults.push((device, xid)),
            other => assert_eq!(other.kind(), 0, "not a record of this source: {other:?}"),
        }
    }
}

pub struct Watcher {
    pub nvml: Nvml,
    pub processes: Processes,
    pub seen: Seen,
    batches: mpsc::Receiver<Batch>,
}

impl Watcher {
    pub fn start(machine: &Machine, settings: NvmlSettings) -> Watcher {
        let processes = Processes::new();
        let (out, batches) = mpsc::channel(64);
        let program = settings.program.clone().or_else(|| Some(machine.program()));
        let stats = Arc::new(Stats::new().expect("valid names"));
        let nvml = Nvml::start(NvmlSettings { program, ..settings }, processes.clone(), out, stats);
        Watcher { nvml, processes, seen: Seen::default(), batches }
    }

    /// Receives batches until the condition holds.
    pub async fn until(&mut self, what: &str, mut is_so: impl FnMut(&Seen) -> bool) {
        let end = Instant::now() + Duration::from_secs(30);
        while !is_so(&self.seen) {
            let batch = tokio::time::timeout(Duration::from_secs(1), self.batches.recv()).await;
            if let Ok(batch) = batch {
                let batch = batch.expect("the source lives");
                assert_eq!(batch.origin, Origin::Host);
                for record in records(&batch.frames) {
                    self.seen.take(&record.expect("a frame").expect("a record"));
                }
            }
            assert!(Instant::now() < end, "{what}: {:?}, {:?}", self.nvml.status(), self.seen.source);
        }
    }

    /// Waits for five more readings of the device.
    pub async fn stays_fresh(&mut self, device: u8) {
        let wanted = self.seen.readings(device) + 5;
        self.until("it stays fresh", |seen| seen.readings(device) >= wanted).await;
    }
}
