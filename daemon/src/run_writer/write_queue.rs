//! Queue of runs that must be written to the store. It has the newest state of each run, in bounded memory.
//!
//! Callers never wait for the writing thread, so a blocked disk must not make the daemon grow. If the queue is full, the user
//! whose runs take the most bytes loses runs. Runs of live processes are dropped first, because the ledger will hand them over
//! again.

use gpumem_model::run::{Run, State};
use gpumem_runs::requests::Piece;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

const WAITING: usize = 16_384;
/// If this many runs are queued, changed runs of live processes stay in the ledger, where they can still change. A run with a full
/// series takes 0.1 MB, so the limit keeps the daemon small.
const LIVING: usize = 64;
/// Default limit of the memory of all queued runs, in bytes.
pub(super) const BYTES: usize = 64 << 20;

/// A state of a run that must be written to the store.
#[derive(Debug)]
pub(super) struct QueuedRun {
    pub uid: String,
    pub run: Box<Run>,
    /// Pieces of the stream of requests that must be added to the stored ones.
    pub requests: Vec<Piece>,
    pub is_final: bool,
    bytes: usize,
    /// Time of the run's oldest change that is not in the store.
    since: Instant,
}

impl QueuedRun {
    pub(crate) fn new(uid: String, run: Run, requests: Vec<Piece>, is_final: bool) -> Self {
        let pieces = requests.iter().map(|piece| piece.bytes.len()).sum::<usize>();
        let bytes = run.weight() + uid.len() + pieces;
        QueuedRun { uid, run: Box::new(run), requests, is_final, bytes, since: Instant::now() }
    }

    pub(crate) fn is_rolled(&self) -> bool {
        matches!(self.run.state, State::Rolled { .. })
    }
}

/// Number of runs that can be added to the queue without dropping any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    /// Number of runs of live processes.
    pub living: usize,
    /// Number of ended runs.
    pub ended: usize,
}

/// The queued runs by position, oldest first.
#[derive(Debug, Default)]
pub(super) struct WriteQueue {
    runs: BTreeMap<u64, Arc<QueuedRun>>,
    next: u64,
    /// Position in `runs` of each process's newest state, by uid, unless that state ends a part of a long run (rolled).
    positions: HashMap<String, u64>,
    /// Estimated memory of the queued runs, in bytes.
    bytes: usize,
    /// Position and state of the run that the thread is writing. A newer state may be at its position by now.
    writing: Option<(u64, Arc<QueuedRun>)>,
    pub max_bytes: usize,
    /// Whether the thread was notified of queued runs and has not read the queue since.
    pub is_notified: bool,
}

impl WriteQueue {
    pub(crate) fn new(max_bytes: usize) -> Self {
        WriteQueue { max_bytes, ..WriteQueue::default() }
    }

    /// Returns the number of queued runs and their bytes.
    pub(crate) fn size(&self) -> (usize, usize) {
        (self.runs.len(), self.bytes)
    }

    /// Returns how many runs can be added. Runs of live processes may use only half of the bytes.
    pub(crate) fn room(&self) -> Room {
        let count = self.runs.len();
        let if_below =
            |limit: usize, max: usize| if self.bytes < limit { max.saturating_sub(count) } else { 0 };
        Room {
            living: if_below(self.max_bytes / 2, LIVING),
            ended: if_below(self.max_bytes / 4 * 3, WAITING),
        }
    }

    pub(crate) fn oldest(&self) -> Duration {
        let front = self.runs.first_key_value().map(|(_, queued)| queued.since);
        front.map_or(Duration::ZERO, |since| since.elapsed())
    }

    pub(crate) fn runs(&self) -> impl DoubleEndedIterator<Item = &Arc<QueuedRun>> {
        self.runs.values()
    }

    /// Returns the next run to write. It counts as being written until [`finish_write`](Self::finish_write) or the next call.
    pub(crate) fn next_to_write(&mut self) -> Option<Arc<QueuedRun>> {
        self.writing = self.runs.first_key_value().map(|(position, queued)| (*position, Arc::clone(queued)));
        self.writing.as_ref().map(|(_, queued)| Arc::clone(queued))
    }

    /// Adds a state of a run. It replaces the queued state of the same part; after a complete part (rolled) it is queued as the
    /// next part. Returns the number of ended runs dropped for lack of room. Dropped runs of live processes will be handed over
    /// again.
    pub(crate) fn push(&mut self, mut new: QueuedRun) -> u64 {
        self.bytes += new.bytes;
        let known = self.positions.get(&new.uid).copied();
        let position = known.unwrap_or(self.next);
        self.next += u64::from(known.is_none());
        if new.is_rolled() {
            self.positions.remove(&new.uid);
        } else if known.is_none() {
            self.positions.insert(new.uid.clone(), position);
        }
        if let Some(before) = self.runs.get(&position) {
            self.bytes -= before.bytes;
            // The store ignores pieces that it already has.
            let waiting = before
                .requests
                .iter()
                .filter(|piece| new.requests.iter().all(|new| new.number != piece.number));
            let mut requests: Vec<Piece> = waiting.cloned().collect();
            let waiting_bytes = requests.iter().map(|piece| piece.bytes.len()).sum::<usize>();
            (new.bytes, self.bytes) = (new.bytes + waiting_bytes, self.bytes + waiting_bytes);
            requests.append(&mut new.requests);
            new.requests = requests;
            if !self.is_being_written(position, before) {
                new.since = before.since;
            }
        }
        self.runs.insert(position, Arc::new(new));
        let mut lost = 0;
        while self.runs.len() > WAITING || self.bytes > self.max_bytes {
            let Some(position) = self.next_to_drop() else { break };
            lost += u64::from(self.remove(position).is_some_and(|queued| queued.is_final));
        }
        lost
    }

