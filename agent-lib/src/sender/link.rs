//! The link: a connection to the daemon or a file that is written instead, and the packet that is being filled for it.

use super::{finishing, wait};
use crate::base::clock::{clock_ns, kernel_ns};
use crate::base::descriptor::{self, CheckedFile, Identity, Owned};
use crate::base::env;
use crate::base::own_thread::{self, SOCKET, TRIED};
use crate::base::ring::Row;
use crate::base::row::{mix, slot_of};
use crate::driver::core::Core;
use crate::record::status;
use crate::sources::api::recordings::create_new;
use gpumem_wire::{Body, ByeReason, ClockKind, Record, SLOT_BYTES, Stamp, frame};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::*;
use std::time::Duration;

/// Largest packet in bytes: three such packets fit into a socket buffer of the kernel's default size.
pub(crate) const PACKET_BYTES: usize = 60 * 1024;
/// First and longest delay between attempts to connect, in ns; each attempt doubles it. The longest is short, so that a daemon
/// started during a job gets the whole state within 6.3 s (see `connect`). An attempt costs 4 us (socket, connect, close), or
/// 0.05 ms in a minute. Without a daemon the agent's thread runs 73 ms in a minute (debug build;
/// tests/suite/live_faults/absent.rs).
const RETRY_NS: std::ops::RangeInclusive<u64> = 100_000_000..=5_000_000_000;
/// Timeout in us while waiting for a busy daemon to accept the connection. The daemon accepts thousands of connections in that
/// time.
const PATIENCE_US: libc::suseconds_t = 250_000;

/// Closes the connection in a forked child: it belongs to the parent process.
pub(crate) fn close_in_child() {
    TRIED.store(false, Release);
    let fd = SOCKET.swap(-1, AcqRel);
    if fd >= 0 {
        // SAFETY: close is async-signal-safe and closes only the child's copy.
        unsafe { libc::close(fd) };
    }
}

#[derive(Debug)]
enum To {
    Nobody,
    Daemon(Identity),
    File(CheckedFile),
}

/// A recording in addition to the connection. Each packet is also written to it.
#[derive(Debug)]
struct AdditionalRecording {
    file: CheckedFile,
    path: PathBuf,
    bytes: u64,
    /// Largest size of the file in bytes. A packet that would exceed it is not written, and the recording ends.
    max_bytes: u64,
    is_full: bool,
}

/// Number of bytes of `max_bytes` that are reserved for a recording's last record.
const LAST_WORD_BYTES: u64 = 128;
/// Maximum number of names to try for a recording's file while files of these names exist.
const NAMES: u32 = 100;

impl AdditionalRecording {
    /// Returns whether `bytes` more bytes may be written, and counts them as written if so.
    fn has_room(&mut self, bytes: usize) -> bool {
        self.is_full |= self.bytes.saturating_add(bytes as u64) > self.max_bytes;
        self.bytes += if self.is_full { 0 } else { bytes as u64 };
        !self.is_full
    }
}

#[derive(Debug)]
pub(crate) struct Link {
    to: To,
    /// An additional recording, requested while the program runs.
    beside: Option<AdditionalRecording>,
    /// Path of the file in `to`; `None` for a connection.
    path: Option<PathBuf>,
    memory: Option<Identity>,
    /// Others may append at most `room()` bytes.
    pub(super) packet: Vec<u8>,
    next_try_ns: u64,
    retry_ns: u64,
    /// Whether the daemon has accepted this process (sent its Welcome).
    is_welcomed: bool,
    /// Number that distinguishes the programs which a process runs one after the other by exec().
    instance: u16,
    /// Whether the connection is to the socket of the system's daemon, not to the user's own.
    is_system: bool,
    /// Whether a packet could not be sent before the program ended. The daemon then reads all unsent records from the shared
    /// memory, so sending them on another connection would count them twice.
    has_given_up: bool,
}

impl Link {
    pub(crate) fn new(core: &Core) -> Self {
        let here = &raw const SOCKET as u64; // the address at which the loader placed this library
        Link {
            to: To::Nobody,
            beside: None,
            path: None,
            memory: Identity::of(core.shared.fd),
            packet: Vec::with_capacity(PACKET_BYTES),
            next_try_ns: 0,
            retry_ns: *RETRY_NS.start(),
            is_welcomed: false,
            instance: mix(kernel_ns(), here) as u16,
            is_system: false,
            has_given_up: false,
        }
    }

