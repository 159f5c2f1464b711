//! The thread that writes runs to the store. A disk may be slow, full or gone: the newest state of every run
//! waits here in memory, is written when the store works again, and can be asked for meanwhile.
//!
//! ```text
//! write_queue    runs that wait to be written
//! earlier_run    a run's place in the store, which an earlier life of the daemon may have begun
//! join_runs      joins what two lives of the daemon saw of one process
//! damaged_store  tells a damaged store from a disk in trouble, and sets it aside
//! retention      deletes old runs, a little at a time
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
use crate::stats::{Count, Stats};
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

/// Questions that wait for the thread; who asks beyond that does without an answer.
const QUESTIONS: usize = 64;
/// New processes of which the store is asked; it is asked again when they are first written.
const RECALLS: usize = 4096;
/// A store that is out of order is tried again after this, doubled up to [`LONGEST`] where it is not for want of something.
const RETRY: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);
/// Stored runs that a search looks into, newest first.
const SEARCHED: usize = 4096;
/// Runs that a search returns, and what they take.
const FOUND: usize = 256;
const FOUND_BYTES: usize = 32 << 20;

/// A question to a thread that waits for a disk is given up after this,
const ANSWER: Duration = Duration::from_secs(2);
/// and when it has waited for longer, nobody asks, and `doctor` says so.
const STUCK: Duration = Duration::from_secs(5);

/// Which runs are wanted.
pub(crate) type Wanted = Box<dyn Fn(&Run) -> bool + Send>;

enum WriterRequest {
    /// Something is on the shelf.
    Write,
    Retain(Retention),
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

/// What an earlier life of the daemon had heard of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Recalled {
    /// Which.
    pub key: ProcessKey,
    /// Ordered records that were booked then.
    pub events: u64,
    /// And lost.
    pub lost: u64,
    /// The program that spoke last.
    pub program: Option<Program>,
}

/// How the store is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// Where it is.
    pub path: PathBuf,
    /// The last write worked, or there was none.
    pub up: bool,
    /// Why not.
    pub reason: Option<String>,
    /// What to do about it.
    pub remedy: Option<&'static str>,
    /// Runs that wait to be written.
    pub waiting: usize,
    /// Bytes that they take in memory, about.
    pub waiting_bytes: usize,
    /// Runs with news that wait with the ledger, because too many wait here.
    pub queued: usize,
    /// Age of the oldest news of a run that is not in the store: what a kill would cost.
    pub oldest: Duration,
    /// It is more than twice as old as it should get.
    pub is_late: bool,
    /// So long a disk has not answered, where that is longer than it should be.
    pub stuck: Option<Duration>,
    /// Size of the file, as it was last looked at.
    pub bytes: u64,
    /// It is larger than it may be, and nothing in it may be deleted.
    pub is_too_large: bool,
    /// Why no run is deleted for its age, though some are old by the clock.
    pub age_doubt: Option<Doubt>,
    /// Where the last damaged store is now.
    pub set_aside: Option<PathBuf>,
}

/// The handle; clones are handles of the same thread.
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

/// Runs with news that the owner of the ledger has not handed over yet.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Queue {
    /// How many.
    pub runs: usize,
    /// Since when the oldest of them waits.
    pub since: Option<Instant>,
    /// How often runs are to be written.
    pub checkpoint: Duration,
}

/// Ends on [`Thread::end`].
#[derive(Debug)]
pub struct Thread(JoinHandle<()>, Sender<WriterRequest>);

