//! The thread that writes runs to the store. A disk may be slow, full or missing. So the newest state of each run waits in
//! memory, where it can be read, and is written when the store works again.
//!
//! ```text
//! write_queue    runs that wait to be written
//! earlier_run    position of a run in the store, which an earlier daemon may have started
//! join_runs      joins a stored run with this daemon's run of the same process
//! damaged_store  distinguishes a damaged store from a disk problem, and replaces it
//! retention      deletes old runs, a few at a time
//! ```

mod damaged_store;
mod earlier_run;
mod join_runs;
mod retention;
mod write_queue;

pub(crate) use retention::{Doubt, Retention};
pub(crate) use write_queue::Room;

use crate::limits::user_share::CpuCharge;
use crate::memory::Spare;
use crate::stats::{Count, Stats, Timing};
use damaged_store::DamagedStore;
use earlier_run::{EarlierRun, OpenRun, write};
use gpumem_ledger::ProcessKey;
use gpumem_model::run::{Program, Run, State};
use gpumem_runs::store::{Newest, Store, StoreError};
use retention::Sweeper;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use write_queue::{QueuedRun, WriteQueue};

/// Maximum number of requests that wait for the thread; further ones are dropped without an answer.
const QUESTIONS: usize = 64;
/// Maximum number of new processes that wait to be searched in the store. Others are searched when they are first written.
const RECALLS: usize = 4096;
/// First delay before a failing store is tried again; doubled up to [`LONGEST`], unless a resource is missing.
const RETRY: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);
/// Maximum number of stored runs that a search reads, newest first.
const SEARCHED: usize = 4096;
/// Maximum number of runs that a search returns, and of their bytes.
const FOUND: usize = 256;
const FOUND_BYTES: usize = 32 << 20;

/// Timeout of a request to this thread, which may wait for a disk.
const ANSWER: Duration = Duration::from_secs(2);
/// Duration of a disk operation after which the thread counts as stuck: it gets no more requests, and `doctor` reports it.
const STUCK: Duration = Duration::from_secs(5);

/// Filter of a search: returns whether a run is wanted.
pub(crate) type Wanted = Box<dyn Fn(&Run) -> bool + Send>;

enum WriterRequest {
    /// The queue has runs that must be written.
    Write,
    Retain(Retention),
    /// All changes of runs until this time (ns, CLOCK_MONOTONIC) have been queued.
    Beat(u64),
    Find {
        wanted: Wanted,
        charge: CpuCharge,
        reply: oneshot::Sender<Vec<Run>>,
    },
    EarlierRun {
        keys: Vec<ProcessKey>,
        reply: oneshot::Sender<Vec<Option<EarlierRun>>>,
    },
    Recall {
        uid: String,
        key: ProcessKey,
        reply: UnboundedSender<Recalled>,
    },
    End,
}

/// Data about a process that an earlier daemon stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Recalled {
    /// The process whose data this is.
    pub key: ProcessKey,
    /// Number of ordered records that the earlier daemon received.
    pub events: u64,
    /// Number of ordered records that the earlier daemon counted as lost.
    pub lost: u64,
    /// Last program that the process ran, as far as the earlier daemon knew.
    pub program: Option<Program>,
}

/// State of the store and of the runs that wait for it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// Path of the store.
    pub path: PathBuf,
    /// Whether the last write succeeded, or none was tried.
    pub up: bool,
    /// Error of the last write, if it failed.
    pub reason: Option<String>,
    /// Remedy for the error in `reason`.
    pub remedy: Option<&'static str>,
    /// Number of runs that wait to be written.
    pub waiting: usize,
    /// Estimated memory of the runs that wait to be written, in bytes.
    pub waiting_bytes: usize,
    /// Number of changed runs that stay in the ledger, because too many wait to be written.
    pub queued: usize,
    /// Age of the oldest change that is not in the store. If the daemon is killed, changes up to this age are lost.
    pub oldest: Duration,
    /// Whether `oldest` is more than twice the interval for writing runs.
    pub is_late: bool,
    /// Duration of the present disk operation, if it is so long that the thread counts as stuck.
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
    jobs: Sender<WriterRequest>,
    asked: Arc<AtomicUsize>,
    status: Arc<Mutex<Status>>,
    shelf: Arc<Mutex<WriteQueue>>,
    queue: Arc<Mutex<Queue>>,
    busy: Arc<Mutex<Option<Instant>>>,
    stats: Arc<Stats>,
}

