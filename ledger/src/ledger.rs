//! The ledger's entry: every record of every source goes through [`Ledger::observe`].

mod oom_holders;
mod output;
mod readings;
mod repeats;

use crate::Map;
use crate::base::device::{DeviceView, Faults, LastMinute, OpenReading};
use crate::base::identity::{AccountRef, DeviceName, Origin, ProcessKey};
use crate::base::quota::{Limits, Quotas, RefusedRecords};
use crate::book::{WINDOW_NS, Window};
use crate::history::ranges::{MAX_SPANS, MAX_SPANS_OF_FILE};
use crate::history::trend::TrendView;
use crate::oom::device::Listing;
use crate::process::Process;
use crate::process::account::Account;
use crate::process::coverage::{EarlierRecords, parse_lines};
use crate::process::view::ProcessView;
use crate::samples::pending::ClosedSample;
use gpumem_model::blocks::Blocks;
use gpumem_model::iterations::Iterations;
use gpumem_model::parameters::Parameters;
use gpumem_model::program_data;
use gpumem_model::run::{DeviceReading, Program};
use gpumem_model::timeline::Timeline;
use gpumem_wire::{Body, ClockKind, Reading, Record, Role, Stamp};
use repeats::DoneReadings;
pub use repeats::RepeatedSample;
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hint::black_box;
use std::sync::Arc;

/// Number of known devices from which on processes may not add others. No machine has so many, and devices are never removed.
const MAX_CLAIMED_DEVICES: usize = 512;
/// Maximum number of devices that the processes of one user may add; as many as one process may have. Processes without a user, as
/// in imports, have no such limit.
const CLAIMED_BY_USER: usize = 64;
/// Number of records that a caller passes to [`Ledger::preload`] before it passes each of them to [`Ledger::observe`].
pub const PRELOADED: usize = 32;
/// Time after an NVML reading (ns) at which its samples are closed without the records of a silent agent.
pub const STALE_AFTER_NS: u64 = 500_000_000;

/// Books the records of all sources, and returns snapshots of the sums.
#[derive(Debug, Default)]
pub struct Ledger {
    pub(crate) devices: Vec<DeviceView>,
    by_name: Map<DeviceName, usize>,
    /// Number of devices that the processes of each user have added.
    claimed: Map<u64, usize>,
    open: Map<usize, OpenReading>,
    /// The last reading of each device during which its memory did not change, with the listed processes.
    pub(crate) listings: Map<usize, Arc<Listing>>,
    pub(crate) processes: Vec<Process>,
    /// For each process, whether it lags: it has missed the last readings of its devices, which would not have changed its bytes.
    lags: Vec<bool>,
    pub(crate) by_key: Map<ProcessKey, usize>,
    /// For each device, the indices of the processes with an account on it; an NVML reading of the device concerns only these.
    pub(crate) members: Vec<Vec<usize>>,
    /// Index of a device, by the number (slot) that the daemon's NVML readings use for it.
    host_slots: Map<u8, usize>,
    pub(crate) now_ns: u64,
    pub(crate) clock: ClockKind,
    /// Wall-clock time minus record time (ns).
    pub(crate) wall_offset_ns: Option<i128>,
    /// Completed readings, by index of the device.
    readings: Vec<DoneReadings>,
    /// Whether a process may need the next reading for its newest OOM entry.
    pub(crate) awaits_reading: bool,
    samples: Vec<(ProcessKey, usize, Arc<ClosedSample>)>,
    repeated: Vec<RepeatedSample>,
    windows: Vec<(ProcessKey, AccountRef, Window)>,
    /// Processes with pending samples, by the time (ns) at which the earliest reading of these samples ended.
    waiting: BinaryHeap<Reverse<(u64, usize)>>,
    /// Process of the last record, so that most look-ups need no hashing.
    last: Option<(ProcessKey, usize)>,
    /// Limits of the ledger's memory for processes, and the present use.
    pub(crate) quotas: Quotas,
    /// Whether a process may have changed since the last snapshot.
    pub(crate) has_changed: Cell<bool>,
    /// Views of all processes in the last snapshot.
    pub(crate) last_views: RefCell<Arc<[Arc<ProcessView>]>>,
    /// Whether processes keep their last blocks.
    keeps_blocks: bool,
    /// Whether later processes keep the roles of their freed blocks.
    keeps_roles: bool,
}

