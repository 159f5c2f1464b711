//! Connection of one agent, from its hello to its end.

use super::ask::{Question, option};
use super::command::{CommandInbox, QueuedCommand};
use super::connection_order::{ConnectionPlace, is_empty};
use super::frames::{self, Fault, PacketChecker};
use super::inherited_connections::{self, InheritedConnection};
use super::memory::{self, Memory};
use super::packet::Packet;
use super::peer::Peer;
use super::post_mortem::{self, UnsentRecords};
use super::reasons::{ConnectionEnd, Refusal};
use super::waiting_peers::ArrivedPeer;
use super::{Agents, frame_now};
use crate::clock;
use crate::limits::agent_slots::{self, AgentSlot, HelloTimeout};
use crate::limits::rate_limit::RateLimit;
use crate::limits::user_queue::QueueSlot;
use crate::service;
use crate::source::{Batch, frame_of};
use crate::stats::Count;
use gpumem_ledger::Origin;
use gpumem_wire::{Body, MAJOR, MINOR, Reading, Record, Stamp, frame};
use rustix::net::{SendFlags, Shutdown, shutdown};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::net::UnixStream;
use tokio::sync::oneshot;

/// Maximum number of packets read from one connection before others are served.
const PACKETS_PER_TURN: usize = 8;

/// Serves a new connection until it ends. The steps at its begin and end are boxed: their state is ten times as large as that of a
/// connection which waits for packets, and a task takes as much memory as its largest step.
pub(super) async fn serve(agents: Arc<Agents>, peer: ArrivedPeer, slot: AgentSlot) {
    let (stream, uid) = (Arc::clone(&peer.stream), peer.caller.uid);
    match Box::pin(welcome(&agents, peer, slot)).await {
        Ok(Some(connection)) => connection.run(&stream).await,
        Ok(None) => agents.stats.add(Count::Asked, 1),
        Err(refusal) => agents.refuse(&stream, uid, &refusal),
    }
}

/// Resumes a connection that an earlier daemon had accepted and the service manager has kept.
pub(crate) async fn resume(agents: Arc<Agents>, inherited: InheritedConnection, place: ConnectionPlace) {
    let (name, pid) = (inherited.name.clone(), inherited.key.pid);
    match Box::pin(inherit(&agents, inherited, place)).await {
        Ok((connection, stream)) => connection.run(&stream).await,
        Err(Refusal::ShuttingDown) => {}
        Err(refusal) => {
            tracing::warn!(pid, why = %refusal, "cannot resume an agent's connection that an earlier daemon had accepted");
            service::forget(&name).await;
        }
    }
}

/// Accepts a connection that an earlier daemon had accepted.
async fn inherit(
    agents: &Arc<Agents>,
    inherited: InheritedConnection,
    place: ConnectionPlace,
) -> Result<(Box<Connection>, UnixStream), Refusal> {
    let stream = std::os::unix::net::UnixStream::from(inherited.socket);
    stream.set_nonblocking(true)?;
    let stream = UnixStream::from_std(stream)?;
    let memory = Memory::accept(inherited.memory, agents.limits().shared_bytes)?;
    let peer = Peer::inherited(&stream, inherited.key)?;
    let no_hello = || Refusal::NoHello(" that was kept".to_owned());
    let hello = frame::records(&inherited.hello).next().and_then(|record| record.ok()?.ok());
    let hello = hello.ok_or_else(no_hello)?;
    if !matches!(hello.body, Body::Hello { start_ticks, .. } if start_ticks == inherited.key.start_ticks) {
        return Err(no_hello());
    }
    let slot = agents.slots.take(peer.uid, &agents.limits()).map_err(|_| Refusal::NoSlot)?;
    let mut connection = Connection::begin(agents, peer, memory, &hello, (slot, place)).await?;
    connection.stored_name = Some(inherited.name);
    agents.stats.add(Count::Resumed, 1);
    connection.read_names().await?;
    connection.greet(&stream);
    Ok((Box::new(connection), stream))
}