    pub(crate) fn to_file(core: &Core, file: File) -> std::io::Result<Self> {
        let mut link = Link::new(core);
        link.begin(core, file)?;
        Ok(link)
    }

    /// Whether there is a connection, a file, or an additional recording.
    pub(crate) fn is_up(&self) -> bool {
        self.has_main() || self.beside.is_some()
    }

    /// Whether there is a connection to the daemon, or the file of GPUMEM_RECORD.
    pub(crate) fn has_main(&self) -> bool {
        !matches!(self.to, To::Nobody)
    }

    /// Whether records may be sent. A daemon with too many connections closes this one and reads nothing after the Hello. So
    /// records stay in the ring until the daemon has sent its Welcome, or until the program ends.
    pub(crate) fn may_speak(&self) -> bool {
        match self.to {
            To::Nobody => self.beside.is_some(),
            To::Daemon(_) => self.is_welcomed || finishing(),
            To::File(_) => true,
        }
    }

    /// Stores that the daemon has accepted this process. If the connection ends, the next attempt to connect is made at once.
    pub(crate) fn be_welcomed(&mut self) {
        self.is_welcomed = true;
        (self.next_try_ns, self.retry_ns) = (0, *RETRY_NS.start());
    }

    /// Returns the path of the recording that is being written: the additional one, or else the file of GPUMEM_RECORD.
    pub(crate) fn recording(&self) -> Option<&Path> {
        let main = self.path.as_deref().filter(|_| matches!(self.to, To::File(_)));
        self.beside.as_ref().map(|beside| beside.path.as_path()).or(main)
    }

    pub(crate) fn is_recording_beside(&self) -> bool {
        self.beside.is_some()
    }

    /// Starts to write each packet to a recording, too. `state` is a link to its file, which contains the state up to now.
    pub(crate) fn record_beside(&mut self, state: Link, path: PathBuf, bytes: u64, max_bytes: Option<u64>) {
        if let To::File(file) = state.to {
            let max_bytes = max_bytes.unwrap_or(u64::MAX).saturating_sub(LAST_WORD_BYTES);
            self.beside = Some(AdditionalRecording { file, path, bytes, max_bytes, is_full: false });
        }
    }

    pub(crate) fn is_beside_full(&self) -> bool {
        self.beside.as_ref().is_some_and(|beside| beside.is_full)
    }

    /// Ends the additional recording with the last record `bye`.
    pub(crate) fn end_beside(&mut self, bye: &Record<'_>) -> std::io::Result<()> {
        let Some(mut beside) = self.beside.take() else {
            return Err(std::io::Error::from_raw_os_error(libc::EIO));
        };
        let mut frame = Vec::new();
        bye.append_frame(&mut frame);
        beside.file.write_all(&frame)
    }

    /// Returns the first bytes of a recording: header, clocks and Hello.
    fn head(&self, core: &Core) -> Vec<u8> {
        let mut head = frame::header().to_vec();
        let anchor = Stamp { time_ns: kernel_ns(), ..Stamp::default() };
        let (realtime_ns, boottime_ns) = (clock_ns(libc::CLOCK_REALTIME), clock_ns(libc::CLOCK_BOOTTIME));
        let clock = ClockKind::Monotonic;
        let body = Body::ClockAnchor { realtime_ns, boottime_ns, clock };
        Record { stamp: anchor, body }.append_frame(&mut head);
        self.hello(core).append_frame(&mut head);
        head
    }

    fn begin(&mut self, core: &Core, file: File) -> std::io::Result<()> {
        let mut file = CheckedFile::new(file)?;
        file.write_all(&self.head(core))?;
        self.to = To::File(file);
        Ok(())
    }

    pub(crate) fn socket(&self) -> RawFd {
        match self.to {
            To::Daemon(socket) => socket.fd,
            _ => -1,
        }
    }

    /// Returns the daemon's user id if the daemon may not request files: it runs neither as root nor as this program's user, and
    /// is not the system's daemon.
    pub(crate) fn stranger(&self) -> Option<u32> {
        let To::Daemon(socket) = &self.to else { return None };
        let uid = server_uid(socket.fd);
        // SAFETY: takes no arguments, never fails.
        let own = unsafe { libc::geteuid() };
        (uid != Some(0) && uid != Some(own) && !(self.is_system && uid.is_some() && uid == owner_of_system()))
            .then_some(uid.unwrap_or(u32::MAX))
    }

