//! Connection slots: limits of connections at one time, in total and for each user.
//!
//! A slot may be marked idle. When all are taken, a newcomer can evict the connection that has been idle longest. So clients that
//! connect and send nothing cannot lock out others.

use crate::os::lock;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// Which limits of connections are reached: that of the whole socket (`all`), that of the user, or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotsFull {
    pub all: bool,
    pub user: bool,
}

/// Slots of one socket. `T` is the state shared by a user's connections. It is dropped with the user's last connection.
#[derive(Debug, Default)]
pub(crate) struct ConnectionSlots<T = ()> {
    taken: Mutex<TakenSlots<T>>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct TakenSlots<T> {
    count: usize,
    users: HashMap<u32, User<T>>,
    last_number: u64,
    /// Idle connections. Key: time from which the connection may be evicted, and a number that makes the key unique.
    idle: BTreeMap<(Instant, u64), Arc<Notify>>,
}

#[derive(Debug)]
struct User<T> {
    count: usize,
    shared: Arc<T>,
}

/// Slot of one connection; given back when dropped.
#[derive(Debug)]
pub(crate) struct ConnectionSlot<T = ()> {
    slots: Arc<ConnectionSlots<T>>,
    uid: u32,
    number: u64,
    evicted: Arc<Notify>,
    /// Time in the key of this slot in `TakenSlots::idle`; `None` while the connection is active.
    evictable_at: Mutex<Option<Instant>>,
    pub shared: Arc<T>,
}

impl<T: Default> ConnectionSlots<T> {
    pub(crate) fn count(&self) -> usize {
        lock(&self.taken).count
    }

    /// Waits until a slot is given back. Returns at once if one was given back since the last call. Only one caller at a time may
    /// wait.
    pub(crate) async fn freed(&self) {
        self.freed.notified().await;
    }

    /// Takes a slot for a connection of the user `uid`. `max` limits all slots, and `max_of_user` those of this user.
    pub(crate) fn take(
        self: &Arc<Self>,
        uid: u32,
        max: usize,
        max_of_user: usize,
    ) -> Result<ConnectionSlot<T>, SlotsFull> {
        let mut taken = lock(&self.taken);
        let of_user = taken.users.get(&uid).map_or(0, |user| user.count);
        let full = SlotsFull { all: taken.count >= max, user: of_user >= max_of_user };
        if full.all || full.user {
            return Err(full);
        }
        taken.count += 1;
        taken.last_number += 1;
        let number = taken.last_number;
        let user = taken.users.entry(uid).or_insert_with(|| User { count: 0, shared: Arc::default() });
        user.count += 1;
        let shared = Arc::clone(&user.shared);
        let (evicted, evictable_at) = (Arc::default(), Mutex::default());
        Ok(ConnectionSlot { slots: Arc::clone(self), uid, number, evicted, evictable_at, shared })
    }

    /// Takes a slot for a connection whose user is unknown, and marks it idle. Returns the slot and the number of connections
    /// that were evicted for it. Waits while all slots are active, or idle for less than `grace`.
    pub(crate) async fn take_or_evict(
        self: &Arc<Self>,
        max: &AtomicUsize,
        grace: Duration,
    ) -> (ConnectionSlot<T>, u64) {
        let mut evicted = 0;
        loop {
            if let Ok(slot) = self.take(0, max.load(Ordering::Relaxed), usize::MAX) {
                slot.mark_idle(grace);
                return (slot, evicted);
            }
            let due = {
                let mut taken = lock(&self.taken);
                match taken.idle.first_entry() {
                    Some(first) if first.key().0 <= Instant::now() => {
                        first.remove().notify_one();
                        evicted += 1;
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

impl<T> ConnectionSlot<T> {
    /// Marks the connection as idle, so that it may be evicted after `grace`.
    pub(crate) fn mark_idle(&self, grace: Duration) {
        self.mark_active();
        let due = Instant::now() + grace;
        let mut taken = lock(&self.slots.taken);
        taken.idle.insert((due, self.number), Arc::clone(&self.evicted));
        drop(taken);
        *lock(&self.evictable_at) = Some(due);
    }

    pub(crate) fn mark_active(&self) {
        if let Some(due) = lock(&self.evictable_at).take() {
            let mut taken = lock(&self.slots.taken);
            taken.idle.remove(&(due, self.number));
        }
    }

    pub(crate) fn evicted(&self) -> Arc<Notify> {
        Arc::clone(&self.evicted)
    }
}

impl<T> Drop for ConnectionSlot<T> {
    fn drop(&mut self) {
        self.mark_active();
        let mut taken = lock(&self.slots.taken);
        taken.count -= 1;
        if let Some(user) = taken.users.get_mut(&self.uid) {
            user.count -= 1;
            if user.count == 0 {
                taken.users.remove(&self.uid);
            }
        }
        drop(taken);
        self.slots.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_cannot_lock_out_the_others() {
        let slots = Arc::new(ConnectionSlots::<()>::default());
        let take = |uid| slots.take(uid, 64, 16);
        let mut held: Vec<_> = (0..100).filter_map(|_| take(1000).ok()).collect();
        assert_eq!(held.len(), 16);
        assert_eq!(take(1000).err(), Some(SlotsFull { all: false, user: true }));
        assert!(take(1001).is_ok());
        for uid in 1001..1010 {
            held.extend((0..100).filter_map(|_| take(uid).ok()));
        }
        assert_eq!(held.len(), 64);
        assert_eq!(take(2000).err(), Some(SlotsFull { all: true, user: false }));
        held.clear();
        assert!(slots.count() == 0 && lock(&slots.taken).users.is_empty());
    }

    #[tokio::test]
    async fn the_connection_that_is_idle_longest_is_evicted() {
        let grace = Duration::from_millis(20);
        let (slots, most) = (Arc::new(ConnectionSlots::<()>::default()), AtomicUsize::new(2));
        let (first, _) = slots.take_or_evict(&most, grace).await;
        let (second, _) = slots.take_or_evict(&most, grace).await;
        first.mark_active();
        let since = Instant::now();
        let evicted = second.evicted();
        let goes = tokio::spawn(async move {
            evicted.notified().await;
            drop(second);
        });
        let (third, evicted) = slots.take_or_evict(&most, grace).await;
        assert_eq!((evicted, since.elapsed() >= grace), (1, true), "not before its time");
        goes.await.unwrap();
        third.mark_active();
        // All are active: the next one waits.
        let waits = tokio::time::timeout(Duration::from_millis(50), slots.take_or_evict(&most, grace)).await;
        assert!(waits.is_err());
        drop(first);
        assert_eq!(slots.take_or_evict(&most, grace).await.1, 0);
        assert!(lock(&slots.taken).idle.is_empty());
    }
}
