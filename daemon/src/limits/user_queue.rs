//! A user's share of the aggregator's inbox, and of the time for reading the memory of ended agents.
//!
//! The ledger takes batches in order of arrival. A connection reads its socket when its user has a free slot. The slot is free
//! again when the ledger has taken the batch. The memory of a user's ended agents is read one agent at a time. After a read that
//! used much processor time, the user is paused for a multiple of that time.

use crate::clock;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};

/// Maximum number of batches of one user in the inbox. Four keep the ledger busy; more would delay other users.
const SLOTS: usize = 4;
/// Minimum processor time of a memory read that is followed by a pause. Most reads take milliseconds; a full ring of a million
/// records with as many rows takes a quarter of a second.
const LONG: Duration = Duration::from_millis(250);
/// Length of the pause as a multiple of the read's processor time. The pause leaves four fifths of the time to other users.
const PAUSE_FACTOR: u32 = 4;
/// Multiple of a costly batch's processing time for which the batch keeps its slot.
const COSTLY_PAUSE_FACTOR: u32 = 16;
/// Minimum processing time at which a costly batch keeps its slot after it was applied.
const COSTLY: Duration = Duration::from_millis(1);

/// Inbox slots of one user, and the lock for reading the memory of the user's ended agents; shared by the user's connections.
#[derive(Debug)]
pub(crate) struct UserQueue {
    slots: Arc<Semaphore>,
    recovering: Mutex<()>,
}

impl Default for UserQueue {
    fn default() -> Self {
        UserQueue { slots: Arc::new(Semaphore::new(SLOTS)), recovering: Mutex::default() }
    }
}

impl UserQueue {
    /// Waits for a slot in the inbox. Slots are given in the order of the calls.
    pub(crate) async fn slot(&self) -> Option<QueueSlot> {
        // Never fails, because the semaphore is never closed.
        let permit = Arc::clone(&self.slots).acquire_owned().await.ok()?;
        Some(QueueSlot { permit: Arc::new(permit), is_costly: false })
    }

    /// Runs `work` for one connection while the user's other connections wait. If it takes more than [`LONG`] of processor time,
    /// pauses the user afterwards.
    pub(crate) async fn run_alone<T>(&self, work: impl Future<Output = T>) -> T {
        let _turn = self.recovering.lock().await;
        let (mut work, mut took) = (pin!(work), Duration::ZERO);
        // Only processor time counts: on a busy machine the work is interrupted, which must not pause the user.
        let done = poll_fn(|context| {
            let started = clock::cpu();
            let polled = work.as_mut().poll(context);
            took += clock::cpu().saturating_sub(started);
            polled
        });
        let done = done.await;
        if took > LONG {
            tokio::time::sleep(took * PAUSE_FACTOR).await;
        }
        done
    }
}

/// A slot in the aggregator's inbox; given back when dropped.
#[derive(Debug, Clone)]
pub struct QueueSlot {
    permit: Arc<OwnedSemaphorePermit>,
    /// Whether the caller must call [`QueueSlot::release_after`].
    pub(crate) is_costly: bool,
}

impl QueueSlot {
    pub(crate) fn costly(self) -> Self {
        QueueSlot { is_costly: true, ..self }
    }

    /// Frees the slot of an applied batch, after a pause if `time`, the processor time used, is long.
    pub(crate) fn release_after(self, time: Duration) {
        if time >= COSTLY {
            tokio::spawn(async move {
                tokio::time::sleep(time * COSTLY_PAUSE_FACTOR).await;
                drop(self.permit);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_work_that_takes_long_is_followed_by_a_pause() {
        let queue = UserQueue::default();
        let began = tokio::time::Instant::now();
        queue.run_alone(tokio::time::sleep(4 * LONG)).await;
        assert!(began.elapsed() < 4 * LONG + LONG, "{:?}", began.elapsed());
        queue.run_alone(async { std::thread::sleep(LONG + Duration::from_millis(10)) }).await;
        assert!(began.elapsed() < 4 * LONG + LONG, "{:?}", began.elapsed());
        let work = async {
            let started = clock::cpu();
            while clock::cpu() - started < LONG + Duration::from_millis(10) {}
        };
        let began = tokio::time::Instant::now();
        queue.run_alone(work).await;
        assert!(began.elapsed() > LONG * PAUSE_FACTOR, "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn a_user_has_a_bounded_number_of_slots_and_gets_them_back() {
        let queue = UserQueue::default();
        let mut held = Vec::new();
        for _ in 0..SLOTS {
            held.push(queue.slot().await);
        }
        let more = tokio::time::timeout(Duration::from_millis(1), queue.slot()).await;
        assert!(more.is_err());
        held.pop();
        assert!(queue.slot().await.is_some());
    }
}
