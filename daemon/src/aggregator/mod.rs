//! The task that owns the ledger. It takes batches of records from one channel, applies them to the ledger and records them.
//! Views read a shared snapshot. The aggregator never blocks: the store and the recording have their own threads.

pub(crate) mod batch;
mod node_counters;
mod process_table;
mod published;
pub(crate) mod recorder;
mod writing;

use crate::clock;
use crate::os::heap_bytes_in_use;
use crate::run_writer::{EarlierCounts, RunWriter};
use crate::stats::{Count, Stats, Timing};
use batch::{Batch, DeferredBatches, FRAMES, LONG, begins_agent};
use gpumem_ledger::{Limits, Origin, PRELOADED, ProcessKey, RefusedRecords};
use gpumem_model::run::Source;
use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_runs::requests::KeepLimits;
use gpumem_wire::{Absence, Body, Record, Stamp, frame};
use node_counters::NodeCounters;
pub(crate) use node_counters::Totals;
use process_table::{Due, ProcessTable};
pub(crate) use published::Published;
pub use published::{ProcessFilter, Query, SnapshotReader};
use recorder::{Recorder, append_for_recording};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::watch;
use writing::{KeptRequests, Roll, worth_keeping};

/// Minimum interval between ticks (see `Aggregator::tick`). A batch causes a tick if this interval has passed, which costs little
/// beyond the wake-up. While no batches arrive, the next beat of [`clock::BEAT`] causes a tick if work waits for one, otherwise the
/// first beat after [`IDLE_TICK`].
const TICK: Duration = Duration::from_millis(75);
/// Interval between ticks while no batches arrive and no work waits. Views still mark old data as `stale`.
const IDLE_TICK: Duration = Duration::from_secs(1);
/// Interval between snapshots while no view reads them, or while the ledger does not change (ns).
const IDLE_PUBLISH_NS: u64 = 750_000_000;
/// Interval (ns) for counting the bytes on the heap.
const HEAP_NS: u64 = 10_000_000_000;
/// Period (ns) after a view's read in which each tick publishes a snapshot if the ledger has changed.
const WATCHED_NS: u64 = 10_000_000_000;
/// Interval (ns) for writing the runs of new processes for the first time. It is short, so that such a run is not lost if the
/// daemon is killed.
const FIRST_CHECKPOINT_NS: u64 = 500_000_000;
/// After their first write, changed runs of processes without an agent are written only at checkpoints whose number is a multiple
/// of this. Those of processes with an agent are written at every checkpoint.
const UNCOVERED_ROUNDS: u64 = 3;
/// Interval (ns) for comparing the wall clock with CLOCK_MONOTONIC. If their difference has changed by more than [`JUMP_NS`], the
/// wall time is recorded again (an anchor).
const ANCHOR_NS: u64 = 1_000_000_000;
const JUMP_NS: i128 = 500_000_000;
/// Maximum number of batches applied before the task yields to other tasks.
const BATCHES: usize = 32;
const LAST_DEFERRED: Duration = Duration::from_millis(200);

/// Default limits of the data that peers can cause the ledger to keep. Together with the daemon's other memory they stay below
/// `MemoryMax` of the systemd unit.
pub(crate) const LIMITS: Limits =
    Limits { rows_per_process: 4_000_000, bytes_per_user: 224 << 20, bytes: 320 << 20 };

/// Intervals for writing and rolling runs, and limits of the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AggregatorSettings {
    /// Interval for writing the runs of live processes.
    pub checkpoint: Duration,
    /// Limits of the data that peers can cause the ledger to keep.
    pub limits: Limits,
    /// Length of a run's part: a process that lives longer gets one run for each period. `None`: one run for its whole life.
    pub roll: Option<Duration>,
    /// Which requests to PyTorch's allocator are kept; `None`: none.
    pub requests: Option<KeepLimits>,
}

impl Default for AggregatorSettings {
    fn default() -> Self {
        AggregatorSettings { checkpoint: Duration::from_secs(5), limits: LIMITS, roll: None, requests: None }
    }
}