/// Connection of an agent whose hello was accepted.
struct Connection {
    agents: Arc<Agents>,
    peer: Peer,
    /// The agent's shared memory; `None` while the daemon reads names from it, and from the begin of reading unsent records on.
    memory: Option<Memory>,
    checker: PacketChecker,
    /// Number of the last resync that was requested (the agent resends its whole state).
    epoch: u64,
    rate_limit: RateLimit,
    /// Whether the process table has the process and will report its end.
    is_watched: bool,
    inbox: CommandInbox,
    /// Name under which the service manager keeps this connection for the next daemon.
    stored_name: Option<String>,
    slot: AgentSlot,
}

/// Reads the first packet, and accepts an agent. If the packet is a request for a report, answers that and returns `None`.
async fn welcome(
    agents: &Arc<Agents>,
    peer: ArrivedPeer,
    slot: AgentSlot,
) -> Result<Option<Box<Connection>>, Refusal> {
    let ArrivedPeer { stream, caller, place, .. } = peer;
    let limits = agents.limits();
    let first = async {
        loop {
            stream.readable().await?;
            place.mark_active();
            match agents.receive(&stream) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => place.mark_idle(&stream),
                other => return other,
            }
        }
    };
    let (patience, silent) = match slot.patience() {
        HelloTimeout::Whole => (limits.hello, Refusal::Silent(limits.hello)),
        HelloTimeout::Brief => (limits.hello.min(agent_slots::BRIEF_TIMEOUT), Refusal::Crowd),
    };
    let first = tokio::time::timeout(patience, first).await;
    let (packet, bytes) = first.map_err(|_| silent)??;
    if packet.len == 0 {
        return Err(Refusal::EarlyEnd);
    }
    let no_hello = |why: &dyn std::fmt::Display| Refusal::NoHello(format!(": {why}"));
    let (frame_slot, payload, after) = match frame::split_frame(&bytes) {
        Ok(Some(parts)) if !packet.cut => parts,
        Ok(_) => return Err(Refusal::NoHello(String::new())),
        Err(error) => return Err(no_hello(&error)),
    };
    let hello = Record::decode(frame_slot, payload).map_err(|error| no_hello(&error))?;
    if let Body::Ask { what, options } = hello.body {
        let peer = caller.peer(option(options, "start_ticks").map(|ticks| ticks.parse().unwrap_or(0)))?;
        let question = Question { key: peer.key, uid: peer.uid, what, options: options.to_owned() };
        drop(place); // later connections need not wait for the answer
        // The connection keeps its slot among those without a hello.
        return agents.answer(&stream, question).await.map(|()| None);
    }
    let Body::Hello { start_ticks, versions, capabilities, instance, claims } = hello.body else {
        return Err(Refusal::NoHello(String::new()));
    };
    if versions >> 16 != u64::from(MAJOR) {
        return Err(Refusal::Version(versions >> 16));
    }
    if packet.no_fds {
        return Err(Refusal::NoDescriptor);
    }
    let fds = packet.fds.len();
    let fd = packet.fds.into_iter().next().filter(|_| fds == 1 && !packet.more_fds);
    let fd = fd.ok_or(Refusal::Descriptors(fds + usize::from(packet.more_fds)))?;
    let memory = Memory::accept(fd, limits.shared_bytes)?;
    let peer = caller.peer(Some(start_ticks))?;
    if peer.had_ended {
        agents.check_ended(&peer)?;
    }
    // For readers of the recording, replace the start time by the one in the daemon's time namespace.
    let start_ticks = peer.key.start_ticks;
    let hello =
        Record { body: Body::Hello { start_ticks, versions, capabilities, instance, claims }, ..hello };

    let mut connection = Connection::begin(agents, peer, memory, &hello, (slot, place)).await?;
    if !after.is_empty() {
        let queue_slot = connection.slot.queue().slot().await;
        if let Err(end) = connection.take(after.to_vec(), queue_slot).await {
            connection.end(&stream, end).await;
            return Err(Refusal::ShuttingDown); // already logged
        }
    }
    connection.greet(&stream);
    connection.store_with_systemd(&stream, &hello).await;
    Ok(Some(Box::new(connection)))
}

