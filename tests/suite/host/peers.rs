//! Misbehaving daemons, each with its own way of answering agents.

use gpumem_wire::{Body, MAJOR, Record, Stamp};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, accept_with, bind, listen, recv, send, sendmsg, socket_with,
};
use std::collections::BTreeSet;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

type Manner = fn(&OwnedFd);

/// The misbehaving daemons, by name.
pub const MANNERS: &[(&str, Manner)] = &[
    ("slow", slow),
    ("silent", silent),
    ("gone at once", gone),
    ("gone later", gone_later),
    ("older", older),
    ("newer", newer),
    ("babbling", babbling),
    ("bossy", bossy),
];

/// A misbehaving daemon, which listens for as long as the test runs.
pub struct Peer {
    pub socket: PathBuf,
    met: Arc<Mutex<BTreeSet<u32>>>,
}

impl Peer {
    pub fn listen(path: &Path, manner: Manner) -> Self {
        let path = path.with_file_name(path.file_name().expect("a name").to_string_lossy().replace(' ', "-"));
        let kind = SocketType::SEQPACKET;
        let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).expect("a socket");
        bind(&socket, &SocketAddrUnix::new(&path).expect("a short path")).expect("bound");
        listen(&socket, 64).expect("listens");
        let met: Arc<Mutex<BTreeSet<u32>>> = Arc::default();
        let all = Arc::clone(&met);
        std::thread::spawn(move || {
            while let Ok(connection) = accept_with(&socket, SocketFlags::CLOEXEC) {
                if let Ok(peer) = socket_peercred(&connection) {
                    all.lock().expect("no panic").insert(peer.pid.as_raw_nonzero().get().unsigned_abs());
                }
                std::thread::spawn(move || manner(&connection));
            }
        });
        Peer { socket: path, met }
    }

    /// Returns whether the agent of this process has connected.
    pub fn met(&self, pid: u32) -> bool {
        self.met.lock().expect("no panic").contains(&pid)
    }
}

/// Receives a packet without its descriptors; `None` when the agent has closed the connection.
fn take(peer: &OwnedFd) -> Option<Vec<u8>> {
    let mut buffer = vec![0; 128 << 10];
    let (_, bytes) = recv(peer, &mut buffer[..], RecvFlags::empty()).ok()?;
    buffer.truncate(bytes);
    (bytes > 0).then_some(buffer)
}

fn drain(peer: &OwnedFd) {
    while take(peer).is_some() {}
}

fn say(peer: &OwnedFd, packet: &[u8]) -> bool {
    send(peer, packet, SendFlags::NOSIGNAL).is_ok()
}

fn frame(body: Body<'_>) -> Vec<u8> {
    let mut packet = Vec::new();
    Record { stamp: Stamp::default(), body }.append_frame(&mut packet);
    packet
}

fn welcome(versions: u64) -> Vec<u8> {
    frame(Body::Welcome { epoch: 1, versions, capabilities: u64::MAX })
}

const OURS: u64 = (MAJOR as u64) << 16;

fn slow(peer: &OwnedFd) {
    say(peer, &welcome(OURS));
    say(peer, &frame(Body::ResyncRequest { epoch: 1 }));
    while take(peer).is_some() {
        std::thread::sleep(Duration::from_millis(30));
    }
}

/// Accepts the connection and sends nothing, until the agent closes it.
fn silent(peer: &OwnedFd) {
    let mut events = [rustix::event::PollFd::new(peer, rustix::event::PollFlags::HUP)];
    let _ = rustix::event::poll(&mut events, None);
}

fn gone(_: &OwnedFd) {}

fn gone_later(peer: &OwnedFd) {
    say(peer, &welcome(OURS));
    say(peer, &frame(Body::ResyncRequest { epoch: 1 }));
    take(peer);
    take(peer);
}

/// A daemon of an older major version: reports that, and closes.
fn older(peer: &OwnedFd) {
    say(peer, &welcome(OURS - (1 << 16)));
    take(peer);
    take(peer);
    take(peer);
}

/// A daemon of a newer version: sends unknown records.
fn newer(peer: &OwnedFd) {
    say(peer, &welcome(OURS + (1 << 16) + 9));
    for kind in 118..=u8::MAX {
        let mut packet = frame(Body::ResyncRequest { epoch: 3 });
        packet[4 + 63] = kind; // the kind's place, or some other one: no matter
        packet[4 + 56] = kind;
        packet.extend([kind; 40]);
        let bytes = (packet.len() - 4) as u32;
        packet[..4].copy_from_slice(&bytes.to_le_bytes());
        say(peer, &packet);
    }
    say(peer, &frame(Body::ResyncRequest { epoch: 4 }));
    drain(peer);
}

/// Sends meaningless bytes in all sizes until the connection closes.
fn babbling(peer: &OwnedFd) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let whole = frame(Body::ResyncRequest { epoch: 7 });
    for round in 0..4000 {
        let mut packet: Vec<u8> = (0..random() % 300).map(|_| random() as u8).collect();
        match round % 8 {
            0 => packet = whole[..(random() as usize % whole.len()).max(1)].to_vec(),
            1 => packet[..].iter_mut().for_each(|byte| *byte = 0xff),
            2 => packet = [&u32::MAX.to_le_bytes()[..], &whole[4..]].concat(),
            3 => packet = vec![0; 60 << 10],
            4 => {
                packet = whole.clone();
                let at = random() as usize % packet.len();
                packet[at] ^= 1 << (random() % 8);
            }
            _ => {}
        }
        // One flipped bit makes some records a command to write a file, which an agent obeys.
        let is_command = |record| {
            matches!(record, Ok(Ok(Record { body: Body::Dump { .. } | Body::RecordControl { .. }, .. })))
        };
        if gpumem_wire::frame::records(&packet).any(is_command) {
            continue;
        }
        if !packet.is_empty() && !say(peer, &packet) {
            return;
        }
        if round % 64 == 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    drain(peer);
}

/// Sends commands without limit, each with descriptors, about existing and impossible files.
fn bossy(peer: &OwnedFd) {
    say(peer, &welcome(OURS));
    let file = std::fs::File::open("/dev/null").expect("opened");
    let paths = [
        "/",
        "/dev/full",
        "/proc/self/mem",
        "/nonexistent/a",
        "/etc/passwd",
        "\u{0}steps=9:1",
        "\u{0}for=-1",
    ];
    for round in 0..200_u64 {
        let path = paths[round as usize % paths.len()];
        let body = match round % 6 {
            0 => Body::RecordControl { on: true, path },
            1 => Body::Dump { path },
            2 => Body::Pause {},
            3 => Body::Resume {},
            4 => Body::RecordControl { on: false, path: "" },
            _ => Body::ResyncRequest { epoch: round },
        };
        let descriptors = [file.as_fd(); 16];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        let packet = frame(body);
        if sendmsg(peer, &[IoSlice::new(&packet)], &mut control, SendFlags::NOSIGNAL).is_err() {
            return;
        }
        if round % 16 == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    drain(peer);
}