impl Ledger {
    pub fn new() -> Self {
        Ledger::default()
    }

    /// Books one record. Records that contradict the known state are counted in the process's `odd`; there are no errors.
    #[inline]
    pub fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        match origin {
            Origin::Host => self.observe_host(record),
            Origin::Process(_) if matches!(record.body, Body::ClockAnchor { .. }) => self.set_clock(record),
            Origin::Process(key) => {
                let index = self.process(key);
                let process = &mut self.processes[index];
                process.forget_view();
                if process.memory_use.count_record() {
                    self.estimate_memory(index);
                }
                if let Body::Device { .. } = record.body {
                    return self.name_slot(index, record);
                }
                let process = &mut self.processes[index];
                process.apply(record);
                let wants_holders = process.ooms.wants_holders;
                if !process.samples.closed.is_empty() || !process.holdings.windows.is_empty() {
                    process.note_ended_windows();
                    self.take_closed(index);
                }
                if wants_holders {
                    self.record_holders(index);
                }
            }
        }
    }

    /// Reads the rows that the next records of an origin concern. These reads wait for the memory at the same time; `observe`
    /// waits for one row after another. Only the first [`PRELOADED`] records count.
    #[inline]
    pub fn preload<'r>(&self, origin: Origin, records: impl Iterator<Item = &'r Record<'r>>) {
        if let Origin::Process(key) = origin
            && let Some(&index) = self.by_key.get(&key)
        {
            let holdings = &self.processes[index].holdings;
            // All places are computed before the first is read: a processor looks ahead a few hundred instructions only.
            let mut homes = [None; PRELOADED];
            for (home, record) in homes.iter_mut().zip(records) {
                *home = holdings.home_of(&record.body);
            }
            black_box(homes.into_iter().flatten().fold(0, |sum, home| sum ^ home.read()));
        }
    }

    #[inline]
    fn process(&mut self, key: ProcessKey) -> usize {
        self.has_changed.set(true);
        if let Some((last, index)) = self.last
            && last == key
        {
            return index;
        }
        let index = match self.by_key.get(&key) {
            Some(&index) => {
                self.wake(index);
                index
            }
            None => {
                let window_ns = if self.clock == ClockKind::Ordinal { 1 } else { WINDOW_NS };
                let is_of_file = self.quotas.limits == Limits::NONE;
                let max_spans = if is_of_file { MAX_SPANS_OF_FILE } else { MAX_SPANS };
                let mut process = Process::new(key, window_ns, max_spans);
                process.holdings.block_ring = self.keeps_blocks.then(Box::default);
                process.holdings.freed_roles = self.keeps_roles.then(Vec::new);
                self.processes.push(process);
                self.lags.push(false);
                self.by_key.insert(key, self.processes.len() - 1);
                self.processes.len() - 1
            }
        };
        self.last = Some((key, index));
        index
    }

    /// Returns the index of the process that a record of the host changes.
    fn process_of(&mut self, stamp: &Stamp, start_ticks: u64) -> usize {
        let index = self.process(ProcessKey { pid: stamp.thread, start_ticks });
        self.processes[index].forget_view();
        index
    }

    /// Handles a `Device` record of a process.
    fn name_slot(&mut self, index: usize, record: &Record<'_>) {
        let Some(device) = self.claimed_device(index, record) else { return };
        let process = &mut self.processes[index];
        let was_member = process.book_on(device).is_some();
        // Number of multiprocessors (upper 16 bits), and number of threads that each can run.
        let shape = u64::from(record.stamp.context);
        process.name_slot(record.stamp.device, device, (shape >> 16) * (shape & 0xffff));
        if !was_member && process.book_on(device).is_some() {
            self.members[device].push(index);
        }
    }

    /// Returns the index of the device in a process's `Device` record; `None` if the process may not add that device.
    fn claimed_device(&mut self, index: usize, record: &Record<'_>) -> Option<usize> {
        let Body::Device { uuid_high, uuid_low, ordinal, id, .. } = record.body else { return None };
        let is_new = !self.by_name.contains_key(&DeviceName::from_record(uuid_high, uuid_low, ordinal, id));
        let is_full = self.processes[index].coverage.full.is_some();
        let user = self.processes[index].facts.uid;
        let by_user = user.and_then(|user| self.claimed.get(&user)).copied().unwrap_or(0);
        let has_room = self.devices.len() < MAX_CLAIMED_DEVICES && by_user < CLAIMED_BY_USER;
        if is_full || is_new && !has_room {
            self.processes[index].holdings.anomalies.devices_beyond += 1;
            return None;
        }
        if let Some(user) = user.filter(|_| is_new) {
            self.claimed.insert(user, by_user + 1);
        }
        Some(self.device(record))
    }

    /// Returns the index of the device in a `Device` record, adding it if it is new.
    fn device(&mut self, record: &Record<'_>) -> usize {
        let Body::Device { uuid_high, uuid_low, total_bytes, ordinal, id, name } = record.body else {
            return 0;
        };
        let key = DeviceName::from_record(uuid_high, uuid_low, ordinal, id);
        let index = *self.by_name.entry(key).or_insert_with(|| {
            self.devices.push(DeviceView {
                name: key,
                ordinal,
                model: name.to_owned(),
                total_bytes: None,
                latest: None,
                recent: LastMinute::default(),
                agreed: None,
                repeated: None,
                faults: Faults::default(),
            });
            self.members.push(Vec::new());
            self.readings.push(DoneReadings::default());
            self.devices.len() - 1
        });
        let Reading(total) = total_bytes;
        let device = &mut self.devices[index];
        device.total_bytes = device.total_bytes.or(total);
        index
    }

    fn set_clock(&mut self, record: &Record<'_>) {
        if let Body::ClockAnchor { realtime_ns, clock, .. } = record.body {
            self.clock = clock;
            self.wall_offset_ns = (clock != ClockKind::Ordinal)
                .then_some(i128::from(realtime_ns) - i128::from(record.stamp.time_ns));
        }
    }

    fn observe_host(&mut self, record: &Record<'_>) {
        let stamp = &record.stamp;
        self.now_ns = self.now_ns.max(stamp.time_ns);
        match record.body {
            Body::Device { .. } => {
                let index = self.device(record);
                let device = &mut self.devices[index];
                // NVML's values replace those of a process, whose device size lacks the driver's share.
                if let Body::Device { ordinal, total_bytes, name, .. } = record.body {
                    device.ordinal = ordinal;
                    device.total_bytes = total_bytes.0.or(device.total_bytes);
                    name.clone_into(&mut device.model);
                }
                self.host_slots.insert(stamp.device, index);
            }
            Body::ClockAnchor { .. } => self.set_clock(record),
            Body::SampleBegin { number } => self.begin_sample(stamp, number),
            Body::DeviceSample { used_bytes, free_bytes, reserved_bytes, unified } => {
                let (time_ns, system_reserved_bytes) = (stamp.time_ns, reserved_bytes.0);
                let sampled =
                    DeviceReading { time_ns, used_bytes, free_bytes, system_reserved_bytes, unified };
                self.sample_device(stamp.device, sampled);
            }
            Body::ProcessSample { start_ticks, used_bytes, absence, .. } => {
                let key = ProcessKey { pid: stamp.thread, start_ticks };
                self.sample_process(stamp, key, used_bytes.0.ok_or(absence));
            }
            Body::SameProcesses {} => self.same_processes(stamp),
            Body::SampleEnd { number, result } => self.end_sample(stamp, number, result),
            Body::AccountedPeak { start_ticks, .. } | Body::ProtectedSample { start_ticks, .. } => {
                let index = self.process_of(stamp, start_ticks);
                let device = self.host_slots.get(&stamp.device);
                let process = &mut self.processes[index];
                if let Some(book) = device.and_then(|&device| process.book_on(device)) {
                    process.accounts[usize::from(book)].note_driver_reading(&record.body);
                }
            }
            Body::EarlierLife { start_ticks, events, lost, instance } => {
                let index = self.process_of(stamp, start_ticks);
                let program = (stamp.seq != 0).then_some(Program { instance, heard: stamp.seq });
                self.processes[index].coverage.earlier = Some(EarlierRecords { events, lost, program });
            }
            Body::DeviceFault { xid } => {
                if let Some(&device) = self.host_slots.get(&stamp.device) {
                    self.devices[device].faults.add(stamp.time_ns, xid);
                }
            }
            Body::ProcessFacts { start_ticks, uid, parent_pid, facts } => {
                let index = self.process_of(stamp, start_ticks);
                let seen = Arc::make_mut(&mut self.processes[index].facts);
                seen.uid = uid.0.or(seen.uid);
                seen.parent_pid = Some(parent_pid).filter(|&pid| pid != 0);
                seen.seen.extend(parse_lines(facts));
            }
            Body::ProcessMark { start_ticks, name } => {
                let index = self.process_of(stamp, start_ticks);
                self.processes[index].program.marks.add(stamp.time_ns, Some(name), true);
            }
            Body::ProcessGone { start_ticks, status } => {
                let index = self.process_of(stamp, start_ticks);
                let is_news = self.processes[index].ended.is_none();
                self.processes[index].end(stamp.time_ns, status.0);
                self.take_closed(index);
                if is_news {
                    self.record_suspected_oom(index, stamp.time_ns, status.0);
                }
            }
            _ => {}
        }
        if let Some(deadline) = self.now_ns.checked_sub(STALE_AFTER_NS)
            && self.clock != ClockKind::Ordinal
        {
            self.close_stale(deadline);
        }
    }

    /// Removes a process and all its data, because its run has ended and is stored. A later record of it starts a new entry.
    pub fn remove_process(&mut self, key: ProcessKey) {
        let Some(index) = self.by_key.remove(&key) else { return };
        self.has_changed.set(true);
        self.lags.swap_remove(index);
        let mut gone = self.processes.swap_remove(index);
        self.quotas.release(&mut gone.memory_use, gone.coverage.full);
        let moved = self.processes.len();
        if let Some(process) = self.processes.get(index) {
            self.by_key.insert(process.key, index);
        }
        self.last = None;
        for members in &mut self.members {
            members.retain(|&at| at != index);
            members.iter_mut().filter(|at| **at == moved).for_each(|at| *at = index);
        }
        self.waiting = std::mem::take(&mut self.waiting)
            .into_iter()
            .filter(|Reverse((_, at))| *at != index)
            .map(|Reverse((since_ns, at))| Reverse((since_ns, if at == moved { index } else { at })))
            .collect();
        self.samples.retain(|(process, ..)| *process != key);
        self.repeated.retain(|repeated| repeated.key != key);
        self.open.values_mut().for_each(|reading| reading.has_removed = true);
        self.readings.iter_mut().for_each(|readings| readings.has_removed = true);
        self.windows.retain(|(process, ..)| *process != key);
    }

    /// Begins a new part of a process's run, because a long run is stored in parts. Peaks and timelines restart with the amounts
    /// held now; marks, complete iterations and out-of-memory entries whose outcome is known are cleared. Everything else
    /// continues.
    pub fn begin_part(&mut self, key: ProcessKey, now_ns: u64) {
        if let Some(&index) = self.by_key.get(&key) {
            self.has_changed.set(true);
            self.wake(index);
            let process = &mut self.processes[index];
            process.forget_view();
            process.holdings.begin_part(now_ns);
            process.accounts.iter_mut().for_each(Account::restart_peaks);
            process.ooms.restart(now_ns);
            process.program.restart(now_ns);
        }
    }

    /// Returns the devices; their order is that of a snapshot.
    pub fn devices(&self) -> &[DeviceView] {
        &self.devices
    }

    /// Returns all processes in any order: key, and whether the process has ended.
    pub fn processes(&self) -> impl Iterator<Item = (ProcessKey, bool)> {
        self.processes.iter().map(|process| (process.key, process.ended.is_some()))
    }

    fn find(&self, key: ProcessKey) -> Option<&Process> {
        self.processes.get(*self.by_key.get(&key)?)
    }

    pub fn is_on_a_device(&self, key: ProcessKey) -> bool {
        self.find(key).is_some_and(|process| !process.accounts.is_empty())
    }

    /// Returns the counters and ranges of a program.
    pub fn own(&self, key: ProcessKey) -> program_data::ProgramData {
        let data = |process: &Process| {
            let name = |tag| process.holdings.cells.tags.get(&tag).cloned();
            process.program.view(process.stream.applied_ns, name)
        };
        self.find(key).map(data).unwrap_or_default()
    }

    /// Returns the points from which growth is judged; `account` is an index in [`ProcessView::accounts`](crate::ProcessView).
    pub fn trend(&self, key: ProcessKey, account: usize) -> TrendView {
        self.find(key).map(|process| process.trend_view(account)).unwrap_or_default()
    }

    /// Returns the timeline of an account, by its index in [`ProcessView::accounts`](crate::ProcessView).
    pub fn timeline(&self, key: ProcessKey, account: usize) -> Timeline {
        self.find(key).map(|process| process.holdings.timeline(account)).unwrap_or_default()
    }

    /// Returns the iterations of an account, by its index in [`ProcessView::accounts`](crate::ProcessView).
    pub fn iterations(&self, key: ProcessKey, account: usize) -> Iterations {
        let iterations = |process: &Process| process.holdings.iterations(account, process.stream.applied_ns);
        self.find(key).map(iterations).unwrap_or_default()
    }

    /// Lets each later process keep its last blocks, in at most 4 MiB.
    pub fn keep_blocks(&mut self) {
        self.keeps_blocks = true;
    }

    /// Lets each later process keep the roles of its freed blocks, until [`take_roles`](Self::take_roles) takes them.
    pub fn keep_roles(&mut self) {
        self.keeps_roles = true;
    }

    /// Returns the roles of the blocks that a process has freed since the last call; with `live`, also those of its live blocks. A
    /// block is named by the number of the record that made it, and may be returned twice.
    pub fn take_roles(&mut self, key: ProcessKey, live: bool) -> Vec<(u64, Role)> {
        let index = self.by_key.get(&key).copied();
        index.map(|index| self.processes[index].holdings.take_roles(live)).unwrap_or_default()
    }

    /// Returns the last blocks of an account, by its index in [`ProcessView::accounts`](crate::ProcessView).
    pub fn blocks(&self, key: ProcessKey, account: usize) -> Blocks {
        let book = u8::try_from(account).unwrap_or(u8::MAX);
        self.find(key).map(|process| process.holdings.blocks(book)).unwrap_or_default()
    }

    /// Returns the parameters and gradients of an account, by its index in [`ProcessView::accounts`](crate::ProcessView).
    pub fn parameters(&self, key: ProcessKey, account: usize) -> Parameters {
        self.find(key).map(|process| process.holdings.parameters(account)).unwrap_or_default()
    }

    /// Sets the limits of the ledger's memory for processes; they hold from now on.
    pub fn set_limits(&mut self, limits: Limits) {
        self.quotas.limits = limits;
    }

    /// Returns the estimated bytes of all processes' data, and the number of records that limits have refused so far.
    pub fn memory_use(&self) -> (usize, RefusedRecords) {
        let mut refused = self.quotas.refused;
        self.processes
            .iter()
            .for_each(|process| refused.add(process.coverage.full, process.memory_use.refused));
        (self.quotas.bytes, refused)
    }

    /// Estimates the memory of a process, and checks its limits.
    #[cold]
    fn estimate_memory(&mut self, index: usize) {
        let process = &mut self.processes[index];
        let (rows, bytes) = (process.holdings.rows(), process.bytes());
        self.quotas.release(&mut process.memory_use, process.coverage.full);
        let (user, load) = (process.facts.uid, &mut process.memory_use);
        self.quotas.charge(load, user, bytes);
        process.coverage.full = self.quotas.full(user, rows);
        // The time of an estimate grows with the number of pools.
        load.schedule(process.holdings.pools.len() / 32);
    }
}
