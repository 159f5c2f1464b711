//! What takes long goes on later: the loop serves everybody, and one process's words must not hold it.
//!
//! Most words take the ledger less than a microsecond. A few look at much of what their process holds (an allocation below which
//! segments wait for memory), and a process may say thousands of them in one batch. So a batch that has taken long is cut, its rest
//! waits many times as long as it took, and what the process says after it waits behind it. Each of those batches keeps its place
//! in the inbox: its user has few, and comes no further.

use crate::aggregator::batch::Batch;
use gpumem_ledger::ProcessKey;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// What a batch may take of the processor at a time; without optimization everything takes so many times as long.
pub(crate) const LONG: Duration = Duration::from_millis(if cfg!(debug_assertions) { 20 } else { 4 });
/// Frames between two looks at the clock.
pub(crate) const FRAMES: u64 = 4;
/// How many times as long it rests.
const RESTS: u64 = 16;

#[derive(Debug, Default)]
struct Waiting {
    batches: VecDeque<Batch>,
    /// When it goes on.
    at_ns: u64,
}

/// The words of processes that rest.
#[derive(Debug, Default)]
pub(crate) struct Later(BTreeMap<ProcessKey, Waiting>);

impl Later {
    /// The batch, unless its process rests: then it goes behind what is there.
    pub(crate) fn pass(&mut self, key: ProcessKey, batch: Batch) -> Option<Batch> {
        match self.0.get_mut(&key) {
            Some(waiting) => {
                waiting.batches.push_back(batch);
                None
            }
            None => Some(batch),
        }
    }

    /// The rest of a batch that took so long.
    pub(crate) fn rest(&mut self, key: ProcessKey, batch: Batch, took: Duration, now_ns: u64) {
        let waiting = self.0.entry(key).or_default();
        waiting.batches.push_front(batch);
        waiting.at_ns = now_ns.saturating_add((took.as_nanos() as u64).saturating_mul(RESTS));
    }

    /// When the first of them goes on.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.0.values().map(|waiting| waiting.at_ns).min()
    }

    /// Batches of a process that has rested, in order: they are taken from its line, and it is in none.
    pub(crate) fn take_due(&mut self, now_ns: u64) -> Option<VecDeque<Batch>> {
        let (&key, _) = self.0.iter().find(|(_, waiting)| waiting.at_ns <= now_ns)?;
        self.0.remove(&key).map(|waiting| waiting.batches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpumem_ledger::Origin;

    const KEY: ProcessKey = ProcessKey { pid: 1, start_ticks: 2 };
    const OTHER: ProcessKey = ProcessKey { pid: 3, start_ticks: 4 };

    fn batch(key: ProcessKey, byte: u8) -> Batch {
        Batch { origin: Origin::Process(key), frames: vec![byte], place: None }
    }

    #[test]
    fn what_follows_waits_behind_the_rest_and_others_pass() {
        let mut later = Later::default();
        assert!(later.pass(KEY, batch(KEY, 1)).is_some() && later.next_ns().is_none());
        later.rest(KEY, batch(KEY, 1), Duration::from_nanos(10), 1000);
        assert!(later.pass(KEY, batch(KEY, 2)).is_none());
        assert!(later.pass(OTHER, batch(OTHER, 3)).is_some());
        assert_eq!(later.next_ns(), Some(1160));
        assert!(later.take_due(1159).is_none());
        let batches = later.take_due(1160).expect("due");
        let order: Vec<u8> = batches.iter().map(|batch| batch.frames[0]).collect();
        assert_eq!((order, later.next_ns()), (vec![1, 2], None));
    }
}
