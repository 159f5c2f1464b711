//! What the kernel tells of an end: who was killed for host memory, and whose a fault of the driver's (Xid) was.
//!
//! Two witnesses, neither of which may be there. The kernel's log names pids; control groups only count how many of their
//! processes were killed, and are readable by everybody. What is found becomes facts of the process that ended
//! (`gpumem_model::ending` has the keys), so a recording has them, too.
//!
//! ```text
//! log      a device, file or pipe that is read without waiting, line by line
//! parse    a line -> what it tells
//! groups   control groups of memory: kills and limits
//! ```

mod groups;
mod log;
mod parse;

use crate::config::KernelSettings;
use gpumem_ledger::ProcessKey;
use groups::{Counted, Groups};
use log::Log;
use parse::Told;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What was heard of processes that have not ended: the oldest go.
const NOTES: usize = 256;
/// What was heard so long ago did not end a process.
const LATELY_NS: u64 = 120_000_000_000;

/// How the log is read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Status {
    /// Where it is; absent where it was switched off.
    pub log: Option<PathBuf>,
    /// Why it cannot be read.
    pub problem: Option<String>,
}

/// The handle; clones are the same. Nothing in it waits.
#[derive(Debug, Clone)]
pub(crate) struct Kernel(Arc<Mutex<Desk>>);

#[derive(Debug)]
struct Desk {
    log: Option<Log>,
    groups: Groups,
    notes: VecDeque<Note>,
    /// Limits that lines before a kill named: older kernels say it without a pid.
    group: Option<String>,
    counted: BTreeMap<ProcessKey, Counted>,
}

/// What was heard of one pid.
#[derive(Debug, Default)]
struct Note {
    pid: u32,
    heard_ns: u64,
    /// `host`, or `cgroup`; absent before the kill itself is told.
    killed: Option<&'static str>,
    group: Option<String>,
    limit_bytes: Option<u64>,
    xid: Option<u64>,
    line: String,
}

impl Kernel {
    /// Listens from now on.
    pub(crate) fn new(settings: &KernelSettings) -> Self {
        let desk = Desk {
            log: settings.log.as_deref().map(Log::open),
            groups: Groups::new(&settings.groups, Path::new("/proc")),
            notes: VecDeque::new(),
            group: None,
            counted: BTreeMap::new(),
        };
        Kernel(Arc::new(Mutex::new(desk)))
    }

    /// Reads what the log has now.
    pub(crate) fn look(&self, now_ns: u64) {
        self.lock().look(now_ns);
    }

    /// A process that is new: what its group has counted so far.
    pub(crate) fn meet(&self, key: ProcessKey) {
        let mut desk = self.lock();
        if let Some(counted) = desk.groups.count(key.pid) {
            desk.counted.insert(key, counted);
        }
    }

    /// A process has ended: `key=value` lines of what is known of that; empty if nothing is.
    pub(crate) fn part(&self, key: ProcessKey, now_ns: u64) -> String {
        let mut desk = self.lock();
        desk.look(now_ns);
        let counted = desk.counted.remove(&key);
        let mut lines = String::new();
        let mut is_killed = false;
        let (mine, others) =
            std::mem::take(&mut desk.notes).into_iter().partition(|note: &Note| note.pid == key.pid);
        desk.notes = others;
        let mine: VecDeque<Note> = mine;
        for note in mine.iter().filter(|note| now_ns.saturating_sub(note.heard_ns) < LATELY_NS) {
            is_killed |= note.killed.is_some();
            note.append(&mut lines);
        }
        if let Some(risen) = counted.filter(|_| !is_killed).and_then(|before| desk.groups.risen(&before)) {
            let _ = writeln!(lines, "host_oom=count\nhost_oom_ns={now_ns}\nhost_oom_cgroup={}", risen.group);
            if let Some(limit_bytes) = risen.limit_bytes {
                let _ = writeln!(lines, "host_oom_limit={limit_bytes}");
            }
        }
        lines
    }

    /// How the log is read.
    pub(crate) fn status(&self) -> Status {
        let desk = self.lock();
        let log = desk.log.as_ref();
        Status { log: log.map(|log| log.path().to_owned()), problem: log.and_then(Log::problem) }
    }

    fn lock(&self) -> MutexGuard<'_, Desk> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Desk {
    fn look(&mut self, now_ns: u64) {
        let Some(log) = &mut self.log else { return };
        for line in log.read(now_ns) {
            if let Some(told) = parse::told(&line) {
                self.hear(told, &line, now_ns);
            }
        }
    }

    fn hear(&mut self, told: Told, line: &str, now_ns: u64) {
        match told {
            Told::Limit { group } => self.group = Some(group),
            Told::Constraint { pid, group } => {
                let note = Note { group, ..self.take(pid, now_ns) };
                self.notes.push_back(note);
            }
            Told::Killed { pid, in_group } => {
                let mut note = self.take(pid, now_ns);
                note.group = note.group.take().or(self.group.take());
                let is_of_group = in_group.unwrap_or(note.group.is_some());
                let group = note.group.as_deref().filter(|_| is_of_group);
                note.limit_bytes = group.and_then(|group| self.groups.limit(group));
                note.killed = Some(if is_of_group { "cgroup" } else { "host" });
                note.line = parse::harmless(line);
                self.notes.push_back(note);
            }
            Told::Xid { pid: Some(pid), xid } => {
                let mut note = self.take(pid, now_ns);
                // 43 and 45 follow from others.
                if note.xid.is_none_or(|known| matches!(known, 43 | 45)) {
                    (note.xid, note.heard_ns) = (Some(xid), now_ns);
                    note.line = parse::harmless(line);
                }
                self.notes.push_back(note);
            }
            // NVML tells of it, too, with its device.
            Told::Xid { pid: None, .. } => {}
        }
    }

    /// The note of a pid, to be put back; a new one if there is none of late.
    fn take(&mut self, pid: u32, now_ns: u64) -> Note {
        let known = self.notes.iter().position(|note| note.pid == pid).and_then(|at| self.notes.remove(at));
        if self.notes.len() >= NOTES {
            self.notes.pop_front();
        }
        let known = known.filter(|note| now_ns.saturating_sub(note.heard_ns) < LATELY_NS);
        known.unwrap_or_else(|| Note { pid, heard_ns: now_ns, ..Note::default() })
    }
}

impl Note {
    fn append(&self, lines: &mut String) {
        let mut line = |key: &str, value: &str| {
            let _ = writeln!(lines, "{key}={value}");
        };
        if let Some(killed) = self.killed {
            line("host_oom", killed);
            line("host_oom_ns", &self.heard_ns.to_string());
            line("host_oom_line", &self.line);
            if let Some(group) = self.group.as_ref().filter(|_| killed == "cgroup") {
                line("host_oom_cgroup", &parse::harmless(group));
            }
            if let Some(limit_bytes) = self.limit_bytes {
                line("host_oom_limit", &limit_bytes.to_string());
            }
        }
        if let Some(xid) = self.xid {
            line("xid", &xid.to_string());
            line("xid_ns", &self.heard_ns.to_string());
            if self.killed.is_none() {
                line("xid_line", &self.line);
            }
        }
    }
}

#[cfg(test)]
mod tests;