/// Changed runs that the aggregator has not handed over to the writing thread yet.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Queue {
    /// Number of these runs.
    pub runs: usize,
    /// Time since which the oldest of these runs waits.
    pub since: Option<Instant>,
    /// Interval for writing runs to the store.
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
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(path: PathBuf, retention: Retention, stats: Arc<Stats>) -> std::io::Result<(Self, Thread)> {
        let (jobs, inbox) = channel();
        let status = Status { path: path.clone(), up: true, ..Status::default() };
        let status = Arc::new(Mutex::new(status));
        let keeper = RunWriter {
            jobs,
            asked: Arc::default(),
            status,
            shelf: Arc::default(),
            queue: Arc::default(),
            busy: Arc::default(),
            stats: Arc::clone(&stats),
        };
        let desk = WriterThread {
            path,
            store: None,
            open: HashMap::new(),
            shelf: Arc::clone(&keeper.shelf),
            busy: Arc::clone(&keeper.busy),
            retry: RETRY,
            next_try: Instant::now(),
            broken: DamagedStore::default(),
            sweeper: Sweeper::new(retention),
            beat_ns: None,
            stats,
            status: Arc::clone(&keeper.status),
        };
        let asked = Arc::clone(&keeper.asked);
        let run = move || desk.run(&inbox, &asked);
        let thread = std::thread::Builder::new().name("keeper".into()).spawn(run)?;
        let end = keeper.jobs.clone();
        Ok((keeper, Thread(thread, end)))
    }

    /// Sets the rules for deleting runs.
    pub(crate) fn retain(&self, retention: Retention) {
        let _ = self.jobs.send(WriterRequest::Retain(retention));
    }

    /// Tells the store that runs without changes are still open, once all waiting runs are written. The caller has handed over
    /// all changes until `time_ns` (CLOCK_MONOTONIC).
    pub(crate) fn beat(&self, time_ns: u64) {
        let _ = self.jobs.send(WriterRequest::Beat(time_ns));
    }

    /// Sets the limit of memory for waiting runs, in bytes.
    pub(crate) fn limit_waiting(&self, bytes: usize) {
        lock(&self.shelf).most = bytes;
    }

    /// Queues the newest state of a run. Never blocks. `over`: this state is final, or ends a part after which the next part
    /// follows. `uid` identifies the process's whole life.
    pub(crate) fn keep(&self, uid: String, run: Run, over: bool) {
        let new = QueuedRun::new(uid, run, over);
        let mut shelf = lock(&self.shelf);
        let lost = shelf.put(new);
        let is_told = std::mem::replace(&mut shelf.is_told, true);
        drop(shelf);
        if !is_told {
            // Sending fails only without the thread, which ends after this handle.
            let _ = self.jobs.send(WriterRequest::Write);
        }
        self.stats.add(Count::StoreDropped, lost);
    }

    /// Returns how many runs can be handed over now. Further ones are dropped; dropped ended runs are counted. While the store
    /// fails, any number of ended runs can be handed over, because the caller cannot keep them.
    pub(crate) fn room(&self) -> Room {
        let room = lock(&self.shelf).room();
        let is_out_of_order = self.stuck().is_some() || !lock(&self.status).up;
        if is_out_of_order { Room { over: usize::MAX, ..room } } else { room }
    }

    /// Records which runs wait in the ledger, for [`Status`].
    pub(crate) fn note_queue(&self, queue: Queue) {
        *lock(&self.queue) = queue;
    }

    /// Searches the store for data of an earlier daemon about a process that is new to this one. So its reports include the
    /// earlier data from the start. Sends a reply only if there is such data. Never blocks.
    pub(crate) fn recall(&self, uid: String, key: ProcessKey, reply: UnboundedSender<Recalled>) {
        self.ask(RECALLS, WriterRequest::Recall { uid, key, reply });
    }

    /// Returns ended runs, newest first: those that wait to be written, then stored ones.
    pub(crate) async fn find(&self, wanted: Wanted, charge: &CpuCharge) -> Vec<Run> {
        let (reply, found) = oneshot::channel();
        self.ask(QUESTIONS, WriterRequest::Find { wanted, charge: charge.clone(), reply });
        answer(found).await.unwrap_or_default()
    }

    /// Returns the runs of live processes, each joined with the data that an earlier daemon stored.
    pub(crate) async fn whole(&self, runs: Vec<Run>) -> Vec<Run> {
        let (reply, earlier) = oneshot::channel();
        let keys = runs.iter().map(key_of).collect();
        self.ask(QUESTIONS, WriterRequest::EarlierRun { keys, reply });
        let mut earlier = answer(earlier).await.unwrap_or_default().into_iter();
        let joined = |run: Run| match earlier.next().flatten() {
            Some(earlier) => earlier.joined(&run).unwrap_or(run),
            None => run,
        };
        runs.into_iter().map(joined).collect()
    }

    /// Sends a request to the thread, or drops it if the thread is stuck or `most` requests wait. A dropped request gets no
    /// answer.
    fn ask(&self, most: usize, question: WriterRequest) {
        if self.stuck().is_some() || self.asked.load(Ordering::Relaxed) >= most {
            return;
        }
        self.asked.fetch_add(1, Ordering::Relaxed);
        let _ = self.jobs.send(question);
    }

    fn stuck(&self) -> Option<Duration> {
        let since = (*lock(&self.busy))?;
        Some(since.elapsed()).filter(|time| *time >= STUCK)
    }

    /// Returns the state of the store and of the queue.
    pub fn status(&self) -> Status {
        let shelf = lock(&self.shelf);
        let ((waiting, waiting_bytes), oldest) = (shelf.load(), shelf.oldest());
        drop(shelf);
        let queue = *lock(&self.queue);
        let oldest = oldest.max(queue.since.map_or(Duration::ZERO, |since| since.elapsed()));
        Status {
            waiting,
            waiting_bytes,
            queued: queue.runs,
            oldest,
            is_late: oldest > queue.checkpoint * 2,
            stuck: self.stuck(),
            ..lock(&self.status).clone()
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

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// State that only the writing thread uses.
struct WriterThread {
    path: PathBuf,
    store: Option<Store>,
    /// Runs that are being written, by the uid of the process's life.
    open: HashMap<String, OpenRun>,
    shelf: Arc<Mutex<WriteQueue>>,
    /// Time at which the thread started an operation that waits for the disk; `None` if it is in none.
    busy: Arc<Mutex<Option<Instant>>>,
    retry: Duration,
    next_try: Instant,
    broken: DamagedStore,
    sweeper: Sweeper,
    /// Time of the last [`beat`](RunWriter::beat) that is not in the store yet (ns, CLOCK_MONOTONIC).
    beat_ns: Option<u64>,
    stats: Arc<Stats>,
    status: Arc<Mutex<Status>>,
}

impl WriterThread {
    fn run(mut self, inbox: &Receiver<WriterRequest>, asked: &AtomicUsize) {
        let mut spare = Spare::new();
        self.write_all();
        loop {
            let next_try = (lock(&self.shelf).load().0 > 0).then_some(self.next_try);
            let next = [next_try, Some(self.sweeper.next)].into_iter().flatten().min();
            let patience =
                next.map_or(LONGEST, |next| next.saturating_duration_since(Instant::now())).min(LONGEST);
            let mut job = match inbox.recv_timeout(patience) {
                Ok(job) => Some(job),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => Some(WriterRequest::End),
            };
            let mut is_over = false;
            while let Some(next) = job {
                *lock(&self.busy) = Some(Instant::now());
                is_over = matches!(next, WriterRequest::End);
                if is_over {
                    break;
                }
                if matches!(
                    next,
                    WriterRequest::Find { .. }
                        | WriterRequest::EarlierRun { .. }
                        | WriterRequest::Recall { .. }
                ) {
                    asked.fetch_sub(1, Ordering::Relaxed);
                }
                self.take(next);
                job = inbox.try_recv().ok();
            }
            if is_over {
                break;
            }
            *lock(&self.busy) = Some(Instant::now());
            if Instant::now() >= self.next_try {
                self.write_all();
            }
            self.sweep();
            spare.give_back();
            *lock(&self.busy) = None;
        }
        self.write_all();
    }

    fn take(&mut self, job: WriterRequest) {
        match job {
            WriterRequest::Write => lock(&self.shelf).is_told = false,
            WriterRequest::Retain(retention) => self.sweeper.retain(retention),
            WriterRequest::Beat(time_ns) => self.beat_ns = Some(time_ns),
            // The client that sent the request has disconnected.
            WriterRequest::Find { reply, .. } if reply.is_closed() => {}
            WriterRequest::Find { wanted, charge, reply } => {
                let _ = reply.send(charge.run_in_thread(|| self.find(&wanted)));
            }
            WriterRequest::EarlierRun { keys, reply } => {
                let _ = reply.send(keys.into_iter().map(|key| self.earlier(key)).collect());
            }
            WriterRequest::Recall { uid, key, reply } => {
                if let Some((events, lost, program)) = self.recall(uid) {
                    let _ = reply.send(Recalled { key, events, lost, program });
                }
            }
            WriterRequest::End => {}
        }
    }

    /// Returns the stored data of a live process. If the store fails, the data is read when the run is first written.
    fn recall(&mut self, uid: String) -> Option<(u64, u64, Option<Program>)> {
        let store = self.store.as_ref()?;
        if self.open.contains_key(&uid) {
            return None;
        }
        let Newest { id, part, is_rolled } = store.newest(&uid).ok()??;
        let before = Arc::new(store.load(id).ok()?);
        // The final run of a short process was written before this request, so there is nothing to continue.
        if matches!(before.state, State::Closed { .. }) {
            return None;
        }
        let heard = join_runs::booked_records(&before);
        let earlier = EarlierRun { part: part + u32::from(is_rolled), before: Some(before) };
        self.open.insert(uid, OpenRun { earlier, ..OpenRun::default() });
        Some(heard)
    }

    fn earlier(&self, key: ProcessKey) -> Option<EarlierRun> {
        let is_it =
            |earlier: &&EarlierRun| earlier.before.as_deref().is_some_and(|before| key_of(before) == key);
        self.open.values().map(|open| &open.earlier).find(is_it).cloned()
    }

    fn find(&self, wanted: &Wanted) -> Vec<Run> {
        let mine: Vec<Arc<QueuedRun>> = lock(&self.shelf).all().rev().cloned().collect();
        // If a process's life is stored in parts, only its newest part is returned.
        let over = mine.iter().filter(|waiting| waiting.over && !waiting.is_rolled());
        let mut over = over.filter(|waiting| wanted(&waiting.run)).map(|waiting| (*waiting.run).clone());
        let (mut found, mut bytes) = (Vec::new(), 0);
        let mut stays = |run: Run| {
            bytes += run.weight();
            let has_room = found.len() < FOUND && bytes <= FOUND_BYTES;
            match has_room {
                true => found.push(run),
                false => self.stats.add(Count::StoreNotShown, 1),
            }
            has_room
        };
        let is_full = !over.all(&mut stays);
        let Some(store) = self.store.as_ref().filter(|_| !is_full) else { return found };
        let known = mine.iter().map(|waiting| waiting.uid.as_str()).collect::<HashSet<_>>();
        for summary in store.newest_runs(SEARCHED).unwrap_or_default() {
            if !known.contains(summary.uid.as_str())
                && !matches!(summary.state, State::Open | State::Rolled { .. })
                && store.load_head(summary.id).is_ok_and(|head| wanted(&head))
                && let Ok(run) = store.load(summary.id)
                && !stays(run)
            {
                break;
            }
        }
        found
    }

    /// Writes the waiting runs until all are written or an error occurs.
    fn write_all(&mut self) {
        let result = self.try_write_all();
        let mut status = lock(&self.status);
        match result {
            Ok(()) => {
                if !status.up {
                    tracing::info!(path = %self.path.display(), "the store works again");
                }
                (status.up, status.reason, status.remedy) = (true, None, None);
                (self.retry, self.next_try) = (RETRY, Instant::now());
            }
            Err(error) => {
                self.stats.add(Count::StoreErrors, 1);
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
        loop {
            let error = match self.write_some() {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if matches!(error, StoreError::DiskFull { .. }) {
                return Err(error);
            }
            // Closes the store. The next attempt opens it again, because the file may have been replaced.
            self.close();
            if !self.broken.note_damage(&error) {
                return Err(error);
            }
            let aside = damaged_store::set_aside(&self.path, &error)?;
            self.stats.add(Count::StoreSetAside, 1);
            lock(&self.status).set_aside = Some(aside);
        }
    }

    fn close(&mut self) {
        self.store = None;
        self.open.values_mut().for_each(|open| open.id = None);
    }

    fn write_some(&mut self) -> Result<(), StoreError> {
        if self.store.is_none() {
            self.store.insert(Store::open(&self.path)?).open_log()?;
        }
        loop {
            // A newer state of a run replaces its waiting older one, so writes to a slow disk do not fall behind.
            let Some(store) = &mut self.store else { return Ok(()) };
            let Some(first) = lock(&self.shelf).first() else {
                return self.beat_ns.take().map_or(Ok(()), |time_ns| store.beat(time_ns));
            };
            let open = self.open.entry(first.uid.clone()).or_default();
            let began = Instant::now();
            match write(store, open, &first) {
                Ok(()) => {
                    self.stats.observe(Timing::StoreWrite, began.elapsed());
                    self.stats.add(Count::StoreWrites, 1);
                    self.broken = DamagedStore::default();
                }
                // The run is dropped, because a retry would fail in the same way.
                Err(error @ StoreError::InvalidRun { .. }) => {
                    tracing::error!(%error, "a run is left out");
                    self.stats.add(Count::StoreDropped, 1);
                }
                Err(error) => return Err(error),
            }
            lock(&self.shelf).done(&first);
            *lock(&self.busy) = Some(Instant::now());
            if first.over {
                self.open.remove(&first.uid);
            }
        }
    }

    /// Deletes old runs for a limited time, if the interval since the last deletion has passed.
    fn sweep(&mut self) {
        if Instant::now() < self.sweeper.next {
            return;
        }
        let Some(store) = &mut self.store else { return self.sweeper.put_off() };
        match self.sweeper.turn(store, &self.stats) {
            Ok(swept) => {
                let mut status = lock(&self.status);
                (status.bytes, status.is_too_large) = (swept.file_bytes, swept.is_too_large);
                status.age_doubt = swept.doubt;
            }
            // Only logged: the next write gets the same error, and replaces the store if it is damaged.
            Err(error) => tracing::warn!(%error, "old runs could not be deleted"),
        }
    }
}

#[cfg(test)]
mod tests;
