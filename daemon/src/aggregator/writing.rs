//! Hands runs to the store: while processes live, after their end, and at shutdown. Builds only as many runs as the store's queue
//! has room for.

use super::Aggregator;
use super::process_table::Due;
use crate::clock::{process_age, since_boot};
use crate::run_writer::LedgerBacklog;
use crate::stats::Count;
use gpumem_ledger::ProcessKey;
use gpumem_model::run::Run;
use gpumem_runs::requests::{KeepLimits, Piece, RequestLog};
use gpumem_wire::{Body, Record, Stamp};
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

/// Time (ns) after the end of a process for which its run stays open for the final records of its agent. Depending on the state of
/// the agent, [`ProcessTable::take_ended`](super::process_table::ProcessTable::take_ended) waits for 0 to 10 times this time.
const GRACE_NS: u64 = 2_000_000_000;
/// Interval (ns) of heartbeats. A heartbeat lets the store record that unchanged runs are still open.
const HEARTBEAT_NS: u64 = 60_000_000_000;
/// Maximum number of runs built at once. Meanwhile the ledger takes no batches.
const RUNS_AT_ONCE: usize = 512;
/// Maximum number of ended processes that wait for room in the store's queue. If more wait, all are handed to the store at once.
const MAX_CLOSING: usize = 16_384;
/// Time at shutdown after which runs are handed to the store even if its queue is full.
const LAST_RUNS: Duration = Duration::from_secs(2);

/// Maximum number of processes that roll (begin a new part) in one tick. Building a run blocks the ledger for some milliseconds.
const ROLLED_AT_ONCE: usize = 8;

impl Aggregator {
    /// Closes the runs of ended processes whose agents have disconnected or have used up their grace period.
    pub(super) fn finish(&mut self, now_ns: u64) {
        let ended = self.processes.take_ended(now_ns, GRACE_NS);
        for &(key, time_ns, status) in &ended {
            let stamp = Stamp { thread: key.pid, time_ns, ..Stamp::default() };
            let status = gpumem_wire::Reading(status);
            self.host(&Record { stamp, body: Body::ProcessGone { start_ticks: key.start_ticks, status } });
            self.closing.push_back(key);
        }
        // A later process with the same pid would be confused with an ended one without a start time. So if one of the ended
        // processes has no start time, the runs of all are closed now.
        let max = if ended.iter().any(|(key, ..)| key.start_ticks == 0) || self.closing.len() > MAX_CLOSING {
            usize::MAX
        } else {
            self.run_writer.room().ended.min(RUNS_AT_ONCE)
        };
        self.close_ended(max);
    }

    /// Hands the runs of up to `max` ended processes to the store, and removes these processes from the ledger.
    pub(super) fn close_ended(&mut self, max: usize) {
        let keys: Vec<ProcessKey> = self.closing.drain(..max.min(self.closing.len())).collect();
        if keys.is_empty() {
            return;
        }
        let runs = self.builder.runs_of(&keys, false);
        let stored = self.store_runs(runs, true);
        self.stats.add(Count::RunsFinished, stored.len() as u64);
        self.counters.update(&self.builder.ledger().snapshot());
        for key in keys {
            self.builder.forget(key);
            self.requests.forget(key);
        }
        self.changed = true;
    }

    /// Ends the parts of processes that have lived for a whole period, and begins their next parts.
    pub(super) fn roll(&mut self, now_ns: u64) {
        let room = self.run_writer.room().ended;
        let mut keys = self.roll.take(self.wall_ns(now_ns), room, || self.processes.live());
        keys.retain(|key| self.processes.has(*key));
        if keys.is_empty() {
            return; // the usual case; updating the counters reads the whole snapshot
        }
        self.counters.update(&self.builder.ledger().snapshot());
        let runs = self.builder.roll(&keys, now_ns);
        let stored = self.store_runs(runs, true);
        self.stats.add(Count::RunsRolled, stored.len() as u64);
        for key in stored {
            self.processes.begin_part(key);
            self.requests.begin_part(key);
        }
    }

    /// Marks changed runs as due for writing; see [`ProcessTable::make_due`](super::process_table::ProcessTable::make_due).
    pub(super) fn make_due(&mut self, which: Due, now_ns: u64) {
        let ledger = self.builder.ledger();
        self.processes.make_due(which, now_ns, |key| ledger.is_on_a_device(key));
    }

