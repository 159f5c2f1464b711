//! Reads the facts of one process from /proc, once.
//!
//! Reading a command line makes the kernel lock the process's memory. A process stuck in a driver may hold that lock for ever
//! (`ps` hangs there). So a thread reads command lines, and is abandoned if it hangs. No other read here can block on the
//! process.

use super::cluster::PodNames;
use super::parse;
use crate::os::is_out_of_descriptors;
use gpumem_ledger::ProcessKey;
use gpumem_model::owner::MAPPED_JOB;
use gpumem_model::owner::cgroup::CgroupOwner;
use gpumem_wire::{Body, Reading, Record, Stamp};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime};

/// Maximum number of bytes read of a command line.
const COMMAND_BYTES: u64 = 4096;
/// Maximum number of ancestors (parent, its parent and so on) that are read.
const ANCESTORS: usize = 64;
/// Maximum number of bytes read from files other than the command line; these files are far smaller.
const FILE_BYTES: u64 = 16 * 1024;
/// Number of retries while the command line is empty (exec in progress).
const EXEC_TRIES: u32 = 5;
/// Interval between retries of an empty command line. An exec takes at most some ms.
const EXEC_PAUSE: Duration = Duration::from_millis(5);
/// Time without an answer after which a thread that reads command lines counts as stuck and is abandoned.
const STUCK_AFTER: Duration = Duration::from_secs(2);
/// Maximum number of abandoned threads. Above it, command lines stay unknown.
const MAX_ABANDONED: u32 = 8;

/// Facts of a process. Strings are safe to print and have no newlines.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Name of the program, at most 15 bytes.
    pub comm: String,
    /// Arguments, up to 4 KiB; `None` until they have been read.
    pub command: Option<String>,
    /// Real user id.
    pub uid: Option<u64>,
    /// Name of the real user from /etc/passwd, or the user's number as text.
    pub user: Option<String>,
    /// Path of the process's control group.
    pub cgroup: Option<String>,
    /// Container and job found in the paths of all the process's control groups.
    pub place: CgroupOwner,
    /// Names of the process's container in Kubernetes; retried until the kubelet has written them.
    pub names: Option<PodNames>,
    /// Job that a batch system's files assign to the process's GPUs; empty if an earlier result turned out to be wrong.
    pub mapped_job: Option<String>,
    /// Pid of the parent when the process was first seen.
    pub parent_pid: u32,
    /// Pids of the parent, its parent and so on up to pid 1, when the process was first seen.
    pub ancestors: Vec<u32>,
    /// Pid in the process's own PID namespace, if different.
    pub inner_pid: Option<u32>,
}

/// Reads /proc/PID/stat; `None` if there is no such process.
/// Errors: No file descriptor was free, so the process could not be checked.
pub(crate) fn try_read_stat(proc: &Path, pid: u32) -> std::io::Result<Option<parse::Stat>> {
    match try_read(proc, pid, "stat", FILE_BYTES) {
        Ok(text) => Ok(parse::stat(&text)),
        Err(error) if is_out_of_descriptors(&error) => Err(error),
        Err(_) => Ok(None),
    }
}

pub(super) fn read_stat(proc: &Path, pid: u32) -> Option<parse::Stat> {
    try_read_stat(proc, pid).ok().flatten()
}

/// Returns the path of a process's control group; see [`parse::cgroup`].
pub(crate) fn cgroup(proc: &Path, pid: u32) -> Option<String> {
    let text = read(proc, pid, "cgroup", FILE_BYTES)?;
    parse::cgroup(&text).map(parse::line)
}

fn read(proc: &Path, pid: u32, file: &str, limit: u64) -> Option<Vec<u8>> {
    try_read(proc, pid, file, limit).ok()
}

/// Bytes that most files of a process have at most. The kernel does not state the size of these files, and a small buffer would
/// take five reads.
const USUAL_BYTES: usize = 1024;

/// Reads at most `limit` bytes of a file of the process.
fn try_read(proc: &Path, pid: u32, file: &str, limit: u64) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::with_capacity(USUAL_BYTES);
    File::open(proc.join(pid.to_string()).join(file))?.take(limit).read_to_end(&mut text)?;
    Ok(text)
}

impl Facts {
    /// Reads the facts of a running process, except its command line.
    pub(super) fn read(proc: &Path, key: ProcessKey, stat: &parse::Stat, users: &mut Users) -> Facts {
        let status = read(proc, key.pid, "status", FILE_BYTES).unwrap_or_default();
        let status = parse::status(&status);
        let cgroup = read(proc, key.pid, "cgroup", FILE_BYTES);
        let mut ancestors = Vec::new();
        let mut parent = stat.parent_pid;
        while parent != 0 && ancestors.len() < ANCESTORS && !ancestors.contains(&parent) {
            ancestors.push(parent);
            parent = read_stat(proc, parent).map_or(0, |stat| stat.parent_pid);
        }
        Facts {
            comm: parse::line(&stat.comm),
            uid: status.uid,
            user: status.uid.and_then(|uid| users.name(uid)),
            cgroup: cgroup.as_deref().and_then(|text| parse::cgroup(text).map(parse::line)),
            place: cgroup
                .map(|text| CgroupOwner::of_file(&String::from_utf8_lossy(&text)))
                .unwrap_or_default(),
            parent_pid: stat.parent_pid,
            ancestors,
            inner_pid: status.inner_pid,
            ..Facts::default()
        }
    }

