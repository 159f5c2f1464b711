//! Table of processes whose runs are not closed. It counts the connected agents of each and decides when its run can be closed.
//!
//! The pidfd reports the end of a process at once, but records of its agent may still be unread in the socket. The run is closed
//! when the connection of its last agent has been read to its end.

use gpumem_ledger::ProcessKey;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Maximum number of closed processes that are remembered, so that a late sample of one does not start a new run.
const REMEMBERED: usize = 16_384;
/// Longest time (ns) after the end of a process at which a process list may still name it. Reading a list takes time, and the
/// end of a process is noticed late.
const LISTED_AFTER_END_NS: u64 = 1_000_000_000;

/// Which changed runs are queued for writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    /// Runs that were never written.
    New,
    /// Runs that were never written, and runs of processes that have or had an agent.
    Covered,
    All,
}

/// A process whose run is not closed.
#[derive(Debug, Default)]
struct Entry {
    agents: u32,
    had_agent: bool,
    /// Whether the driver's accounting mode has reported the process's peak memory. Then a final peak follows after its end.
    is_accounted: bool,
    /// End of the process: its time (ns, CLOCK_MONOTONIC) and the exit status, if known.
    gone: Option<(u64, Option<u64>)>,
    /// Whether the process has new data since its run was last written.
    changed: bool,
    /// Latest value of each reading, keyed by kind of reading and number (slot) of the device.
    readings: Vec<((u8, u8), Option<u64>)>,
    /// Whether the run of the process is in the queue `due`.
    is_due: bool,
    /// Time at which a process list first named the process (ns, CLOCK_MONOTONIC). Only set if its start time is unknown.
    missed_ns: Option<u64>,
    /// Whether a list made after `missed_ns` also names the process. Then it runs in a PID namespace that is not visible here.
    /// Otherwise it may have ended before /proc was read, and its agent's first record (hello) may follow.
    is_listed_again: bool,
}

impl Entry {
    /// Returns whether an agent's first record (hello) may still supply the missing start time.
    fn may_be_identified(&self, key: &ProcessKey) -> bool {
        key.start_ticks == 0 && !self.is_listed_again
    }
}

/// Processes whose runs are not closed, and recently closed ones.
#[derive(Debug, Default)]
pub(crate) struct ProcessTable {
    processes: BTreeMap<ProcessKey, Entry>,
    /// Processes in `processes` that have ended.
    ending: BTreeSet<ProcessKey>,
    /// Processes in `processes` whose runs have never been written.
    new: BTreeSet<ProcessKey>,
    /// Queue of runs to be written, oldest first, each with the time since which it waits (ns, CLOCK_MONOTONIC).
    due: VecDeque<(ProcessKey, u64)>,
    closed: VecDeque<ProcessKey>,
    /// Time at which each process in `closed` ended (ns, CLOCK_MONOTONIC).
    ended_ns: BTreeMap<ProcessKey, u64>,
    /// Processes whose end was reported before any other record, oldest first, with time and exit status. Other records may still
    /// arrive: an agent's first record (hello), or a sample that listed the process while it ran.
    early: VecDeque<(ProcessKey, u64, Option<u64>)>,
    /// Processes without a start time, by device slot. The value: whether the list that is being read has them. They ended before
    /// /proc was read, or are in a PID namespace that is not visible here. No pidfd reports their end.
    unseen: BTreeMap<(u8, ProcessKey), bool>,
    /// Processes added since the last [`ProcessTable::take_newcomers`].
    take_new: Vec<ProcessKey>,
}

impl ProcessTable {
    /// Stores the value of a reading. If it differs from the previous value, marks the run of the process as changed. `kind` and
    /// `device` identify the reading. Returns false if the run is closed.
    pub(crate) fn note_reading(&mut self, key: ProcessKey, kind: u8, device: u8, value: Option<u64>) -> bool {
        let Some(entry) = self.processes.get_mut(&key) else { return self.mark_changed(key) };
        match entry.readings.iter_mut().find(|(known, _)| *known == (kind, device)) {
            Some((_, known)) => entry.changed |= std::mem::replace(known, value) != value,
            None => {
                entry.readings.push(((kind, device), value));
                entry.changed = true;
            }
        }
        true
    }

    /// Marks the run of a process as changed. Returns false if its run is closed.
    pub(crate) fn mark_changed(&mut self, key: ProcessKey) -> bool {
        if let Some(entry) = self.processes.get_mut(&key) {
            entry.changed = true;
        }
        self.add(key)
    }