impl Connection {
    /// Creates a connection from a hello that was received now or by an earlier daemon.
    async fn begin(
        agents: &Arc<Agents>,
        peer: Peer,
        memory: Memory,
        hello: &Record<'_>,
        (mut slot, place): (AgentSlot, ConnectionPlace),
    ) -> Result<Self, Refusal> {
        slot.welcomed();
        place.reached().await;
        agents.wait_for_predecessor(peer.key).await;
        let epoch = agents.next_epoch();
        let Body::Hello { start_ticks, versions, capabilities, instance, claims } = hello.body else {
            return Err(Refusal::NoHello(String::new()));
        };
        let (claims, program) = frames::split_program(claims);
        let hello_body = Body::Hello { start_ticks, versions, capabilities, instance, claims: &claims };
        let Peer { key, uid, rebase_ns, had_ended } = peer;
        let mut connection = Connection {
            inbox: agents.register(key),
            agents: Arc::clone(agents),
            checker: PacketChecker::new(rebase_ns),
            memory: Some(memory),
            epoch,
            rate_limit: RateLimit::new(agents.limits().bytes_per_s),
            peer,
            is_watched: false,
            stored_name: None,
            slot,
        };
        // Stamp the records with the pid that the kernel names.
        let stamp = Stamp { thread: key.pid, time_ns: clock::now_ns(), seq: 0, ..hello.stamp };
        let up = frame_of(stamp, Body::Source { up: true, reason: "agent" });
        // Send this before the facts, because facts of a closed process are refused. A process list may have named the process,
        // whose run was then closed before this hello was read.
        connection.hand(up).await.map_err(|()| Refusal::ShuttingDown)?;
        // From now on the process table reports the end of the process. If it has ended already, this connection reports that.
        let processes = &agents.processes;
        connection.is_watched = processes.identify(key.pid) == Some(key) && processes.facts(key).is_some();
        let mut facts = Vec::new();
        processes.take_facts(clock::now_ns(), &mut facts);
        if !connection.is_watched {
            processes.last_facts(key, &mut facts);
        }
        if had_ended && facts.is_empty() {
            processes.claimed_facts(key, uid, program.unwrap_or_default(), &mut facts);
        }
        if !facts.is_empty() {
            agents.hand(Batch::of_host(facts)).await.map_err(|()| Refusal::ShuttingDown)?;
        }
        connection.hand(frame_of(stamp, hello_body)).await.map_err(|()| Refusal::ShuttingDown)?;
        agents.stats.add(Count::Welcomed, 1);
        if agents.log_rate_limit.allows(uid) {
            tracing::info!(pid = key.pid, uid, epoch, "agent connected");
        }
        Ok(connection)
    }

    /// Hands the names (of tags, for example) that the agent had sent to an earlier daemon to the ledger, before records use them.
    async fn read_names(&mut self) -> Result<(), Refusal> {
        let Some(memory) = self.memory.take() else { return Ok(()) };
        let (header, mut read) = (memory.header()?, 0);
        loop {
            let frames = post_mortem::names(&memory, &header, read)?;
            read += frames.len() as u64;
            if frames.is_empty() {
                break;
            }
            // Stop reading names at invalid bytes; the records themselves may still be valid.
            let Ok((frames, _)) = self.check(frames) else { break };
            self.hand(frames).await.map_err(|()| Refusal::ShuttingDown)?;
        }
        self.memory = Some(memory);
        Ok(())
    }

