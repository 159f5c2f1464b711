//! The thread that writes runs to the store. A disk may be slow, full or gone: the newest state of every run
//! waits here in memory, is written when the store works again, and can be asked for meanwhile.
//!
//! ```text
//! lives       a run that an earlier life of the daemon began
//! aside       a store that is damaged
//! retention   what is deleted, a little at a time
//! ```

mod aside;
mod lives;
mod retention;

pub use retention::Retention;

use crate::stats::{Count, Stats};
use aside::Broken;
use gpumem_ledger::ProcessKey;
use gpumem_runs::run::{Run, State};
use gpumem_runs::store::{Newest, RunId, Store, StoreError};
use retention::Sweeper;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

/// Checkpoints on their way beyond this are left out: the next one says more.
const QUEUED: usize = 256;
/// Runs that may wait for a store that is out of order.
const WAITING: usize = 512;
/// Runs of which no more is heard before they are written.
const AT_ONCE: usize = WAITING / 2;
/// A store that is out of order is tried again after this, doubled up to [`LONGEST`] where it is not for want of something.
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
    Retain(Retention),
    Find { wanted: Wanted, reply: oneshot::Sender<Vec<Run>> },
    Join { runs: Vec<Run>, reply: oneshot::Sender<Vec<Run>> },
    Recall { uid: String, key: ProcessKey, reply: UnboundedSender<Recalled> },
    End,
}

/// What an earlier life of the daemon had heard of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recalled {
    /// Which.
    pub key: ProcessKey,
    /// Ordered records that were booked then.
    pub events: u64,
    /// And lost.
    pub lost: u64,
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
    /// Size of the file, as it was last looked at.
    pub bytes: u64,
    /// It is larger than it may be, and nothing in it may be deleted.
    pub is_too_large: bool,
    /// Where the last damaged store is now.
    pub set_aside: Option<PathBuf>,
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
    pub fn start(path: PathBuf, retention: Retention, stats: Arc<Stats>) -> std::io::Result<(Self, Thread)> {
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
            broken: Broken::default(),
            sweeper: Sweeper::new(retention),
            stats,
            status: Arc::clone(&keeper.status),
        };
        let queued = Arc::clone(&keeper.queued);
        let run = move || desk.run(&inbox, &queued);
        let thread = std::thread::Builder::new().name("keeper".into()).spawn(run)?;
        let end = keeper.jobs.clone();
        Ok((keeper, Thread(thread, end)))
    }

    /// What is kept from now on.
    pub fn retain(&self, retention: Retention) {
        self.queued.fetch_add(1, Ordering::Relaxed);
        let _ = self.jobs.send(Job::Retain(retention));
    }

    /// Keeps the newest state of a run; `over`: nothing more will come, or if it has rolled, the next part. `uid` is that of
    /// its life. Never waits.
    pub fn keep(&self, uid: String, run: Run, over: bool) {
        // Large ones wait alone.
        if !over && self.queued.load(Ordering::Relaxed) >= QUEUED / (1 + run.cells.len() / 1024) {
            return;
        }
        self.queued.fetch_add(1, Ordering::Relaxed);
        // The thread ends only after this handle.
        let _ = self.jobs.send(Job::Keep { uid, run: Box::new(run), over });
    }

    /// Looks for what an earlier life of the daemon knew of a process that is new to this one, so that its reports have that
    /// from now on. Says it if there is something. Never waits.
    pub fn recall(&self, uid: String, key: ProcessKey, reply: UnboundedSender<Recalled>) {
        self.queued.fetch_add(1, Ordering::Relaxed);
        let _ = self.jobs.send(Job::Recall { uid, key, reply });
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
    /// Which part of its life it is.
    part: u32,
    /// This life has written to it.
    is_ours: bool,
    /// What an earlier life of the daemon had written: of this part, or if it has rolled, of the one before.
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
    /// By the uid of the life.
    open: HashMap<String, Open>,
    /// The newest state of each run that is not written yet, oldest first.
    waiting: Vec<Waiting>,
    retry: Duration,
    next_try: Instant,
    broken: Broken,
    sweeper: Sweeper,
    stats: Arc<Stats>,
    status: Arc<Mutex<Status>>,
}

impl Desk {
    fn run(mut self, inbox: &Receiver<Job>, queued: &AtomicUsize) {
        self.write_all();
        loop {
            let next_try = (!self.waiting.is_empty()).then_some(self.next_try);
            let next = [next_try, Some(self.sweeper.next)].into_iter().flatten().min();
            let patience =
                next.map_or(LONGEST, |next| next.saturating_duration_since(Instant::now())).min(LONGEST);
            let mut job = match inbox.recv_timeout(patience) {
                Ok(job) => Some(job),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => Some(Job::End),
            };
            // What is newer takes the place of what is older before anything is written: who is slow must not fall behind.
            let mut is_over = false;
            while let Some(next) = job {
                is_over = matches!(next, Job::End);
                if is_over {
                    break;
                }
                queued.fetch_sub(1, Ordering::Relaxed);
                self.take(next);
                job = if self.waiting.len() < AT_ONCE { inbox.try_recv().ok() } else { None };
            }
            if is_over {
                break;
            }
            if Instant::now() >= self.next_try {
                self.write_all();
            }
            self.sweep();
        }
        self.write_all();
    }