    /// Builds the changed runs that are due and hands them to the store, as many as it has room for.
    pub(super) fn checkpoint(&mut self, now_ns: u64) {
        let due = self.processes.take_due(self.run_writer.room().living.min(RUNS_AT_ONCE));
        let checkpoint_ns = self.settings.checkpoint.as_nanos() as u64;
        let late = due.iter().filter(|(_, since_ns)| now_ns.saturating_sub(*since_ns) > checkpoint_ns);
        self.stats.add(Count::StoreLate, late.count() as u64);
        let keys: Vec<ProcessKey> = due.into_iter().map(|(key, _)| key).collect();
        self.store_present(&keys, false);
        let (runs, since_ns) = self.processes.due();
        let age = since_ns.map(|since_ns| Duration::from_nanos(now_ns.saturating_sub(since_ns)));
        let since = age.and_then(|age| Instant::now().checked_sub(age));
        self.run_writer.set_backlog(LedgerBacklog { runs, since, checkpoint: self.settings.checkpoint });
        if runs == 0 && self.complete_ns.saturating_sub(self.heartbeat_ns) >= HEARTBEAT_NS {
            self.heartbeat_ns = self.complete_ns;
            self.run_writer.heartbeat(self.complete_ns);
        }
    }

    fn store_present(&mut self, keys: &[ProcessKey], is_final: bool) {
        if !keys.is_empty() {
            let runs = self.builder.runs_of(keys, true);
            self.store_runs(runs, is_final);
        }
    }

    /// Hands runs to the store, except those of processes that never used a device. Returns the processes of the queued runs.
    fn store_runs(&mut self, mut runs: Vec<(ProcessKey, Run)>, is_final: bool) -> Vec<ProcessKey> {
        runs.retain(|(_, run)| worth_keeping(run));
        let store = |(key, run)| {
            let requests = self.requests.take(key).into_iter().collect();
            self.run_writer.queue(self.uid(key), run, requests, is_final);
            key
        };
        runs.into_iter().map(store).collect()
    }

    /// Closes all runs at shutdown. Live processes' runs are written in their current state, changed ones first.
    pub(super) async fn close(&mut self) {
        let began = Instant::now();
        self.finish(u64::MAX);
        self.make_due(Due::All, 0);
        let mut keys: Vec<_> = self.processes.take_due(usize::MAX).into_iter().map(|(key, _)| key).collect();
        let changed: HashSet<_> = keys.iter().copied().collect();
        keys.extend(self.processes.keys().into_iter().filter(|key| !changed.contains(key)));
        while !self.closing.is_empty() || !keys.is_empty() {
            let is_late = began.elapsed() >= LAST_RUNS;
            let room = if is_late { usize::MAX } else { self.run_writer.room().ended.min(RUNS_AT_ONCE) };
            if room == 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            } else if self.closing.is_empty() {
                let chunk: Vec<_> = keys.drain(..room.min(keys.len())).collect();
                self.store_present(&chunk, true);
            } else {
                self.close_ended(room);
            }
        }
        self.recorder = None;
    }

    /// Returns the uid of a process's run: the text that identifies the process in the store (not a user id). Each daemon returns
    /// the same uid for the same process.
    pub(super) fn uid(&self, key: ProcessKey) -> String {
        format!("{}:{}:{}", self.boot_id, key.pid, key.start_ticks)
    }
}

/// Streams of requests to PyTorch's allocator, which are stored with runs if `runs.keep_requests` is set.
#[derive(Debug, Default)]
pub(super) struct KeptRequests {
    /// Which part of each stream is kept; `None`: no requests are kept.
    limits: Option<KeepLimits>,
    logs: HashMap<ProcessKey, RequestLog>,
    /// Memory of all logs in bytes.
    held_bytes: usize,
}

/// Maximum memory of the streams of all processes (bytes). A process that needs more loses its stream.
const MAX_STREAM_BYTES: usize = 96 << 20;

impl KeptRequests {
    /// Applies new limits. Streams begin with processes that connect afterwards, because a stream needs the state at its begin.
    pub(super) fn set_limits(&mut self, limits: Option<KeepLimits>) {
        self.limits = limits;
        if limits.is_none() {
            (self.logs, self.held_bytes) = Default::default();
        }
    }

    pub(super) fn observe(&mut self, key: ProcessKey, record: &Record<'_>) {
        if self.limits.is_none() {
            return;
        }
        if let Body::Source { up: true, .. } = record.body {
            self.logs.entry(key).or_default();
        } else {
            self.change(key, |log| log.observe(&record.stamp, &record.body));
            if self.held_bytes > MAX_STREAM_BYTES {
                self.change(key, RequestLog::end);
            }
        }
    }

    /// Changes the log of a process if it has one, and the sum of their memory.
    fn change<R>(&mut self, key: ProcessKey, change: impl FnOnce(&mut RequestLog) -> R) -> Option<R> {
        let log = self.logs.get_mut(&key)?;
        let before = log.held_bytes();
        let result = change(log);
        self.held_bytes = (self.held_bytes + log.held_bytes()).saturating_sub(before);
        Some(result)
    }

