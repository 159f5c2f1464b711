//! Queue of runs that must be written to the store. It has the newest state of each run, in bounded memory.
//!
//! Callers never wait for the writing thread, so a blocked disk must not make the daemon grow. If the queue is full, the user
//! whose runs take the most bytes loses runs. Runs of live processes are dropped first, because the ledger will hand them over
//! again.

use gpumem_model::run::{Run, State};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of runs in the queue.
const WAITING: usize = 16_384;
/// Number of queued runs from which on the ledger keeps those of live processes. There they can still change until they are
/// written.
const LIVING: usize = 512;
/// Default limit of the memory of all queued runs, in bytes.
pub(super) const BYTES: usize = 64 << 20;

/// A state of a run that must be written to the store.
#[derive(Debug)]
pub(super) struct QueuedRun {
    pub uid: String,
    pub run: Box<Run>,
    pub over: bool,
    bytes: usize,
    /// Time of the run's oldest change that is not in the store.
    since: Instant,
}

impl QueuedRun {
    pub(crate) fn new(uid: String, run: Run, over: bool) -> Self {
        let bytes = run.weight() + uid.len();
        QueuedRun { uid, run: Box::new(run), over, bytes, since: Instant::now() }
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
    pub over: usize,
}

/// The queued runs by position, oldest first.
#[derive(Debug)]
pub(super) struct WriteQueue {
    waiting: BTreeMap<u64, Arc<QueuedRun>>,
    next: u64,
    /// Position of the newest state of each process's life, by uid, unless that state ends a part (rolled).
    places: HashMap<String, u64>,
    bytes: usize,
    /// Position and state of the run that the thread is writing. A newer state may be at its position by now.
    writing: Option<(u64, Arc<QueuedRun>)>,
    pub most: usize,
    /// Whether the thread was notified of queued runs and has not read the queue since.
    pub is_told: bool,
}

impl Default for WriteQueue {
    fn default() -> Self {
        WriteQueue {
            waiting: BTreeMap::new(),
            next: 0,
            places: HashMap::new(),
            bytes: 0,
            writing: None,
            most: BYTES,
            is_told: false,
        }
    }
}

impl WriteQueue {
    /// Returns the number of queued runs and their bytes.
    pub(crate) fn load(&self) -> (usize, usize) {
        (self.waiting.len(), self.bytes)
    }

    /// Returns how many runs can be added. Runs of live processes may use only half of the bytes.
    pub(crate) fn room(&self) -> Room {
        let count = self.waiting.len();
        let if_below =
            |limit: usize, most: usize| if self.bytes < limit { most.saturating_sub(count) } else { 0 };
        Room { living: if_below(self.most / 2, LIVING), over: if_below(self.most / 4 * 3, WAITING) }
    }

    /// Returns the age of the oldest change in the queue.
    pub(crate) fn oldest(&self) -> Duration {
        let front = self.waiting.first_key_value().map(|(_, waiting)| waiting.since);
        front.map_or(Duration::ZERO, |since| since.elapsed())
    }

    pub(crate) fn all(&self) -> impl DoubleEndedIterator<Item = &Arc<QueuedRun>> {
        self.waiting.values()
    }

    /// Returns the next run to write. It counts as being written until [`done`](Self::done) or the next call.
    pub(crate) fn first(&mut self) -> Option<Arc<QueuedRun>> {
        self.writing = self.waiting.first_key_value().map(|(place, waiting)| (*place, Arc::clone(waiting)));
        self.writing.as_ref().map(|(_, waiting)| Arc::clone(waiting))
    }

    /// Adds a state of a run. It replaces the queued state of the same part; after a complete part (rolled) it is queued as the
    /// next part. Returns the number of ended runs dropped for lack of room. Dropped runs of live processes will be handed over
    /// again.
    pub(crate) fn put(&mut self, mut new: QueuedRun) -> u64 {
        self.bytes += new.bytes;
        let known = self.places.get(&new.uid).copied();
        let place = known.unwrap_or(self.next);
        self.next += u64::from(known.is_none());
        if new.is_rolled() {
            self.places.remove(&new.uid);
        } else if known.is_none() {
            self.places.insert(new.uid.clone(), place);
        }
        if let Some(before) = self.waiting.get(&place) {
            self.bytes -= before.bytes;
            if !self.is_written(place, before) {
                new.since = before.since;
            }
        }
        self.waiting.insert(place, Arc::new(new));
        let mut lost = 0;
        while self.waiting.len() > WAITING || self.bytes > self.most {
            let Some(place) = self.least_wanted() else { break };
            lost += u64::from(self.remove(place).is_some_and(|waiting| waiting.over));
        }
        lost
    }

    fn is_written(&self, place: u64, waiting: &Arc<QueuedRun>) -> bool {
        self.writing.as_ref().is_some_and(|(at, writing)| *at == place && Arc::ptr_eq(waiting, writing))
    }