    /// Adds a process if it is new. Returns false if its run is closed.
    pub(crate) fn add(&mut self, key: ProcessKey) -> bool {
        if self.processes.contains_key(&key) {
            return true;
        }
        if self.ended_ns.contains_key(&key) {
            return false;
        }
        let early = self.early.iter().position(|&(ended, ..)| ended == key);
        let gone =
            early.and_then(|index| self.early.remove(index)).map(|(_, time_ns, status)| (time_ns, status));
        if gone.is_some() {
            self.ending.insert(key);
        }
        self.processes.insert(key, Entry { changed: true, gone, ..Entry::default() });
        self.new.insert(key);
        self.take_new.push(key);
        true
    }

    /// Begins another run of a closed process, because its agent's hello was read late. The store joins both runs. Returns
    /// whether records of the process are accepted now.
    pub(crate) fn reopen(&mut self, key: ProcessKey) -> bool {
        self.ended_ns.remove(&key);
        self.closed.retain(|over| *over != key);
        self.mark_changed(key)
    }

    /// Returns whether a process list has named this pid and its start time could not be read.
    pub(crate) fn is_unidentified(&self, pid: u32) -> bool {
        let key = ProcessKey { pid, start_ticks: 0 };
        self.processes.get(&key).is_some_and(|entry| entry.may_be_identified(&key))
    }

    /// Removes the entry of a pid without a start time, because the hello of its agent has the start time. Returns the old key.
    pub(crate) fn take_unidentified(&mut self, pid: u32) -> ProcessKey {
        let key = ProcessKey { pid, start_ticks: 0 };
        self.processes.remove(&key);
        self.ending.remove(&key);
        self.new.remove(&key);
        self.unseen.retain(|(_, listed), _| *listed != key);
        key
    }

    pub(crate) fn take_newcomers(&mut self) -> Vec<ProcessKey> {
        std::mem::take(&mut self.take_new)
    }

    pub(crate) fn has(&self, key: ProcessKey) -> bool {
        self.processes.contains_key(&key)
    }

    /// Begins reading the process list of a device. At first, no process counts as listed there.
    pub(crate) fn list_begins(&mut self, device: u8) {
        self.unseen.iter_mut().filter(|((on, _), _)| *on == device).for_each(|(_, named)| *named = false);
    }

    /// Returns the process that a list made at `listed_ns` names as `key`. If `key` has no start time, because /proc did not have
    /// it, returns a known process with the same pid that runs or ended at most [`LISTED_AFTER_END_NS`] before `listed_ns`. Without
    /// such a process, returns `key`.
    pub(crate) fn identified(&self, key: ProcessKey, listed_ns: u64) -> ProcessKey {
        if key.start_ticks != 0 {
            return key;
        }
        let with_start = ProcessKey { start_ticks: 1, ..key }..=ProcessKey { start_ticks: u64::MAX, ..key };
        let is_in_time = |ended_ns: u64| listed_ns <= ended_ns.saturating_add(LISTED_AFTER_END_NS);
        let mut open = self.processes.range(with_start.clone()).rev();
        let mut ended = self.ended_ns.range(with_start).rev();
        open.find(|(_, entry)| entry.gone.is_none_or(|(ended_ns, _)| is_in_time(ended_ns)))
            .map(|(&found, _)| found)
            .or_else(|| ended.find(|(_, ended_ns)| is_in_time(**ended_ns)).map(|(&found, _)| found))
            .unwrap_or(key)
    }

    /// Records that NVML's process list of a device contains `key`. The list was made at `listed_ns` and received at `now_ns`.
    pub(crate) fn list_names(&mut self, device: u8, key: ProcessKey, listed_ns: u64, now_ns: u64) {
        if key.start_ticks != 0 {
            return;
        }
        self.unseen.insert((device, key), true);
        if let Some(entry) = self.processes.get_mut(&key) {
            let missed_ns = *entry.missed_ns.get_or_insert(now_ns.max(listed_ns));
            entry.is_listed_again |= listed_ns > missed_ns.saturating_add(LISTED_AFTER_END_NS);
        }
    }

