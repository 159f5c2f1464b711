//! Slots for connections of agents, limited in total, for each user, and for peers without a hello.

use super::connection_slots::{ConnectionSlot, ConnectionSlots};
use super::user_queue::UserQueue;
use std::sync::Arc;
use std::time::Duration;

/// Limits of peers on the agent socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgentLimits {
    pub connections: usize,
    pub connections_per_uid: usize,
    /// Maximum number of connections that have not sent a hello.
    pub waiting: usize,
    pub hello: Duration,
    /// Maximum number of bytes read from one connection in a second; further packets wait. 0: no limit.
    pub bytes_per_s: u64,
    pub shared_bytes: u64,
    /// Maximum number of live allocations read from an agent's memory when it ends and records are missing.
    pub rows: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AgentSlotsFull {
    All,
    OfUid,
    /// All slots for peers that have not sent a hello are taken.
    Waiting,
}

/// How long a peer may take to send its hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HelloTimeout {
    /// The whole timeout, [`AgentLimits::hello`].
    Whole,
    /// The short timeout, [`BRIEF_TIMEOUT`], because the slots with the whole timeout are taken. A program may be interrupted
    /// between connect(2) and its hello, and a very short program does not connect again.
    Brief,
}

pub(crate) const BRIEF_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum number of peers with [`HelloTimeout::Brief`], as a multiple of [`AgentLimits::waiting`].
const BRIEF_SHARE: usize = 4;

#[derive(Debug, Default)]
pub(crate) struct AgentSlots {
    connections: Arc<ConnectionSlots<UserQueue>>,
    waiting: Arc<ConnectionSlots>,
    brief: Arc<ConnectionSlots>,
}

/// Slot for one agent's connection; given back when dropped.
#[derive(Debug)]
pub(crate) struct AgentSlot {
    connection: ConnectionSlot<UserQueue>,
    /// Slot among peers without a hello; given back when the hello arrives.
    without_hello: Option<(HelloTimeout, ConnectionSlot)>,
}

impl AgentSlots {
    /// Returns the number of connections, and the number of those without a hello. Both exclude peers with [`HelloTimeout::Brief`].
    pub(crate) fn count(&self) -> (usize, usize) {
        (self.connections.count() - self.brief.count(), self.waiting.count())
    }

    pub(crate) fn welcomed(&self) -> usize {
        self.connections.count() - self.waiting.count() - self.brief.count()
    }

    /// Waits until a connection slot is given back. Only one caller at a time may wait.
    pub(crate) async fn freed(&self) {
        self.connections.freed().await;
    }

    pub(crate) fn take(&self, uid: u32, limits: &AgentLimits) -> Result<AgentSlot, AgentSlotsFull> {
        let mut slot = self.take_for_hello(uid, limits)?;
        // One user may have a quarter of the slots, so that silent peers leave the rest to others.
        let take = |slots: &Arc<ConnectionSlots>, max: usize| slots.take(uid, max, (max / 4).max(1));
        let waiting = take(&self.waiting, limits.waiting).map(|slot| (HelloTimeout::Whole, slot));
        let waiting = waiting.or_else(|_| {
            let brief = take(&self.brief, limits.waiting.saturating_mul(BRIEF_SHARE));
            brief.map(|slot| (HelloTimeout::Brief, slot))
        });
        slot.without_hello = Some(waiting.map_err(|_| AgentSlotsFull::Waiting)?);
        Ok(slot)
    }

    /// Takes a slot for a peer whose hello has arrived; it does not count as waiting.
    pub(crate) fn take_for_hello(&self, uid: u32, limits: &AgentLimits) -> Result<AgentSlot, AgentSlotsFull> {
        let connection = self.connections.take(uid, limits.connections, limits.connections_per_uid);
        let connection =
            connection.map_err(|full| if full.all { AgentSlotsFull::All } else { AgentSlotsFull::OfUid })?;
        Ok(AgentSlot { connection, without_hello: None })
    }
}

impl AgentSlot {
    pub(crate) fn welcomed(&mut self) {
        self.without_hello = None;
    }

    pub(crate) fn patience(&self) -> HelloTimeout {
        self.without_hello.as_ref().map_or(HelloTimeout::Whole, |(patience, _)| *patience)
    }

    pub(crate) fn queue(&self) -> &Arc<UserQueue> {
        &self.connection.shared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: AgentLimits = AgentLimits {
        connections: 3,
        connections_per_uid: 2,
        waiting: 4,
        hello: Duration::from_secs(1),
        bytes_per_s: 0,
        shared_bytes: 0,
        rows: 0,
    };

    #[test]
    fn each_limit_holds_and_is_given_back() {
        let slots = AgentSlots::default();
        let mut first = slots.take(1, &LIMITS).unwrap();
        let brief =
            slots.take(1, &LIMITS).expect("it may wait briefly: a quarter of those that wait is taken");
        assert_eq!((first.patience(), brief.patience()), (HelloTimeout::Whole, HelloTimeout::Brief));
        assert_eq!((slots.count(), slots.welcomed()), ((1, 1), 0));
        drop(brief);
        let queue = Arc::clone(slots.take_for_hello(1, &LIMITS).expect("it does not wait").queue());
        assert!(Arc::ptr_eq(&queue, first.queue()), "a user's connections share a queue");
        first.welcomed();
        let mut second = slots.take(1, &LIMITS).unwrap();
        second.welcomed();
        assert_eq!(slots.take(1, &LIMITS).unwrap_err(), AgentSlotsFull::OfUid);
        let other = slots.take(2, &LIMITS).unwrap();
        assert_eq!(slots.take(3, &LIMITS).unwrap_err(), AgentSlotsFull::All);
        assert_eq!(slots.count(), (3, 1));
        drop((first, second, other));
        assert_eq!((slots.count(), slots.welcomed(), slots.brief.count()), ((0, 0), 0, 0));
        let next = slots.take(1, &LIMITS).unwrap();
        assert!(!Arc::ptr_eq(&queue, next.queue()), "a queue ends with its user's last connection");
    }

    #[test]
    fn peers_that_may_wait_briefly_are_bounded_too() {
        let limits = AgentLimits { connections: 1000, connections_per_uid: 1000, waiting: 8, ..LIMITS };
        let slots = AgentSlots::default();
        let of = |uid| std::iter::from_fn(|| slots.take(uid, &limits).ok()).collect::<Vec<_>>();
        let one = of(1);
        assert_eq!(one.len(), 2 + 8);
        assert_eq!(slots.take(1, &limits).unwrap_err(), AgentSlotsFull::Waiting);
        let others: Vec<_> = (2..9).flat_map(of).collect();
        assert_eq!(one.len() + others.len(), 8 + 32, "a user's silent peers leave most to the others");
    }
}