    /// Returns the entries of a process's stream since the last call.
    pub(super) fn take(&mut self, key: ProcessKey) -> Option<Piece> {
        let limits = self.limits?;
        self.change(key, |log| log.take(limits))?
    }

    /// Begins the stream of the next part of a long run.
    pub(super) fn begin_part(&mut self, key: ProcessKey) {
        self.change(key, RequestLog::begin_part);
    }

    pub(super) fn forget(&mut self, key: ProcessKey) {
        let freed = self.logs.remove(&key).map_or(0, |log| log.held_bytes());
        self.held_bytes = self.held_bytes.saturating_sub(freed);
    }
}

/// Returns whether a run is to be stored. Runs of processes that never used a device are not.
pub(super) fn worth_keeping(run: &Run) -> bool {
    !run.devices.is_empty()
}

/// Decides when the run of a long-lived process is split into parts ("rolling").
///
/// Parts end at multiples of the period since 1970. With a period of a day that is midnight UTC, the time zone of all reports. A
/// process rolls only after it has lived for a whole period, so that midnight does not split a job of one hour.
#[derive(Debug, Default)]
pub(super) struct Roll {
    period: Option<Duration>,
    passed: i128,
    /// Processes that lived when the last period ended, and whose part has not ended yet.
    waiting: Vec<ProcessKey>,
}

impl Roll {
    /// Sets the period (the length of a part). The next parts end when the new period ends.
    pub(crate) fn set(&mut self, period: Option<Duration>, wall_ns: i128) {
        if period == self.period {
            return;
        }
        self.period = period;
        self.waiting.clear();
        self.passed = self.periods(wall_ns).unwrap_or(0);
    }

    fn periods(&self, wall_ns: i128) -> Option<i128> {
        let period_ns = i128::try_from(self.period?.as_nanos()).ok().filter(|ns| *ns > 0)?;
        Some(wall_ns.div_euclid(period_ns))
    }

    /// Returns whether processes wait for the end of their part.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns the processes whose part ends now, at most `room` and [`ROLLED_AT_ONCE`]. `live` returns all live processes.
    pub(crate) fn take(
        &mut self,
        wall_ns: i128,
        room: usize,
        live: impl FnOnce() -> Vec<ProcessKey>,
    ) -> Vec<ProcessKey> {
        let Some((period, passed)) = self.period.zip(self.periods(wall_ns)) else { return Vec::new() };
        // `passed` is the number of periods since 1970. If the wall clock was set back, it is smaller than before, and no part of a
        // run ends.
        if passed > self.passed {
            self.passed = passed;
            let up = since_boot();
            self.waiting = live();
            // A process with an unknown start time rolls too: an unneeded split is better than a run that never ends.
            self.waiting.retain(|key| process_age(key.start_ticks, up) >= period);
        }
        self.waiting.split_off(self.waiting.len().saturating_sub(ROLLED_AT_ONCE.min(room)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY_NS: i128 = 86_400_000_000_000;

    fn roll() -> Roll {
        let mut roll = Roll::default();
        roll.set(Some(Duration::from_secs(86_400)), 20_000 * DAY_NS + 5);
        roll
    }

    #[test]
    fn at_midnight_those_roll_that_have_lived_for_a_day() {
        let up = since_boot();
        let young = ProcessKey { pid: 1, start_ticks: (up.as_millis() / 10) as u64 };
        assert!(process_age(young.start_ticks, up) < Duration::from_millis(20));
        let old = ProcessKey { pid: 2, start_ticks: 0 };
        assert_eq!(process_age(old.start_ticks, up), up);
        let mut roll = roll();
        assert_eq!(roll.take(20_000 * DAY_NS + 6, 9, || panic!("the day goes on")), []);
        let rolled = roll.take(20_001 * DAY_NS, 9, || vec![young, old]);
        assert_eq!(rolled, if up >= Duration::from_secs(86_400) { vec![old] } else { vec![] });
        assert_eq!(roll.take(20_000 * DAY_NS, 9, || panic!("a clock that was set back")), []);
    }

    #[test]
    fn many_roll_a_few_at_a_time() {
        let mut roll = Roll::default();
        roll.set(Some(Duration::from_nanos(1)), 0);
        let keys: Vec<_> = (1..=20).map(|pid| ProcessKey { pid, start_ticks: 0 }).collect();
        let turns: Vec<usize> = [99, 7, 99, 99].map(|room| roll.take(1, room, || keys.clone()).len()).into();
        assert_eq!(turns, [8, 7, 5, 0]);
        roll.set(None, 2);
        assert_eq!(roll.take(5, 9, || panic!("never")), []);
    }
}