/// The task that owns the ledger (in `builder`) and books all records.
pub struct Aggregator {
    builder: RunBuilder,
    processes: ProcessTable,
    stats: Arc<Stats>,
    run_writer: RunWriter,
    recorder: Option<Recorder>,
    settings: AggregatorSettings,
    publisher: watch::Sender<Arc<Published>>,
    /// The views have clones of this reader. All clones share the times of reads and ticks.
    reader: SnapshotReader,
    published_ns: u64,
    /// Time (ns) at which the bytes on the heap were last counted.
    heap_ns: u64,
    /// Whether the ledger has changed since the last snapshot.
    changed: bool,
    /// `wall_offset_ns`: wall clock minus CLOCK_MONOTONIC (ns) when an anchor was last recorded. `anchored_ns`: time of the last
    /// comparison of both clocks; 0: the next tick records an anchor.
    wall_offset_ns: i128,
    anchored_ns: u64,
    /// Times (ns, CLOCK_MONOTONIC) at which changed runs (`checkpoint_ns`) and new runs (`first_ns`) were last queued for writing.
    checkpoint_ns: u64,
    first_ns: u64,
    /// Number of checkpoints so far. Runs of processes without an agent are written at every [`UNCOVERED_ROUNDS`]th one.
    round: u64,
    /// Times (ns, CLOCK_MONOTONIC) at which all changed runs were last queued (`complete_ns`), and the last heartbeat was sent
    /// (`heartbeat_ns`).
    complete_ns: u64,
    heartbeat_ns: u64,
    roll: Roll,
    requests: KeptRequests,
    /// Ended processes whose runs wait for room in the store's queue.
    closing: VecDeque<ProcessKey>,
    deferred: DeferredBatches,
    boot_id: String,
    counters: NodeCounters,
    /// Channel for numbers of records that an earlier daemon stored about processes that are new to this one.
    earlier_counts: (UnboundedSender<EarlierCounts>, UnboundedReceiver<EarlierCounts>),
    /// Numbers of records that the ledger had refused, because of its limits, at the last snapshot.
    refused: RefusedRecords,
}

impl Aggregator {
    /// Makes an aggregator with an empty ledger, and the reader of its snapshots.
    pub fn new(
        stats: Arc<Stats>,
        run_writer: RunWriter,
        settings: AggregatorSettings,
    ) -> (Self, SnapshotReader) {
        let now_ns = clock::now_ns();
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let source = Source { kind: "daemon".into(), origin: host, preset: None };
        let builder = RunBuilder::new(source);
        let snapshot = builder.ledger().snapshot();
        let first = Published {
            at_ns: now_ns,
            made: Instant::now(),
            snapshot,
            totals: Totals::default(),
            remembered_bytes: 0,
        };
        let (publisher, published) = watch::channel(Arc::new(first));
        let time = || Arc::new(AtomicU64::new(now_ns));
        let reader = SnapshotReader { published, read_ns: time(), ticked_ns: time() };
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let mut aggregator = Aggregator {
            builder,
            processes: ProcessTable::default(),
            stats,
            run_writer,
            recorder: None,
            settings,
            publisher,
            reader: reader.clone(),
            published_ns: now_ns,
            heap_ns: 0,
            changed: true,
            wall_offset_ns: 0,
            anchored_ns: 0,
            checkpoint_ns: now_ns,
            first_ns: now_ns,
            round: 0,
            complete_ns: now_ns,
            heartbeat_ns: now_ns,
            roll: Roll::default(),
            requests: KeptRequests::default(),
            closing: VecDeque::new(),
            deferred: DeferredBatches::default(),
            boot_id: boot_id.trim_end().to_owned(),
            counters: NodeCounters::default(),
            earlier_counts: mpsc::unbounded_channel(),
            refused: RefusedRecords::default(),
        };
        aggregator.anchor(now_ns);
        aggregator.set_pace(settings);
        (aggregator, reader)
    }

    /// Starts a recording, or ends the current one with `None`.
    pub(crate) fn record(&mut self, recorder: Option<Recorder>) {
        self.recorder = recorder;
        // The next tick records an anchor (wall time), because a recording must begin with one.
        self.anchored_ns = 0;
    }

    /// Applies a new interval for checkpoints, limits of the ledger and length of parts.
    pub fn set_pace(&mut self, settings: AggregatorSettings) {
        self.settings = settings;
        self.roll.set(settings.roll, self.wall_ns(clock::now_ns()));
        self.builder.limit(settings.limits);
        self.requests.set_limits(settings.requests);
    }

