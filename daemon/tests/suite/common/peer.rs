//! A hand-made peer on the agent socket, which sends exactly what a test wants.

use super::{PATIENCE, wait_for};
use gpumem_wire::layout::{HEADER_BYTES, Header};
use gpumem_wire::{Body, MAJOR, MINOR, MemoryKind, Reading, Record, SLOT_BYTES, Slot, Stamp, frame};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::pwrite;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, sendmsg, socket_with,
};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// Returns field 22 of /proc/self/stat.
pub fn own_start_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("/proc");
    let after = stat.rsplit_once(')').expect("a name").1;
    after.split_ascii_whitespace().nth(19).and_then(|field| field.parse().ok()).expect("a start time")
}

pub fn record(stamp: Stamp, body: Body<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    Record { stamp, body }.append_frame(&mut out);
    out
}

pub fn hello(start_ticks: u64, versions: u64) -> Vec<u8> {
    let claims = "rank=3\njob=test-job\n";
    let body = Body::Hello { start_ticks, versions, capabilities: 0, instance: 1, claims };
    let stamp = Stamp { thread: std::process::id(), time_ns: now(), ..Stamp::default() };
    record(stamp, body)
}

pub const VERSIONS: u64 = (MAJOR as u64) << 16 | MINOR as u64;

pub fn now() -> u64 {
    gpumemd::clock::now_ns()
}

/// Returns a record that names device slot 0.
pub fn device() -> Vec<u8> {
    let body = Body::Device {
        uuid_high: 7,
        uuid_low: 9,
        total_bytes: Reading::of(80 << 30),
        ordinal: 0,
        id: gpumem_wire::DeviceIdKind::Gpu,
        name: "Hand-made GPU",
    };
    record(Stamp { device: 0, time_ns: now(), ..Stamp::default() }, body)
}

pub fn tag(tag: u32, path: &str) -> Vec<u8> {
    record(Stamp { tag, time_ns: now(), ..Stamp::default() }, Body::Tag { path })
}

pub fn allocation(seq: u64, bytes: u64, tag: u32) -> (Stamp, Body<'static>) {
    let stamp = Stamp { seq, tag, device: 0, time_ns: now(), ..Stamp::default() };
    (stamp, Body::AllocEnd { address: seq << 32, bytes, pool: 0, took_us: 1, memory: MemoryKind::Device })
}

pub fn watermark(last_seq: u64) -> Vec<u8> {
    let body = Body::Watermark { last_seq, in_flight_since_ns: 0 };
    record(Stamp { time_ns: now(), ..Stamp::default() }, body)
}

/// Returns a resync with these rows.
pub fn resync(epoch: u64, after_seq: u64, rows: &[(Stamp, Body<'static>)]) -> Vec<u8> {
    let stamp = Stamp { time_ns: now(), ..Stamp::default() };
    let mut out = record(stamp, Body::ResyncBegin { epoch, after_seq });
    for &(stamp, body) in rows {
        out.extend(record(Stamp { flags: gpumem_wire::Flags::RESTATED, ..stamp }, body));
    }
    out.extend(record(stamp, Body::ResyncEnd { epoch, head_seq: after_seq, rows: rows.len() as u64 }));
    out
}

/// The shared memory of an agent.
pub struct Memory {
    pub fd: OwnedFd,
    pub header: Header,
}

impl Memory {
    pub fn new() -> Self {
        Memory::sealed(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
    }

    pub fn sealed(seals: SealFlags) -> Self {
        let header = Header {
            major: MAJOR,
            minor: MINOR,
            pid: std::process::id(),
            start_ticks: own_start_ticks(),
            ring_slots: 16,
            live_rows: 8,
            name_bytes: 4096,
            head_seq: 0,
            lost: 0,
            names_end: 0,
        };
        let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd");
        ftruncate(&fd, header.file_bytes().expect("a size")).expect("room");
        let memory = Memory { fd, header };
        memory.write_header();
        fcntl_add_seals(&memory.fd, seals).expect("seals");
        memory
    }

    pub fn write_header(&self) {
        self.write(&self.header.encode(), 0);
    }

    pub fn write(&self, bytes: &[u8], offset: u64) {
        assert_eq!(pwrite(&self.fd, bytes, offset), Ok(bytes.len()));
    }

    /// Writes an ordered record to the ring.
    pub fn ring(&mut self, (stamp, body): (Stamp, Body<'_>)) {
        let slot: Slot = Record { stamp, body }.encode().0;
        self.write(&slot, self.header.slot_offset(stamp.seq));
        self.header.head_seq = self.header.head_seq.max(stamp.seq);
        self.write_header();
    }

    pub fn live(&self, row: u64, (stamp, body): (Stamp, Body<'_>)) {
        let slot: Slot = Record { stamp, body }.encode().0;
        self.write(&slot, self.header.live_offset().expect("an offset") + row * SLOT_BYTES as u64);
    }

    pub fn name(&mut self, frame: &[u8]) {
        let at = self.header.names_offset().expect("an offset") + self.header.names_end;
        self.write(frame, at);
        self.header.names_end += frame.len() as u64;
        self.write_header();
    }
}

const _: () = assert!(HEADER_BYTES == 4096);

/// The peer's connection.
pub struct Peer {
    pub socket: OwnedFd,
}

impl Peer {
    pub fn connect(path: &Path) -> Self {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket");
        let address = SocketAddrUnix::new(path).expect("a path");
        // A socket has its name a moment before it accepts connections.
        wait_for("a daemon", || connect(&socket, &address).ok());
        Peer { socket }
    }

    /// Connects, sends a hello, and reads the welcome. Returns the peer and the epoch of the resync.
    pub fn welcomed(path: &Path, memory: &Memory) -> (Self, u64) {
        let peer = Peer::connect(path);
        peer.send_with(&hello(own_start_ticks(), VERSIONS), &[memory.fd.as_fd()]);
        let reply = peer.receive().expect("a welcome");
        let records: Vec<_> = frame::records(&reply).map(|record| record.unwrap().unwrap().body).collect();
        match records[..] {
            [Body::Welcome { epoch: welcome, .. }, Body::ResyncRequest { epoch }] if welcome == epoch => {
                (peer, epoch)
            }
            ref other => panic!("{other:?}"),
        }
    }

    pub fn send(&self, bytes: &[u8]) -> bool {
        rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL) == Ok(bytes.len())
    }

    pub fn send_with(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || beside.push(SendAncillaryMessage::ScmRights(fds)));
        let sent = sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut beside, SendFlags::NOSIGNAL);
        assert_eq!(sent, Ok(bytes.len()));
    }

    /// Returns the next packet, or `None` when the daemon has closed the connection.
    pub fn receive(&self) -> Option<Vec<u8>> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        // Children of other tests in this process may end, and their SIGCHLD interrupts the call.
        let ready = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&patience)));
        assert_eq!(ready, Ok(1), "the daemon says nothing");
        let mut buffer = vec![0; 64 << 10];
        let (len, _) = recv(&self.socket, &mut buffer[..], RecvFlags::empty()).unwrap_or((0, 0));
        buffer.truncate(len);
        (len > 0).then_some(buffer)
    }

    /// Asserts that the daemon closes the connection and sends nothing before.
    #[track_caller]
    pub fn is_closed(&self) {
        let mut words = 0;
        wait_for("the connection to be closed", || {
            words += 1;
            assert!(words < 10, "the daemon continues to answer");
            self.receive().is_none().then_some(())
        });
    }
}
