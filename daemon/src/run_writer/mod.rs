//! The thread that writes runs to the store. A disk may be slow, full or missing. So the newest state of each run waits in
//! memory, where it can be read, and is written when the store works again.
//!
//! ```text
//! write_queue    runs that wait to be written
//! earlier_run    position of a run in the store, which an earlier daemon may have started
//! live_findings  findings of live processes
//! ended_runs     the processes that ended last, with their stored runs
//! join_runs      joins a stored run with this daemon's run of the same process
//! damaged_store  distinguishes a damaged store from a disk problem, and replaces it
//! retention      deletes old runs, a few at a time
//! ```

mod damaged_store;
mod earlier_run;
mod ended_runs;
mod join_runs;
mod live_findings;
mod retention;
mod write_queue;

pub(crate) use ended_runs::EndedRuns;
pub(crate) use live_findings::{LiveFindings, ProcessFindings};
pub(crate) use retention::{Doubt, Retention};
pub(crate) use write_queue::Room;

use crate::limits::user_share::CpuCharge;
use crate::os::{lock, trim_heap, unmap_code};
use crate::stats::{Count, Stats, Timing};
use damaged_store::DamagedStore;
use earlier_run::{EarlierRun, OpenRun, write};
use gpumem_ledger::ProcessKey;
use gpumem_model::run::{Program, Run, State};
use gpumem_runs::requests::Piece;
use gpumem_runs::store::{RunId, Store, StoreError};
use retention::Sweeper;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use write_queue::{BYTES, QueuedRun, WriteQueue};

/// Maximum number of requests that wait for the thread; further ones are dropped without an answer.
const MAX_REQUESTS: usize = 64;
/// Maximum number of new processes that wait to be searched in the store. Others are searched when they are first written.
const MAX_NEW_PROCESSES: usize = 4096;
/// First delay before a failing store is tried again; doubled up to [`LONGEST`], but not after errors that may be temporary.
const RETRY: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);
/// Maximum number of stored runs that a search reads, newest first.
const SEARCHED: usize = 4096;
/// Maximum number of runs that a search returns, and maximum of their total bytes.
const FOUND: usize = 256;
const FOUND_BYTES: usize = 32 << 20;

/// Interval at which freed memory is returned to the system. Each return takes some milliseconds. The C library keeps free memory
/// below the last used block, so a daemon that once served sixty processes would seem to grow with each later process.
const TRIM_INTERVAL: Duration = Duration::from_secs(60);
/// Time after the start of the first return: the runs of all processes have been made then.
const FIRST_TRIM: Duration = Duration::from_secs(5);

const ANSWER: Duration = Duration::from_secs(2);
/// Duration of a disk operation after which the thread counts as stuck: it gets no more requests, and `doctor` reports it.
const STUCK: Duration = Duration::from_secs(5);

/// Filter of a search: returns whether a run is wanted.
pub(crate) type RunFilter = Box<dyn Fn(&Run) -> bool + Send>;

enum WriterRequest {
    Write,
    SetRetention(Retention),
    /// Record that unchanged runs are still open. Changes of runs until this time (ns, CLOCK_MONOTONIC) have been queued.
    Heartbeat(u64),
    Find {
        filter: RunFilter,
        charge: CpuCharge,
        reply: oneshot::Sender<Vec<Run>>,
    },
    Load {
        id: RunId,
        reply: oneshot::Sender<Run>,
    },
    /// Returns for each live process what an earlier daemon stored about it.
    EarlierRuns {
        keys: Vec<ProcessKey>,
        reply: oneshot::Sender<Vec<Option<EarlierRun>>>,
    },
    /// Returns the counts that an earlier daemon stored about a process, if there are any.
    EarlierCounts {
        uid: String,
        key: ProcessKey,
        reply: UnboundedSender<EarlierCounts>,
    },
    End,
}

/// Counts of a process's records that an earlier daemon stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EarlierCounts {
    pub key: ProcessKey,
    /// Number of records with a sequence number that the earlier daemon received.
    pub events: u64,
    /// Number of records with a sequence number that the earlier daemon counted as lost.
    pub lost: u64,
    /// Last program that the process ran, as far as the earlier daemon knew.
    pub program: Option<Program>,
}

