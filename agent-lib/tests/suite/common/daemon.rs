//! The daemon's end of the socket, with a ledger behind it.

use gpumem_ledger::{AccountView, Ledger, Origin, ProcessKey, ProcessView};
use gpumem_wire::layout::Header;
use gpumem_wire::{AgentState, Body, Record, Stamp, frame};
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Returns the timeout of conditions in tests.
pub fn patience() -> Duration {
    gpumem_test_support::DEADLINE
}

/// A folder that is removed when the value is dropped.
#[derive(Debug)]
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        static FOLDERS: AtomicU32 = AtomicU32::new(0);
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("gpumem-{name}-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn address(path: &Path) -> (libc::sockaddr_un, libc::socklen_t) {
    // SAFETY: all zeros are a valid value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (place, &byte) in address.sun_path.iter_mut().zip(path.as_os_str().as_bytes()) {
        *place = byte as libc::c_char;
    }
    (address, size_of::<libc::sockaddr_un>() as libc::socklen_t)
}

/// Listens on the agent's socket path.
#[derive(Debug)]
pub struct Daemon(RawFd);

impl Daemon {
    pub fn listen(path: &Path) -> Self {
        let (address, len) = address(path);
        // SAFETY: the address has that length.
        let fd = unsafe {
            let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
            assert!(libc::bind(fd, (&raw const address).cast(), len) == 0 && libc::listen(fd, 8) == 0);
            fd
        };
        Daemon(fd)
    }

    /// The same as a server of another user, which requires root.
    pub fn listen_as(path: &Path, uid: u32) -> Self {
        let keep = u32::MAX; // -1: unchanged
        let daemon = Daemon::listen(path);
        // The kernel stores the effective user of the thread that listens. A raw call changes only this thread's user.
        // SAFETY: no memory is involved.
        unsafe {
            assert_eq!(libc::syscall(libc::SYS_setresuid, keep, uid, keep), 0);
            assert_eq!(libc::listen(daemon.0, 8), 0);
            assert_eq!(libc::syscall(libc::SYS_setresuid, keep, 0, keep), 0);
        }
        daemon
    }

    /// Whether a client connects within `time`.
    pub fn is_called(&self, time: Duration) -> bool {
        readable(self.0, time)
    }

    pub fn accept(&self) -> Peer {
        self.accept_from(std::process::id())
    }

    /// Accepts the agent of another process.
    pub fn accept_from(&self, pid: u32) -> Peer {
        assert!(self.is_called(patience()), "no agent connects");
        // SAFETY: a listening socket.
        let socket =
            unsafe { libc::accept4(self.0, std::ptr::null_mut(), std::ptr::null_mut(), libc::SOCK_CLOEXEC) };
        let mut peer = Peer {
            socket,
            memory: -1,
            ledger: Ledger::new(),
            key: ProcessKey { pid, start_ticks: 0 },
            seen: Vec::new(),
            watermark: 0,
            resyncs: 0,
            state: None,
            bye: false,
            done: Vec::new(),
            ended: false,
        };
        while peer.key.start_ticks == 0 {
            assert!(peer.take(patience()), "no Hello");
        }
        // An agent keeps its records until it gets a welcome. Epoch 0 belongs to no resync. An agent that has gone needs no
        // welcome.
        let mut packet = Vec::new();
        let body = Body::Welcome { epoch: 0, versions: 1 << 16, capabilities: 0 };
        Record { stamp: Stamp::default(), body }.append_frame(&mut packet);
        // SAFETY: a buffer of this length.
        unsafe { libc::send(socket, packet.as_ptr().cast(), packet.len(), libc::MSG_NOSIGNAL) };
        peer
    }