    /// Asks the service manager, if there is one, to keep the connection while no daemon runs.
    async fn store_with_systemd(&mut self, stream: &UnixStream, hello: &Record<'_>) {
        let Some(memory) = &self.memory else { return };
        if !self.agents.stores_connections.load(Ordering::Relaxed) {
            return;
        }
        let frame = frame_of(hello.stamp, hello.body);
        match inherited_connections::store(stream, memory, self.peer.key, &frame).await {
            Ok(name) => self.stored_name = name,
            Err(error) => tracing::debug!(pid = self.peer.key.pid, %error, "a connection is not kept"),
        }
    }

    /// Answers a hello, and asks the agent to send its whole state.
    fn greet(&self, stream: &UnixStream) {
        let epoch = self.epoch;
        let versions = u64::from(MAJOR) << 16 | u64::from(MINOR);
        let bodies = [Body::Welcome { epoch, versions, capabilities: 0 }, Body::ResyncRequest { epoch }];
        let reply = bodies.map(frame_now).concat();
        // The first bytes in an empty socket always fit. If the peer has closed, the next read reports it. Do not send through
        // tokio, which does not know yet that an inherited connection is writable.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let _ = rustix::net::send(stream, &reply, flags);
    }

    async fn run(mut self: Box<Self>, stream: &UnixStream) {
        let mut resyncs = self.agents.resyncs.subscribe();
        let mut over = self.agents.over.subscribe();
        let mut gone = self.agents.expect_end(self.peer.key, self.is_watched);
        let mut successors = Vec::new();
        let end = loop {
            if !successors.is_empty() && is_empty(stream) {
                for successor in successors.drain(..) {
                    let _: Result<(), ()> = oneshot::Sender::send(successor, ());
                }
            }
            tokio::select! {
                biased;
                // Leave unread packets in the socket for the next daemon.
                () = async { drop(over.wait_for(|over| *over).await) } => break ConnectionEnd::ShuttingDown,
                ready = stream.readable() => {
                    if let Err(error) = ready {
                        break ConnectionEnd::System(error);
                    }
                    if let Err(end) = self.read_packets(stream, PACKETS_PER_TURN).await {
                        break end;
                    }
                    tokio::task::yield_now().await;
                }
                // The process has ended, so all its packets are in the socket. Do not wait for the end of the connection:
                // children may hold it open.
                _ = &mut gone => break self.read_packets(stream, usize::MAX).await.err().unwrap_or(ConnectionEnd::Gone),
                Ok(()) = resyncs.changed() => self.request_resync(stream),
                Some(command) = self.inbox.commands.recv() => self.command(stream, command),
                Some(successor) = self.inbox.successors.recv() => successors.push(successor),
            }
        };
        Box::pin(self.end(stream, end)).await;
        // Returning drops `successors`, so later connections of the process stop waiting.
    }

    /// Asks the agent to resend its whole state.
    fn request_resync(&mut self, stream: &UnixStream) {
        self.epoch = self.agents.next_epoch();
        // Try only once: a peer that does not read its socket must not block the daemon.
        let _ = stream.try_write(&frame_now(Body::ResyncRequest { epoch: self.epoch }));
    }

    /// Sends a command to the agent. If an earlier command has no result yet, its requester gets an error.
    fn command(&mut self, stream: &UnixStream, (command, requester): QueuedCommand) {
        let body = command.body();
        self.inbox.pending = Some((body.kind(), requester));
        if stream.try_write(&frame_now(body)).is_err() {
            self.inbox.pending = None; // the peer does not read its socket
        }
    }

    /// Reads up to `packets` packets and hands their records to the ledger.
    async fn read_packets(&mut self, stream: &UnixStream, packets: usize) -> Result<(), ConnectionEnd> {
        for _ in 0..packets {
            let slot = self.slot.queue().slot().await;
            let (packet, bytes) = match self.agents.receive(stream) {
                Ok(received) => received,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                // The peer closed without reading all data sent to it. The kernel reports this once, before it returns the
                // packets that are still queued. The end of the connection follows them.
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => continue,
                Err(error) => return Err(ConnectionEnd::System(error)),
            };
            match packet {
                Packet { cut: true, .. } => return Err(ConnectionEnd::Oversize),
                Packet { len: 0, .. } => return Err(ConnectionEnd::Closed),
                packet if packet.more_fds || packet.no_fds || !packet.fds.is_empty() => {
                    return Err(ConnectionEnd::Descriptors);
                }
                _ => {}
            }
            let len = bytes.len();
            self.take(bytes, slot).await?;
            let waited = self.rate_limit.acquire(len).await;
            self.agents.stats.add(Count::AgentWaited, u64::from(waited));
        }
        Ok(())
    }