/// State of the run store, and counts of the runs that wait to be written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    pub path: PathBuf,
    /// Whether the last write succeeded, or none was tried.
    pub up: bool,
    pub reason: Option<String>,
    pub remedy: Option<&'static str>,
    pub waiting: usize,
    /// Estimated memory of the runs that wait to be written, in bytes.
    pub waiting_bytes: usize,
    /// Number of changed runs that stay in the ledger, because too many wait to be written.
    pub queued: usize,
    /// Age of the oldest change that is not in the store. If the daemon is killed, changes up to this age are lost.
    pub oldest: Duration,
    /// Whether `oldest` is more than twice the interval for writing runs.
    pub is_late: bool,
    /// Duration of the present disk operation if the writing thread counts as stuck; otherwise `None`.
    pub stuck: Option<Duration>,
    /// Size of the store's file in bytes, as last read.
    pub bytes: u64,
    /// Whether the store is larger than its limit although no run in it may be deleted.
    pub is_too_large: bool,
    /// Reason why old runs are not deleted: their age by the wall clock may be wrong.
    pub age_doubt: Option<Doubt>,
    /// New path of the store that was last renamed because it was damaged.
    pub set_aside: Option<PathBuf>,
}

/// Handle of the writing thread. Clones are handles of the same thread.
#[derive(Debug, Clone)]
pub struct RunWriter {
    requests: Sender<WriterRequest>,
    shared: Arc<Shared>,
}

/// State that the writing thread shares with its handles.
#[derive(Debug)]
struct Shared {
    /// Number of requests for data that the thread has not begun to answer.
    pending: AtomicUsize,
    status: Mutex<Status>,
    queue: Mutex<WriteQueue>,
    backlog: Mutex<LedgerBacklog>,
    findings: LiveFindings,
    ended: EndedRuns,
    /// Time at which the thread started an operation that waits for the disk; `None` if no such operation is in progress.
    busy_since: Mutex<Option<Instant>>,
    stats: Arc<Stats>,
}

/// Changed runs that the aggregator has not sent to the writing thread yet.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct LedgerBacklog {
    pub runs: usize,
    /// Time since which the oldest changed run waits in the ledger; `None` if none waits.
    pub since: Option<Instant>,
    pub checkpoint: Duration,
}

/// The writing thread. [`Thread::end`] ends it.
#[derive(Debug)]
pub struct Thread(JoinHandle<()>, Sender<WriterRequest>);