    /// Starts `count` clients that connect, send nothing and connect again, forever. The queue is full when this returns.
    pub fn crowd(&self, path: &Path, count: usize) {
        let full = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        for _ in 0..count {
            let (full, path) = (std::sync::Arc::clone(&full), path.to_owned());
            std::thread::spawn(move || {
                let (address, len) = address(&path);
                // SAFETY: the address has that length; only this thread uses the socket.
                while unsafe {
                    let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
                    full.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let is_in = libc::connect(fd, (&raw const address).cast(), len) == 0;
                    libc::close(fd);
                    is_in
                } {}
            });
        }
        // The queue holds 9 connections; then every client blocks in connect().
        let is_full = || full.load(std::sync::atomic::Ordering::Relaxed) == 9 + count;
        let began = std::time::Instant::now();
        while !is_full() {
            assert!(began.elapsed() < patience(), "the queue does not become full");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Accepts one client from the queue and disconnects it; returns whether it had sent its hello.
    pub fn let_one_in(&self) -> bool {
        assert!(self.is_called(patience()), "nobody connects");
        // SAFETY: a listening socket.
        unsafe {
            let socket =
                libc::accept4(self.0, std::ptr::null_mut(), std::ptr::null_mut(), libc::SOCK_CLOEXEC);
            let has_spoken = readable(socket, Duration::from_millis(20));
            let mut byte = 0_u8;
            let is_agent = has_spoken && libc::recv(socket, (&raw mut byte).cast(), 1, 0) > 0;
            libc::close(socket);
            is_agent
        }
    }

    /// Refuses the next agent for lack of room: closes the connection after its hello without reading more.
    pub fn refuse(&self) {
        assert!(self.is_called(patience()), "no agent connects");
        let mut buffer = [0_u8; 4096];
        // SAFETY: a listening socket; a buffer of this length.
        unsafe {
            let socket =
                libc::accept4(self.0, std::ptr::null_mut(), std::ptr::null_mut(), libc::SOCK_CLOEXEC);
            assert!(libc::recv(socket, buffer.as_mut_ptr().cast(), buffer.len(), 0) > 0, "no hello");
            readable(socket, Duration::from_millis(200));
            libc::close(socket);
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // SAFETY: the value's own socket.
        unsafe { libc::close(self.0) };
    }
}

fn readable(fd: RawFd, time: Duration) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd.
    unsafe { libc::poll(&mut poll, 1, time.as_millis() as i32) > 0 }
}

/// A connection.
pub struct Peer {
    socket: RawFd,
    pub memory: RawFd,
    pub ledger: Ledger,
    pub key: ProcessKey,
    /// Kinds of the received records, in order.
    pub seen: Vec<String>,
    pub watermark: u64,
    pub resyncs: u64,
    pub state: Option<(AgentState, String)>,
    pub bye: bool,
    /// Results of commands: kind, errno, text.
    pub done: Vec<(u8, u16, String)>,
    pub ended: bool,
}

impl Drop for Peer {
    fn drop(&mut self) {
        // SAFETY: the value's own socket.
        unsafe { libc::close(self.socket) };
    }
}

impl Peer {
    /// Receives a packet within `time`; returns whether there was one.
    pub fn take(&mut self, time: Duration) -> bool {
        if self.ended || !readable(self.socket, time) {
            return false;
        }
        let mut buffer = vec![0_u8; 64 * 1024];
        let mut control = [0_u64; 8];
        let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        // SAFETY: a message header over these buffers; descriptors are read where the kernel put them.
        let got = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
            (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), 64);
            let got = libc::recvmsg(self.socket, &mut message, libc::MSG_CMSG_CLOEXEC);
            let header = libc::CMSG_FIRSTHDR(&message);
            if !header.is_null() && (*header).cmsg_type == libc::SCM_RIGHTS {
                self.memory = libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned();
            }
            got
        };
        if got <= 0 {
            self.ended = true;
            return false;
        }
        for record in frame::records(&buffer[..got as usize]) {
            let record = record.expect("whole frames").expect("known kinds");
            self.observe(&record);
        }
        true
    }

    fn observe(&mut self, record: &Record<'_>) {
        let name = Body::KINDS.iter().find(|(_, kind)| *kind == record.body.kind()).expect("a kind").0;
        self.seen.push(name.to_owned());
        match record.body {
            Body::Hello { start_ticks, .. } => {
                assert_eq!(record.stamp.thread, self.key.pid);
                self.key.start_ticks = start_ticks;
            }
            Body::Watermark { last_seq, .. } => self.watermark = last_seq,
            Body::ResyncEnd { .. } => self.resyncs += 1,
            Body::Agent { state, detail, .. } => self.state = Some((state, detail.to_owned())),
            Body::Bye { .. } => self.bye = true,
            Body::Done { result, command, told } => self.done.push((command, result, told.to_owned())),
            _ => {}
        }
        self.ledger.observe(Origin::Process(self.key), record);
    }

