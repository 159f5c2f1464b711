//! Places for connections that strangers open. When all are taken, the one that has been silent longest makes place for the
//! newcomer: whoever opens connections and says nothing cannot lock out whoever asks.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// All of them.
#[derive(Debug)]
pub(crate) struct Places {
    most: Arc<AtomicUsize>,
    taken: Mutex<Taken>,
    /// A place was given back.
    freed: Notify,
}

#[derive(Debug, Default)]
struct Taken {
    count: usize,
    next: u64,
    /// Who says nothing, by when they may be cut.
    silent: BTreeMap<(Instant, u64), Arc<Notify>>,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    places: Arc<Places>,
    number: u64,
    cut: Arc<Notify>,
    /// Its key among the silent ones.
    silent: Mutex<Option<Instant>>,
}

impl Places {
    /// As many as `most` says at any time.
    pub(crate) fn new(most: Arc<AtomicUsize>) -> Arc<Self> {
        Arc::new(Places { most, taken: Mutex::default(), freed: Notify::new() })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a place that was free.
    fn free(&self) -> Option<u64> {
        let mut taken = self.taken();
        let is_free = taken.count < self.most.load(Ordering::Relaxed);
        taken.count += usize::from(is_free);
        taken.next += 1;
        is_free.then_some(taken.next)
    }

    /// A place for a newcomer, who is silent so far, and how many were cut for it. Waits while all are taken by who is being
    /// answered, or has hardly come.
    pub(crate) async fn take(self: &Arc<Self>, grace: Duration) -> (Place, u64) {
        let mut cut = 0;
        loop {
            if let Some(number) = self.free() {
                let (places, silent) = (Arc::clone(self), Mutex::default());
                let place = Place { places, number, cut: Arc::default(), silent };
                place.is_silent(grace);
                return (place, cut);
            }
            let due = {
                let mut taken = self.taken();
                match taken.silent.first_entry() {
                    Some(first) if first.key().0 <= Instant::now() => {
                        first.remove().notify_one();
                        cut += 1;
                        None
                    }
                    first => first.map(|first| first.key().0),
                }
            };
            let is_due = async {
                match due {
                    Some(due) => sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.freed.notified() => {}
                () = is_due => {}
            }
        }
    }
}

impl Place {
    /// Nothing is known to be asked here: after so long, another may have the place.
    pub(crate) fn is_silent(&self, grace: Duration) {
        self.is_busy();
        let due = Instant::now() + grace;
        self.places.taken().silent.insert((due, self.number), Arc::clone(&self.cut));
        *self.silent() = Some(due);
    }

    /// A question was asked here.
    pub(crate) fn is_busy(&self) {
        if let Some(due) = self.silent().take() {
            self.places.taken().silent.remove(&(due, self.number));
        }
    }

    /// Resolves when the place is given to another.
    pub(crate) fn cut(&self) -> Arc<Notify> {
        Arc::clone(&self.cut)
    }

    fn silent(&self) -> MutexGuard<'_, Option<Instant>> {
        self.silent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.is_busy();
        self.places.taken().count -= 1;
        self.places.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_one_that_is_silent_longest_makes_place() {
        let grace = Duration::from_millis(20);
        let places = Places::new(Arc::new(AtomicUsize::new(2)));
        let (first, _) = places.take(grace).await;
        let (second, _) = places.take(grace).await;
        first.is_busy();
        let since = Instant::now();
        // Whoever is asked to go goes.
        let cut = second.cut();
        let goes = tokio::spawn(async move {
            cut.notified().await;
            drop(second);
        });
        let (third, cut) = places.take(grace).await;
        assert_eq!((cut, since.elapsed() >= grace), (1, true), "not before its time");
        goes.await.unwrap();
        third.is_busy();
        // All are answered: the next waits for one of them.
        let waits = tokio::time::timeout(Duration::from_millis(50), places.take(grace)).await;
        assert!(waits.is_err());
        drop(first);
        assert_eq!(places.take(grace).await.1, 0);
        assert!(places.taken().silent.is_empty());
    }
}
