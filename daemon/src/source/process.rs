//! Table of processes: finds the process to which a pid belongs, and reports when a process ends.
//!
//! Each process that a source names is identified once: a pidfd is opened, and `/proc/PID/stat` is read. If the pidfd shows that
//! the process still lives after that, pid and start time belong together. From then on the pid is looked up in the table until
//! the pidfd reports the end. Facts (user, command, cgroup) are read once and returned as `ProcessFacts` frames by
//! [`Processes::take_facts`].
//!
//! ```text
//! process.rs     the table, and the stream of ended processes
//! facts.rs       reads facts of one process from /proc; its command line on a separate thread
//! parse.rs       parses the text of files in /proc
//! cluster.rs     finds names of containers in Kubernetes, and jobs of GPUs
//! late_facts.rs  retries container names and jobs until they appear
//! ```

mod cluster;
mod facts;
mod late_facts;
mod parse;

pub(crate) use cluster::Gpu;
pub(crate) use facts::{Facts, cgroup, try_read_stat};
pub(crate) use parse::status;

use crate::clock::now_ns;
use crate::config::ProcessSettings;
use crate::os::lock;
use facts::CommandReader;
use gpumem_ledger::ProcessKey;
use late_facts::LateFacts;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, OnceCell};

/// Maximum number of remembered ended processes, which readings begun before their end may still name.
const ENDED_KEPT: usize = 1024;
/// Interval for checking whether processes without a pidfd have ended.
const NO_PIDFD_INTERVAL: Duration = Duration::from_secs(1);

/// The daemon's process table. Clones share one table.
#[derive(Debug, Clone)]
pub struct Processes {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    proc: PathBuf,
    settings: ProcessSettings,
    /// Watches all pidfds; readable when one of the processes has ended. `None` if it cannot be created.
    epoll: Option<OwnedFd>,
    /// A copy of the descriptor `epoll`, registered with tokio by the first call of [`Processes::next_ended`].
    ready: OnceCell<Option<AsyncFd<OwnedFd>>>,
    /// Notified when a process was removed from the table.
    ended: Notify,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// Running processes by pid.
    live: HashMap<u32, Entry>,
    /// Ended processes that [`Processes::next_ended`] has not returned yet.
    unreported: VecDeque<EndedProcess>,
    /// Processes added since the last [`Processes::take_new`].
    take_new: Vec<ProcessKey>,
    /// Recently ended processes with their uids, oldest first. A late reading may still name them.
    recently_ended: VecDeque<(ProcessKey, Option<u64>)>,
    /// Number of the last added entry. Epoll events contain it, to distinguish an entry from a later one with the same pid.
    generation: u32,
    /// New or changed facts of processes that [`Processes::take_facts`] has not returned yet.
    unannounced: Vec<(ProcessKey, Arc<Facts>)>,
    commands: CommandReader,
    users: facts::Users,
    /// Number of running processes without a pidfd.
    without_pidfd: usize,
    /// Number of processes that were removed from `live`.
    ends: u64,
    /// Whether facts of a process in `live` may have to be retried.
    has_late: bool,
}

impl Table {
    fn entry(&self, key: ProcessKey) -> Option<&Entry> {
        self.live.get(&key.pid).filter(|entry| entry.key == key)
    }

    fn entry_mut(&mut self, key: ProcessKey) -> Option<&mut Entry> {
        self.live.get_mut(&key.pid).filter(|entry| entry.key == key)
    }

    /// Lets [`Processes::take_facts`] return new facts of a process, instead of older ones that it has not returned.
    fn announce(&mut self, key: ProcessKey, facts: Arc<Facts>) {
        self.unannounced.retain(|(announced, _)| *announced != key);
        self.unannounced.push((key, facts));
    }

    fn note_ended(&mut self, key: ProcessKey, uid: Option<u64>) {
        self.recently_ended.push_back((key, uid));
        if self.recently_ended.len() > ENDED_KEPT {
            self.recently_ended.pop_front();
        }
    }
}

