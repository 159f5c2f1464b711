//! A hand-made peer on the agent socket: the test controls every byte, descriptor and page of memory. Also runs such
//! peers as other users.

use super::machine::Job;
use gpumem_test_support::SharedCopy;
use gpumem_wire::layout::Header;
use gpumem_wire::{Body, MAJOR, MINOR, Record, Slot, Stamp};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::pwrite;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, sendmsg, socket_with,
};
use std::ffi::OsStr;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

pub use super::mixer::now_ns;

/// A user without any permissions here.
pub const NOBODY: u32 = 65_534;
/// Most descriptors in a message.
pub const MOST_FDS: usize = 253;
/// Seals of an agent's memory.
pub const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Returns a frame.
pub fn record(stamp: Stamp, body: Body<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    Record { stamp, body }.append_frame(&mut out);
    out
}

/// Returns a stamp with the present time and no position in any order.
pub fn unordered() -> Stamp {
    Stamp { time_ns: now_ns(), device: 0, ..Stamp::default() }
}

/// Returns a stamp with the present time and a position in the order.
pub fn ordered(seq: u64) -> Stamp {
    Stamp { seq, ..unordered() }
}

/// Returns field 22 of a process's stat.
///
/// # Panics
/// If there is no such process.
pub fn start_ticks(pid: u32) -> u64 {
    ticks(&pid.to_string())
}

/// Returns the start time of this process, in any PID namespace.
///
/// # Panics
/// If /proc is missing.
pub fn own_start_ticks() -> u64 {
    ticks("self")
}

fn ticks(of: &str) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{of}/stat")).expect("a process");
    let after = stat.rsplit_once(')').expect("a name").1;
    after.split_ascii_whitespace().nth(19).and_then(|field| field.parse().ok()).expect("a start time")
}

/// Returns a hello of a process with this start time.
pub fn hello(start_ticks: u64) -> Vec<u8> {
    let versions = u64::from(MAJOR) << 16 | u64::from(MINOR);
    let claims = "job=not-mine\nuser=root\n";
    record(unordered(), Body::Hello { start_ticks, versions, capabilities: 0, instance: 1, claims })
}

/// Memory as an agent shares it.
#[derive(Debug)]
pub struct Shared {
    /// The descriptor.
    pub fd: OwnedFd,
    /// Header for its first bytes.
    pub header: Header,
}

impl Shared {
    /// Creates memory with this number of slots and rows, and these seals.
    ///
    /// # Panics
    /// If it cannot be created.
    pub fn new(ring_slots: u64, live_rows: u64, seals: SealFlags) -> Self {
        let pid = std::process::id();
        let header = Header {
            major: MAJOR,
            minor: MINOR,
            pid,
            start_ticks: own_start_ticks(),
            ring_slots,
            live_rows,
            name_bytes: 1 << 16,
            head_seq: 0,
            lost: 0,
            names_end: 0,
        };
        let fd = memfd_create("hostile", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd");
        ftruncate(&fd, header.file_bytes().expect("a size")).expect("room");
        let shared = Shared { fd, header };
        shared.say();
        fcntl_add_seals(&shared.fd, seals).expect("seals");
        shared
    }

    /// Creates a small valid one.
    pub fn small() -> Self {
        Shared::new(16, 8, SEALS)
    }

    /// Writes the header.
    pub fn say(&self) {
        self.write(&self.header.encode(), 0);
    }

    /// Writes bytes at any offset.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn write(&self, bytes: &[u8], offset: u64) {
        assert_eq!(pwrite(&self.fd, bytes, offset), Ok(bytes.len()));
    }

    /// Returns the bytes of an ordered record as stored in a ring or table.
    pub fn slot(stamp: Stamp, body: Body<'_>) -> Slot {
        Record { stamp, body }.encode().0
    }
}

/// A connection to a daemon.
#[derive(Debug)]
pub struct Peer(OwnedFd);

impl Peer {
    /// Connects without sending anything; `None` if the daemon refuses or is absent.
    pub fn connect(path: &Path) -> Option<Self> {
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).ok()?;
        connect(&socket, &SocketAddrUnix::new(path).ok()?).ok()?;
        Some(Peer(socket))
    }

    /// Connects with a valid hello; `None` unless the daemon sends a welcome.
    pub fn welcomed(path: &Path, shared: &Shared) -> Option<Self> {
        let peer = Peer::connect(path)?;
        peer.send_with(&hello(shared.header.start_ticks), &[shared.fd.as_fd()]).then_some(())?;
        peer.hear(10).filter(|packet| !packet.is_empty())?;
        Some(peer)
    }

    /// Sends a packet, and waits as long as necessary; false if the daemon has closed the connection.
    pub fn send(&self, packet: &[u8]) -> bool {
        rustix::net::send(&self.0, packet, SendFlags::NOSIGNAL) == Ok(packet.len())
    }

    /// Sends a packet with descriptors.
    pub fn send_with(&self, packet: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        let fits = fds.is_empty() || beside.push(SendAncillaryMessage::ScmRights(fds));
        let sent = sendmsg(&self.0, &[IoSlice::new(packet)], &mut beside, SendFlags::NOSIGNAL);
        fits && sent == Ok(packet.len())
    }

    /// Returns the next packet: empty after the daemon closed the connection, `None` after a timeout.
    pub fn hear(&self, seconds: i64) -> Option<Vec<u8>> {
        let patience = Timespec { tv_sec: seconds, tv_nsec: 0 };
        (poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&patience)) == Ok(1)).then_some(())?;
        let mut buffer = vec![0; 64 << 10];
        let (len, _) = recv(&self.0, &mut buffer[..], RecvFlags::empty()).unwrap_or((0, 0));
        buffer.truncate(len);
        Some(buffer)
    }

    /// Returns whether the daemon has closed the connection, or does so within a time.
    pub fn is_closed(&self, seconds: i64) -> bool {
        let deadline = now_ns() + seconds as u64 * 1_000_000_000;
        while now_ns() < deadline {
            if self.hear(1).is_some_and(|packet| packet.is_empty()) {
                return true;
            }
        }
        false
    }
}

/// Runs this test program again as another user to play a part: its test `peers::as_another_user`, which reads the
/// part's name from [`part`]. Dropping the returned value kills it.
pub fn play(uid: u32, part: &str, environment: &[(&str, &OsStr)]) -> Job {
    static COPY: OnceLock<SharedCopy> = OnceLock::new();
    let mut command = Command::new(COPY.get_or_init(SharedCopy::of_this_program).path());
    command.args(["--exact", "peers::as_another_user", "--nocapture", "--test-threads=1"]);
    command.env("GPUMEM_TEST_PART", part).envs(environment.iter().copied());
    if uid != 0 {
        command.uid(uid).gid(uid);
    }
    Job::start(&mut command)
}

/// The part that this process plays, if it was started by [`play`].
pub fn part() -> Option<String> {
    std::env::var("GPUMEM_TEST_PART").ok()
}

/// Prints a line for the parent process, and stays until it is killed.
pub fn say_and_stay(words: &str) -> ! {
    println!("\n{words}");
    loop {
        std::thread::park();
    }
}