    fn hello<'a>(&self, core: &'a Core) -> Record<'a> {
        let versions = u64::from(gpumem_wire::MAJOR) << 16 | u64::from(gpumem_wire::MINOR);
        let stamp = Stamp { time_ns: core.recorder.clock.now(), thread: core.pid, ..Stamp::default() };
        let (instance, claims) = (self.instance, core.settings.claims.as_str());
        Record {
            stamp,
            body: Body::Hello { start_ticks: core.start_ticks, versions, capabilities: 0, instance, claims },
        }
    }

    /// Tries to connect if an attempt is due; returns whether there is a link now.
    pub(crate) fn connect(&mut self, core: &Core) -> bool {
        let now = core.recorder.clock.now();
        if self.has_given_up || now < self.next_try_ns && !finishing() {
            return false;
        }
        self.packet.clear();
        let up = match &core.settings.record {
            Some(path) => self.open_file(core, path),
            None => self.memory.is_some_and(Identity::holds) && self.open_socket(core),
        };
        self.is_welcomed = false;
        // The delay varies by a quarter, so that not all processes retry at once. Set after success, too: the connection may end.
        let jitter = mix(now, core.pid.into()) % (self.retry_ns / 2) + self.retry_ns * 3 / 4;
        self.next_try_ns = now + jitter;
        self.retry_ns = (self.retry_ns * 2).min(*RETRY_NS.end());
        TRIED.store(true, Release);
        up
    }

    fn open_file(&mut self, core: &Core, path: &Path) -> bool {
        let Some((file, path)) = fresh(path) else { return false };
        let is_own = file.metadata().is_ok_and(|about| about.is_file());
        let is_begun = self.begin(core, file).is_ok();
        if !is_begun && is_own {
            // Attempts on a full disk must not leave many empty files.
            let _ = std::fs::remove_file(&path);
        }
        self.path = std::path::absolute(path).ok();
        is_begun
    }

    fn open_socket(&mut self, core: &Core) -> bool {
        for path in sockets(core) {
            let fd = new_socket();
            let Some(socket) = Identity::of(fd) else { return false };
            SOCKET.store(fd, Release); // before connecting, so that a child that is forked now closes it
            self.to = To::Daemon(socket);
            if (connect(fd, path) || stand_in_line(fd, path)) && self.send_hello(core, fd) {
                self.is_system = path == Path::new(env::SYSTEM_SOCKET);
                return true;
            }
            self.close();
        }
        false
    }

    /// Sends the first packet: Hello, with the memfd.
    fn send_hello(&self, core: &Core, socket: RawFd) -> bool {
        let mut packet = Vec::new();
        self.hello(core).append_frame(&mut packet);
        let mut part = libc::iovec { iov_base: packet.as_mut_ptr().cast(), iov_len: packet.len() };
        let mut control = [0_u64; 4]; // aligned for a cmsghdr with one descriptor (24 bytes)
        let fd = core.shared.fd;
        // SAFETY: a message header over this stack's buffers; the control buffer has room for one descriptor.
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(size_of::<RawFd>() as u32) as _;
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as _;
            libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd);
            libc::sendmsg(socket, &message, libc::MSG_NOSIGNAL)
        };
        sent == packet.len() as isize
    }

    /// Ends the link. The records of the unsent packet are still in the ring.
    pub(crate) fn close(&mut self) {
        self.packet.clear();
        if let To::Daemon(socket) = std::mem::replace(&mut self.to, To::Nobody) {
            SOCKET.store(-1, Release);
            if socket.holds() {
                // SAFETY: the agent's own socket, not used again.
                unsafe { libc::close(socket.fd) };
            }
        }
    }

    pub(crate) fn room(&self) -> usize {
        PACKET_BYTES - self.packet.len()
    }

    /// Appends a record; sends the packet first if it is full. Returns false if the link has ended.
    pub(crate) fn frame(&mut self, record: &Record<'_>) -> bool {
        if record.frame_bytes() > self.room() && !self.flush() {
            return false;
        }
        record.append_frame(&mut self.packet);
        true
    }

    /// Appends a record that has no payload, given as a ring slot. Returns false if the link has ended.
    pub(crate) fn slot(&mut self, row: &Row) -> bool {
        if frame::PREFIX_BYTES + SLOT_BYTES > self.room() && !self.flush() {
            return false;
        }
        let mut frame = [0; frame::PREFIX_BYTES + SLOT_BYTES];
        let (prefix, slot) = frame.split_at_mut(frame::PREFIX_BYTES);
        prefix.copy_from_slice(&(SLOT_BYTES as u32).to_le_bytes());
        slot.copy_from_slice(&slot_of(row));
        self.packet.extend_from_slice(&frame);
        true
    }

    /// Sends the packet, waiting for the daemon without limit (with a timeout at exit). Returns false if the link has ended.
    pub(crate) fn flush(&mut self) -> bool {
        if self.packet.is_empty() {
            return self.is_up();
        }
        if let Some(beside) = &mut self.beside
            && beside.has_room(self.packet.len())
            && beside.file.write_all(&self.packet).is_err()
        {
            self.beside = None; // a frame may be half written, so nothing after it could be read
        }
        let sent = match &mut self.to {
            To::Nobody => self.beside.is_some(),
            To::File(file) => file.write_all(&self.packet).is_ok(),
            To::Daemon(socket) => {
                let sent = send(*socket, &self.packet);
                self.has_given_up = sent == Sent::TimedOut;
                sent == Sent::Whole
            }
        };
        self.packet.clear();
        if !sent {
            self.close();
        }
        sent
    }

    /// Returns the next packet from the daemon. `None` if there is none now, or if the link has ended.
    pub(crate) fn receive<'a>(&mut self, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
        let To::Daemon(socket) = self.to else { return None };
        if !socket.holds() {
            self.close();
            return None;
        }
        let packet = receive_now(socket.fd, buffer);
        if packet.is_some_and(<[u8]>::is_empty) || packet.is_none() && !try_again() {
            self.close();
        }
        packet.filter(|packet| !packet.is_empty())
    }
}