/// A running process.
#[derive(Debug)]
struct Entry {
    key: ProcessKey,
    /// See [`Table::generation`].
    generation: u32,
    /// `None` if the kernel has no pidfds (before 5.3) or descriptors ran out; then each identification reads /proc.
    pidfd: Option<OwnedFd>,
    facts: Arc<Facts>,
    /// GPUs that the process has used; empty unless the configuration names files that assign GPUs to jobs.
    gpus: Vec<Gpu>,
    /// Facts that are retried; `None` if all are known, or the time for retries is over.
    late: Option<LateFacts>,
}

/// A process that has ended, as returned by [`Processes::next_ended`].
#[derive(Debug)]
pub struct EndedProcess {
    pub key: ProcessKey,
    /// Facts of the process, such as user and command.
    pub facts: Arc<Facts>,
    proc: PathBuf,
    pidfd: Option<OwnedFd>,
}

impl EndedProcess {
    /// Returns the exit status as waitpid encodes it, if the pidfd or /proc already has it.
    pub(crate) fn status(&self) -> Option<u64> {
        let of_pidfd = self.pidfd.as_ref().and_then(crate::descriptors::exit_status);
        of_pidfd.or_else(|| {
            let stat = facts::read_stat(&self.proc, self.key.pid)?;
            let is_it = stat.start_ticks == self.key.start_ticks && stat.has_ended();
            // /proc shows 0 to readers without permission. Readers with the same uid have permission, so their 0 is real.
            let may_look = self.facts.uid == Some(u64::from(rustix::process::geteuid().as_raw()));
            stat.status.filter(|status| is_it && (*status != 0 || may_look))
        })
    }
}

impl Default for Processes {
    fn default() -> Self {
        Processes::new()
    }
}

impl Processes {
    /// Returns an empty table that reads /proc.
    pub fn new() -> Self {
        Processes::with(ProcessSettings::default())
    }

    /// Returns an empty table that reads /proc and the files named in `settings`.
    pub(crate) fn with(settings: ProcessSettings) -> Self {
        Processes::over(Path::new("/proc"), settings)
    }

