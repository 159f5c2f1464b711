//! The one owner of the ledger. Batches come in by one channel, are decoded, observed, recorded; what views read
//! goes out as one shared snapshot. It waits for nobody: the store and the recording have threads of their own.

pub(crate) mod batch;
mod node_counters;
mod process_table;
pub(crate) mod recorder;
mod roll;
mod writing;

use crate::clock;
use crate::limits::user_queue::QueueSlot;
use crate::limits::user_share::CpuCharge;
use crate::run_writer::{Recalled, RunWriter};
use crate::stats::{Count, Stats};
use batch::{Batch, DeferredBatches};
use gpumem_ledger::{Limits, Origin, ProcessKey, ProcessView, RefusedRecords, Snapshot};
use gpumem_model::run::{Run, Source};
use gpumem_runs::builder::{RunBuilder, Sink};
use gpumem_wire::{Body, Record, Stamp, frame};
use node_counters::NodeCounters;
pub(crate) use node_counters::Totals;
use process_table::ProcessTable;
use recorder::Recorder;
use roll::Roll;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::{oneshot, watch};
use writing::worth_keeping;

/// Time passes for the ledger about that often, with what a source says: waking up for it is most of what it costs.
const TICK: Duration = Duration::from_millis(75);
/// The same where no source says anything: what makes silence `stale`.
const QUIET_TICK: Duration = Duration::from_millis(250);
/// Views that nobody looks at are made that often.
const IDLE_PUBLISH_NS: u64 = 1_000_000_000;
/// For so long after somebody looked, they are made at every tick.
const WATCHED_NS: u64 = 10_000_000_000;
/// A process that is new is written sooner: a daemon that is killed must not take its run along.
const FIRST_CHECKPOINT_NS: u64 = 500_000_000;
/// The wall clock is looked at that often, and anchored anew when it was set by more than [`JUMP_NS`].
const ANCHOR_NS: u64 = 1_000_000_000;
const JUMP_NS: i128 = 500_000_000;
/// Batches taken before others get a turn.
const BATCHES: usize = 32;
/// At the daemon's end, what rests has so long.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// What views read.
#[derive(Debug)]
pub(crate) struct Published {
    /// When it was made, CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// The same moment, by the clock that [`Published::now_ns`] reads.
    pub made: Instant,
    /// The ledger.
    pub snapshot: Snapshot,
    /// What has happened since the daemon started.
    pub totals: Totals,
    /// Bytes, about, that the ledger remembers of what processes said.
    pub remembered_bytes: usize,
}

