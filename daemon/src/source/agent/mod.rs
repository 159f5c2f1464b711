//! Serves processes that have loaded our library (agents). They connect to a SOCK_SEQPACKET socket, pass their shared memory
//! with a first record (hello), and send records of events.
//!
//! ```text
//! connection             one agent, from hello to end
//! connection_order       order among the connections of a process
//! inherited_connections  connections that outlive the daemon
//! reasons                why a peer is refused, and why a connection ends
//! peer                   identity of the process that connected
//! packet                 reads one packet from the socket
//! frames                 checks the frames that an agent sends
//! memory                 an agent's memfd
//! post_mortem            reads records that an ended agent did not send
//! ask                    sends a program the report about itself
//! command                commands to agents
//! ```
//!
//! Peers are untrusted: lengths, texts, times and identities that a peer sends are checked. Processing a peer's packets delays
//! others by at most the peer's share of time.

mod ask;
mod command;
mod connection;
mod connection_order;
mod frames;
mod inherited_connections;
mod memory;
mod packet;
mod peer;
mod post_mortem;
mod reasons;
mod waiting_peers;

pub(crate) use ask::{Answerer, Unanswered, option};
pub(crate) use packet::MAX_PACKET_BYTES;

use super::process::Processes;
use super::{Batch, frame_of};
use crate::clock;
use crate::limits::agent_slots::{AgentLimits, AgentSlot, AgentSlots, AgentSlotsFull};
use crate::limits::rate_limit::LogRateLimit;
use crate::os::{DescriptorShortage, fit_connections, lock};
use crate::service;
use crate::stats::{Count, Stats};
use command::AgentHandle;
use connection_order::ConnectionOrder;
use gpumem_ledger::ProcessKey;
use gpumem_wire::{Body, Stamp};
use packet::Packet;
use peer::Caller;
use reasons::Refusal;
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::MissedTickBehavior;
use waiting_peers::{ArrivedPeer, WaitingPeers};

/// At shutdown, time limit for handing packets that were already read to the aggregator.
const LAST_PACKETS: Duration = Duration::from_millis(300);
/// Interval for checking whether peers that wait for a slot are still running.
const CHECK_WAITING: Duration = Duration::from_millis(100);
/// Consequence of running out of descriptors, for the log message.
const CANNOT_CONNECT: &str = "agents cannot connect";

/// Callback that receives the UUID of a device that NVML should query soon.
pub(crate) type Hint = Box<dyn Fn([u8; 16]) + Send + Sync>;

pub(crate) struct Agents {
    inbox: mpsc::Sender<Batch>,
    stats: Arc<Stats>,
    processes: Processes,
    hint: Hint,
    limits: Mutex<AgentLimits>,
    slots: AgentSlots,
    order: Arc<ConnectionOrder>,
    /// Number of the next resync of any agent (in a resync, an agent resends its whole state).
    epochs: AtomicU64,
    /// Number of times that the daemon asked all agents to resend their state. Each connection watches this number.
    resyncs: watch::Sender<u64>,
    /// Set to true at shutdown, so that connections stop reading.
    over: watch::Sender<bool>,
    /// Whether the service manager keeps accepted connections while no daemon runs.
    stores_connections: AtomicBool,
    /// Channels that notify connections when their process ends.
    ends: Mutex<HashMap<ProcessKey, Vec<oneshot::Sender<()>>>>,
    /// Buffer into which packets are read before they are checked. All connections share it, because no task awaits while it is
    /// locked.
    packet: Mutex<Vec<u8>>,
    handles: Mutex<HashMap<ProcessKey, AgentHandle>>,
    /// Renders the reports that programs request about themselves.
    answerer: OnceLock<Answerer>,
    log_rate_limit: LogRateLimit,
    /// Held while the rows (live allocations) of an ended agent are in memory, so that only one agent's are.
    rows: tokio::sync::Mutex<()>,
    shortage: DescriptorShortage,
}

impl Agents {
    pub(crate) fn new(
        limits: AgentLimits,
        processes: Processes,
        inbox: mpsc::Sender<Batch>,
        stats: Arc<Stats>,
        hint: Hint,
    ) -> Arc<Self> {
        Arc::new(Agents {
            inbox,
            stats,
            processes,
            hint,
            limits: Mutex::new(limits),
            slots: AgentSlots::default(),
            order: Arc::default(),
            epochs: AtomicU64::new(1),
            resyncs: watch::Sender::new(0),
            over: watch::Sender::new(false),
            stores_connections: AtomicBool::new(false),
            ends: Mutex::default(),
            packet: Mutex::new(vec![0; MAX_PACKET_BYTES]),
            handles: Mutex::default(),
            answerer: OnceLock::new(),
            log_rate_limit: LogRateLimit::default(),
            rows: tokio::sync::Mutex::default(),
            shortage: DescriptorShortage::default(),
        })
    }