/// Reports to the daemon that the sender has panicked, and where. The connection stays open until the program ends: a daemon may
/// not read data that is pending when a connection closes.
pub(crate) fn last_words(core: &Core) {
    let fd = SOCKET.load(Acquire);
    if fd < 0 {
        return;
    }
    let stamp = Stamp { time_ns: core.recorder.clock.now(), ..Stamp::default() };
    let mut packet = Vec::new();
    for said in status::reports_after(u64::MAX, core.recorder.clock.now()) {
        let body = Body::Agent { result: said.result, state: said.state, detail: &said.detail };
        Record { stamp, body }.append_frame(&mut packet);
    }
    Record { stamp, body: Body::Bye { reason: ByeReason::Disarmed } }.append_frame(&mut packet);
    send_now(fd, &packet);
}

/// Sends a packet without waiting for room; returns whether it was sent.
pub(crate) fn send_now(fd: RawFd, packet: &[u8]) -> bool {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the buffer has this length.
    unsafe { libc::send(fd, packet.as_ptr().cast(), packet.len(), flags) >= 0 }
}

/// Returns the next packet, empty at the end of the connection. `None` if there is none now, or after an error: see errno.
pub(crate) fn receive_now(fd: RawFd, buffer: &mut [u8]) -> Option<&[u8]> {
    // SAFETY: the buffer has this length.
    let got = unsafe { libc::recv(fd, buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_DONTWAIT) };
    buffer.get(..usize::try_from(got).ok()?)
}

/// Creates the file, or the first of `NAME-2.EXT`, `NAME-3.EXT`, ... that does not exist. If `path` exists and is not a regular
/// file (/dev/null), opens it.
fn fresh(path: &Path) -> Option<(File, PathBuf)> {
    if std::fs::metadata(path).is_ok_and(|about| !about.is_file()) {
        return Some((OpenOptions::new().write(true).open(path).ok()?, path.to_owned()));
    }
    for number in 1..=NAMES {
        let mut name = path.file_stem()?.to_owned();
        if number > 1 {
            name.push(format!("-{number}"));
        }
        if let Some(extension) = path.extension() {
            name.push(".");
            name.push(extension);
        }
        let path = path.with_file_name(name);
        match create_new(&path) {
            Ok(file) => return Some((file, path)),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(_) => return None,
        }
    }
    None
}

fn try_again() -> bool {
    let error = std::io::Error::last_os_error().raw_os_error();
    matches!(error, Some(libc::EAGAIN | libc::EINTR | libc::ENOBUFS))
}