    fn take(&mut self, job: Job) {
        match job {
            Job::Keep { uid, run, over } => self.wait(Waiting { uid, run, over }),
            Job::Retain(retention) => self.sweeper = Sweeper::new(retention),
            Job::Find { wanted, reply } => {
                let _ = reply.send(self.find(&wanted));
            }
            Job::Join { runs, reply } => {
                let _ = reply.send(runs.into_iter().map(|run| self.whole(run)).collect());
            }
            Job::Recall { uid, key, reply } => {
                if let Some((events, lost)) = self.recall(uid) {
                    let _ = reply.send(Recalled { key, events, lost });
                }
            }
            Job::End => {}
        }
    }

    /// What is stored of the life that goes on. A store that cannot say it now is asked again by the first write.
    fn recall(&mut self, uid: String) -> Option<(u64, u64)> {
        let store = self.store.as_ref()?;
        if self.open.contains_key(&uid) {
            return None;
        }
        let Newest { id, part, is_rolled } = store.newest(&uid).ok()??;
        let before = Box::new(store.load(id).ok()?);
        let heard = lives::heard(&before);
        let part = part + u32::from(is_rolled);
        self.open.insert(uid, Open { part, before: Some(before), ..Open::default() });
        Some(heard)
    }

    /// The newest state of a part takes the place of an older one; a part that has rolled is not the next one.
    fn wait(&mut self, new: Waiting) {
        let is_rolled = |waiting: &Waiting| matches!(waiting.run.state, State::Rolled { .. });
        match self.waiting.iter_mut().find(|waiting| waiting.uid == new.uid && !is_rolled(waiting)) {
            Some(waiting) => *waiting = new,
            None => self.waiting.push(new),
        }
        if self.waiting.len() > WAITING {
            // One that goes on will come again.
            let living = self.waiting.iter().position(|waiting| !waiting.over);
            self.waiting.remove(living.unwrap_or(0));
            self.stats.add(Count::StoreDropped, u64::from(living.is_none()));
        }
    }

    fn whole(&self, run: Run) -> Run {
        let key = |run: &Run| (run.process.pid, run.process.start_ticks);
        let mut open = self.open.values().filter(|open| open.before.is_some());
        match open.find(|open| open.before.as_deref().is_some_and(|before| key(before) == key(&run))) {
            Some(open) => open.joined(&run).unwrap_or(run),
            None => run,
        }
    }

    fn find(&self, wanted: &Wanted) -> Vec<Run> {
        let is_rolled = |run: &Run| matches!(run.state, State::Rolled { .. });
        // Of a life in parts the newest part speaks.
        let mine = self.waiting.iter().rev().filter(|waiting| waiting.over && !is_rolled(&waiting.run));
        let mut found: Vec<Run> =
            mine.map(|waiting| (*waiting.run).clone()).filter(|run| wanted(run)).collect();
        let Some(store) = &self.store else { return found };
        let known = self.waiting.iter().map(|waiting| waiting.uid.as_str()).collect::<Vec<_>>();
        for summary in store.list().unwrap_or_default().into_iter().take(SEARCHED) {
            if found.len() >= FOUND {
                break;
            }
            if !known.contains(&summary.uid.as_str())
                && !matches!(summary.state, State::Open | State::Rolled { .. })
                && store.load_head(summary.id).is_ok_and(|head| wanted(&head))
                && let Ok(run) = store.load(summary.id)
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
                (status.up, status.reason, status.remedy) = (true, None, None);
                (self.retry, self.next_try) = (RETRY, Instant::now());
            }
            Err(error) => {
                self.stats.add(Count::StoreErrors, 1);
                let reason = error.to_string();
                if status.reason.as_ref() != Some(&reason) {
                    tracing::error!(%error, "runs are kept in memory until the store works again");
                }
                status.remedy = Some(aside::remedy(&error));
                (status.up, status.reason) = (false, Some(reason));
                self.next_try = Instant::now() + self.retry;
                self.retry = if aside::may_pass(&error) { RETRY } else { (self.retry * 2).min(LONGEST) };
            }
        }
        status.waiting = self.waiting.len();
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
            if !self.broken.is_beyond_repair(&error) {
                return Err(error);
            }
            let aside = aside::set_aside(&self.path, &error)?;
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
        while let (Some(store), Some(first)) = (&mut self.store, self.waiting.first()) {
            let open = self.open.entry(first.uid.clone()).or_default();
            match write(store, open, first) {
                Ok(()) => {
                    self.stats.add(Count::StoreWrites, 1);
                    self.broken = Broken::default();
                }
                // No later try would do better.
                Err(error @ StoreError::InvalidRun { .. }) => {
                    tracing::error!(%error, "a run is left out");
                    self.stats.add(Count::StoreDropped, 1);
                }
                Err(error) => return Err(error),
            }
            let done = self.waiting.remove(0);
            if done.over {
                self.open.remove(&done.uid);
            }
        }
        Ok(())
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
            }
            // Writes will tell of it, and set the store aside if it is damaged.
            Err(error) => tracing::warn!(%error, "old runs could not be deleted"),
        }
    }
}

