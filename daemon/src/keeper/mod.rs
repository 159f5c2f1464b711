//! The thread that writes runs to the store. A disk may be slow, full or gone: the newest state of every run
//! waits here in memory, is written when the store works again, and can be asked for meanwhile.

mod lives;

use crate::stats::{Count, Stats};
use gpumem_runs::run::Run;
use gpumem_runs::store::{RunId, Store, StoreError};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Checkpoints on their way beyond this are left out: the next one says more.
const QUEUED: usize = 256;
/// Runs that may wait for a store that is out of order.
const WAITING: usize = 512;
/// A store that is out of order is tried again after this, doubled up to [`LONGEST`].
const RETRY: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);
/// Stored runs that a search looks into, newest first.
const SEARCHED: usize = 4096;
/// Runs that a search returns.
const FOUND: usize = 256;

/// A question to a thread that waits for a disk is given up after this.
const ANSWER: Duration = Duration::from_secs(2);

/// Which runs are wanted.
pub type Wanted = Box<dyn Fn(&Run) -> bool + Send>;

enum Job {
    Keep { uid: String, run: Box<Run>, over: bool },
    Find { wanted: Wanted, reply: oneshot::Sender<Vec<Run>> },
    Join { runs: Vec<Run>, reply: oneshot::Sender<Vec<Run>> },
    End,
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
    /// Runs that wait to be written.
    pub waiting: usize,
}

/// The handle; clones are the same keeper.
#[derive(Debug, Clone)]
pub struct Keeper {
    jobs: Sender<Job>,
    queued: Arc<AtomicUsize>,
    status: Arc<Mutex<Status>>,
}

/// Ends on [`Thread::end`].
#[derive(Debug)]
pub struct Thread(JoinHandle<()>, Sender<Job>);

