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
use groups::{GroupKills, Groups, killed_group};
use log::Log;
use parse::LogEvent;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// Maximum number of remembered reports about processes that have not ended yet; the oldest are dropped.
const MAX_NOTES: usize = 256;
/// Age (ns) above which a report no longer explains the end of a process.
const RECENT_NS: u64 = 120_000_000_000;

/// Whether the kernel's log can be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LogStatus {
    /// Path of the kernel's log; `None` if reading it is disabled.
    pub log: Option<PathBuf>,
    /// Reason why the log cannot be read; `None` if it can.
    pub problem: Option<String>,
}

/// Handle of the reader of the kernel's reports. Clones share its state. No call blocks.
#[derive(Debug, Clone)]
pub(crate) struct Kernel(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    log: Option<Log>,
    groups: Groups,
    /// Reports about processes that have not ended, newest first.
    notes: VecDeque<Note>,
    /// Control group named by an earlier line of the log, until the line of the kill is read. Older kernels write the former line
    /// without a pid.
    group: Option<String>,
    /// Number of kills in each control group of a process, as counted when the process began.
    kills: BTreeMap<ProcessKey, Vec<GroupKills>>,
}

/// What the log has reported about a process. The table has at most one note for each pid.
#[derive(Debug, Default)]
struct Note {
    pid: u32,
    /// Time at which the report was read (ns).
    read_ns: u64,
    /// Cause of a kill: `host` or `cgroup`; `None` until the log reports the kill itself.
    killed: Option<&'static str>,
    /// Control group whose limit was the cause.
    group: Option<String>,
    /// Memory limit of `group`.
    limit_bytes: Option<u64>,
    /// Number of the fault that the GPU driver reported (Xid).
    xid: Option<u64>,
    /// Line of the log that reports the kill or the fault.
    line: String,
}

impl Kernel {
    /// Starts reading the kernel's log at its end.
    pub(crate) fn new(settings: &KernelSettings) -> Self {
        let state = State {
            log: (settings.log.as_os_str() != "off").then(|| Log::open(&settings.log)),
            groups: Groups::new(&settings.control_groups, Path::new("/proc")),
            notes: VecDeque::new(),
            group: None,
            kills: BTreeMap::new(),
        };
        Kernel(Arc::new(Mutex::new(state)))
    }

    /// Reads and parses the new lines of the kernel's log.
    pub(crate) fn read_log(&self, now_ns: u64) {
        self.lock().read_log(now_ns);
    }

    /// Stores the kill counts of a new process's control groups, for comparison when it ends.
    pub(crate) fn note_start(&self, key: ProcessKey) {
        let mut state = self.lock();
        if let Some(kills) = state.groups.count(key.pid) {
            state.kills.insert(key, kills);
        }
    }

    /// Returns the reason for the end of a process as `key=value` lines; empty if unknown.
    pub(crate) fn end_facts(&self, key: ProcessKey, now_ns: u64) -> String {
        let mut state = self.lock();
        state.read_log(now_ns);
        let kills = state.kills.remove(&key);
        let note = state.remove_note(key.pid, now_ns).unwrap_or_default();
        let mut lines = note.lines();
        if note.killed.is_none()
            && let Some((group, limit_bytes)) = kills.as_deref().and_then(killed_group)
        {
            let _ = writeln!(lines, "host_oom=count\nhost_oom_ns={now_ns}\nhost_oom_cgroup={group}");
            if let Some(limit_bytes) = limit_bytes {
                let _ = writeln!(lines, "host_oom_limit={limit_bytes}");
            }
        }
        lines
    }

    pub(crate) fn status(&self) -> LogStatus {
        let state = self.lock();
        let log = state.log.as_ref();
        LogStatus { log: log.map(|log| log.path.clone()), problem: log.and_then(Log::problem) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

impl State {
    fn read_log(&mut self, now_ns: u64) {
        let Some(log) = &mut self.log else { return };
        for line in log.read(now_ns) {
            if let Some(event) = parse::parse(&line) {
                self.note(event, &line, now_ns);
            }
        }
    }

    /// Stores an event of the log in the note of its process.
    fn note(&mut self, event: LogEvent, line: &str, now_ns: u64) {
        match event {
            LogEvent::Limit { group } => self.group = Some(group),
            LogEvent::Constraint { pid, group } => self.note_mut(pid, now_ns).group = group,
            LogEvent::Killed { pid, in_group } => {
                let limit_group = self.group.take();
                let note = self.note_mut(pid, now_ns);
                note.group = note.group.take().or(limit_group);
                let is_of_group = in_group.unwrap_or(note.group.is_some());
                note.killed = Some(if is_of_group { "cgroup" } else { "host" });
                note.line = parse::harmless(line);
                let group = note.group.clone().filter(|_| is_of_group);
                let limit_bytes = group.and_then(|group| self.groups.limit(&group));
                self.note_mut(pid, now_ns).limit_bytes = limit_bytes;
            }
            LogEvent::Xid { pid: Some(pid), xid } => {
                let note = self.note_mut(pid, now_ns);
                // Replace only Xid 43 and 45, which are consequences of other faults.
                if note.xid.is_none_or(|known| matches!(known, 43 | 45)) {
                    (note.xid, note.read_ns) = (Some(xid), now_ns);
                    note.line = parse::harmless(line);
                }
            }
            // Ignore an Xid without a pid; NVML reports it as well, with its device.
            LogEvent::Xid { pid: None, .. } => {}
        }
    }

    /// Returns the recent note of a pid, or a new one.
    fn note_mut(&mut self, pid: u32, now_ns: u64) -> &mut Note {
        let known = self.remove_note(pid, now_ns);
        self.notes.truncate(MAX_NOTES - 1);
        let note = known.unwrap_or_else(|| Note { pid, read_ns: now_ns, ..Note::default() });
        self.notes.push_front(note);
        &mut self.notes[0]
    }

    /// Removes the note of a pid. Returns it if it is recent.
    fn remove_note(&mut self, pid: u32, now_ns: u64) -> Option<Note> {
        let at = self.notes.iter().position(|note| note.pid == pid)?;
        self.notes.remove(at).filter(|note| now_ns.saturating_sub(note.read_ns) < RECENT_NS)
    }
}

impl Note {
    /// Returns the report as `key=value` lines.
    fn lines(&self) -> String {
        let Note { read_ns, line, .. } = self;
        let mut lines = String::new();
        let mut add = |arguments: std::fmt::Arguments<'_>| {
            let _ = writeln!(lines, "{arguments}");
        };
        if let Some(killed) = self.killed {
            add(format_args!("host_oom={killed}\nhost_oom_ns={read_ns}\nhost_oom_line={line}"));
            if let Some(group) = self.group.as_ref().filter(|_| killed == "cgroup") {
                add(format_args!("host_oom_cgroup={}", parse::harmless(group)));
            }
            if let Some(limit_bytes) = self.limit_bytes {
                add(format_args!("host_oom_limit={limit_bytes}"));
            }
        }
        if let Some(xid) = self.xid {
            add(format_args!("xid={xid}\nxid_ns={read_ns}"));
            if self.killed.is_none() {
                add(format_args!("xid_line={line}"));
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests;