impl Published {
    /// Now, CLOCK_MONOTONIC. Ages are differences to this: a sample ages while nothing is published, too.
    pub(crate) fn now_ns(&self) -> u64 {
        self.at_ns.saturating_add(u64::try_from(self.made.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Where views read. Reading never waits.
#[derive(Debug, Clone)]
pub struct SnapshotReader {
    published: watch::Receiver<Arc<Published>>,
    read_ns: Arc<AtomicU64>,
    turned_ns: Arc<AtomicU64>,
}

impl SnapshotReader {
    /// The state as it was last published: at most a second old, and a tenth of one for who looks often.
    pub(crate) fn read(&self) -> Arc<Published> {
        self.read_ns.store(clock::now_ns(), Ordering::Relaxed);
        self.published.borrow().clone()
    }

    /// When somebody last looked.
    pub(crate) fn read_ns(&self) -> u64 {
        self.read_ns.load(Ordering::Relaxed)
    }

    /// When the aggregator last ticked: several times a second.
    pub(crate) fn turned_ns(&self) -> u64 {
        self.turned_ns.load(Ordering::Relaxed)
    }
}

/// What views ask the aggregator for.
pub enum Query {
    /// Runs of the processes that are wanted, as they stand.
    Runs(Box<dyn Fn(&ProcessView) -> bool + Send>, CpuCharge, oneshot::Sender<Vec<Run>>),
    /// A mark of this name for live processes that are wanted; says when, and whose.
    Mark(String, Box<dyn Fn(&ProcessView) -> bool + Send>, oneshot::Sender<(u64, Vec<u32>)>),
}

/// What peers can make the ledger remember, unless the configuration says otherwise: with what the daemon has beside it, less than
/// the unit's `MemoryMax`.
pub(crate) const LIMITS: Limits =
    Limits { rows_per_process: 4_000_000, bytes_per_user: 224 << 20, bytes: 320 << 20 };

/// How often runs are written and rolled, and what the ledger may remember.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AggregatorSettings {
    /// Runs that go on are written that often.
    pub checkpoint: Duration,
    /// What peers can make the ledger remember.
    pub limits: Limits,
    /// Processes that live longer have a run per such time; `None`: one, however long.
    pub roll: Option<Duration>,
}

impl Default for AggregatorSettings {
    fn default() -> Self {
        AggregatorSettings { checkpoint: Duration::from_secs(5), limits: LIMITS, roll: None }
    }
}

/// The owner of the ledger.
pub struct Aggregator {
    builder: RunBuilder,
    tracks: ProcessTable,
    stats: Arc<Stats>,
    keeper: RunWriter,
    recorder: Option<Recorder>,
    pace: AggregatorSettings,
    publisher: watch::Sender<Arc<Published>>,
    read_ns: Arc<AtomicU64>,
    turned_ns: Arc<AtomicU64>,
    published_ns: u64,
    changed: bool,
    wall_offset_ns: i128,
    anchored_ns: u64,
    /// When all runs with news were last made due, and when those that are new were.
    checkpoint_ns: u64,
    first_ns: u64,
    roll: Roll,
    /// Processes whose part has ended, and whose run waits for that room.
    rolling: VecDeque<ProcessKey>,
    /// Ended processes whose runs wait for room in front of the store.
    closing: VecDeque<ProcessKey>,
    deferred: DeferredBatches,
    boot_id: String,
    tally: NodeCounters,
    /// What the store says of processes that are new to this life.
    recalls: (UnboundedSender<Recalled>, UnboundedReceiver<Recalled>),
    /// Records that the ledger's limits had refused when views were last told.
    refused: RefusedRecords,
}

impl Aggregator {
    /// Makes an aggregator with an empty ledger, and what views read it with.
    pub fn new(stats: Arc<Stats>, keeper: RunWriter, pace: AggregatorSettings) -> (Self, SnapshotReader) {
        let now_ns = clock::now_ns();
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let source = Source { kind: "daemon".into(), origin: host, preset: None };
        let mut builder = RunBuilder::new(source);
        builder.limit(pace.limits);
        let snapshot = builder.ledger().snapshot();
        let first = Published {
            at_ns: now_ns,
            made: Instant::now(),
            snapshot,
            totals: Totals::default(),
            remembered_bytes: 0,
        };
        let (publisher, published) = watch::channel(Arc::new(first));
        let read_ns = Arc::new(AtomicU64::new(now_ns));
        let turned_ns = Arc::new(AtomicU64::new(now_ns));
        let board =
            SnapshotReader { published, read_ns: Arc::clone(&read_ns), turned_ns: Arc::clone(&turned_ns) };
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let mut core = Aggregator {
            builder,
            tracks: ProcessTable::default(),
            stats,
            keeper,
            recorder: None,
            pace,
            publisher,
            read_ns,
            turned_ns,
            published_ns: now_ns,
            changed: true,
            wall_offset_ns: 0,
            anchored_ns: 0,
            checkpoint_ns: now_ns,
            first_ns: now_ns,
            roll: Roll::default(),
            rolling: VecDeque::new(),
            closing: VecDeque::new(),
            deferred: DeferredBatches::default(),
            boot_id: boot_id.trim_end().to_owned(),
            tally: NodeCounters::default(),
            recalls: mpsc::unbounded_channel(),
            refused: RefusedRecords::default(),
        };
        core.anchor(now_ns);
        core.roll.set(pace.roll, core.wall_ns(now_ns));
        (core, board)
    }

    /// Records from now on, or no longer.
    pub(crate) fn record(&mut self, recorder: Option<Recorder>) {
        self.recorder = recorder;
        // A recording begins with what ties its times to the wall clock.
        self.anchored_ns = 0;
    }

    /// How often runs are written.
    pub fn set_pace(&mut self, pace: AggregatorSettings) {
        self.pace = pace;
        self.roll.set(pace.roll, self.wall_ns(clock::now_ns()));
        self.builder.limit(pace.limits);
    }

    /// Takes what comes until `work` says that it is over; then closes what is open.
    pub async fn run(
        mut self,
        mut inbox: mpsc::Receiver<Batch>,
        mut asks: mpsc::Receiver<Query>,
        mut orders: mpsc::Receiver<Command>,
    ) {
        let mut ticks = tokio::time::interval(QUIET_TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut batches = Vec::with_capacity(BATCHES);
        let mut ticked_ns = clock::now_ns();
        loop {
            let deferred_ns = self.deferred.next_ns();
            tokio::select! {
                biased;
                order = orders.recv() => match order {
                    Some(Command::Record(recorder)) => self.record(recorder),
                    Some(Command::AggregatorSettings(pace)) => self.set_pace(pace),
                    Some(Command::End) | None => break,
                },
                _ = ticks.tick() => {
                    ticked_ns = clock::now_ns();
                    self.tick(ticked_ns);
                }
                Some(ask) = asks.recv() => self.answer(ask),
                Some(recalled) = self.recalls.1.recv() => self.hear_of_earlier(&recalled),
                () = at(deferred_ns) => {
                    let _ = self.go_on(clock::now_ns());
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
                        ticks.reset();
                    } else {
                        self.finish(now_ns);
                    }
                    // An inbox that was emptied gives others their turn by itself; a turn costs a system call.
                    if taken == BATCHES {
                        tokio::task::yield_now().await;
                    }
                }
            }
        }
        // What sources had handed over before they were told to end.
        while let Ok(batch) = inbox.try_recv() {
            self.take(batch);
        }
        let began = Instant::now();
        while began.elapsed() < LAST_WORDS && self.go_on(u64::MAX) {}
        self.close().await;
    }

    /// Observes a batch; one of a process that rests goes behind what that process has said before.
    pub fn take(&mut self, batch: Batch) {
        let passed = match batch.origin {
            Origin::Process(key) => self.deferred.pass(key, batch),
            Origin::Host => Some(batch),
        };
        if let Some(batch) = passed {
            self.take_now(batch);
        }
    }

    /// A process that has rested goes on; whether there was one.
    fn go_on(&mut self, now_ns: u64) -> bool {
        let batches = self.deferred.take_due(now_ns);
        let is_one = batches.is_some();
        batches.into_iter().flatten().for_each(|batch| self.take(batch));
        is_one
    }

    fn take_now(&mut self, mut batch: Batch) {
        self.changed = true;
        let (began, began_cpu) = (Instant::now(), batch.slot.as_ref().map(|_| clock::cpu()));
        let took = || began_cpu.map(|began| clock::cpu().saturating_sub(began)).unwrap_or_default();
        let mut rest = batch.frames.as_slice();
        let (mut records, mut is_long) = (0, false);
        if let Origin::Process(key) = batch.origin
            && !self.tracks.register(key)
            && !(begins_agent(&batch.frames) && self.tracks.reopen(key))
        {
            // What ends a connection is of no consequence then; what has a number is missing from the run.
            let events = std::iter::from_fn(|| {
                let (slot, payload, after) = frame::split_frame(rest).ok().flatten()?;
                rest = after;
                Some(Record::decode(slot, payload).is_ok_and(|record| record.stamp.seq > 0))
            });
            let events = events.filter(|is_event| *is_event).count() as u64;
            self.stats.add(Count::Late, 1);
            self.stats.add(Count::SkippedOver, events);
            return;
        }
        // Framing was checked by the source; what is cut ends the batch.
        while let Ok(Some((slot, payload, after))) = frame::split_frame(rest) {
            if let Ok(record) = Record::decode(slot, payload) {
                self.observe(batch.origin, &record);
                records += 1;
            }
            rest = after;
            // What others' work takes meanwhile, on a busy machine, is not this one's.
            is_long = records % batch::FRAMES == 0 && began.elapsed() >= batch::LONG && took() >= batch::LONG;
            if is_long {
                break;
            }
        }
        self.stats.add(Count::Records, records);
        if let Origin::Process(key) = batch.origin
            && is_long
            && !rest.is_empty()
        {
            let done = batch.frames.len() - rest.len();
            let frames = batch.frames.split_off(done);
            let rest = Batch { origin: batch.origin, frames, slot: batch.slot.take() };
            self.deferred.defer(key, rest, took(), clock::now_ns());
        } else if let Some(slot) = batch.slot.take().filter(QueueSlot::is_costly) {
            slot.took(took());
        }
        if let Some(recorder) = &self.recorder {
            recorder.take(without_ends(batch));
        }
        for key in self.tracks.take_newcomers() {
            self.keeper.recall(self.uid(key), key, self.recalls.0.clone());
        }
    }

    /// An earlier life of the daemon knew this process.
    fn hear_of_earlier(&mut self, recalled: &Recalled) {
        let Recalled { key, events, lost, program } = *recalled;
        if self.tracks.has(key) {
            let (instance, seq) = program.map_or((0, 0), |program| (program.instance, program.heard));
            let stamp = Stamp { thread: key.pid, time_ns: clock::now_ns(), seq, ..Stamp::default() };
            let body = Body::EarlierLife { start_ticks: key.start_ticks, events, lost, instance };
            self.host(&Record { stamp, body });
            self.changed = true;
        }
    }

    fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        match (origin, record.body) {
            (Origin::Process(key), Body::Source { up, .. }) => self.tracks.agent(key, up),
            (
                Origin::Host,
                Body::ProcessSample { start_ticks, .. }
                | Body::ProcessFacts { start_ticks, .. }
                | Body::AccountedPeak { start_ticks, .. }
                | Body::ProtectedSample { start_ticks, .. },
            ) => {
                let key = ProcessKey { pid: record.stamp.thread, start_ticks };
                if self.tracks.register(key) {
                    if matches!(record.body, Body::ProcessSample { .. }) {
                        self.tracks.list_names(record.stamp.device, key);
                    }
                    if matches!(record.body, Body::AccountedPeak { .. }) {
                        self.tracks.accounted(key);
                    }
                    self.builder.observe(origin, record);
                } else {
                    self.stats.add(Count::Late, 1);
                }
            }
            (Origin::Host, Body::ProcessGone { start_ticks, status }) => {
                let key = ProcessKey { pid: record.stamp.thread, start_ticks };
                self.tracks.gone(key, record.stamp.time_ns, status.0);
            }
            _ => {
                match record.body {
                    Body::SampleBegin { .. } => self.tracks.list_begins(record.stamp.device),
                    Body::SampleEnd { result: 0, .. } => {
                        self.tracks.list_ends(record.stamp.device, record.stamp.time_ns);
                    }
                    _ => {}
                }
                self.builder.observe(origin, record);
            }
        }
    }

    /// Time has passed.
    pub fn tick(&mut self, now_ns: u64) {
        self.host(&Record { stamp: Stamp { time_ns: now_ns, ..Stamp::default() }, body: Body::Tick {} });
        if now_ns.saturating_sub(self.anchored_ns) >= ANCHOR_NS {
            self.anchor(now_ns);
        }
        self.finish(now_ns);
        let since_ns = now_ns.saturating_sub(self.checkpoint_ns);
        let is_due = since_ns >= self.pace.checkpoint.as_nanos() as u64;
        if is_due {
            self.checkpoint_ns = now_ns;
        }
        let since_ns = now_ns.saturating_sub(self.first_ns);
        if is_due || since_ns >= FIRST_CHECKPOINT_NS && self.tracks.has_new() {
            self.first_ns = now_ns;
            self.make_due(!is_due, now_ns);
        }
        self.checkpoint(now_ns);
        self.roll(now_ns);
        self.turned_ns.store(now_ns, Ordering::Relaxed);
        let watched = now_ns.saturating_sub(self.read_ns.load(Ordering::Relaxed)) < WATCHED_NS;
        // What is published says what is `stale`, which changes when nothing else does.
        if self.changed && watched || now_ns.saturating_sub(self.published_ns) >= IDLE_PUBLISH_NS {
            self.publish(now_ns);
        }
    }

    /// Shows views the state of now.
    pub fn publish(&mut self, now_ns: u64) {
        (self.published_ns, self.changed) = (now_ns, false);
        let snapshot = self.builder.ledger().snapshot();
        self.tally.update(&snapshot);
        let totals = self.tally.totals.clone();
        let (remembered_bytes, refused) = self.builder.ledger().load();
        let before = std::mem::replace(&mut self.refused, refused);
        self.stats.add(Count::RefusedRows, refused.rows - before.rows);
        self.stats.add(Count::RefusedOfUser, refused.user - before.user);
        self.stats.add(Count::RefusedOfAll, refused.all - before.all);
        self.publisher.send_replace(Arc::new(Published {
            at_ns: now_ns,
            made: Instant::now(),
            snapshot,
            totals,
            remembered_bytes,
        }));
    }

    /// Something that the daemon itself says.
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

    fn answer(&mut self, ask: Query) {
        match ask {
            // Who asked has gone away.
            Query::Runs(_, _, reply) if reply.is_closed() => {}
            Query::Runs(wanted, charge, reply) => {
                let runs = charge.run(|| {
                    let snapshot = self.builder.ledger().snapshot();
                    let keys: Vec<_> =
                        snapshot.processes.iter().filter(|of| wanted(of)).map(|of| of.key).collect();
                    let runs = self.builder.runs_of(&keys, true).into_iter();
                    runs.map(|(_, run)| run).filter(worth_keeping).collect()
                });
                let _ = reply.send(runs);
            }
            Query::Mark(name, wanted, reply) => {
                let time_ns = clock::now_ns();
                let snapshot = self.builder.ledger().snapshot();
                let live = snapshot.processes.iter().filter(|of| of.ended.is_none() && wanted(of));
                let keys: Vec<ProcessKey> = live.map(|of| of.key).collect();
                for key in &keys {
                    let stamp = Stamp { thread: key.pid, time_ns, ..Stamp::default() };
                    let start_ticks = key.start_ticks;
                    self.host(&Record { stamp, body: Body::ProcessMark { start_ticks, name: &name } });
                    self.tracks.register(*key);
                }
                self.changed = true;
                let _ = reply.send((time_ns, keys.iter().map(|key| key.pid).collect()));
            }
        }
    }
}

/// Whether these frames begin with the record by which a connection says that an agent is there.
fn begins_agent(frames: &[u8]) -> bool {
    let Ok(Some((slot, payload, _))) = frame::split_frame(frames) else { return false };
    matches!(Record::decode(slot, payload), Ok(Record { body: Body::Source { up: true, .. }, .. }))
}

/// Waits for a moment; where there is none, for ever.
async fn at(moment_ns: Option<u64>) {
    match moment_ns.map(|moment_ns| moment_ns.saturating_sub(clock::now_ns())) {
        Some(wait_ns) => tokio::time::sleep(Duration::from_nanos(wait_ns)).await,
        None => std::future::pending().await,
    }
}

/// Commands of the app.
#[derive(Debug)]
pub enum Command {
    /// Record there from now on, or no longer.
    Record(Option<Recorder>),
    /// Write runs so often.
    AggregatorSettings(AggregatorSettings),
    /// Close everything.
    End,
}

/// The ledger is told of the end of a process when its run is closed, not when it was seen: a recording must say
/// it in the same place.
fn without_ends(batch: Batch) -> Batch {
    const PROCESS_GONE: u8 = 101;
    let mut frames = Vec::new();
    let (mut rest, mut found) = (batch.frames.as_slice(), false);
    while batch.origin == Origin::Host
        && let Ok(Some((slot, _, after))) = frame::split_frame(rest)
    {
        match slot[60] {
            PROCESS_GONE => found = true,
            _ => frames.extend_from_slice(&rest[..rest.len() - after.len()]),
        }
        rest = after;
    }
    if found { Batch { frames, ..batch } } else { batch }
}