impl Thread {
    /// Writes what waits, and ends; does not wait for that longer than so.
    pub fn end(self, longest: Duration) {
        let started = Instant::now();
        let _ = self.1.send(WriterRequest::End);
        while !self.0.is_finished() && started.elapsed() < longest {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl RunWriter {
    /// Starts the thread. The store is opened by it; what is wrong is told in [`Status`].
    ///
    /// # Errors
    /// No thread can be started.
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
            stats,
            status: Arc::clone(&keeper.status),
        };
        let asked = Arc::clone(&keeper.asked);
        let run = move || desk.run(&inbox, &asked);
        let thread = std::thread::Builder::new().name("keeper".into()).spawn(run)?;
        let end = keeper.jobs.clone();
        Ok((keeper, Thread(thread, end)))
    }

    /// What is kept from now on.
    pub(crate) fn retain(&self, retention: Retention) {
        let _ = self.jobs.send(WriterRequest::Retain(retention));
    }

    /// What runs that wait for the store may take of the memory from now on.
    pub(crate) fn limit_waiting(&self, bytes: usize) {
        lock(&self.shelf).most = bytes;
    }

    /// Keeps the newest state of a run; `over`: nothing more will come, or if it has rolled, the next part. `uid` is that of
    /// its life. Never waits.
    pub(crate) fn keep(&self, uid: String, run: Run, over: bool) {
        let new = QueuedRun::new(uid, run, over);
        let mut shelf = lock(&self.shelf);
        let lost = shelf.put(new);
        let is_told = std::mem::replace(&mut shelf.is_told, true);
        drop(shelf);
        if !is_told {
            // The thread ends only after this handle.
            let _ = self.jobs.send(WriterRequest::Write);
        }
        self.stats.add(Count::StoreDropped, lost);
    }

    /// How many runs can be handed over now. More are dropped, and counted if they are over. A store that is out of order
    /// takes any number that is over: its owner must not keep them.
    pub(crate) fn room(&self) -> Room {
        let room = lock(&self.shelf).room();
        let is_out_of_order = self.stuck().is_some() || !lock(&self.status).up;
        if is_out_of_order { Room { over: usize::MAX, ..room } } else { room }
    }

    /// Notes what waits with the owner of the ledger.
    pub(crate) fn note_queue(&self, queue: Queue) {
        *lock(&self.queue) = queue;
    }

    /// Looks for what an earlier life of the daemon knew of a process that is new to this one, so that its reports have that
    /// from now on. Says it if there is something. Never waits.
    pub(crate) fn recall(&self, uid: String, key: ProcessKey, reply: UnboundedSender<Recalled>) {
        self.ask(RECALLS, WriterRequest::Recall { uid, key, reply });
    }

    /// Runs that are over, newest first: those that wait, then those in the store.
    pub(crate) async fn find(&self, wanted: Wanted, charge: &CpuCharge) -> Vec<Run> {
        let (reply, found) = oneshot::channel();
        self.ask(QUESTIONS, WriterRequest::Find { wanted, charge: charge.clone(), reply });
        answer(found).await.unwrap_or_default()
    }

    /// Runs that go on, with what an earlier life of the daemon saw of them.
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

    /// A question that is not asked is one whose answer never comes.
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

    /// How the store is.
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

/// What the thread says, unless a disk holds it up: then views do without.
async fn answer<T>(reply: oneshot::Receiver<T>) -> Option<T> {
    tokio::time::timeout(ANSWER, reply).await.ok()?.ok()
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The thread's own.
struct WriterThread {
    path: PathBuf,
    store: Option<Store>,
    /// By the uid of the life.
    open: HashMap<String, OpenRun>,
    shelf: Arc<Mutex<WriteQueue>>,
    /// Since when it has done something that may take as long as a disk takes.
    busy: Arc<Mutex<Option<Instant>>>,
    retry: Duration,
    next_try: Instant,
    broken: DamagedStore,
    sweeper: Sweeper,
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
            // Who asked has gone away.
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

    /// What is stored of the life that goes on. A store that cannot say it now is asked again by the first write.
    fn recall(&mut self, uid: String) -> Option<(u64, u64, Option<Program>)> {
        let store = self.store.as_ref()?;
        if self.open.contains_key(&uid) {
            return None;
        }
        let Newest { id, part, is_rolled } = store.newest(&uid).ok()??;
        let before = Arc::new(store.load(id).ok()?);
        // It lived so briefly that its run was written, and over, before this question came: nothing more will.
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
        // Of a life in parts the newest part speaks.
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

    /// Writes what waits, until something goes wrong.
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
            // Opened again at the next try: the file may have been replaced.
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
            self.store = Some(Store::open(&self.path)?);
        }
        loop {
            // What is newer takes the place of what is older while that waits: who is slow must not fall behind.
            let Some(first) = lock(&self.shelf).first() else { return Ok(()) };
            let Some(store) = &mut self.store else { return Ok(()) };
            let open = self.open.entry(first.uid.clone()).or_default();
            match write(store, open, &first) {
                Ok(()) => {
                    self.stats.add(Count::StoreWrites, 1);
                    self.broken = DamagedStore::default();
                }
                // No later try would do better.
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

    /// A turn of what retention has to do, if it is due.
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
            // Writes will tell of it, and set the store aside if it is damaged.
            Err(error) => tracing::warn!(%error, "old runs could not be deleted"),
        }
    }
}

#[cfg(test)]
mod tests;