fn write(store: &mut Store, open: &mut Open, of: &Waiting) -> Result<(), StoreError> {
    let id = match open.id {
        Some(id) => id,
        None => begin(store, open, of)?,
    };
    let joined = open.joined(&of.run);
    let run = joined.as_ref().unwrap_or(&of.run);
    let write = if of.over { Store::close } else { Store::checkpoint };
    match write(store, id, run) {
        // Somebody deleted it.
        Err(StoreError::UnknownRun { .. }) => {
            open.id = None;
            let id = begin(store, open, of)?;
            write(store, id, run)
        }
        result => result,
    }
}

/// The run's place in the store. A life that is there already was begun by an earlier life of the daemon, or by this one
/// before the store broke or the run rolled.
fn begin(store: &mut Store, open: &mut Open, of: &Waiting) -> Result<RunId, StoreError> {
    let in_this_life = of.run.coverage.part.map_or(1, |part| part.number);
    let (id, part) = match store.newest(&of.uid)? {
        Some(Newest { id, part, is_rolled: false }) => {
            if !open.is_ours {
                open.before = Some(Box::new(store.load(id)?));
            }
            (Some(id), part)
        }
        Some(Newest { id, part, is_rolled: true }) => {
            if !open.is_ours {
                let is_next = of.run.coverage.part.is_none();
                open.before = if is_next { Some(Box::new(store.load(id)?)) } else { None };
            }
            (None, part + 1)
        }
        None => (None, in_this_life),
    };
    open.part = part;
    let id = match id {
        Some(id) => id,
        None => {
            let joined = open.joined(&of.run);
            store.begin_part(joined.as_ref().unwrap_or(&of.run), &of.uid, part)?
        }
    };
    (open.id, open.is_ours) = (Some(id), true);
    Ok(id)
}

impl Open {
    /// The run with what an earlier life of the daemon saw, and its number as the store counts; none if it is that already.
    fn joined(&self, run: &Run) -> Option<Run> {
        let mut joined = self.before.as_ref().map(|before| lives::joined(before, run));
        let is_counted = |run: &Run| run.coverage.part.is_none_or(|part| part.number == self.part);
        if !joined.as_ref().map_or(is_counted(run), is_counted) {
            let run = joined.get_or_insert_with(|| run.clone());
            run.coverage.part.iter_mut().for_each(|part| part.number = self.part);
        }
        joined
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_runs::run::{Clock, Coverage, Process, Source};

    fn run(events: u64) -> Run {
        Run {
            source: Source { kind: "daemon".into(), origin: "host".into(), preset: None },
            clock: Clock::Monotonic { wall_offset_ns: None },
            process: Process { pid: 7, start_ticks: 9, ..Process::default() },
            state: State::Open,
            coverage: Coverage { events, ..Coverage::default() },
            caveats: Vec::new(),
            cells: Vec::new(),
            devices: Vec::new(),
        }
    }

    /// A disk that is slow gets the newest state, and not one after another that nobody wants any more: otherwise the end would
    /// come before the last of them.
    #[test]
    fn what_is_old_is_not_written_when_there_is_something_newer() {
        const STATES: u64 = 200;
        let dir = std::env::temp_dir().join(format!("gpumemd-keeper-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let (path, stats) = (dir.join("runs.sqlite"), Arc::new(Stats::default()));
        let (keeper, thread) =
            Keeper::start(path.clone(), Retention::default(), Arc::clone(&stats)).expect("a thread");
        (1..=STATES).for_each(|events| keeper.keep("boot:7:9".into(), run(events), false));
        thread.end(Duration::from_secs(60));
        let list = Store::open_read_only(&path).and_then(|store| store.list()).expect("a store");
        assert_eq!((list.len(), list[0].events), (1, STATES));
        let writes = stats.get(Count::StoreWrites);
        assert!(writes < STATES / 2, "{writes} writes");
        std::fs::remove_dir_all(&dir).expect("removed");
    }
}
