//! Reads the kernel's reports about why processes ended: kills for lack of host memory, and faults of the GPU driver (Xid).
//!
//! There are two sources, and either may be missing. The kernel's log names pids. Control groups only count kills of their
//! processes, but every user can read them. The results become facts of the ended process, so they are in a recording too.
//! `gpumem_model::ending` has their keys.
//!
//! ```text
//! log      reads a device, file or pipe line by line, without blocking
//! parse    parses a line
//! groups   memory control groups: kills and limits
//! ```

mod groups;
mod log;
mod parse;

use crate::config::KernelSettings;
use crate::os::lock;
use gpumem_ledger::ProcessKey;
use groups::{Counted, Groups};
use log::Log;
use parse::LogEvent;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// Maximum number of remembered reports about processes that have not ended yet; the oldest are dropped.
const NOTES: usize = 256;
/// Age (ns) above which a report no longer explains the end of a process.
const LATELY_NS: u64 = 120_000_000_000;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Status {
    /// Path of the kernel's log; `None` if reading it is disabled.
    pub log: Option<PathBuf>,
    /// Reason why the log cannot be read; `None` if it can.
    pub problem: Option<String>,
}

/// Handle of the reader. Clones share the state. No call blocks.
#[derive(Debug, Clone)]
pub(crate) struct Kernel(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    log: Option<Log>,
    groups: Groups,
    notes: VecDeque<Note>,
    /// Control group named by the preceding line of the log. Older kernels write that line without a pid.
    group: Option<String>,
    counted: BTreeMap<ProcessKey, Counted>,
}

#[derive(Debug, Default)]
struct Note {
    pid: u32,
    heard_ns: u64,
    /// Cause of a kill: `host` or `cgroup`; `None` until the log reports the kill itself.
    killed: Option<&'static str>,
    group: Option<String>,
    limit_bytes: Option<u64>,
    xid: Option<u64>,
    line: String,
}

impl Kernel {
    /// Starts reading the kernel's log at its end.
    pub(crate) fn new(settings: &KernelSettings) -> Self {
        let desk = State {
            log: settings.log.as_deref().map(Log::open),
            groups: Groups::new(&settings.groups, Path::new("/proc")),
            notes: VecDeque::new(),
            group: None,
            counted: BTreeMap::new(),
        };
        Kernel(Arc::new(Mutex::new(desk)))
    }

    /// Reads and parses the new lines of the kernel's log.
    pub(crate) fn look(&self, now_ns: u64) {
        self.lock().look(now_ns);
    }

    /// Stores the kill counts of a new process's control groups, for comparison when it ends.
    pub(crate) fn note_start(&self, key: ProcessKey) {
        let mut desk = self.lock();
        if let Some(counted) = desk.groups.count(key.pid) {
            desk.counted.insert(key, counted);
        }
    }

    /// Returns the reason for the end of a process as `key=value` lines; empty if unknown.
    pub(crate) fn end_facts(&self, key: ProcessKey, now_ns: u64) -> String {
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
        if let Some(risen) =
            counted.filter(|_| !is_killed).and_then(|before| desk.groups.killed_group(&before))
        {
            let _ = writeln!(lines, "host_oom=count\nhost_oom_ns={now_ns}\nhost_oom_cgroup={}", risen.group);
            if let Some(limit_bytes) = risen.limit_bytes {
                let _ = writeln!(lines, "host_oom_limit={limit_bytes}");
            }
        }
        lines
    }

    pub(crate) fn status(&self) -> Status {
        let desk = self.lock();
        let log = desk.log.as_ref();
        Status { log: log.map(|log| log.path().to_owned()), problem: log.and_then(Log::problem) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

impl State {
    fn look(&mut self, now_ns: u64) {
        let Some(log) = &mut self.log else { return };
        for line in log.read(now_ns) {
            if let Some(told) = parse::parse(&line) {
                self.hear(told, &line, now_ns);
            }
        }
    }

    fn hear(&mut self, told: LogEvent, line: &str, now_ns: u64) {
        match told {
            LogEvent::Limit { group } => self.group = Some(group),
            LogEvent::Constraint { pid, group } => {
                let note = Note { group, ..self.take(pid, now_ns) };
                self.notes.push_back(note);
            }
            LogEvent::Killed { pid, in_group } => {
                let mut note = self.take(pid, now_ns);
                note.group = note.group.take().or(self.group.take());
                let is_of_group = in_group.unwrap_or(note.group.is_some());
                let group = note.group.as_deref().filter(|_| is_of_group);
                note.limit_bytes = group.and_then(|group| self.groups.limit(group));
                note.killed = Some(if is_of_group { "cgroup" } else { "host" });
                note.line = parse::harmless(line);
                self.notes.push_back(note);
            }
            LogEvent::Xid { pid: Some(pid), xid } => {
                let mut note = self.take(pid, now_ns);
                // Replace only Xid 43 and 45, which are consequences of other faults.
                if note.xid.is_none_or(|known| matches!(known, 43 | 45)) {
                    (note.xid, note.heard_ns) = (Some(xid), now_ns);
                    note.line = parse::harmless(line);
                }
                self.notes.push_back(note);
            }
            // Ignore an Xid without a pid; NVML reports it as well, with its device.
            LogEvent::Xid { pid: None, .. } => {}
        }
    }

    /// Removes and returns the recent note of a pid, or returns a new one. The caller must put it back.
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