    fn is_being_written(&self, position: u64, queued: &Arc<QueuedRun>) -> bool {
        self.writing.as_ref().is_some_and(|(at, writing)| *at == position && Arc::ptr_eq(queued, writing))
    }

    /// Returns the position of the next run to drop: of the user with the most bytes, first a run of a live process.
    fn next_to_drop(&self) -> Option<u64> {
        let free =
            || self.runs.iter().filter(|(position, queued)| !self.is_being_written(**position, queued));
        let mut users = BTreeMap::<Option<u64>, usize>::new();
        for (_, queued) in free() {
            *users.entry(queued.run.process.uid).or_default() += queued.bytes;
        }
        let (user, _) = users.into_iter().max_by_key(|(_, bytes)| *bytes)?;
        let theirs = || free().filter(|(_, queued)| queued.run.process.uid == user);
        let (position, _) = theirs().find(|(_, queued)| !queued.is_final).or_else(|| theirs().next())?;
        Some(*position)
    }

    fn remove(&mut self, position: u64) -> Option<Arc<QueuedRun>> {
        let removed = self.runs.remove(&position)?;
        self.bytes -= removed.bytes;
        if self.positions.get(&removed.uid) == Some(&position) {
            self.positions.remove(&removed.uid);
        }
        Some(removed)
    }

    /// Removes a state that has been written. If a newer state of the run was added meanwhile, that state is moved to the end.
    pub(crate) fn finish_write(&mut self, written: &Arc<QueuedRun>) {
        let Some((position, _)) = self.writing.take() else { return };
        let Some(now) = self.runs.get(&position) else { return };
        if Arc::ptr_eq(now, written) {
            self.remove(position);
            return;
        }
        // Only if the newer state does not end a part, because parts of one life must be written in order.
        if !now.is_rolled()
            && let Some(newer) = self.runs.remove(&position)
        {
            self.positions.insert(newer.uid.clone(), self.next);
            self.runs.insert(self.next, newer);
            self.next += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::run;
    use super::*;

    fn waiting(uid: u64, life: u64, over: bool, tag: usize) -> QueuedRun {
        let mut run = run(life);
        run.process.uid = Some(uid);
        run.process.facts.insert("command".into(), "x".repeat(tag));
        QueuedRun::new(format!("{uid}:{life}"), run, Vec::new(), over)
    }

    fn names(queue: &WriteQueue) -> Vec<&str> {
        queue.runs().map(|queued| queued.uid.as_str()).collect()
    }

    #[test]
    fn who_takes_most_loses_first_and_of_theirs_what_comes_again() {
        let mut queue = WriteQueue::new(1 << 20);
        assert_eq!(queue.push(waiting(1, 1, true, 1000)), 0);
        let mut lost = 0;
        for life in 0..100 {
            lost += queue.push(waiting(2, life, life % 2 == 0, 100_000));
        }
        // There is room for at most ten: ended runs, the newest ones.
        let (count, bytes) = queue.size();
        assert!(count >= 9 && bytes <= 1 << 20, "{count} of {bytes} bytes");
        assert_eq!(names(&queue)[0], "1:1");
        assert!(queue.runs().all(|queued| queued.is_final));
        assert_eq!(lost + count as u64 - 1, 50, "each that is over waits or is counted");
        // A run that exceeds the limit alone is lost, and all others stay.
        assert_eq!(queue.push(waiting(3, 1, true, 2 << 20)), 1);
        assert_eq!(queue.size(), (count, bytes));
    }

    #[test]
    fn many_small_runs_that_are_over_all_have_room() {
        let mut queue = WriteQueue::new(BYTES);
        let lost: u64 = (0..10_000).map(|life| queue.push(waiting(1, life, true, 1))).sum();
        assert_eq!((lost, queue.size().0), (0, 10_000));
        assert_eq!(queue.room().living, 0, "those that continue wait with the ledger");
        assert!(queue.room().ended > 0);
    }

    #[test]
    fn parts_of_one_life_stay_in_their_order() {
        let rolled = |life| {
            let mut part = waiting(1, life, true, 1);
            part.run.state = State::Rolled { time_ns: 1 };
            part
        };
        let mut queue = WriteQueue::new(BYTES);
        queue.push(waiting(1, 1, false, 1));
        let first = queue.next_to_write().expect("it waits");
        queue.push(rolled(1));
        queue.push(waiting(1, 2, false, 1));
        queue.push(waiting(1, 1, false, 1));
        queue.finish_write(&first);
        let is_rolled: Vec<bool> = queue.runs().map(|queued| queued.is_rolled()).collect();
        assert_eq!((names(&queue), is_rolled), (vec!["1:1", "1:2", "1:1"], vec![true, false, false]));
    }

    #[test]
    fn what_became_newer_while_it_was_written_comes_after_the_others() {
        let mut queue = WriteQueue::new(BYTES);
        queue.push(waiting(1, 1, false, 1));
        queue.push(waiting(1, 2, false, 1));
        let first = queue.next_to_write().expect("it waits");
        queue.push(waiting(1, 1, true, 1));
        queue.finish_write(&first);
        assert_eq!(names(&queue), ["1:2", "1:1"]);
        let second = queue.next_to_write().expect("it waits");
        queue.finish_write(&second);
        assert_eq!(names(&queue), ["1:1"]);
        assert_eq!(queue.size().1, queue.next_to_write().expect("it waits").bytes);
    }
}