    fn least_wanted(&self) -> Option<u64> {
        let free = || self.waiting.iter().filter(|(place, waiting)| !self.is_written(**place, waiting));
        let mut users = BTreeMap::<Option<u64>, usize>::new();
        for (_, waiting) in free() {
            *users.entry(waiting.run.process.uid).or_default() += waiting.bytes;
        }
        let (user, _) = users.into_iter().max_by_key(|(_, bytes)| *bytes)?;
        let theirs = || free().filter(|(_, waiting)| waiting.run.process.uid == user);
        let place = |found: (&u64, &Arc<QueuedRun>)| *found.0;
        theirs().find(|(_, waiting)| !waiting.over).map(place).or_else(|| theirs().next().map(place))
    }

    fn remove(&mut self, place: u64) -> Option<Arc<QueuedRun>> {
        let removed = self.waiting.remove(&place)?;
        self.bytes -= removed.bytes;
        if self.places.get(&removed.uid) == Some(&place) {
            self.places.remove(&removed.uid);
        }
        Some(removed)
    }

    /// Removes a run that has been written. If a newer state of it was added meanwhile, that is moved to the end.
    pub(crate) fn done(&mut self, written: &Arc<QueuedRun>) {
        let Some((place, _)) = self.writing.take() else { return };
        let Some(now) = self.waiting.get(&place) else { return };
        if Arc::ptr_eq(now, written) {
            self.remove(place);
            return;
        }
        // Only if the newer state does not end a part, because parts of one life must be written in order.
        if !now.is_rolled()
            && let Some(newer) = self.waiting.remove(&place)
        {
            self.places.insert(newer.uid.clone(), self.next);
            self.waiting.insert(self.next, newer);
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
        QueuedRun::new(format!("{uid}:{life}"), run, over)
    }

    fn names(shelf: &WriteQueue) -> Vec<&str> {
        shelf.all().map(|waiting| waiting.uid.as_str()).collect()
    }

    #[test]
    fn who_takes_most_loses_first_and_of_theirs_what_comes_again() {
        let mut shelf = WriteQueue { most: 1 << 20, ..WriteQueue::default() };
        assert_eq!(shelf.put(waiting(1, 1, true, 1000)), 0);
        let mut lost = 0;
        for life in 0..100 {
            lost += shelf.put(waiting(2, life, life % 2 == 0, 100_000));
        }
        // There is room for at most ten: ended runs, the newest ones.
        let (count, bytes) = shelf.load();
        assert!(count >= 9 && bytes <= 1 << 20, "{count} of {bytes} bytes");
        assert_eq!(names(&shelf)[0], "1:1");
        assert!(shelf.all().all(|waiting| waiting.over));
        assert_eq!(lost + count as u64 - 1, 50, "each that is over waits or is counted");
        // A run that exceeds the limit alone is lost, and all others stay.
        assert_eq!(shelf.put(waiting(3, 1, true, 2 << 20)), 1);
        assert_eq!(shelf.load(), (count, bytes));
    }

    #[test]
    fn many_small_runs_that_are_over_all_have_room() {
        let mut shelf = WriteQueue::default();
        let lost: u64 = (0..10_000).map(|life| shelf.put(waiting(1, life, true, 1))).sum();
        assert_eq!((lost, shelf.load().0), (0, 10_000));
        assert_eq!(shelf.room().living, 0, "those that continue wait with the ledger");
        assert!(shelf.room().over > 0);
    }

    #[test]
    fn parts_of_one_life_stay_in_their_order() {
        let rolled = |life| {
            let mut part = waiting(1, life, true, 1);
            part.run.state = State::Rolled { time_ns: 1 };
            part
        };
        let mut shelf = WriteQueue::default();
        shelf.put(waiting(1, 1, false, 1));
        let first = shelf.first().expect("it waits");
        shelf.put(rolled(1));
        shelf.put(waiting(1, 2, false, 1));
        shelf.put(waiting(1, 1, false, 1));
        shelf.done(&first);
        let is_rolled: Vec<bool> = shelf.all().map(|waiting| waiting.is_rolled()).collect();
        assert_eq!((names(&shelf), is_rolled), (vec!["1:1", "1:2", "1:1"], vec![true, false, false]));
    }

    #[test]
    fn what_became_newer_while_it_was_written_comes_after_the_others() {
        let mut shelf = WriteQueue::default();
        shelf.put(waiting(1, 1, false, 1));
        shelf.put(waiting(1, 2, false, 1));
        let first = shelf.first().expect("it waits");
        shelf.put(waiting(1, 1, true, 1));
        shelf.done(&first);
        assert_eq!(names(&shelf), ["1:2", "1:1"]);
        let second = shelf.first().expect("it waits");
        shelf.done(&second);
        assert_eq!(names(&shelf), ["1:1"]);
        assert_eq!(shelf.load().1, shelf.first().expect("it waits").bytes);
    }
}
