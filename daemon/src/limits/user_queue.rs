//! Fairness between users: whatever the connections of one user send, the others wait for a bounded part of it.
//!
//! The ledger takes batches in the order in which they come, so what one user has in its inbox is bounded: a connection reads its
//! socket when it has a place there, and gets the place back when the ledger has taken the batch. What ended agents left is
//! read one agent of a user at a time, and who makes that long rests as many times as long.

use crate::aggregator::batch::Place;
use crate::clock;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, Semaphore};

/// Batches of one user that wait for the ledger: enough to keep it busy, and what each user adds to the time that others wait.
const PLACES: usize = 4;
/// Reading what was left takes milliseconds, a full ring of a million records and as many rows a quarter of a second.
const LONG: Duration = Duration::from_millis(250);
/// Who takes longer leaves four fifths of the time to others.
const RESTS: u32 = 4;

/// What the connections of one user share.
#[derive(Debug)]
pub(crate) struct Turn {
    places: Arc<Semaphore>,
    recovering: Mutex<()>,
}

impl Default for Turn {
    fn default() -> Self {
        Turn { places: Arc::new(Semaphore::new(PLACES)), recovering: Mutex::default() }
    }
}

impl Turn {
    /// A place in the inbox, in the order in which they were asked for.
    pub(crate) async fn place(&self) -> Option<Place> {
        // It is never closed.
        let permit = Arc::clone(&self.places).acquire_owned().await.ok()?;
        Some(Place::new(permit))
    }

    /// Does work that is done for one connection of a user at a time.
    pub(crate) async fn alone<T>(&self, work: impl Future<Output = T>) -> T {
        let _turn = self.recovering.lock().await;
        let (mut work, mut took) = (pin!(work), Duration::ZERO);
        // Only what it does itself counts: on a busy machine it waits for its turns and for a processor, and that must not make
        // everybody rest.
        let done = poll_fn(|context| {
            let started = clock::cpu();
            let polled = work.as_mut().poll(context);
            took += clock::cpu().saturating_sub(started);
            polled
        });
        let done = done.await;
        if took > LONG {
            tokio::time::sleep(took * RESTS).await;
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_only_waited_long_does_not_rest() {
        let turn = Turn::default();
        let began = tokio::time::Instant::now();
        turn.alone(tokio::time::sleep(4 * LONG)).await;
        assert!(began.elapsed() < 4 * LONG + LONG, "{:?}", began.elapsed());
        turn.alone(async { std::thread::sleep(LONG + Duration::from_millis(10)) }).await;
        assert!(began.elapsed() < 4 * LONG + LONG, "{:?}", began.elapsed());
        let work = async {
            let started = clock::cpu();
            while clock::cpu() - started < LONG + Duration::from_millis(10) {}
        };
        let began = tokio::time::Instant::now();
        turn.alone(work).await;
        assert!(began.elapsed() > LONG * RESTS, "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn a_user_has_so_many_places_and_gets_them_back() {
        let turn = Turn::default();
        let mut held = Vec::new();
        for _ in 0..PLACES {
            held.push(turn.place().await);
        }
        let more = tokio::time::timeout(Duration::from_millis(1), turn.place()).await;
        assert!(more.is_err());
        held.pop();
        assert!(turn.place().await.is_some());
    }
}