    /// Applies batches and answers queries until a [`Command::End`] arrives or the command channel closes. Then closes all open
    /// runs.
    pub async fn run(
        mut self,
        mut inbox: mpsc::Receiver<Batch>,
        mut queries: mpsc::Receiver<Query>,
        mut commands: mpsc::Receiver<Command>,
    ) {
        let mut timer = clock::BeatTimer::new();
        let mut batches = Vec::with_capacity(BATCHES);
        let (mut ticked_ns, mut is_soon) = (clock::now_ns(), true);
        loop {
            let last_tick_ns = ticked_ns;
            let deferred_ns = self.deferred.next_ns();
            tokio::select! {
                biased;
                command = commands.recv() => match command {
                    Some(Command::Record(recorder)) => self.record(recorder),
                    Some(Command::AggregatorSettings(settings)) => self.set_pace(settings),
                    Some(Command::End) | None => break,
                },
                () = timer.expired() => {
                    ticked_ns = clock::now_ns();
                    self.tick(ticked_ns);
                }
                Some(query) = queries.recv() => self.answer(query),
                Some(counts) = self.earlier_counts.1.recv() => self.apply_earlier_counts(&counts),
                () = at(deferred_ns) => {
                    let _ = self.take_deferred(clock::now_ns());
                    tokio::task::yield_now().await;
                }
                taken = inbox.recv_many(&mut batches, BATCHES) => {
                    for batch in batches.drain(..) {
                        self.take(batch);
                    }
                    let now_ns = clock::now_ns();
                    if now_ns.saturating_sub(ticked_ns) >= TICK.as_nanos() as u64 {
                        self.tick(now_ns);
                        ticked_ns = now_ns;
                    } else {
                        self.finish(now_ns);
                    }
                    // If the inbox is empty, the next receive lets other tasks run. Yielding as well would cost a system call.
                    if taken == BATCHES {
                        tokio::task::yield_now().await;
                    }
                }
            }
            let (now_ns, was_soon) = (clock::now_ns(), is_soon && last_tick_ns == ticked_ns);
            is_soon = was_soon || self.wants_tick(now_ns);
            if is_soon != was_soon || last_tick_ns != ticked_ns {
                timer.set(self.until_tick(now_ns, is_soon));
            }
        }
        // Apply the batches that sources had queued before shutdown.
        while let Ok(batch) = inbox.try_recv() {
            self.take(batch);
        }
        let began = Instant::now();
        while began.elapsed() < LAST_DEFERRED && self.take_deferred(u64::MAX) {}
        self.close().await;
    }

    /// Returns whether work waits for the next tick: a change to be published, or runs to be closed or written.
    fn wants_tick(&self, now_ns: u64) -> bool {
        self.changed && self.is_watched(now_ns)
            || self.processes.wants_tick()
            || !self.closing.is_empty()
            || self.roll.is_waiting()
    }

    /// Returns how long to wait for batches before the next tick.
    fn until_tick(&self, now_ns: u64, is_soon: bool) -> Duration {
        let since_ns = now_ns.saturating_sub(self.checkpoint_ns);
        let checkpoint = self.settings.checkpoint.saturating_sub(Duration::from_nanos(since_ns));
        if is_soon { TICK } else { IDLE_TICK.min(checkpoint).max(TICK) }
    }

