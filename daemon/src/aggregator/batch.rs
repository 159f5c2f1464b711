//! Batches of records that sources hand to the aggregator, and the queue of batches that are deferred because they take long.
//!
//! The ledger takes most records in less than a microsecond. Records of a few kinds make the ledger search most of the data of
//! their process. A process may send thousands of these in one batch. A batch that takes long is split: the unprocessed rest waits
//! for a multiple of the time used so far. Later batches of the process queue behind that rest. Each waiting batch keeps its slot
//! in the inbox, so its user cannot send more meanwhile.

use crate::limits::user_queue::QueueSlot;
use gpumem_ledger::{Origin, ProcessKey};
use gpumem_wire::{Body, Record, Stamp, frame};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Frames from one origin, in the order in which they were sent.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Sender of the frames: the daemon's own sources (host), or one process.
    pub origin: Origin,
    /// Concatenated frames in the format of `gpumem_wire::frame`.
    pub frames: Vec<u8>,
    /// The user's slot in the inbox, held until the ledger has taken the batch; `None` for the daemon's own sources.
    pub slot: Option<QueueSlot>,
}

impl Batch {
    /// Returns a batch whose frames come from the daemon's own sources.
    pub(crate) fn of_host(frames: Vec<u8>) -> Self {
        Batch { origin: Origin::Host, frames, slot: None }
    }
}

/// Processor time of the ledger after which a batch is split. Debug builds get more because they are several times slower.
pub(super) const LONG: Duration = Duration::from_millis(if cfg!(debug_assertions) { 20 } else { 4 });
/// Number of records applied between two checks of the time that a batch has taken.
pub(super) const FRAMES: u64 = 4;
/// When a batch is split, its rest waits for this multiple of the time used so far.
const PAUSE_FACTOR: u64 = 16;

/// Deferred batches of one process, in order.
#[derive(Debug, Default)]
struct DeferredQueue {
    batches: VecDeque<Batch>,
    /// Time at which the first of these batches is applied (ns, CLOCK_MONOTONIC).
    at_ns: u64,
}

#[derive(Debug, Default)]
pub(super) struct DeferredBatches(BTreeMap<ProcessKey, DeferredQueue>);

impl DeferredBatches {
    /// Queues the batch if earlier batches of its process are deferred. Otherwise returns it, to be applied now.
    pub(super) fn queue_or_return(&mut self, key: ProcessKey, batch: Batch) -> Option<Batch> {
        match self.0.get_mut(&key) {
            Some(waiting) => {
                waiting.batches.push_back(batch);
                None
            }
            None => Some(batch),
        }
    }

    /// Defers the rest of a batch. `took`: processor time that the first part of the batch has used.
    pub(super) fn defer(&mut self, key: ProcessKey, batch: Batch, took: Duration, now_ns: u64) {
        let waiting = self.0.entry(key).or_default();
        waiting.batches.push_front(batch);
        waiting.at_ns = now_ns.saturating_add((took.as_nanos() as u64).saturating_mul(PAUSE_FACTOR));
    }

    /// Returns when the next deferred batch is applied (ns, CLOCK_MONOTONIC); `None` if no batch is deferred.
    pub(super) fn next_ns(&self) -> Option<u64> {
        self.0.values().map(|waiting| waiting.at_ns).min()
    }

    /// Removes and returns the deferred batches of one process whose wait is over, in order.
    pub(super) fn take_due(&mut self, now_ns: u64) -> Option<VecDeque<Batch>> {
        let (&key, _) = self.0.iter().find(|(_, waiting)| waiting.at_ns <= now_ns)?;
        self.0.remove(&key).map(|waiting| waiting.batches)
    }
}

pub(crate) fn frame_of(stamp: Stamp, body: Body<'_>) -> Vec<u8> {
    let mut frame = Vec::new();
    Record { stamp, body }.append_frame(&mut frame);
    frame
}

/// Returns whether the first frame reports that an agent has connected.
pub(super) fn begins_agent(frames: &[u8]) -> bool {
    let Ok(Some((slot, payload, _))) = frame::split_frame(frames) else { return false };
    matches!(Record::decode(slot, payload), Ok(Record { body: Body::Source { up: true, .. }, .. }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: ProcessKey = ProcessKey { pid: 1, start_ticks: 2 };
    const OTHER: ProcessKey = ProcessKey { pid: 3, start_ticks: 4 };

    fn batch(key: ProcessKey, byte: u8) -> Batch {
        Batch { origin: Origin::Process(key), frames: vec![byte], slot: None }
    }

    #[test]
    fn a_batch_waits_behind_the_rest_of_its_process_and_others_pass() {
        let mut deferred = DeferredBatches::default();
        assert!(deferred.queue_or_return(KEY, batch(KEY, 1)).is_some() && deferred.next_ns().is_none());
        deferred.defer(KEY, batch(KEY, 1), Duration::from_nanos(10), 1000);
        assert!(deferred.queue_or_return(KEY, batch(KEY, 2)).is_none());
        assert!(deferred.queue_or_return(OTHER, batch(OTHER, 3)).is_some());
        assert_eq!(deferred.next_ns(), Some(1160));
        assert!(deferred.take_due(1159).is_none());
        let batches = deferred.take_due(1160).expect("due");
        let order: Vec<u8> = batches.iter().map(|batch| batch.frames[0]).collect();
        assert_eq!((order, deferred.next_ns()), (vec![1, 2], None));
    }
}