    /// Resumes connections that the service manager kept for this daemon. From now on new connections are kept as well.
    pub(crate) async fn inherit(self: &Arc<Self>, handed: Vec<(String, OwnedFd)>) {
        self.stores_connections.store(true, Ordering::Relaxed);
        let (inherited, unusable) = inherited_connections::group(handed);
        for name in unusable {
            tracing::warn!(
                name,
                "cannot resume an agent connection that systemd kept: its descriptors are not usable"
            );
            service::forget(&name).await;
        }
        for connection in inherited {
            let place = self.order.join(connection.key.pid, None);
            tokio::spawn(connection::resume(Arc::clone(self), connection, place));
        }
    }

    /// Stops reading, and waits up to [`LAST_PACKETS`] until packets already read have been handed to the aggregator. A packet
    /// read later would be lost; an unread one remains for the next daemon.
    pub(crate) async fn finish(&self) {
        self.over.send_replace(true);
        let deadline = tokio::time::Instant::now() + LAST_PACKETS;
        while self.slots.welcomed() > 0 && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Fails if a process that ended before it was accepted claims to be a known process of another user.
    fn check_ended(&self, peer: &peer::Peer) -> Result<(), Refusal> {
        match self.processes.owner(peer.key) {
            Some(owner) if owner != u64::from(peer.uid) => {
                let owner = u32::try_from(owner).unwrap_or(u32::MAX);
                Err(peer::IdentityError::User { pid: peer.key.pid, uid: peer.uid, owner }.into())
            }
            _ => Ok(()),
        }
    }

    /// Sets the limits for connections that are accepted later.
    pub(crate) fn set_limits(&self, limits: AgentLimits) {
        *lock(&self.limits) = limits;
    }

    /// Sets the renderer of reports that programs request about themselves. Only the first call has an effect.
    pub(crate) fn answer_with(&self, answerer: Answerer) {
        let _ = self.answerer.set(answerer);
    }

    /// Returns the number of connections, and the number that have not sent a hello.
    pub(crate) fn connections(&self) -> (usize, usize) {
        self.slots.count()
    }

    /// Asks every agent to resend its state, because a recording that begins now must contain it.
    pub(crate) fn resync(&self) {
        self.resyncs.send_modify(|count| *count += 1);
    }

    /// Notifies connections that their process has ended. The socket may show no sign of that, because children may hold it open.
    pub(crate) fn ended(&self, key: ProcessKey) {
        let waiting = lock(&self.ends).remove(&key);
        for waiting in waiting.into_iter().flatten() {
            // An error means that the connection is already closed.
            let _ = waiting.send(());
        }
    }

    /// Returns a receiver that resolves when the process ends, or at once if `is_watched` is false (it had ended before).
    fn expect_end(&self, key: ProcessKey, is_watched: bool) -> oneshot::Receiver<()> {
        let (sender, receiver) = oneshot::channel();
        if is_watched {
            let mut ends = lock(&self.ends);
            // Drop the entries of connections that closed although their process still runs.
            ends.retain(|_, waiting| {
                waiting.retain(|waiting| !waiting.is_closed());
                !waiting.is_empty()
            });
            ends.entry(key).or_default().push(sender);
        }
        receiver
    }

    pub(crate) async fn listen(self: Arc<Self>, listener: UnixListener) {
        let mut waiting = WaitingPeers::default();
        let mut check = tokio::time::interval(CHECK_WAITING);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.slots.freed(), if !waiting.is_empty() => {
                    self.serve_ready(&mut waiting);
                    continue;
                }
                _ = check.tick(), if !waiting.is_empty() => {
                    for uid in waiting.close_impatient() {
                        self.refuse_for_slots(uid, AgentSlotsFull::OfUid);
                    }
                    // A configuration reload may have raised the limits.
                    self.serve_ready(&mut waiting);
                    continue;
                }
            };
            let (stream, _) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    self.stats.add(Count::AcceptFailures, 1);
                    self.shortage.note(CANNOT_CONNECT, &error);
                    // Do not retry at once: without descriptors that would spin. The connection stays in the kernel's queue.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            self.arrived(stream, &mut waiting);
        }
    }

    /// Serves waiting peers for which slots are free now.
    fn serve_ready(self: &Arc<Self>, waiting: &mut WaitingPeers) {
        let limits = self.limits();
        for (uid, peer, slot) in waiting.take_ready(|uid, stream| self.slot(uid, stream, &limits)) {
            match slot {
                Ok(slot) => self.serve(peer, slot),
                Err(full) => self.refuse_for_slots(uid, full),
            }
        }
    }

    /// Serves a new connection, or queues it if all slots of its user are taken. Refuses it if no slot at all is free, or if there
    /// is no room in the queue.
    fn arrived(self: &Arc<Self>, stream: UnixStream, waiting: &mut WaitingPeers) {
        // A peer without credentials gets uid -1, which no user has.
        let uid = stream.peer_cred().map_or(u32::MAX, |peer| peer.uid());
        let limits = self.limits();
        let slot = match waiting.has(uid) {
            true => Err(AgentSlotsFull::OfUid),
            false => self.slot(uid, &stream, &limits),
        };
        if let Err(full) = slot {
            let room = fit_connections(usize::MAX).saturating_sub(limits.connections);
            if full != AgentSlotsFull::OfUid || !waiting.has_room(uid, room) {
                return self.refuse_for_slots(uid, full);
            }
        }
        let caller = match Caller::of(&stream) {
            Ok(caller) => caller,
            Err(unknown) => return self.refuse(&stream, uid, &unknown.into()),
        };
        let stream = Arc::new(stream);
        let place = self.order.join(caller.pid, Some(Arc::clone(&stream)));
        let peer = ArrivedPeer { stream, caller, place, until: None };
        match slot {
            Ok(slot) => self.serve(peer, slot),
            Err(_) => waiting.push(uid, peer),
        }
    }

    /// Takes a slot for a peer. If its hello is already in the socket, the peer does not count as one without a hello.
    fn slot(&self, uid: u32, stream: &UnixStream, limits: &AgentLimits) -> Result<AgentSlot, AgentSlotsFull> {
        match connection_order::is_empty(stream) {
            true => self.slots.take(uid, limits),
            false => self.slots.take_for_hello(uid, limits),
        }
    }

    fn serve(self: &Arc<Self>, peer: ArrivedPeer, slot: AgentSlot) {
        tokio::spawn(connection::serve(Arc::clone(self), peer, slot));
    }

    fn refuse_for_slots(&self, uid: u32, full: AgentSlotsFull) {
        let count = match full {
            AgentSlotsFull::All => Count::RefusedFull,
            AgentSlotsFull::OfUid => Count::RefusedUid,
            AgentSlotsFull::Waiting => Count::RefusedWaiting,
        };
        self.stats.add(count, 1);
        tracing::debug!(uid, ?full, "no slot for a peer on the agent socket");
    }

    /// Counts and logs the refusal of a peer. Its connection closes when the stream is dropped.
    fn refuse(&self, stream: &UnixStream, uid: u32, refusal: &Refusal) {
        if let Some(count) = refusal.count() {
            self.stats.add(count, 1);
        }
        if refusal.is_out_of_descriptors() {
            self.shortage.note(CANNOT_CONNECT, refusal);
        } else if !matches!(refusal, Refusal::ShuttingDown) && self.log_rate_limit.allows(uid) {
            let pid = stream.peer_cred().ok().and_then(|peer| peer.pid());
            tracing::warn!(uid, pid, why = %refusal, "a peer on the agent socket was refused");
        }
    }

    /// Returns the limits. The number of connections is reduced to what the available descriptors allow.
    fn limits(&self) -> AgentLimits {
        let limits = *lock(&self.limits);
        AgentLimits { connections: fit_connections(limits.connections), ..limits }
    }

    fn next_epoch(&self) -> u64 {
        self.epochs.fetch_add(1, Ordering::Relaxed)
    }

    fn receive(&self, stream: &UnixStream) -> io::Result<(Packet, Vec<u8>)> {
        let mut buffer = lock(&self.packet);
        let packet = packet::receive(stream, &mut buffer)?;
        let bytes = buffer[..packet.len].to_vec();
        Ok((packet, bytes))
    }

    /// Hands a batch to the aggregator. Fails if the daemon is ending.
    async fn hand(&self, batch: Batch) -> Result<(), ()> {
        self.inbox.send(batch).await.map_err(|_| ())
    }
}

/// Encodes a record of the daemon to an agent as a frame.
fn frame_now(body: Body<'_>) -> Vec<u8> {
    frame_of(Stamp { time_ns: clock::now_ns(), ..Stamp::default() }, body)
}