    /// Returns whether a view has read within [`WATCHED_NS`].
    fn is_watched(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.reader.read_ns()) < WATCHED_NS
    }

    /// Applies a batch. If earlier batches of its process are deferred, it queues behind them.
    pub fn take(&mut self, batch: Batch) {
        let passed = match batch.origin {
            Origin::Process(key) => self.deferred.queue_or_return(key, batch),
            Origin::Host => Some(batch),
        };
        if let Some(batch) = passed {
            self.take_now(batch);
        }
    }

    /// Applies the deferred batches of one process whose wait is over. Returns whether there were any.
    fn take_deferred(&mut self, now_ns: u64) -> bool {
        let batches = self.deferred.take_due(now_ns);
        let has_any = batches.is_some();
        batches.into_iter().flatten().for_each(|batch| self.take(batch));
        has_any
    }

    fn take_now(&mut self, mut batch: Batch) {
        self.changed = true;
        let (began, began_cpu) = (Instant::now(), batch.slot.as_ref().map(|_| clock::cpu()));
        let took = || began_cpu.map(|began| clock::cpu().saturating_sub(began)).unwrap_or_default();
        let mut rest = batch.frames.as_slice();
        let (mut records, mut is_long, mut has_news, mut recorded) = (0, false, false, Vec::new());
        if let Origin::Process(ProcessKey { pid, .. }) = batch.origin
            && self.processes.is_unidentified(pid)
            && begins_agent(&batch.frames)
        {
            // A process list named this pid, but the start time of the process was unknown. The agent has now sent the start time.
            self.counters.update(&self.builder.ledger().snapshot());
            self.builder.forget(self.processes.take_unidentified(pid));
        }
        if let Origin::Process(key) = batch.origin
            && !self.processes.add(key)
            && !(begins_agent(&batch.frames) && self.processes.reopen(key))
        {
            // The run of this process is closed, so its records are dropped. Those with a sequence number are counted as
            // missing. Others, such as the end of a connection, do not matter.
            let records = frame::records(rest).map_while(Result::ok).flatten();
            let events = records.filter(|record| record.stamp.seq > 0).count() as u64;
            self.stats.add(Count::Late, 1);
            self.stats.add(Count::SkippedOver, events);
            return;
        }
        // The source has checked the frames. If one is invalid nevertheless, the rest of the batch is dropped.
        let (mut unread, mut next) = (rest, Vec::with_capacity(PRELOADED));
        while !is_long {
            while next.len() < PRELOADED
                && let Ok(Some((slot, payload, after))) = frame::split_frame(unread)
            {
                unread = after;
                next.extend(Record::decode(slot, payload).ok().map(|record| (record, after)));
            }
            if next.is_empty() {
                break;
            }
            self.builder.ledger().preload(batch.origin, next.iter().map(|(record, _)| record));
            for (record, after) in next.drain(..) {
                has_news |= !matches!(record.body, Body::Watermark { .. });
                if self.recorder.is_some() && batch.origin == Origin::Host {
                    append_for_recording(&record, self.builder.ledger(), &mut recorded);
                }
                self.observe(batch.origin, &record);
                (rest, records) = (after, records + 1);
                // Processor time decides whether the batch is split: on a busy machine the elapsed time includes other work.
                is_long = records % FRAMES == 0 && began.elapsed() >= LONG && took() >= LONG;
                if is_long {
                    break;
                }
            }
        }
        self.stats.add(Count::Records, records);
        if let Origin::Process(key) = batch.origin
            && has_news
        {
            self.processes.mark_changed(key);
        }
        if let Origin::Process(key) = batch.origin
            && is_long
            && !rest.is_empty()
        {
            let done = batch.frames.len() - rest.len();
            let frames = batch.frames.split_off(done);
            let rest = Batch { origin: batch.origin, frames, slot: batch.slot.take() };
            self.deferred.defer(key, rest, took(), clock::now_ns());
        } else if let Some(slot) = batch.slot.take().filter(|slot| slot.is_costly) {
            slot.release_after(took());
        }
        if let Some(recorder) = &self.recorder {
            recorder.take(if batch.origin == Origin::Host { Batch::of_host(recorded) } else { batch });
        }
        for key in self.processes.take_newcomers() {
            self.run_writer.request_earlier_counts(self.uid(key), key, self.earlier_counts.0.clone());
        }
        self.stats.observe(Timing::Batch, began.elapsed());
    }

    /// Tells the ledger how many records of this process an earlier daemon had received and lost.
    fn apply_earlier_counts(&mut self, counts: &EarlierCounts) {
        let EarlierCounts { key, events, lost, program } = *counts;
        if self.processes.has(key) {
            let (instance, seq) = program.map_or((0, 0), |program| (program.instance, program.heard));
            let stamp = Stamp { thread: key.pid, time_ns: clock::now_ns(), seq, ..Stamp::default() };
            let body = Body::EarlierLife { start_ticks: key.start_ticks, events, lost, instance };
            self.host(&Record { stamp, body });
            self.changed = true;
        }
    }

    fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        let Stamp { thread: pid, device, time_ns, .. } = record.stamp;
        if let Origin::Process(key) = origin {
            self.requests.observe(key, record);
        }
        match (origin, record.body) {
            (Origin::Process(key), Body::Source { up, .. }) => self.processes.count_agent(key, up),
            (
                Origin::Host,
                Body::ProcessSample { start_ticks, .. }
                | Body::ProcessFacts { start_ticks, .. }
                | Body::AccountedPeak { start_ticks, .. }
                | Body::ProtectedSample { start_ticks, .. },
            ) => self.observe_process(ProcessKey { pid, start_ticks }, *record),
            (Origin::Host, Body::ProcessGone { start_ticks, status }) => {
                self.processes.set_end(ProcessKey { pid, start_ticks }, time_ns, status.0);
            }
            (_, body) => {
                match body {
                    Body::SampleBegin { .. } => self.processes.list_begins(device),
                    Body::SampleEnd { result: 0, .. } => self.processes.list_ends(device, time_ns),
                    _ => {}
                }
                self.builder.observe(origin, record);
            }
        }
    }

    /// Applies a record of NVML or /proc about a process, unless the run of the process is closed.
    fn observe_process(&mut self, mut key: ProcessKey, mut record: Record<'_>) {
        let Stamp { device, time_ns, .. } = record.stamp;
        // A pid of another PID namespace does not identify a process here.
        let is_foreign = matches!(record.body, Body::ProcessSample { absence: Absence::WrongNamespace, .. });
        if let Body::ProcessSample { start_ticks, .. }
        | Body::AccountedPeak { start_ticks, .. }
        | Body::ProtectedSample { start_ticks, .. } = &mut record.body
            && !is_foreign
        {
            key = self.processes.identified(key, time_ns);
            *start_ticks = key.start_ticks;
        }
        let is_open = match record.body {
            Body::ProcessSample { used_bytes, absence, .. } => {
                // Unknown bytes are stored as an impossible number that encodes the reason, so that a change of reason is noticed.
                let absence = u64::MAX - u64::from(absence.to_code());
                self.processes.note_reading(key, 0, device, used_bytes.0.or(Some(absence)))
            }
            Body::ProtectedSample { protected_bytes, .. } => {
                self.processes.note_reading(key, 1, device, Some(protected_bytes))
            }
            Body::AccountedPeak { peak_bytes, .. } => {
                self.processes.note_reading(key, 2, device, Some(peak_bytes))
            }
            _ => self.processes.mark_changed(key),
        };
        if !is_open {
            self.stats.add(Count::Late, 1);
            return;
        }
        match record.body {
            Body::ProcessSample { .. } => self.processes.list_names(device, key, time_ns, clock::now_ns()),
            Body::AccountedPeak { .. } => self.processes.mark_accounted(key),
            _ => {}
        }
        self.builder.observe(Origin::Host, &record);
    }

    /// Does the periodic work: records the wall time, closes ended processes, hands runs to the store, splits them into parts,
    /// publishes a snapshot.
    pub fn tick(&mut self, now_ns: u64) {
        self.host(&Record { stamp: Stamp { time_ns: now_ns, ..Stamp::default() }, body: Body::Tick {} });
        if now_ns.saturating_sub(self.anchored_ns) >= ANCHOR_NS {
            self.anchor(now_ns);
        }
        self.finish(now_ns);
        let is_due = now_ns.saturating_sub(self.checkpoint_ns) >= self.settings.checkpoint.as_nanos() as u64;
        if is_due {
            self.checkpoint_ns = now_ns;
            self.round += 1;
        }
        let due = match is_due {
            true if self.round.is_multiple_of(UNCOVERED_ROUNDS) => Due::All,
            true => Due::Covered,
            false => Due::New,
        };
        if due == Due::All {
            self.complete_ns = now_ns;
        }
        let since_ns = now_ns.saturating_sub(self.first_ns);
        if is_due || since_ns >= FIRST_CHECKPOINT_NS && self.processes.has_new() {
            self.first_ns = now_ns;
            self.make_due(due, now_ns);
        }
        self.checkpoint(now_ns);
        self.roll(now_ns);
        self.reader.ticked_ns.store(now_ns, Ordering::Relaxed);
        // Publish about every second even without changes, because a snapshot marks old data as `stale`.
        if self.changed && self.is_watched(now_ns)
            || now_ns.saturating_sub(self.published_ns) >= IDLE_PUBLISH_NS
        {
            self.publish(now_ns);
        }
    }

    /// Publishes a snapshot of the ledger, which views read.
    pub fn publish(&mut self, now_ns: u64) {
        (self.published_ns, self.changed) = (now_ns, false);
        if now_ns.saturating_sub(self.heap_ns) >= HEAP_NS {
            self.heap_ns = now_ns;
            self.stats.heap_bytes.store(heap_bytes_in_use().unwrap_or(0), Ordering::Relaxed);
        }
        let snapshot = self.builder.ledger().snapshot();
        let last = Arc::clone(&self.publisher.borrow());
        let mut remembered_bytes = last.remembered_bytes;
        if !Arc::ptr_eq(&snapshot.processes, &last.snapshot.processes) {
            self.counters.update(&snapshot);
            let (bytes, refused) = self.builder.ledger().memory_use();
            let before = std::mem::replace(&mut self.refused, refused);
            self.stats.add(Count::RefusedRows, refused.rows - before.rows);
            self.stats.add(Count::RefusedOfUser, refused.user - before.user);
            self.stats.add(Count::RefusedOfAll, refused.all - before.all);
            remembered_bytes = bytes;
        }
        let totals = self.counters.totals.clone();
        self.publisher.send_replace(Arc::new(Published {
            at_ns: now_ns,
            made: Instant::now(),
            snapshot,
            totals,
            remembered_bytes,
        }));
    }

    /// Applies a record that the daemon itself made, and writes it to the recording.
    fn host(&mut self, record: &Record<'_>) {
        self.builder.observe(Origin::Host, record);
        if let Some(recorder) = &self.recorder {
            let mut frames = Vec::new();
            record.append_frame(&mut frames);
            recorder.take(Batch::of_host(frames));
        }
    }

    fn anchor(&mut self, now_ns: u64) {
        let offset_ns = clock::wall_offset_ns();
        if self.anchored_ns == 0 || (offset_ns - self.wall_offset_ns).abs() > JUMP_NS {
            self.wall_offset_ns = offset_ns;
            self.host(&clock::anchor());
        }
        self.anchored_ns = now_ns;
    }

    fn wall_ns(&self, now_ns: u64) -> i128 {
        i128::from(now_ns) + self.wall_offset_ns
    }

    fn answer(&mut self, query: Query) {
        match query {
            // The client has disconnected, so no answer is made.
            Query::Runs(_, _, reply) if reply.is_closed() => {}
            Query::Runs(filter, charge, reply) => {
                let runs = charge.run(|| {
                    let snapshot = self.builder.ledger().snapshot();
                    let keys: Vec<_> = snapshot
                        .processes
                        .iter()
                        .filter(|process| filter(process))
                        .map(|process| process.key)
                        .collect();
                    let runs = self.builder.runs_of(&keys, true).into_iter();
                    runs.map(|(_, run)| run).filter(worth_keeping).collect()
                });
                let _ = reply.send(runs);
            }
            Query::Mark(name, filter, reply) => {
                let time_ns = clock::now_ns();
                let snapshot = self.builder.ledger().snapshot();
                let live = snapshot.running().filter(|process| filter(process));
                let keys: Vec<ProcessKey> = live.map(|process| process.key).collect();
                for key in &keys {
                    let stamp = Stamp { thread: key.pid, time_ns, ..Stamp::default() };
                    let start_ticks = key.start_ticks;
                    self.host(&Record { stamp, body: Body::ProcessMark { start_ticks, name: &name } });
                    self.processes.mark_changed(*key);
                }
                self.changed = true;
                let _ = reply.send((time_ns, keys.iter().map(|key| key.pid).collect()));
            }
        }
    }
}

/// Waits until this time (ns, CLOCK_MONOTONIC); never returns for `None`.
async fn at(moment_ns: Option<u64>) {
    match moment_ns.map(|moment_ns| moment_ns.saturating_sub(clock::now_ns())) {
        Some(wait_ns) => tokio::time::sleep(Duration::from_nanos(wait_ns)).await,
        None => std::future::pending().await,
    }
}

/// Commands to the aggregator from the daemon's main task.
#[derive(Debug)]
pub enum Command {
    /// Starts this recording, or ends the current one with `None`.
    Record(Option<Recorder>),
    /// Applies these settings.
    AggregatorSettings(AggregatorSettings),
    /// Closes all runs and ends the task.
    End,
}