    /// Receives packets until `done` returns true.
    pub fn until(&mut self, what: &str, done: impl Fn(&Peer) -> bool) {
        let start = Instant::now();
        while !done(self) {
            assert!(start.elapsed() < patience(), "still no {what}; last {:?}", self.seen.last());
            assert!(!self.ended, "the agent is gone before {what}");
            self.take(Duration::from_millis(50));
        }
    }

    /// Receives packets until everything recorded so far has arrived.
    pub fn catch_up(&mut self) {
        let head = gpumem::driver::core::Core::get().expect("a core").recorder.ring.head();
        self.until("watermark", |peer| peer.watermark >= head);
    }

    pub fn send(&self, body: Body<'_>) {
        let mut packet = Vec::new();
        Record { stamp: Stamp::default(), body }.append_frame(&mut packet);
        // SAFETY: a buffer of this length.
        let sent = unsafe { libc::send(self.socket, packet.as_ptr().cast(), packet.len(), 0) };
        assert_eq!(sent, packet.len() as isize);
    }

    /// Requests the state and waits until it has arrived, with everything recorded so far.
    pub fn resync(&mut self, epoch: u64) {
        self.resync_from(epoch);
        self.catch_up();
    }

    /// Requests the state and waits until it has arrived; also from another process.
    pub fn resync_from(&mut self, epoch: u64) {
        let before = self.resyncs;
        self.send(Body::Welcome { epoch, versions: 1 << 16, capabilities: 0 });
        self.send(Body::ResyncRequest { epoch });
        self.until("resync", |peer| peer.resyncs > before);
    }

    pub fn view(&self) -> ProcessView {
        (**self.ledger.snapshot().processes.first().expect("a process")).clone()
    }

    /// Returns the account of its first device.
    pub fn account(&self) -> AccountView {
        self.view().accounts.first().expect("an account").clone()
    }

    /// Returns the bytes of each tag of a device; untagged bytes as "", idle pool bytes as "(idle)".
    pub fn tags(&self) -> std::collections::BTreeMap<String, i64> {
        let view = self.view();
        let mut tags = std::collections::BTreeMap::new();
        for (cell, amount) in view.cells.iter().zip(&view.accounts[0].amounts) {
            let name = match cell.class {
                gpumem_ledger::Class::PoolIdle => "(idle)".to_owned(),
                gpumem_ledger::Class::Opaque => "(opaque)".to_owned(),
                _ => cell.tag.as_deref().unwrap_or("").to_owned(),
            };
            *tags.entry(name).or_insert(0) += amount;
        }
        tags.retain(|_, bytes| *bytes != 0);
        tags
    }

    /// Returns the header of the memory that came with the Hello.
    pub fn header(&self) -> Header {
        let mut bytes = [0_u8; 72];
        // SAFETY: the buffer has this length, and the stat is filled by the call.
        unsafe {
            assert_eq!(libc::pread(self.memory, bytes.as_mut_ptr().cast(), 72, 0), 72);
            let mut stat: libc::stat = std::mem::zeroed();
            assert_eq!(libc::fstat(self.memory, &mut stat), 0);
            Header::decode(&bytes, stat.st_size as u64).expect("a header")
        }
    }

    /// Reads bytes of that memory.
    pub fn read(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let mut buffer = vec![0_u8; bytes];
        // SAFETY: a buffer of this length.
        let got = unsafe { libc::pread(self.memory, buffer.as_mut_ptr().cast(), bytes, offset as i64) };
        buffer.truncate(got.max(0) as usize);
        buffer
    }
}

/// Starts the agent in this process, as if the driver had just called it, without CUPTI.
pub fn agent(
    socket: &Path,
    change: impl FnOnce(&mut gpumem::base::env::Settings),
) -> &'static gpumem::driver::core::Core {
    let mut settings = gpumem::base::env::Settings {
        sockets: vec![socket.to_owned()],
        ring_slots: 1 << 16,
        live_rows: 1 << 14,
        name_bytes: 1 << 20,
        claims: "rank=3\nworld_size=8\n".to_owned(),
        exit_wait_ms: 20_000, // it does not wait once all is sent
        record_dirs: std::env::temp_dir().canonicalize().into_iter().collect(),
        ..Default::default()
    };
    settings.layers.sites = false; // memory that a test does not tag stays untagged
    change(&mut settings);
    let core = gpumem::entry::attach::start_with(settings).expect("an agent");
    gpumem::driver::core::report_status(AgentState::Covered, 0, "");
    core
}