    /// Ends the process list of a device. Processes without a start time that no list names any more count as ended.
    pub(crate) fn list_ends(&mut self, device: u8, time_ns: u64) {
        let left = self.unseen.iter().filter(|((on, _), named)| *on == device && !**named);
        let left: Vec<ProcessKey> = left.map(|(&(_, key), _)| key).collect();
        for key in left {
            self.unseen.remove(&(device, key));
            if !self.unseen.keys().any(|&(_, other)| other == key) {
                self.set_end(key, time_ns, None);
            }
        }
    }

    /// Counts the connected agents of a process. `up`: one has connected; otherwise one has disconnected.
    pub(crate) fn count_agent(&mut self, key: ProcessKey, up: bool) {
        if let Some(entry) = self.processes.get_mut(&key) {
            entry.had_agent = true;
            entry.agents = if up { entry.agents + 1 } else { entry.agents.saturating_sub(1) };
        }
    }

    pub(crate) fn mark_accounted(&mut self, key: ProcessKey) {
        if let Some(entry) = self.processes.get_mut(&key) {
            entry.is_accounted = true;
        }
    }

    /// Stores the end of a process. Keeps the first reported time and the first available exit status.
    pub(crate) fn set_end(&mut self, key: ProcessKey, time_ns: u64, status: Option<u64>) {
        if let Some(entry) = self.processes.get_mut(&key) {
            let (time_ns, known) = *entry.gone.get_or_insert((time_ns, status));
            entry.gone = Some((time_ns, known.or(status)));
            self.ending.insert(key);
        } else if !self.ended_ns.contains_key(&key) && !self.early.iter().any(|&(ended, ..)| ended == key) {
            self.early.push_back((key, time_ns, status));
            if self.early.len() > REMEMBERED {
                self.early.pop_front();
            }
        }
    }

    /// Removes and returns the processes whose runs can be closed. The grace period after the end of a process depends on its
    /// agents:
    /// - Connected: ten times `grace_ns`. Thousands may end at once, and all records of each are read before its connection ends.
    /// - No longer connected, or in a PID namespace that is not visible here: no grace period.
    /// - Listed after its end, without a start time: ten times `grace_ns`, because the hello of its agent may identify it.
    /// - Never connected: a tenth of `grace_ns`. A list may name a short program that ends while its hello waits to be read.
    pub(crate) fn take_ended(&mut self, now_ns: u64, grace_ns: u64) -> Vec<(ProcessKey, u64, Option<u64>)> {
        let mut ended = Vec::new();
        for key in &self.ending {
            let Some(entry) = self.processes.get(key) else { continue };
            let Some((time_ns, status)) = entry.gone else { continue };
            let wait_ns = match entry.agents {
                0 if entry.may_be_identified(key) => grace_ns * 10,
                0 if entry.had_agent || key.start_ticks == 0 => 0,
                0 => grace_ns / 10,
                _ => grace_ns * 10,
            };
            // The driver's final peak arrives with the next process lists.
            let wait_ns = if entry.is_accounted { wait_ns.max(grace_ns / 2) } else { wait_ns };
            if now_ns.saturating_sub(time_ns) >= wait_ns {
                ended.push((*key, time_ns, status));
            }
        }
        for (key, time_ns, _) in &ended {
            self.processes.remove(key);
            self.ending.remove(key);
            self.new.remove(key);
            // A process without a start time is not remembered, because a later process with its pid would have the same key.
            if key.start_ticks != 0 {
                self.closed.push_back(*key);
                self.ended_ns.insert(*key, *time_ns);
            }
        }
        while self.closed.len() > REMEMBERED {
            if let Some(key) = self.closed.pop_front() {
                self.ended_ns.remove(&key);
            }
        }
        ended
    }

    /// Queues the runs that have new data since they were last written. Runs that were never written go first, ordered by the
    /// start of their processes, because the store numbers them in that order. A process stays new while it has no run (`has_run`
    /// returns false) or a hello may still identify it.
    pub(crate) fn make_due(&mut self, which: Due, now_ns: u64, has_run: impl Fn(ProcessKey) -> bool) {
        let mut new = Vec::new();
        for (&key, entry) in self.processes.iter_mut().filter(|(_, entry)| entry.changed && !entry.is_due) {
            let is_new = self.new.contains(&key);
            if is_new && (entry.may_be_identified(&key) || !has_run(key)) {
                continue;
            }
            entry.is_due = is_new || which == Due::All || which == Due::Covered && entry.had_agent;
            if is_new {
                new.push(key);
            } else if entry.is_due {
                self.due.push_back((key, now_ns));
            }
            self.new.remove(&key);
        }
        new.sort_by_key(|key| std::cmp::Reverse((key.start_ticks, key.pid)));
        new.into_iter().for_each(|key| self.due.push_front((key, now_ns)));
    }

