//! Peers that wait for a connection slot of their user.
//!
//! Short programs may start faster than their records are read. Each has sent its records when it ends, and does not connect
//! again: a refusal would lose its run. Its connection waits here instead, in the order of arrival.

use super::connection_order::Place;
use super::peer::Caller;
use crate::limits::agent_slots::{AgentSlot, AgentSlotsFull};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use tokio::net::UnixStream;

/// A connection with the identity that its process had when it was accepted.
pub(super) struct ArrivedPeer {
    pub stream: Arc<UnixStream>,
    pub caller: Caller,
    pub place: Place,
}

/// The queue of each user.
#[derive(Default)]
pub(super) struct WaitingPeers {
    users: HashMap<u32, VecDeque<ArrivedPeer>>,
    count: usize,
}

impl WaitingPeers {
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns whether peers of this user wait: a later one must not overtake them.
    pub(super) fn has(&self, uid: u32) -> bool {
        self.users.contains_key(&uid)
    }

    /// Returns whether a peer of this user may wait. `most` is the limit of all users together; one user may have a quarter.
    pub(super) fn has_room(&self, uid: u32, most: usize) -> bool {
        let of_user = self.users.get(&uid).map_or(0, VecDeque::len);
        self.count < most && of_user < most / 4
    }

    pub(super) fn push(&mut self, uid: u32, peer: ArrivedPeer) {
        self.users.entry(uid).or_default().push_back(peer);
        self.count += 1;
    }

    /// Takes the peers for which `slot` finds a slot, each user's in their order, and those that it refuses for another
    /// reason than a lack of slots.
    pub(super) fn take_ready(
        &mut self,
        slot: impl Fn(u32, &UnixStream) -> Result<AgentSlot, AgentSlotsFull>,
    ) -> Vec<(u32, ArrivedPeer, Result<AgentSlot, AgentSlotsFull>)> {
        let mut ready = Vec::new();
        self.users.retain(|&uid, queue| {
            while let Some(peer) = queue.front() {
                let found = slot(uid, &peer.stream);
                if matches!(found, Err(AgentSlotsFull::All | AgentSlotsFull::OfUid)) {
                    break;
                }
                ready.extend(queue.pop_front().map(|peer| (uid, peer, found)));
            }
            !queue.is_empty()
        });
        self.count -= ready.len();
        ready
    }
}