impl Thread {
    /// Makes the thread write the waiting runs and end. Waits for its end at most for `longest`.
    pub fn end(self, longest: Duration) {
        let started = Instant::now();
        let _ = self.1.send(WriterRequest::End);
        while !self.0.is_finished() && started.elapsed() < longest {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl RunWriter {
    /// Starts the thread, which opens the store. Errors of the store are reported in [`Status`].
    pub fn start(path: PathBuf, retention: Retention, stats: Arc<Stats>) -> std::io::Result<(Self, Thread)> {
        let (requests, inbox) = channel();
        let shared = Arc::new(Shared {
            pending: AtomicUsize::default(),
            status: Mutex::new(Status { path: path.clone(), up: true, ..Status::default() }),
            queue: Mutex::new(WriteQueue::new(BYTES)),
            backlog: Mutex::default(),
            findings: LiveFindings::default(),
            ended: EndedRuns::default(),
            busy_since: Mutex::default(),
            stats,
        });
        let writer = WriterThread {
            path,
            store: None,
            open: HashMap::new(),
            retry: RETRY,
            next_try: Instant::now(),
            damage: DamagedStore::default(),
            sweeper: Sweeper::new(retention),
            heartbeat_ns: None,
            shared: Arc::clone(&shared),
        };
        let thread = std::thread::Builder::new().name("keeper".into()).spawn(move || writer.run(&inbox))?;
        let end = requests.clone();
        Ok((RunWriter { requests, shared }, Thread(thread, end)))
    }

    pub(crate) fn set_retention(&self, retention: Retention) {
        let _ = self.requests.send(WriterRequest::SetRetention(retention));
    }

    /// After all waiting runs are written, records in the store that unchanged runs are still open. The caller has sent all
    /// changes until `time_ns` (CLOCK_MONOTONIC).
    pub(crate) fn heartbeat(&self, time_ns: u64) {
        let _ = self.requests.send(WriterRequest::Heartbeat(time_ns));
    }

    pub(crate) fn set_queue_limit(&self, bytes: usize) {
        lock(&self.shared.queue).max_bytes = bytes;
    }

    /// Queues the newest state of a run. Never blocks. `is_final`: this state is final, or ends a part after which the next part
    /// follows. `uid` identifies the process's whole life. `requests` are added to the run's stream of requests.
    pub(crate) fn queue(&self, uid: String, run: Run, requests: Vec<Piece>, is_final: bool) {
        let new = QueuedRun::new(uid, run, requests, is_final);
        let mut queue = lock(&self.shared.queue);
        let lost = queue.push(new);
        let is_notified = std::mem::replace(&mut queue.is_notified, true);
        drop(queue);
        if !is_notified {
            // Sending fails only without the thread, which ends after this handle.
            let _ = self.requests.send(WriterRequest::Write);
        }
        self.shared.stats.add(Count::StoreDropped, lost);
    }

    /// Returns how many runs the queue accepts now. Further runs are dropped; dropped ended runs are counted. While the store
    /// fails, the queue accepts any number of ended runs, because the caller cannot keep them.
    pub(crate) fn room(&self) -> Room {
        let room = lock(&self.shared.queue).room();
        let fails = self.stuck().is_some() || !lock(&self.shared.status).up;
        if fails { Room { ended: usize::MAX, ..room } } else { room }
    }

    /// Records which runs wait in the ledger, for [`Status`].
    pub(crate) fn set_backlog(&self, backlog: LedgerBacklog) {
        *lock(&self.shared.backlog) = backlog;
    }

    /// Searches the store for data of an earlier daemon about a process that is new to this one. So its reports include the
    /// earlier data from the start. Sends a reply only if there is such data. Never blocks.
    pub(crate) fn request_earlier_counts(
        &self,
        uid: String,
        key: ProcessKey,
        reply: UnboundedSender<EarlierCounts>,
    ) {
        self.request(MAX_NEW_PROCESSES, WriterRequest::EarlierCounts { uid, key, reply });
    }

    /// Returns ended runs, newest first: those that wait to be written, then stored ones.
    pub(crate) async fn find(&self, filter: RunFilter, charge: &CpuCharge) -> Vec<Run> {
        let (reply, found) = oneshot::channel();
        self.request(MAX_REQUESTS, WriterRequest::Find { filter, charge: charge.clone(), reply });
        answer(found).await.unwrap_or_default()
    }

    /// Returns a stored run; `None` if it cannot be read, or not soon.
    pub(crate) async fn load(&self, id: RunId) -> Option<Run> {
        let (reply, run) = oneshot::channel();
        self.request(MAX_REQUESTS, WriterRequest::Load { id, reply });
        answer(run).await
    }

    /// Returns the runs of live processes, each joined with the data that an earlier daemon stored.
    pub(crate) async fn join_earlier(&self, runs: Vec<Run>) -> Vec<Run> {
        let (reply, earlier) = oneshot::channel();
        let keys = runs.iter().map(key_of).collect();
        self.request(MAX_REQUESTS, WriterRequest::EarlierRuns { keys, reply });
        let mut earlier = answer(earlier).await.unwrap_or_default().into_iter();
        let join =
            |run: Run| earlier.next().flatten().and_then(|earlier| earlier.joined(&run)).unwrap_or(run);
        runs.into_iter().map(join).collect()
    }

    /// Sends a request to the thread, or drops it if the thread is stuck or `max_pending` requests wait. A dropped request gets
    /// no answer.
    fn request(&self, max_pending: usize, request: WriterRequest) {
        if self.stuck().is_none() && self.shared.pending.load(Ordering::Relaxed) < max_pending {
            self.shared.pending.fetch_add(1, Ordering::Relaxed);
            let _ = self.requests.send(request);
        }
    }

    /// Returns the duration of the present disk operation if it is at least [`STUCK`].
    fn stuck(&self) -> Option<Duration> {
        let since = (*lock(&self.shared.busy_since))?;
        Some(since.elapsed()).filter(|time| *time >= STUCK)
    }

    /// Returns the findings of live processes. They are made when a run is written, so they are as old as the last checkpoint.
    /// While the store fails, they are made at each attempt to write.
    pub(crate) fn findings(&self) -> &LiveFindings {
        &self.shared.findings
    }

    /// Returns the processes that ended last.
    pub(crate) fn ended(&self) -> &EndedRuns {
        &self.shared.ended
    }

    /// Returns the state of the store and of the queue.
    pub fn status(&self) -> Status {
        let queue = lock(&self.shared.queue);
        let ((waiting, waiting_bytes), oldest) = (queue.size(), queue.oldest());
        drop(queue);
        let backlog = *lock(&self.shared.backlog);
        let oldest = oldest.max(backlog.since.map_or(Duration::ZERO, |since| since.elapsed()));
        Status {
            waiting,
            waiting_bytes,
            queued: backlog.runs,
            oldest,
            is_late: oldest > backlog.checkpoint * 2,
            stuck: self.stuck(),
            ..lock(&self.shared.status).clone()
        }
    }
}

fn key_of(run: &Run) -> ProcessKey {
    ProcessKey { pid: run.process.pid, start_ticks: run.process.start_ticks }
}

/// Returns the thread's answer; `None` if a disk delays it for longer than [`ANSWER`].
async fn answer<T>(reply: oneshot::Receiver<T>) -> Option<T> {
    tokio::time::timeout(ANSWER, reply).await.ok()?.ok()
}

struct WriterThread {
    path: PathBuf,
    store: Option<Store>,
    /// Runs whose final state is not written yet, keyed by the text (uid) that identifies a process's whole life.
    open: HashMap<String, OpenRun>,
    retry: Duration,
    next_try: Instant,
    damage: DamagedStore,
    sweeper: Sweeper,
    /// Time of the last [`heartbeat`](RunWriter::heartbeat) that is not in the store yet (ns, CLOCK_MONOTONIC).
    heartbeat_ns: Option<u64>,
    shared: Arc<Shared>,
}

impl WriterThread {
    fn run(mut self, inbox: &Receiver<WriterRequest>) {
        let mut next_trim = Instant::now() + FIRST_TRIM;
        self.write_all();
        loop {
            let next_try = (lock(&self.shared.queue).size().0 > 0).then_some(self.next_try);
            let next = next_try.map_or(self.sweeper.next, |next_try| next_try.min(self.sweeper.next));
            let wait = next.min(next_trim).saturating_duration_since(Instant::now());
            let mut request = match inbox.recv_timeout(wait) {
                Ok(request) => Some(request),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => Some(WriterRequest::End),
            };
            while let Some(next) = request {
                self.set_busy();
                if matches!(next, WriterRequest::End) {
                    return self.write_all();
                }
                self.handle(next);
                request = inbox.try_recv().ok();
            }
            self.set_busy();
            if Instant::now() >= self.next_try {
                self.write_all();
            }
            self.sweep();
            if Instant::now() >= next_trim {
                self.return_memory();
                next_trim = Instant::now() + TRIM_INTERVAL;
            }
            *lock(&self.shared.busy_since) = None;
        }
    }

    fn set_busy(&self) {
        *lock(&self.shared.busy_since) = Some(Instant::now());
    }

    fn handle(&mut self, request: WriterRequest) {
        use WriterRequest::{EarlierCounts, EarlierRuns, End, Find, Heartbeat, Load, SetRetention, Write};
        if matches!(request, Find { .. } | Load { .. } | EarlierRuns { .. } | EarlierCounts { .. }) {
            self.shared.pending.fetch_sub(1, Ordering::Relaxed);
        }
        match request {
            Write => lock(&self.shared.queue).is_notified = false,
            SetRetention(retention) => self.sweeper.set_retention(retention),
            Heartbeat(time_ns) => self.heartbeat_ns = Some(time_ns),
            // The client that sent the request has disconnected.
            Find { reply, .. } if reply.is_closed() => {}
            Find { filter, charge, reply } => {
                let _ = reply.send(charge.run_in_thread(|| self.find(&filter)));
            }
            Load { reply, .. } if reply.is_closed() => {}
            Load { id, reply } => {
                let run = self.store.as_ref().and_then(|store| store.load(id).ok());
                if let Some(run) = run {
                    let _ = reply.send(run);
                }
            }
            EarlierRuns { keys, reply } => {
                let open = |key| self.open.values().find(|open| open.key == Some(key));
                let earlier = |key| open(key).map(|open| open.earlier.clone());
                let _ = reply.send(keys.into_iter().map(earlier).collect());
            }
            EarlierCounts { uid, key, reply } => {
                if let Some(counts) = self.earlier_counts(uid, key) {
                    let _ = reply.send(counts);
                }
            }
            End => {}
        }
    }

    /// Returns the stored counts of a live process. If the store fails, they are read when the run is first written.
    fn earlier_counts(&mut self, uid: String, key: ProcessKey) -> Option<EarlierCounts> {
        let store = self.store.as_ref()?;
        if self.open.contains_key(&uid) {
            return None;
        }
        let earlier = earlier_run::of_live_process(store, &uid)?;
        let before = earlier.before.as_ref()?;
        let (events, lost) = (join_runs::received_records(before), before.coverage.lost);
        let program = before.coverage.programs.last().copied();
        self.open.insert(uid, OpenRun { key: Some(key), earlier, ..OpenRun::default() });
        Some(EarlierCounts { key, events, lost, program })
    }

    fn find(&self, filter: &RunFilter) -> Vec<Run> {
        let queued: Vec<Arc<QueuedRun>> = lock(&self.shared.queue).runs().rev().cloned().collect();
        // If a process's life is stored in parts, only its newest part is returned.
        let ended = queued.iter().filter(|queued| queued.is_final && !queued.is_rolled());
        let mut ended = ended.filter(|queued| filter(&queued.run)).map(|queued| (*queued.run).clone());
        let (mut found, mut bytes) = (Vec::new(), 0);
        let mut add = |run: Run| {
            bytes += run.weight();
            let has_room = found.len() < FOUND && bytes <= FOUND_BYTES;
            match has_room {
                true => found.push(run),
                false => self.shared.stats.add(Count::StoreNotShown, 1),
            }
            has_room
        };
        let is_full = !ended.all(&mut add);
        let Some(store) = self.store.as_ref().filter(|_| !is_full) else { return found };
        let known = queued.iter().map(|queued| queued.uid.as_str()).collect::<HashSet<_>>();
        for summary in store.newest_runs(SEARCHED).unwrap_or_default() {
            if !known.contains(summary.uid.as_str())
                && !matches!(summary.state, State::Open | State::Rolled { .. })
                && store.load_head(summary.id).is_ok_and(|head| filter(&head))
                && let Ok(run) = store.load(summary.id)
                && !add(run)
            {
                break;
            }
        }
        found
    }

    /// Writes the waiting runs until all are written or an error occurs.
    fn write_all(&mut self) {
        let result = self.try_write_all();
        if result.is_err() {
            let waiting: Vec<Arc<QueuedRun>> = lock(&self.shared.queue).runs().cloned().collect();
            waiting.iter().for_each(|queued| self.shared.findings.update(&queued.run));
        }
        let mut status = lock(&self.shared.status);
        match result {
            Ok(()) => {
                if !status.up {
                    tracing::info!(path = %self.path.display(), "the store works again");
                }
                (status.up, status.reason, status.remedy) = (true, None, None);
                (self.retry, self.next_try) = (RETRY, Instant::now());
            }
            Err(error) => {
                self.shared.stats.add(Count::StoreErrors, 1);
                let reason = error.to_string();
                if status.reason.as_ref() != Some(&reason) {
                    tracing::error!(%error, "runs are kept in memory until the store works again");
                }
                status.remedy = Some(damaged_store::remedy(&error));
                (status.up, status.reason) = (false, Some(reason));
                self.next_try = Instant::now() + self.retry;
                self.retry =
                    if damaged_store::may_pass(&error) { RETRY } else { (self.retry * 2).min(LONGEST) };
            }
        }
    }

    fn try_write_all(&mut self) -> Result<(), StoreError> {
        while let Err(error) = self.write_some() {
            if matches!(error, StoreError::DiskFull { .. }) {
                return Err(error);
            }
            // The next attempt opens the store again, because the file may have been replaced.
            self.store = None;
            self.open.values_mut().for_each(|open| open.id = None);
            if !self.damage.add_error(&error) {
                return Err(error);
            }
            let aside = damaged_store::set_aside(&self.path, &error)?;
            self.shared.ended.clear();
            self.shared.stats.add(Count::StoreSetAside, 1);
            lock(&self.shared.status).set_aside = Some(aside);
        }
        Ok(())
    }

    fn write_some(&mut self) -> Result<(), StoreError> {
        if self.store.is_none() {
            self.store.insert(Store::open(&self.path)?).open_log()?;
        }
        loop {
            // A newer state of a run replaces its waiting older one, so writes to a slow disk do not fall behind.
            let Some(store) = &mut self.store else { return Ok(()) };
            let Some(first) = lock(&self.shared.queue).next_to_write() else {
                return self.heartbeat_ns.take().map_or(Ok(()), |time_ns| store.heartbeat(time_ns));
            };
            let open = self.open.entry(first.uid.clone()).or_default();
            let began = Instant::now();
            match write(store, open, &first) {
                Ok(()) => {
                    self.shared.stats.observe(Timing::StoreWrite, began.elapsed());
                    self.shared.stats.add(Count::StoreWrites, 1);
                    self.damage = DamagedStore::default();
                }
                // The run is dropped, because a retry would fail in the same way.
                Err(error @ StoreError::InvalidRun { .. }) => {
                    tracing::error!(%error, "a run is left out");
                    self.shared.stats.add(Count::StoreDropped, 1);
                }
                Err(error) => return Err(error),
            }
            let (joined, id) = (open.earlier.joined(&first.run), open.id);
            self.shared.findings.update(joined.as_ref().unwrap_or(&first.run));
            lock(&self.shared.queue).finish_write(&first);
            open.key = Some(key_of(&first.run));
            if first.is_rolled() {
                *open = OpenRun { key: open.key, earlier: open.earlier.after_roll(), ..OpenRun::default() };
            } else if first.is_final {
                id.into_iter().for_each(|id| self.shared.ended.add(id, &first.run));
                self.open.remove(&first.uid);
            }
            self.set_busy();
        }
    }

    /// Returns freed memory, memory that SQLite keeps for later reads, and code that is not in use to the system.
    fn return_memory(&self) {
        if let Some(Err(error)) = self.store.as_ref().map(Store::release_memory) {
            tracing::debug!(%error, "SQLite keeps its memory");
        }
        trim_heap();
        unmap_code();
    }

    /// Deletes old runs for a limited time, if the interval since the last deletion has passed.
    fn sweep(&mut self) {
        if Instant::now() < self.sweeper.next {
            return;
        }
        let Some(store) = &mut self.store else { return self.sweeper.postpone() };
        match self.sweeper.turn(store, &self.shared.stats) {
            Ok(file_bytes) => {
                let mut status = lock(&self.shared.status);
                (status.bytes, status.is_too_large) = (file_bytes, self.sweeper.is_too_large);
                status.age_doubt = self.sweeper.doubt;
            }
            // Only logged: the next write gets the same error, and replaces the store if it is damaged.
            Err(error) => tracing::warn!(%error, "old runs could not be deleted"),
        }
    }
}

#[cfg(test)]
mod tests;