    /// Removes up to `max` runs from the queue. Returns each with the time since which it waits (ns, CLOCK_MONOTONIC).
    pub(crate) fn take_due(&mut self, max: usize) -> Vec<(ProcessKey, u64)> {
        let mut taken = Vec::new();
        while taken.len() < max
            && let Some((key, since_ns)) = self.due.pop_front()
        {
            // Closed processes are skipped, because their final run is written separately.
            if let Some(entry) = self.processes.get_mut(&key).filter(|entry| entry.is_due) {
                (entry.is_due, entry.changed) = (false, false);
                taken.push((key, since_ns));
            }
        }
        taken
    }

    /// Returns the length of the queue, and the time since which its oldest run waits (ns, CLOCK_MONOTONIC).
    pub(crate) fn due(&self) -> (usize, Option<u64>) {
        (self.due.len(), self.due.iter().map(|(_, since_ns)| *since_ns).min())
    }

    pub(crate) fn has_new(&self) -> bool {
        !self.new.is_empty()
    }

    /// Returns whether runs wait to be written for the first time, to be written again or to be closed.
    pub(crate) fn wants_tick(&self) -> bool {
        self.has_new() || !self.due.is_empty() || !self.ending.is_empty()
    }

    pub(crate) fn live(&self) -> Vec<ProcessKey> {
        self.processes.iter().filter(|(_, entry)| entry.gone.is_none()).map(|(&key, _)| key).collect()
    }

    /// Marks a process as changed and never written, because a new part of its run begins.
    pub(crate) fn begin_part(&mut self, key: ProcessKey) {
        if let Some(entry) = self.processes.get_mut(&key) {
            entry.changed = true;
            self.new.insert(key);
        }
    }