    fn over(proc: &Path, settings: ProcessSettings) -> Self {
        let inner = Inner {
            proc: proc.to_owned(),
            settings,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).ok(),
            ready: OnceCell::new(),
            ended: Notify::new(),
            table: Mutex::default(),
        };
        Processes { inner: Arc::new(inner) }
    }

    /// Returns the process that has `pid` now; `None` if there is none, or it is not visible from here. Costs one lookup for a
    /// known process and a few file reads for a new one.
    pub fn identify(&self, pid: u32) -> Option<ProcessKey> {
        self.try_identify(pid).ok().flatten()
    }

    /// Like [`Processes::identify`], but fails if no file descriptor was free, so that the process could not be checked.
    pub(crate) fn try_identify(&self, pid: u32) -> std::io::Result<Option<ProcessKey>> {
        let mut table = self.lock();
        if let Some(entry) = table.live.get(&pid) {
            let key = entry.key;
            if entry.pidfd.is_some() || !self.has_ended(key) {
                return Ok(Some(key));
            }
            self.end(&mut table, key);
        }
        let Some(known) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let pidfd = pidfd_open(known, PidfdFlags::empty()).ok();
        let ended = table.recently_ended.iter().rev().map(|(key, _)| *key).find(|key| key.pid == pid);
        let Some(stat) = try_read_stat(&self.inner.proc, pid)? else { return Ok(ended) };
        let key = ProcessKey { pid, start_ticks: stat.start_ticks };
        if stat.has_ended() || pidfd.as_ref().is_some_and(is_readable) {
            // Another process may have taken the pid while /proc was read, so accept only the process that ended recently.
            return Ok(ended.filter(|&ended| ended == key));
        }
        self.add(&mut table, key, pidfd, &stat);
        Ok(Some(key))
    }

    /// Returns the number of processes that have ended so far, if all these processes run and a pidfd reports their ends. While
    /// [`Processes::ends`] returns the same number, their pids identify them.
    pub(crate) fn ends_if_live(&self, mut keys: impl Iterator<Item = ProcessKey>) -> Option<u64> {
        let table = self.lock();
        let is_live = |key| table.entry(key).is_some_and(|entry| entry.pidfd.is_some());
        keys.all(is_live).then_some(table.ends)
    }

    /// Returns the number of processes that have ended so far.
    pub(crate) fn ends(&self) -> u64 {
        self.lock().ends
    }

    /// Returns whether /proc shows that a process without a pidfd has ended; false if no file descriptor was free.
    fn has_ended(&self, key: ProcessKey) -> bool {
        let is_same = |stat: parse::Stat| stat.start_ticks == key.start_ticks && !stat.has_ended();
        try_read_stat(&self.inner.proc, key.pid).is_ok_and(|stat| !stat.is_some_and(is_same))
    }

    fn add(&self, table: &mut Table, key: ProcessKey, pidfd: Option<OwnedFd>, stat: &parse::Stat) {
        table.generation = table.generation.wrapping_add(1);
        let generation = table.generation;
        let token = epoll::EventData::new_u64(u64::from(generation) << 32 | u64::from(key.pid));
        let pidfd = pidfd.filter(|pidfd| {
            let events = epoll::EventFlags::IN;
            self.inner.epoll.as_ref().is_some_and(|epoll| epoll::add(epoll, pidfd, token, events).is_ok())
        });
        table.without_pidfd += usize::from(pidfd.is_none());
        let facts = Arc::new(Facts::read(&self.inner.proc, key, stat, &mut table.users));
        table.commands.request(&self.inner.proc, key);
        table.unannounced.push((key, Arc::clone(&facts)));
        table.take_new.push(key);
        let late = LateFacts::of_container(&self.inner.settings, &facts);
        table.has_late |= late.is_some();
        table.live.insert(key.pid, Entry { key, generation, pidfd, facts, gpus: Vec::new(), late });
    }

    fn end(&self, table: &mut Table, key: ProcessKey) {
        let Some(entry) = table.live.remove(&key.pid) else { return };
        table.without_pidfd -= usize::from(entry.pidfd.is_none());
        table.ends += 1;
        // The pidfd stays open until the exit status is available, and epoll would report it repeatedly.
        if let (Some(epoll), Some(pidfd)) = (&self.inner.epoll, &entry.pidfd) {
            let _ = epoll::delete(epoll, pidfd);
        }
        let (proc, facts, uid) = (self.inner.proc.clone(), Arc::clone(&entry.facts), entry.facts.uid);
        table.unreported.push_back(EndedProcess { key, facts, proc, pidfd: entry.pidfd });
        table.note_ended(key, uid);
        self.inner.ended.notify_one();
    }

    /// Removes ended processes from the table. Costs one system call if none has ended. Sources call this before they identify
    /// the pids in a reading.
    pub(crate) fn sweep(&self) {
        self.sweep_table(&mut self.lock());
    }

    fn sweep_table(&self, table: &mut Table) {
        let Some(epoll) = &self.inner.epoll else { return };
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            match epoll::wait(epoll, rustix::buffer::spare_capacity(&mut events), Some(&now)) {
                Ok(found) if found > 0 => {}
                _ => return,
            }
            for event in &events {
                let token = event.data.u64();
                let (generation, pid) = ((token >> 32) as u32, token as u32);
                let key = table.live.get(&pid).filter(|entry| entry.generation == generation);
                if let Some(key) = key.map(|entry| entry.key) {
                    self.end(table, key);
                }
            }
        }
    }

    /// Removes ended processes without a pidfd from the table.
    fn sweep_without_pidfd(&self) {
        let mut table = self.lock();
        let keys = table.live.values().filter(|entry| entry.pidfd.is_none()).map(|entry| entry.key);
        for key in keys.filter(|&key| self.has_ended(key)).collect::<Vec<_>>() {
            self.end(&mut table, key);
        }
    }

    /// Waits for the next ended process and returns it. Each is returned once; dropping the future loses none. The receiver
    /// decides when to send its `ProcessGone`, because records of its agent may still arrive.
    pub async fn next_ended(&self) -> EndedProcess {
        let make = async || {
            let epoll = self.inner.epoll.as_ref()?.try_clone().ok()?;
            #[expect(deprecated, reason = "its unsafe successor is for types whose descriptor may change")]
            AsyncFd::with_interest(epoll, Interest::READABLE).ok()
        };
        let ready = self.inner.ready.get_or_init(make).await;
        loop {
            let without_pidfd = {
                let mut table = self.lock();
                self.sweep_table(&mut table);
                if let Some(next_ended) = table.unreported.pop_front() {
                    return next_ended;
                }
                table.without_pidfd > 0
            };
            tokio::select! {
                Some(mut guard) = async { ready.as_ref()?.readable().await.ok() } => guard.clear_ready(),
                () = self.inner.ended.notified() => {}
                () = tokio::time::sleep(NO_PIDFD_INTERVAL), if without_pidfd => self.sweep_without_pidfd(),
            }
        }
    }

    /// Appends the `ProcessFacts` frames of new processes, and again with the command line when that has been read, which may
    /// take long. Callers put these frames in front of a batch about the processes.
    pub(crate) fn take_facts(&self, time_ns: u64, frames: &mut Vec<u8>) {
        let table = &mut *self.lock();
        for (key, command) in table.commands.take() {
            if let Some(entry) = table.entry_mut(key) {
                Arc::make_mut(&mut entry.facts).command = Some(command);
                let facts = Arc::clone(&entry.facts);
                table.announce(key, facts);
            }
        }
        for (key, facts) in table.unannounced.drain(..) {
            facts.append_frame(key, time_ns, frames);
        }
    }

    /// Appends the facts that /proc still has of a process that may have ended: name and user, until its parent waits for it.
    pub(crate) fn last_facts(&self, key: ProcessKey, frames: &mut Vec<u8>) {
        let stat = facts::read_stat(&self.inner.proc, key.pid);
        let Some(stat) = stat.filter(|stat| stat.start_ticks == key.start_ticks) else { return };
        let facts = Facts::read(&self.inner.proc, key, &stat, &mut self.lock().users);
        facts.append_frame(key, now_ns(), frames);
    }

    /// Appends facts of a process that had ended before /proc was read: its user, and the program name in its hello.
    pub(crate) fn claimed_facts(&self, key: ProcessKey, uid: u32, program: &str, frames: &mut Vec<u8>) {
        let mut table = self.lock();
        let (uid, comm) = (Some(uid.into()), parse::line(program.as_bytes()).chars().take(15).collect());
        let user = uid.and_then(|uid| table.users.name(uid));
        Facts { comm, uid, user, ..Facts::default() }.append_frame(key, now_ns(), frames);
        // Remember the process, because readings taken while it ran may still name it.
        table.note_ended(key, uid);
    }

    /// Returns the uid of a process that is running or ended recently.
    pub(crate) fn owner(&self, key: ProcessKey) -> Option<u64> {
        let table = self.lock();
        match table.entry(key) {
            Some(entry) => entry.facts.uid,
            None => table.recently_ended.iter().rev().find(|(ended, _)| *ended == key)?.1,
        }
    }

    /// Returns the processes that were added since the last call and still run.
    pub(crate) fn take_new(&self) -> Vec<ProcessKey> {
        let mut table = self.lock();
        let new = std::mem::take(&mut table.take_new);
        new.into_iter().filter(|&key| table.entry(key).is_some()).collect()
    }

    pub(crate) fn facts(&self, key: ProcessKey) -> Option<Arc<Facts>> {
        self.lock().entry(key).map(|entry| Arc::clone(&entry.facts))
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.lock().live.len()
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        lock(&self.inner.table)
    }
}

/// Returns whether the pidfd reports that its process has ended.
fn is_readable(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(ready) if ready > 0)
}

#[cfg(test)]
mod tests;
