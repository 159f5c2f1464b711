//! Peers that wait for a connection slot of their user.
//!
//! Short programs may start faster than their records are read. Such a program sends its records, ends, and does not connect
//! again, so a refusal would lose its run. Its connection waits here, in order of arrival, until it is read. A program that
//! still runs is refused after [`PATIENCE`]: its agent retries, and `doctor` names the limit.

use super::connection_order::ConnectionPlace;
use super::peer::Caller;
use crate::limits::agent_slots::{AgentSlot, AgentSlotsFull};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::Instant;

/// Time for which a running program may wait for a slot.
const PATIENCE: Duration = Duration::from_millis(500);

/// A connection, with the identity of its process as found on accept.
pub(super) struct ArrivedPeer {
    pub stream: Arc<UnixStream>,
    pub caller: Caller,
    pub place: ConnectionPlace,
    /// While it waits: time at which it is closed if its program still runs; `None` once the program has ended.
    pub until: Option<Instant>,
}

#[derive(Default)]
pub(super) struct WaitingPeers {
    /// Peers of each user, in order of arrival.
    users: HashMap<u32, VecDeque<ArrivedPeer>>,
    /// Number of peers of all users.
    count: usize,
}

/// Returns whether the peer has closed its end of the socket.
fn is_closed(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0) && fds[0].revents().contains(PollFlags::HUP)
}

impl WaitingPeers {
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns whether peers of this user wait. A later peer must not overtake them.
    pub(super) fn has(&self, uid: u32) -> bool {
        self.users.contains_key(&uid)
    }

    /// Returns whether a peer of this user may wait. `max` is the maximum for all users; one user may have a quarter of it.
    pub(super) fn has_room(&self, uid: u32, max: usize) -> bool {
        let of_user = self.users.get(&uid).map_or(0, VecDeque::len);
        self.count < max && of_user < max / 4
    }

    pub(super) fn push(&mut self, uid: u32, peer: ArrivedPeer) {
        let until = Some(Instant::now() + PATIENCE);
        self.users.entry(uid).or_default().push_back(ArrivedPeer { until, ..peer });
        self.count += 1;
    }

    /// Removes peers for which `slot` returns a slot, in each user's order. Also removes peers that it refuses for another
    /// reason than a limit of connections.
    pub(super) fn take_ready(
        &mut self,
        slot: impl Fn(u32, &UnixStream) -> Result<AgentSlot, AgentSlotsFull>,
    ) -> Vec<(u32, ArrivedPeer, Result<AgentSlot, AgentSlotsFull>)> {
        let mut ready = Vec::new();
        self.users.retain(|&uid, queue| {
            while let Some(first) = queue.front() {
                let found = slot(uid, &first.stream);
                if matches!(found, Err(AgentSlotsFull::All | AgentSlotsFull::OfUid)) {
                    break;
                }
                ready.extend(queue.pop_front().map(|first| (uid, first, found)));
            }
            !queue.is_empty()
        });
        self.count -= ready.len();
        ready
    }

    /// Closes the connections of running programs that have waited for [`PATIENCE`]. Returns the uid of each.
    pub(super) fn close_impatient(&mut self) -> Vec<u32> {
        let mut closed = Vec::new();
        self.users.retain(|&uid, queue| {
            queue.retain_mut(|waiting| match waiting.until {
                Some(until) if until <= Instant::now() => {
                    waiting.until = None;
                    let has_ended = is_closed(&waiting.stream);
                    if !has_ended {
                        closed.push(uid);
                    }
                    has_ended
                }
                _ => true,
            });
            !queue.is_empty()
        });
        self.count -= closed.len();
        closed
    }
}