    /// Checks a packet and hands its records to the aggregator. `slot` is a slot in the queue of the user.
    async fn take(&mut self, packet: Vec<u8>, slot: Option<QueueSlot>) -> Result<(), ConnectionEnd> {
        self.agents.stats.add(Count::Packets, 1);
        self.agents.stats.add(Count::Bytes, packet.len() as u64);
        let (frames, costly) = self.check(packet).map_err(ConnectionEnd::Fault)?;
        self.inbox.find_result(&frames);
        self.hand_pieces(frames, costly, slot).await.map_err(|()| ConnectionEnd::ShuttingDown)?;
        self.inbox.last_seq.store(self.checker.last_seq, Ordering::Relaxed);
        Ok(())
    }

    /// Checks a packet. Returns the frames that the ledger accepts, and the number of costly ones (see `frames::split`).
    fn check(&mut self, packet: Vec<u8>) -> Result<(Vec<u8>, u64), Fault> {
        let (frames, counts) = self.checker.check(packet, clock::now_ns())?;
        self.agents.stats.add(Count::SkippedUnknown, counts.unknown);
        self.agents.stats.add(Count::SkippedForbidden, counts.forbidden);
        self.agents.stats.add(Count::SkippedDevices, counts.devices);
        for uuid in self.checker.take_hints() {
            (self.agents.hint)(uuid);
        }
        Ok((frames, counts.costly))
    }

    async fn hand(&self, frames: Vec<u8>) -> Result<(), ()> {
        self.hand_pieces(frames, 0, None).await
    }

    /// Hands frames to the ledger. The first batch uses `slot`, if given; each other batch waits for a slot in the queue of the
    /// user. Frames with `costly` records are split into several batches, so that other processes are served in between.
    async fn hand_pieces(&self, frames: Vec<u8>, costly: u64, mut slot: Option<QueueSlot>) -> Result<(), ()> {
        let pieces = if costly == 0 { vec![frames] } else { frames::split(&frames) };
        for frames in pieces {
            let mut slot = match slot.take() {
                Some(slot) => Some(slot),
                None => self.slot.queue().slot().await,
            };
            if costly != 0 {
                slot = slot.map(QueueSlot::costly);
            }
            self.agents.hand(Batch { origin: Origin::Process(self.peer.key), frames, slot }).await?;
        }
        Ok(())
    }

    /// Ends the connection: forwards records that the agent had not sent, and reports that the agent has ended. Also reports the
    /// end of the process if no pidfd will. A newer connection of the process waits until this returns.
    async fn end(self, stream: &UnixStream, end: ConnectionEnd) {
        let (agents, key) = (Arc::clone(&self.agents), self.peer.key);
        let last_seq = Arc::clone(&self.inbox.last_seq);
        self.close(stream, end).await;
        agents.forget(key, &last_seq);
    }

