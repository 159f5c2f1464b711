//! The agent's side of a connection to a daemon, played by this process: hello with its memory, the reply to the request for its
//! state, prepared packets. It contains none of the agent's own computation.

use super::cost::now_ns;
use super::traffic::tag_name;
use gpumem_wire::layout::Header;
use gpumem_wire::{Body, DeviceIdKind, MAJOR, MINOR, MemoryKind, Reading, Record, Stamp, frame};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, send, sendmsg, socket_with,
};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// Upper limit of packets, as in agents.
const PACKET_BYTES: usize = 60 << 10;

/// A connection to a daemon.
#[derive(Debug)]
pub struct Peer {
    socket: OwnedFd,
}

/// Packs events into packets as an agent does.
pub fn packed(events: &[Record<'_>]) -> Vec<Vec<u8>> {
    let mut packets = vec![Vec::with_capacity(PACKET_BYTES)];
    for event in events {
        let mut last = packets.pop().unwrap_or_default();
        if last.len() + event.frame_bytes() > PACKET_BYTES {
            packets.push(std::mem::replace(&mut last, Vec::with_capacity(PACKET_BYTES)));
        }
        event.append_frame(&mut last);
        packets.push(last);
    }
    packets
}

fn start_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("this process");
    let (_, fields) = stat.rsplit_once(')').expect("a name");
    fields.split_ascii_whitespace().nth(19).and_then(|ticks| ticks.parse().ok()).expect("field 22")
}

fn memory() -> OwnedFd {
    let header = Header {
        major: MAJOR,
        minor: MINOR,
        pid: std::process::id(),
        start_ticks: start_ticks(),
        ring_slots: 64,
        live_rows: 0,
        name_bytes: 0,
        head_seq: 0,
        lost: 0,
        names_end: 0,
    };
    let fd = memfd_create("gpumem", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd");
    ftruncate(&fd, header.file_bytes().expect("small")).expect("its size");
    rustix::io::pwrite(&fd, &header.encode(), 0).expect("its header");
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).expect("seals");
    fd
}

/// Returns a UUID in NVML's form as the two words of a record.
fn words(uuid: &str) -> (u64, u64) {
    let hex: String = uuid.trim_start_matches("GPU-").chars().filter(|&c| c != '-').collect();
    let word = |text: &str| u64::from_str_radix(text, 16).expect("a UUID");
    (word(&hex[..16]), word(&hex[16..]))
}

impl Peer {
    /// Connects and sends its hello. Waits while the daemon's queue is full, but not for a reply.
    ///
    /// # Panics
    /// If no daemon listens.
    pub fn introduce(path: &Path) -> Self {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket");
        connect(&socket, &SocketAddrUnix::new(path).expect("a path")).expect("a daemon");
        let peer = Peer { socket };
        let stamp = Stamp { thread: std::process::id(), time_ns: now_ns(), ..Stamp::default() };
        let versions = u64::from(MAJOR) << 16 | u64::from(MINOR);
        let hello =
            Body::Hello { start_ticks: start_ticks(), versions, capabilities: 0, instance: 1, claims: "" };
        peer.send_with_memory(&one(stamp, hello));
        peer
    }

    /// Connects, and returns after the daemon has received its hello, its device, `tags` names and an empty state.
    ///
    /// # Panics
    /// If the daemon does not send a welcome.
    pub fn connect(path: &Path, uuid: &str, tags: u32) -> Self {
        let peer = Peer::introduce(path);
        let epoch = peer.asked();
        peer.describe(uuid, tags);
        let at = Stamp { time_ns: now_ns(), ..Stamp::default() };
        peer.send(&one(at, Body::ResyncBegin { epoch, after_seq: 0 }));
        peer.send(&one(at, Body::ResyncEnd { epoch, head_seq: 0, rows: 0 }));
        peer
    }

    /// Sends the device with this UUID and `tags` names.
    ///
    /// # Panics
    /// If the daemon is gone.
    pub fn describe(&self, uuid: &str, tags: u32) {
        let (uuid_high, uuid_low) = words(uuid);
        let total_bytes = Reading::of(80 << 30);
        let device = Body::Device {
            uuid_high,
            uuid_low,
            total_bytes,
            ordinal: 0,
            id: DeviceIdKind::Gpu,
            name: "bench",
        };
        let at = Stamp { time_ns: now_ns(), ..Stamp::default() };
        self.send(&one(Stamp { device: 0, ..at }, device));
        let names: Vec<_> = (1..=tags).map(|tag| (tag, tag_name(tag))).collect();
        let tags = names
            .iter()
            .map(|(tag, path)| Record { stamp: Stamp { tag: *tag, ..at }, body: Body::Tag { path } });
        packed(&tags.collect::<Vec<_>>()).iter().for_each(|packet| self.send(packet));
    }

    /// Sends the record of an allocation with the name 1 on device slot 0, as number `seq`.
    ///
    /// # Panics
    /// If the daemon is gone.
    pub fn allocate(&self, seq: u64, bytes: u64) {
        let stamp = Stamp { seq, tag: 1, device: 0, time_ns: now_ns(), ..Stamp::default() };
        let memory = MemoryKind::Device;
        self.send(&one(stamp, Body::AllocEnd { address: seq << 32, bytes, pool: 0, took_us: 1, memory }));
    }

    /// Sends a packet; waits while the socket is full.
    ///
    /// # Panics
    /// If the daemon is gone.
    pub fn send(&self, packet: &[u8]) {
        let sent = send(&self.socket, packet, SendFlags::NOSIGNAL).expect("a daemon that listens");
        assert_eq!(sent, packet.len());
    }

    /// Sends a watermark: everything up to `last_seq` has been sent.
    pub fn watermark(&self, last_seq: u64) {
        let stamp = Stamp { time_ns: now_ns(), ..Stamp::default() };
        self.send(&one(stamp, Body::Watermark { last_seq, in_flight_since_ns: 0 }));
    }

    fn send_with_memory(&self, packet: &[u8]) {
        let memory = memory();
        let fds = [memory.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        assert!(beside.push(SendAncillaryMessage::ScmRights(&fds)), "room for one descriptor");
        let sent = sendmsg(&self.socket, &[IoSlice::new(packet)], &mut beside, SendFlags::NOSIGNAL);
        assert_eq!(sent, Ok(packet.len()));
    }

    /// Waits for the request for its state, and returns its epoch.
    fn asked(&self) -> u64 {
        let mut buffer = vec![0; PACKET_BYTES];
        loop {
            let (bytes, _) = recv(&self.socket, &mut buffer, RecvFlags::empty()).expect("an answer");
            assert_ne!(bytes, 0, "the daemon refused this process: see its log");
            for record in frame::records(&buffer[..bytes]) {
                if let Body::ResyncRequest { epoch } = record.expect("frames").expect("known").body {
                    return epoch;
                }
            }
        }
    }
}

fn one(stamp: Stamp, body: Body<'_>) -> Vec<u8> {
    let mut frames = Vec::new();
    Record { stamp, body }.append_frame(&mut frames);
    frames
}