    pub(crate) fn keys(&self) -> Vec<ProcessKey> {
        self.processes.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: ProcessKey = ProcessKey { pid: 1, start_ticks: 2 };

    #[test]
    fn an_end_waits_for_the_last_word() {
        let mut tracks = ProcessTable::default();
        assert!(tracks.mark_changed(KEY));
        tracks.count_agent(KEY, true);
        tracks.set_end(KEY, 100, None);
        assert_eq!(tracks.take_ended(150, 1000), []);
        tracks.count_agent(KEY, false);
        assert_eq!(tracks.take_ended(150, 1000), [(KEY, 100, None)]);
        assert!(!tracks.mark_changed(KEY), "it is over");
    }

    #[test]
    fn but_not_for_ever() {
        let mut tracks = ProcessTable::default();
        tracks.mark_changed(KEY);
        tracks.count_agent(KEY, true);
        tracks.set_end(KEY, 100, None);
        tracks.set_end(KEY, 200, Some(9));
        assert_eq!(tracks.take_ended(10_099, 1000), []);
        assert_eq!(tracks.take_ended(10_100, 1000), [(KEY, 100, Some(9))]);
        assert_eq!(tracks.keys(), []);
    }

    #[test]
    fn the_first_word_is_waited_for_a_moment() {
        let mut tracks = ProcessTable::default();
        tracks.mark_changed(KEY);
        tracks.set_end(KEY, 100, None);
        assert_eq!(tracks.take_ended(199, 1000), []);
        assert_eq!(tracks.take_ended(200, 1000), [(KEY, 100, None)]);
    }

    #[test]
    fn hello_that_is_read_after_the_end_reopens_the_run() {
        let mut tracks = ProcessTable::default();
        tracks.mark_changed(KEY);
        tracks.set_end(KEY, 100, None);
        assert_eq!(tracks.take_ended(200, 1000), [(KEY, 100, None)]);
        assert!(!tracks.mark_changed(KEY));
        assert!(tracks.reopen(KEY) && tracks.mark_changed(KEY));
        tracks.count_agent(KEY, true);
        tracks.count_agent(KEY, false);
        tracks.set_end(KEY, 300, None);
        assert_eq!(tracks.take_ended(300, 1000), [(KEY, 300, None)]);
        assert!(!tracks.mark_changed(KEY), "it is over again");
    }

    #[test]
    fn an_end_that_comes_first_is_not_forgotten() {
        let mut tracks = ProcessTable::default();
        tracks.set_end(KEY, 100, None);
        tracks.set_end(KEY, 150, Some(9));
        assert_eq!(tracks.take_ended(200, 1000), [], "nothing was said of it");
        assert!(tracks.mark_changed(KEY));
        tracks.count_agent(KEY, true);
        assert_eq!(tracks.take_ended(250, 1000), [], "its agent still speaks");
        tracks.count_agent(KEY, false);
        assert_eq!(tracks.take_ended(300, 1000), [(KEY, 100, None)]);
        assert!(!tracks.mark_changed(KEY), "it is over");
    }

    #[test]
    fn without_a_start_time_the_lists_tell_the_end() {
        let unseen = ProcessKey { pid: 7, start_ticks: 0 };
        let mut tracks = ProcessTable::default();
        let mut now = 0;
        let mut list = |device: u8, keys: &[ProcessKey], complete: bool| {
            now += 2 * LISTED_AFTER_END_NS;
            tracks.list_begins(device);
            for &key in keys {
                assert!(tracks.mark_changed(key));
                tracks.list_names(device, key, now, now);
            }
            if complete {
                tracks.list_ends(device, now);
            }
            let over = tracks.take_ended(now, 1000).into_iter();
            over.map(|(key, ended_ns, _)| (key, ended_ns == now)).collect::<Vec<_>>()
        };
        assert_eq!(list(0, &[unseen, KEY], true), []);
        assert_eq!(list(0, &[unseen, KEY], true), []);
        assert_eq!(list(1, &[unseen], true), []);
        assert_eq!(list(0, &[], false), [], "a list that failed tells nothing");
        assert_eq!(list(0, &[], true), [], "the other device still lists it");
        assert_eq!(list(1, &[], true), [(unseen, true)]);
        assert_eq!(list(1, &[unseen], true), [], "the pid is another process's now");
        assert_eq!(list(1, &[unseen], true), []);
        assert_eq!(list(1, &[], true), [(unseen, true)]);
    }

    /// A list made at `listed_ns` and read at `now_ns` names the process. Returns the runs that are due then.
    fn list(
        tracks: &mut ProcessTable,
        key: ProcessKey,
        listed_ns: u64,
        now_ns: u64,
    ) -> Vec<(ProcessKey, u64)> {
        tracks.list_begins(0);
        assert!(tracks.mark_changed(key));
        tracks.list_names(0, key, listed_ns, now_ns);
        tracks.list_ends(0, listed_ns);
        tracks.make_due(Due::New, now_ns, |_| true);
        tracks.take_due(9)
    }

    #[test]
    fn hello_identifies_a_process_that_several_waiting_lists_name_after_its_end() {
        const SECOND: u64 = 1_000_000_000;
        let unseen = ProcessKey { start_ticks: 0, ..KEY };
        let mut tracks = ProcessTable::default();
        // Lists of 30 s, read after the daemon was stopped for that time.
        for (at, listed_ns) in (0..30).map(|at| (at, at * SECOND)) {
            assert_eq!(list(&mut tracks, unseen, listed_ns, 30 * SECOND + at), [], "a hello may follow");
        }
        assert!(tracks.is_unidentified(KEY.pid));
        assert_eq!(tracks.take_unidentified(KEY.pid), unseen);
        assert!(!tracks.has(unseen) && !tracks.is_unidentified(KEY.pid));

        let now = 40 * SECOND;
        assert_eq!(list(&mut tracks, unseen, now, now + 5), [], "another process with that pid");
        assert_eq!(list(&mut tracks, unseen, now + SECOND, now + SECOND), [], "it may have ended at once");
        let later = now + 5 + SECOND + 1;
        assert_eq!(
            list(&mut tracks, unseen, later, later),
            [(unseen, later)],
            "it lives, in another namespace"
        );
        assert!(!tracks.is_unidentified(KEY.pid));
    }

    #[test]
    fn list_that_is_read_after_the_hello_belongs_to_the_process_of_the_hello() {
        let unseen = ProcessKey { start_ticks: 0, ..KEY };
        let mut tracks = ProcessTable::default();
        assert_eq!(tracks.identified(unseen, 50), unseen, "nothing is known");
        tracks.mark_changed(KEY);
        tracks.count_agent(KEY, true);
        assert_eq!(tracks.identified(unseen, 50), KEY, "its end was not noticed so far");
        let ended_ns = 3_000_000_000;
        tracks.set_end(KEY, ended_ns, None);
        let latest = ended_ns + LISTED_AFTER_END_NS;
        let is_it = |tracks: &ProcessTable| {
            [ended_ns, latest, latest + 1].map(|listed_ns| tracks.identified(unseen, listed_ns) == KEY)
        };
        assert_eq!(is_it(&tracks), [true, true, false]);
        tracks.count_agent(KEY, false);
        assert_eq!(tracks.take_ended(latest, 1000), [(KEY, ended_ns, None)]);
        assert_eq!(is_it(&tracks), [true, true, false], "its run is closed");
        let other = ProcessKey { pid: KEY.pid + 1, ..unseen };
        assert_eq!(tracks.identified(other, ended_ns), other);
    }

    #[test]
    fn listed_after_its_end_waits_for_a_hello() {
        let unseen = ProcessKey { start_ticks: 0, ..KEY };
        let mut tracks = ProcessTable::default();
        assert!(tracks.mark_changed(unseen));
        tracks.list_begins(0);
        tracks.list_names(0, unseen, 50, 50);
        tracks.list_ends(0, 50);
        tracks.list_begins(0);
        tracks.list_ends(0, 100);
        assert_eq!(tracks.take_ended(10_099, 1000), []);
        assert_eq!(tracks.take_ended(10_100, 1000), [(unseen, 100, None)]);
    }

    #[test]
    fn new_runs_are_written_in_the_order_of_their_processes() {
        let keys = [(900, 1), (30, 2), (500, 3)].map(|(pid, start_ticks)| ProcessKey { pid, start_ticks });
        let mut tracks = ProcessTable::default();
        keys.iter().for_each(|key| assert!(tracks.mark_changed(*key)));
        tracks.make_due(Due::New, 5, |key| key != keys[0]);
        assert_eq!(tracks.take_due(9), [(keys[1], 5), (keys[2], 5)], "pids begin again");
        assert!(tracks.has_new(), "the first one is on no device so far");
        tracks.mark_changed(keys[1]);
        tracks.make_due(Due::All, 6, |_| true);
        assert_eq!(tracks.take_due(9), [(keys[0], 6), (keys[1], 6)]);
    }

    #[test]
    fn reading_that_repeats_the_last_one_makes_no_run_due() {
        let mut tracks = ProcessTable::default();
        assert!(tracks.note_reading(KEY, 0, 1, Some(5)));
        let mut due = |value, which| {
            assert!(tracks.note_reading(KEY, 0, 1, value));
            tracks.make_due(which, 6, |_| true);
            tracks.take_due(9).len()
        };
        assert_eq!(due(Some(5), Due::New), 1, "it is new");
        assert_eq!(due(Some(5), Due::All), 0);
        assert_eq!([due(Some(7), Due::Covered), due(Some(7), Due::All), due(Some(7), Due::All)], [0, 1, 0]);
        assert_eq!([due(None, Due::All), due(None, Due::All)], [1, 0]);
        tracks.count_agent(KEY, true);
        tracks.mark_changed(KEY);
        tracks.make_due(Due::Covered, 7, |_| true);
        assert_eq!(tracks.take_due(9), [(KEY, 7)]);
    }

    #[test]
    fn runs_are_due_once_and_new_ones_first() {
        let key = |pid| ProcessKey { pid, start_ticks: 2 };
        let mut tracks = ProcessTable::default();
        tracks.mark_changed(key(1));
        tracks.mark_changed(key(2));
        tracks.make_due(Due::New, 5, |_| true);
        assert!(!tracks.has_new());
        tracks.make_due(Due::All, 6, |_| true);
        assert_eq!(tracks.due(), (2, Some(5)), "each is due once");
        assert_eq!(tracks.take_due(9).len(), 2);
        tracks.make_due(Due::All, 7, |_| true);
        assert_eq!(tracks.due().0, 0, "nothing was said since");
        tracks.mark_changed(key(1));
        tracks.make_due(Due::New, 8, |_| true);
        assert_eq!(tracks.due().0, 0, "it is not new");
        tracks.make_due(Due::All, 9, |_| true);
        tracks.mark_changed(key(3));
        tracks.make_due(Due::New, 10, |_| true);
        assert_eq!(tracks.take_due(1), [(key(3), 10)], "a new one goes first");
        assert_eq!(tracks.take_due(9), [(key(1), 9)], "the rest keeps its place");
    }
}