/// Returns how long a packet may wait for room once the program ends: a little less than the program waits for the sender.
fn farewell_time() -> Duration {
    Duration::from_millis(Core::get().map_or(0, |core| core.settings.exit_wait_ms) * 4 / 5)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    Whole,
    Closed,
    /// The program ends, and the daemon made no room in time.
    TimedOut,
}

fn send(socket: Identity, packet: &[u8]) -> Sent {
    let start = std::time::Instant::now();
    loop {
        if !socket.holds() {
            return Sent::Closed;
        }
        if send_now(socket.fd, packet) {
            return Sent::Whole;
        }
        if !try_again() {
            return Sent::Closed;
        }
        if finishing() && start.elapsed() > farewell_time() {
            return Sent::TimedOut;
        }
        // The daemon may also have closed its end: POLLHUP then ends the wait, and send() returns EPIPE.
        let patience = if finishing() { 5 } else { 100 };
        wait(&[(socket.fd, libc::POLLOUT)], Duration::from_millis(patience));
    }
}

/// Connects to a daemon whose queue of connections (backlog) is full: waits in connect(), which admits clients in order. A client
/// that only retries may find the queue full each time. Only the sender waits here, at most `PATIENCE_US`.
fn stand_in_line(fd: RawFd, path: &Path) -> bool {
    if !try_again() || !own_thread::is_here() || finishing() {
        return false;
    }
    let patience = libc::timeval { tv_sec: 0, tv_usec: PATIENCE_US };
    let len = size_of::<libc::timeval>() as libc::socklen_t;
    let wait = |is_wanted: bool| {
        let flags = if is_wanted { 0 } else { libc::O_NONBLOCK };
        // SAFETY: the agent's own socket, which has no other flags.
        unsafe { libc::fcntl(fd, libc::F_SETFL, flags) == 0 }
    };
    // SAFETY: passes a timeval with its length.
    let is_bounded = unsafe {
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_SNDTIMEO, (&raw const patience).cast(), len) == 0
    };
    is_bounded && wait(true) && connect(fd, path) && wait(false)
}

/// Returns the sockets on which a daemon may listen, in the order in which they are tried.
fn sockets(core: &Core) -> impl Iterator<Item = &PathBuf> {
    let doubtful = core.settings.doubtful_socket.as_ref();
    core.settings.sockets.iter().filter(move |path| doubtful != Some(path) || is_ours(path))
}

fn new_socket() -> RawFd {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no memory is involved.
    descriptor::up(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })
}

fn connect(fd: RawFd, path: &Path) -> bool {
    // SAFETY: all zeros are a valid value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() {
        return false;
    }
    for (place, &byte) in address.sun_path.iter_mut().zip(bytes) {
        *place = byte as libc::c_char;
    }
    let len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: the address has this length. A blocking socket has a timeout.
    unsafe { libc::connect(fd, (&raw const address).cast(), len) == 0 }
}

/// Opens another connection to the daemon, for a query; `None` without a daemon.
pub(crate) fn connect_anew(core: &Core) -> Option<Owned> {
    sockets(core).find_map(|path| Some(Owned(new_socket())).filter(|socket| connect(socket.0, path)))
}

/// Returns the user id that the process at the other end had when it called listen().
fn server_uid(socket: RawFd) -> Option<u32> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `peer`, and their number to `len`; both live until the call returns.
    let result = unsafe {
        let place = (&raw mut peer).cast();
        libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, place, &raw mut len)
    };
    (result == 0).then_some(peer.uid)
}

/// Returns the owner of the directory of the system's socket, if only root can have made that directory.
fn owner_of_system() -> Option<u32> {
    let directory = Path::new(env::SYSTEM_SOCKET).parent()?;
    let is_roots = |of: &std::fs::Metadata| of.uid() == 0 && of.mode() & 0o022 == 0;
    let above = std::fs::symlink_metadata(directory.parent()?).ok().filter(is_roots);
    above.and_then(|_| std::fs::symlink_metadata(directory).ok()).filter(|of| of.is_dir()).map(|of| of.uid())
}

/// Whether a socket in /tmp can be trusted: its directory belongs to the user, and only the user can write to it.
fn is_ours(path: &Path) -> bool {
    let directory = path.parent().and_then(|directory| std::fs::symlink_metadata(directory).ok());
    // SAFETY: takes no arguments, never fails.
    let uid = unsafe { libc::geteuid() };
    directory.is_some_and(|directory| {
        directory.is_dir() && directory.uid() == uid && directory.mode() & 0o022 == 0
    })
}