    /// Returns the facts as `key=value` lines, the payload of `ProcessFacts`.
    pub(crate) fn lines(&self) -> String {
        let mut lines = String::new();
        let (place, names) = (&self.place, self.names.as_ref());
        let inner_pid = self.inner_pid.map(|pid| pid.to_string());
        let ancestors: Vec<String> = self.ancestors.iter().map(u32::to_string).collect();
        let ancestors = Some(ancestors.join(",")).filter(|pids| !pids.is_empty());
        for (key, value) in [
            ("comm", Some(&*self.comm)),
            ("command", self.command.as_deref()),
            ("user", self.user.as_deref()),
            ("cgroup", self.cgroup.as_deref()),
            ("container", place.short_container()),
            ("pod_uid", place.pod_uid.as_deref()),
            ("slurm_job", place.slurm_job.as_deref()),
            ("slurm_step", place.slurm_step.as_deref()),
            ("pod", names.map(|names| &*names.pod)),
            ("namespace", names.map(|names| &*names.namespace)),
            ("container_name", names.map(|names| &*names.container)),
            (MAPPED_JOB, self.mapped_job.as_deref()),
            ("ns_pid", inner_pid.as_deref()),
            ("ancestors", ancestors.as_deref()),
        ] {
            if let Some(value) = value {
                let _ = writeln!(lines, "{key}={value}");
            }
        }
        lines
    }

    pub(crate) fn append_frame(&self, key: ProcessKey, time_ns: u64, frames: &mut Vec<u8>) {
        let facts = self.lines();
        let body = Body::ProcessFacts {
            start_ticks: key.start_ticks,
            uid: Reading(self.uid),
            parent_pid: self.parent_pid.into(),
            facts: &facts,
        };
        Record { stamp: Stamp { time_ns, thread: key.pid, ..Stamp::default() }, body }.append_frame(frames);
    }
}

/// Reads names of users from /etc/passwd, again when the file has changed. Users of other directories are shown by number.
#[derive(Debug, Default)]
pub(super) struct Users {
    text: String,
    /// Time of the file's last change when it was read.
    changed: Option<SystemTime>,
}

impl Users {
    /// Returns the user's name, or the number if it has none; `None` if /etc/passwd cannot be read.
    pub(super) fn name(&mut self, uid: u64) -> Option<String> {
        let path = "/etc/passwd";
        let changed = fs::metadata(path).and_then(|file| file.modified()).ok();
        if changed != self.changed {
            let mut bytes = Vec::new();
            File::open(path).ok()?.take(4 << 20).read_to_end(&mut bytes).ok()?;
            self.text = String::from_utf8_lossy(&bytes).into_owned();
            self.changed = changed;
        }
        let name = parse::user_name(&self.text, uid).map(|name| parse::line(name.as_bytes()));
        Some(name.unwrap_or_else(|| uid.to_string()))
    }
}

/// Reads command lines on a thread of its own.
#[derive(Debug, Default)]
pub(super) struct CommandReader {
    thread: Option<ReaderThread>,
    /// Number of threads that were abandoned because they were stuck.
    abandoned: u32,
}

#[derive(Debug)]
struct ReaderThread {
    requests: mpsc::Sender<(PathBuf, ProcessKey)>,
    results: mpsc::Receiver<(ProcessKey, Option<String>)>,
    /// Number of requests that the thread has not answered.
    open: usize,
    /// Time of the thread's last answer, or of the first request after it.
    moved: Instant,
}

impl CommandReader {
    /// Requests the command line of a process.
    pub(crate) fn request(&mut self, proc: &Path, key: ProcessKey) {
        let is_stuck = |thread: &mut ReaderThread| thread.open > 0 && thread.moved.elapsed() > STUCK_AFTER;
        self.abandoned += u32::from(self.thread.take_if(is_stuck).is_some());
        if self.thread.is_none() && self.abandoned < MAX_ABANDONED {
            self.thread = ReaderThread::start();
        }
        if let Some(thread) = &mut self.thread {
            if thread.open == 0 {
                thread.moved = Instant::now();
            }
            thread.open += usize::from(thread.requests.send((proc.to_owned(), key)).is_ok());
        }
    }

    /// Returns the command lines that have been read since the last call.
    pub(crate) fn take(&mut self) -> Vec<(ProcessKey, String)> {
        let Some(thread) = self.thread.as_mut().filter(|thread| thread.open > 0) else { return Vec::new() };
        let mut commands = Vec::new();
        while let Ok((key, command)) = thread.results.try_recv() {
            thread.open -= 1;
            thread.moved = Instant::now();
            commands.extend(command.map(|command| (key, command)));
        }
        commands
    }
}

impl ReaderThread {
    fn start() -> Option<ReaderThread> {
        let (requests, received) = mpsc::channel::<(PathBuf, ProcessKey)>();
        let (sender, results) = mpsc::channel();
        let read_all = move || {
            for (proc, key) in received {
                if sender.send((key, read_command(&proc, key))).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("proc-cmdline".to_owned()).stack_size(128 * 1024);
        thread.spawn(read_all).ok()?;
        Some(ReaderThread { requests, results, open: 0, moved: Instant::now() })
    }
}

/// Reads the command line of a process; `None` if it has none, or another process has taken the pid.
fn read_command(proc: &Path, key: ProcessKey) -> Option<String> {
    let mut text = read(proc, key.pid, "cmdline", COMMAND_BYTES)?;
    // Retry an empty command line: during an exec the new program name is set before the command line.
    for _ in 0..EXEC_TRIES {
        if !text.is_empty() {
            break;
        }
        std::thread::sleep(EXEC_PAUSE);
        text = read(proc, key.pid, "cmdline", COMMAND_BYTES)?;
    }
    let command = parse::command(&text)?;
    let stat = read_stat(proc, key.pid)?;
    (stat.start_ticks == key.start_ticks).then_some(command)
}