impl Thread {
    /// Writes what waits, and ends; does not wait for that longer than so.
    pub fn end(self, longest: Duration) {
        let started = Instant::now();
        let _ = self.1.send(Job::End);
        while !self.0.is_finished() && started.elapsed() < longest {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Keeper {
    /// Starts the thread. The store is opened by it; what is wrong is told in [`Status`].
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(path: PathBuf, stats: Arc<Stats>) -> std::io::Result<(Self, Thread)> {
        let (jobs, inbox) = channel();
        let status = Status { path: path.clone(), up: true, ..Status::default() };
        let keeper = Keeper { jobs, queued: Arc::default(), status: Arc::new(Mutex::new(status)) };
        let desk = Desk {
            path,
            store: None,
            open: HashMap::new(),
            waiting: Vec::new(),
            retry: RETRY,
            next_try: Instant::now(),
            stats,
            status: Arc::clone(&keeper.status),
        };
        let queued = Arc::clone(&keeper.queued);
        let run = move || desk.run(&inbox, &queued);
        let thread = std::thread::Builder::new().name("keeper".into()).spawn(run)?;
        let end = keeper.jobs.clone();
        Ok((keeper, Thread(thread, end)))
    }

    /// Keeps the newest state of a run; `over`: nothing more will come. Never waits.
    pub fn keep(&self, uid: String, run: Run, over: bool) {
        if !over && self.queued.load(Ordering::Relaxed) >= QUEUED {
            return;
        }
        self.queued.fetch_add(1, Ordering::Relaxed);
        // The thread ends only after this handle.
        let _ = self.jobs.send(Job::Keep { uid, run: Box::new(run), over });
    }

    /// Runs that are over, newest first: those that wait, then those in the store.
    pub async fn find(&self, wanted: Wanted) -> Vec<Run> {
        let (reply, found) = oneshot::channel();
        self.queued.fetch_add(1, Ordering::Relaxed);
        let _ = self.jobs.send(Job::Find { wanted, reply });
        answer(found).await.unwrap_or_default()
    }

    /// Runs that go on, with what an earlier life of the daemon saw of them.
    pub async fn whole(&self, runs: Vec<Run>) -> Vec<Run> {
        let (reply, joined) = oneshot::channel();
        self.queued.fetch_add(1, Ordering::Relaxed);
        let _ = self.jobs.send(Job::Join { runs: runs.clone(), reply });
        answer(joined).await.unwrap_or(runs)
    }

    /// How the store is.
    pub fn status(&self) -> Status {
        lock(&self.status).clone()
    }
}

/// What the thread says, unless a disk holds it up: then views do without.
async fn answer(reply: oneshot::Receiver<Vec<Run>>) -> Option<Vec<Run>> {
    tokio::time::timeout(ANSWER, reply).await.ok()?.ok()
}

fn lock(status: &Mutex<Status>) -> MutexGuard<'_, Status> {
    status.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A run that is being written.
#[derive(Default)]
struct Open {
    /// Its place in the store; none while that is closed.
    id: Option<RunId>,
    /// This life has written to it.
    is_ours: bool,
    /// What an earlier life of the daemon had written.
    before: Option<Box<Run>>,
}

struct Waiting {
    uid: String,
    run: Box<Run>,
    over: bool,
}

/// The thread's own.
struct Desk {
    path: PathBuf,
    store: Option<Store>,
    open: HashMap<String, Open>,
    /// The newest state of each run that is not written yet, oldest first.
    waiting: Vec<Waiting>,
    retry: Duration,
    next_try: Instant,
    stats: Arc<Stats>,
    status: Arc<Mutex<Status>>,
}

impl Desk {
    fn run(mut self, inbox: &Receiver<Job>, queued: &AtomicUsize) {
        self.write_all();
        loop {
            let patience = if self.waiting.is_empty() {
                LONGEST
            } else {
                self.next_try.saturating_duration_since(Instant::now())
            };
            match inbox.recv_timeout(patience) {
                Ok(Job::End) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(job) => {
                    queued.fetch_sub(1, Ordering::Relaxed);
                    self.take(job);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if Instant::now() >= self.next_try {
                self.write_all();
            }
        }
        self.write_all();
    }

    fn take(&mut self, job: Job) {
        match job {
            Job::Keep { uid, run, over } => {
                match self.waiting.iter_mut().find(|waiting| waiting.uid == uid) {
                    Some(waiting) => (waiting.run, waiting.over) = (run, over),
                    None => self.waiting.push(Waiting { uid, run, over }),
                }
                if self.waiting.len() > WAITING {
                    self.waiting.remove(0);
                    self.stats.add(Count::StoreDropped, 1);
                }
            }
            Job::Find { wanted, reply } => {
                let _ = reply.send(self.find(&wanted));
            }
            Job::Join { runs, reply } => {
                let _ = reply.send(runs.into_iter().map(|run| self.whole(run)).collect());
            }
            Job::End => {}
        }
    }

    fn whole(&self, run: Run) -> Run {
        let key = |run: &Run| (run.process.pid, run.process.start_ticks);
        let mut before = self.open.values().filter_map(|open| open.before.as_ref());
        match before.find(|before| key(before) == key(&run)) {
            Some(before) => lives::joined(before, &run),
            None => run,
        }
    }

    fn find(&self, wanted: &Wanted) -> Vec<Run> {
        let mine = self.waiting.iter().rev().filter(|waiting| waiting.over);
        let mut found: Vec<Run> =
            mine.map(|waiting| (*waiting.run).clone()).filter(|run| wanted(run)).collect();
        let Some(store) = &self.store else { return found };
        let known = self.waiting.iter().map(|waiting| waiting.uid.as_str()).collect::<Vec<_>>();
        for summary in store.list().unwrap_or_default().into_iter().take(SEARCHED) {
            if found.len() >= FOUND {
                break;
            }
            if !known.contains(&summary.uid.as_str())
                && summary.state != gpumem_runs::run::State::Open
                && let Ok(run) = store.load(summary.id)
                && wanted(&run)
            {
                found.push(run);
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
                (status.up, status.reason) = (true, None);
                (self.retry, self.next_try) = (RETRY, Instant::now());
            }
            Err(error) => {
                self.stats.add(Count::StoreErrors, 1);
                let reason = error.to_string();
                if status.reason.as_ref() != Some(&reason) {
                    tracing::error!(%error, "runs are kept in memory until the store works again");
                }
                (status.up, status.reason) = (false, Some(reason));
                self.next_try = Instant::now() + self.retry;
                self.retry = (self.retry * 2).min(LONGEST);
            }
        }
        status.waiting = self.waiting.len();
    }

    fn try_write_all(&mut self) -> Result<(), StoreError> {
        if self.store.is_none() {
            self.store = Some(open(&self.path)?);
        }
        while let (Some(store), Some(first)) = (&mut self.store, self.waiting.first()) {
            match write(store, &mut self.open, first) {
                Ok(()) => self.stats.add(Count::StoreWrites, 1),
                // No later try would do better.
                Err(error @ StoreError::InvalidRun { .. }) => {
                    tracing::error!(%error, "a run is left out");
                    self.stats.add(Count::StoreDropped, 1);
                }
                Err(error) => {
                    if !matches!(error, StoreError::DiskFull { .. }) {
                        // Opened again at the next try: the file may have been replaced.
                        self.store = None;
                        self.open.values_mut().for_each(|open| open.id = None);
                    }
                    return Err(error);
                }
            }
            let done = self.waiting.remove(0);
            if done.over {
                self.open.remove(&done.uid);
            }
        }
        Ok(())
    }
}

/// Opens the store; one that is damaged is put aside, so that a new one can be begun.
fn open(path: &Path) -> Result<Store, StoreError> {
    match Store::open(path) {
        Err(error @ StoreError::Damaged { .. }) => {
            let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            let suffix = format!(".damaged-{}", seconds.map_or(0, |since| since.as_secs()));
            tracing::error!(%error, suffix, "the damaged store is put aside");
            for side in ["", "-wal", "-shm"] {
                let named = |end: &str| {
                    let mut name = path.as_os_str().to_owned();
                    name.push(end);
                    PathBuf::from(name)
                };
                // The side files need not be there; a main file that stays is reported by the next open.
                let _ = std::fs::rename(named(side), named(&format!("{suffix}{side}")));
            }
            Store::open(path)
        }
        result => result,
    }
}

fn write(store: &mut Store, open: &mut HashMap<String, Open>, of: &Waiting) -> Result<(), StoreError> {
    let known = open.entry(of.uid.clone()).or_default();
    let id = match known.id {
        Some(id) => id,
        None => begin(store, known, of)?,
    };
    let joined = known.before.as_ref().map(|before| lives::joined(before, &of.run));
    let run = joined.as_ref().unwrap_or(&of.run);
    let write = if of.over { Store::close } else { Store::checkpoint };
    match write(store, id, run) {
        // Somebody deleted it.
        Err(StoreError::UnknownRun { .. }) => {
            known.id = None;
            let id = begin(store, known, of)?;
            write(store, id, run)
        }
        result => result,
    }
}

/// The run's place in the store. One that is there already was begun by an earlier life of the daemon, or by this
/// one before the store broke.
fn begin(store: &mut Store, known: &mut Open, of: &Waiting) -> Result<RunId, StoreError> {
    let id = match store.begin(&of.run, &of.uid) {
        Err(StoreError::KnownUid { id, .. }) => {
            if !known.is_ours {
                known.before = Some(Box::new(store.load(id)?));
            }
            id
        }
        begun => begun?,
    };
    (known.id, known.is_ours) = (Some(id), true);
    Ok(id)
}