    async fn close(mut self, stream: &UnixStream, end: ConnectionEnd) {
        // Take the time first: the agent's memory holds the state up to now. The process may run on and execute another program.
        let (pid, uid, ended_ns) = (self.peer.key.pid, self.peer.uid, clock::now_ns());
        if matches!(end, ConnectionEnd::ShuttingDown) {
            return;
        }
        let is_logged = self.agents.log_rate_limit.allows(uid);
        match end.count() {
            Some(count) => {
                self.agents.stats.add(count, 1);
                if is_logged {
                    tracing::warn!(pid, uid, why = %end, "an agent's connection was closed because of invalid data");
                }
            }
            None if is_logged => tracing::info!(pid, uid, why = %end, "agent disconnected"),
            None => {}
        }
        if let Some(name) = self.stored_name.take() {
            // Shut down, because the service manager holds the connection open until it has processed the removal.
            let _ = shutdown(stream, Shutdown::Both);
            service::forget(&name).await;
        }
        // Do not read the memory of a peer that sent invalid data.
        if let Some(memory) = self.memory.take().filter(|_| end.count().is_none())
            && let Err(error) = Arc::clone(self.slot.queue()).run_alone(self.recover(memory, ended_ns)).await
            && is_logged
        {
            tracing::warn!(pid, uid, why = %error, "the unsent records of an agent cannot be read");
        }
        let stamp = Stamp { thread: pid, time_ns: clock::now_ns(), ..Stamp::default() };
        let body = Body::Source { up: false, reason: &end.to_string() };
        if self.hand(frame_of(stamp, body)).await.is_err() {
            return;
        }
        if !self.is_watched {
            let start_ticks = self.peer.key.start_ticks;
            let body = Body::ProcessGone { start_ticks, status: Reading::ABSENT };
            let _ = self.agents.hand(Batch::of_host(frame_of(stamp, body))).await;
        }
    }

    /// Reads records from the agent's memory that were not received from the socket, and hands them to the ledger.
    async fn recover(&mut self, memory: Memory, ended_ns: u64) -> Result<(), memory::MemoryError> {
        let agents = Arc::clone(&self.agents);
        let before = self.checker.last_seq;
        let received = (before, self.checker.has_gaps);
        let mut unsent = UnsentRecords::new(memory, received, agents.next_epoch(), agents.limits().rows)?;
        let mut rows = None;
        while let Some(piece) = unsent.next_piece(ended_ns).await? {
            if unsent.is_at_rows() && rows.is_none() {
                rows = Some(agents.rows.lock().await);
            }
            tokio::task::yield_now().await;
            if piece.is_empty() {
                continue;
            }
            match self.check(piece) {
                Ok((frames, costly)) => {
                    if self.hand_pieces(frames, costly, None).await.is_err() {
                        return Ok(());
                    }
                }
                Err(fault) => {
                    if self.agents.log_rate_limit.allows(self.peer.uid) {
                        tracing::warn!(pid = self.peer.key.pid, why = %fault, "an agent's shared memory has invalid records");
                    }
                    return Ok(());
                }
            }
        }
        self.agents.stats.add(Count::Recovered, self.checker.last_seq.saturating_sub(before));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::agent_slots::AgentLimits;
    use crate::source::agent::peer::Caller;
    use crate::source::process::Processes;
    use std::time::Duration;
    use tokio::sync::mpsc;

    #[tokio::test]
    async fn waiting_connection_takes_little_memory() {
        let limits = AgentLimits {
            connections: 8,
            connections_per_uid: 8,
            waiting: 8,
            hello: Duration::from_secs(1),
            bytes_per_s: 0,
            shared_bytes: 1 << 20,
            rows: 1,
        };
        let (inbox, _batches) = mpsc::channel(1);
        let stats = Arc::new(crate::stats::Stats::default());
        let agents = Agents::new(limits, Processes::new(), inbox, stats, Box::new(|_| {}));
        let (stream, _agent) = UnixStream::pair().expect("a pair");
        let caller = Caller::of(&stream).expect("this process");
        let stream = Arc::new(stream);
        let place = agents.order.join(caller.pid, Some(Arc::clone(&stream)));
        let slot = agents.slots.take(caller.uid, &limits).expect("a free slot");
        let task = serve(Arc::clone(&agents), ArrivedPeer { stream, caller, place, until: None }, slot);
        let bytes = size_of_val(&task) + size_of::<Connection>();
        assert!(bytes < 4096, "{bytes}");
    }
}
