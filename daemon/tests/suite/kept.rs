//! Connections that the service manager keeps between two daemons.

use crate::common::peer::{
    Memory, Peer, VERSIONS, allocation, device, own_start_ticks, record, resync, tag, watermark,
};
use crate::common::{PATIENCE, Scratch, http, wait_for};
use gpumem_wire::{Body, frame};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix, SocketFlags,
    SocketType, bind, listen, recvmsg, socket_with,
};
use rustix::process::{Pid, Signal, kill_process};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::{Child, Command, Stdio};

/// A minimal service manager.
struct Manager {
    scratch: Scratch,
    notify: UnixDatagram,
    passed: Vec<(String, OwnedFd)>,
}

struct Life(Child);

impl Drop for Life {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Life {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("sent");
    }

    fn end(mut self) {
        wait_for("its end", || self.0.try_wait().expect("a child"));
    }
}

impl Manager {
    fn new() -> Self {
        Manager::with(0.1)
    }

    /// Starts daemons that write runs at this interval.
    fn with(checkpoint_s: f64) -> Self {
        let scratch = Scratch::new();
        let notify = UnixDatagram::bind(scratch.join("notify")).expect("a socket");
        notify.set_read_timeout(Some(PATIENCE)).expect("a limit");
        let listener = |name: &str, kind| {
            let socket =
                socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).expect("a socket");
            bind(&socket, &SocketAddrUnix::new(scratch.join(name)).expect("a path")).expect("bound");
            listen(&socket, 16).expect("listens");
            (name.trim_end_matches(".sock").to_owned(), socket)
        };
        let passed =
            vec![listener("agent.sock", SocketType::SEQPACKET), listener("control.sock", SocketType::STREAM)];
        let text = format!(
            "[runs]\nstore = \"{}/runs.sqlite\"\ncheckpoint_every_s = {checkpoint_s}\n[metrics]\nlisten = \"off\"\n\
             [nvml]\nlibrary = \"/nonexistent\"\n",
            scratch.0.display()
        );
        std::fs::write(scratch.join("gpumemd.toml"), text).expect("written");
        Manager { scratch, notify, passed }
    }

    /// Starts a daemon with all kept descriptors, from descriptor 3 on, in another order, and waits until it is ready.
    fn start(&self) -> Life {
        let life = self.start_unheard();
        self.hear("READY=1");
        life
    }

    fn start_unheard(&self) -> Life {
        let high: Vec<OwnedFd> =
            self.passed.iter().map(|(_, fd)| fcntl_dupfd_cloexec(fd, 100).unwrap()).collect();
        high.iter().for_each(|fd| fcntl_setfd(fd, FdFlags::empty()).expect("passed on"));
        let names: Vec<&str> = self.passed.iter().rev().map(|(name, _)| name.as_str()).collect();
        let places = (3..).zip(high.iter().rev().map(AsRawFd::as_raw_fd));
        let places: Vec<String> = places.map(|(at, fd)| format!("{at}<&{fd} {fd}<&-")).collect();
        let script = format!(
            "export LISTEN_PID=$$ LISTEN_FDS={} LISTEN_FDNAMES={}; exec \"$@\" {}",
            names.len(),
            names.join(":"),
            places.join(" ")
        );
        let mut command = Command::new("bash");
        command.args(["-c", &script, "bash", env!("CARGO_BIN_EXE_gpumemd"), "--config"]);
        command.arg(self.scratch.join("gpumemd.toml")).env("NOTIFY_SOCKET", self.scratch.join("notify"));
        Life(command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("started"))
    }

    /// Waits for a message with this text. Returns it with its descriptors.
    fn hear(&self, word: &str) -> (String, Vec<OwnedFd>) {
        loop {
            let mut bytes = [0; 1024];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut beside = RecvAncillaryBuffer::new(&mut space);
            let parts = &mut [IoSliceMut::new(&mut bytes)];
            let len = recvmsg(&self.notify, parts, &mut beside, RecvFlags::CMSG_CLOEXEC)
                .unwrap_or_else(|error| panic!("no {word}: {error}"))
                .bytes;
            let mut fds = Vec::new();
            for message in beside.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = message {
                    fds.extend(more);
                }
            }
            let text = String::from_utf8_lossy(&bytes[..len]).into_owned();
            if text.lines().any(|line| line == word) {
                return (text, fds);
            }
        }
    }

    /// Stores the descriptors of the next request. Returns their name.
    fn keep(&mut self) -> String {
        let (text, fds) = self.hear("FDSTORE=1");
        assert!(text.contains("FDPOLL=0\n"), "{text}");
        let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).expect("a name").to_owned();
        assert_eq!(fds.len(), 3);
        self.passed.extend(fds.into_iter().map(|fd| (name.clone(), fd)));
        name
    }

    fn ask(&self, path: &str) -> String {
        let stream = UnixStream::connect(self.scratch.join("control.sock")).expect("a daemon");
        http(stream, "GET", path).1
    }

    /// Returns the bytes that the daemon shows as tracked by agents.
    fn tracked(&self) -> Option<i64> {
        let rows: serde_json::Value = serde_json::from_str(&self.ask("/v1/runs")).ok()?;
        rows[0]["devices"][0]["last"]["tracked_bytes"].as_i64()
    }
}

/// Returns the hello of another program in this process.
fn hello_of(instance: u16) -> Vec<u8> {
    let body = Body::Hello {
        start_ticks: own_start_ticks(),
        versions: VERSIONS,
        capabilities: 0,
        instance,
        claims: "",
    };
    record(gpumem_wire::Stamp { thread: std::process::id(), ..Default::default() }, body)
}

/// Reads the welcome of a daemon that accepts or inherits the connection. Returns the epoch.
fn welcome(peer: &Peer) -> u64 {
    let reply = peer.receive().expect("a welcome");
    let bodies: Vec<_> = frame::records(&reply).map(|record| record.unwrap().unwrap().body).collect();
    match bodies[..] {
        [Body::Welcome { .. }, Body::ResyncRequest { epoch }] => epoch,
        ref other => panic!("{other:?}"),
    }
}

#[test]
fn the_next_daemon_goes_on_with_the_connections_of_the_last_one() {
    let mut manager = Manager::new();
    let first = manager.start();
    let mut memory = Memory::new();
    let (peer, epoch) = Peer::welcomed(&manager.scratch.join("agent.sock"), &memory);
    let name = manager.keep();
    assert!(name.starts_with(&format!("agent-{}-{}-", std::process::id(), own_start_ticks())), "{name}");
    // An agent has the names in its memory too.
    memory.name(&device());
    memory.name(&tag(1, "model"));
    let one = allocation(1, 100, 1);
    memory.ring(one);
    let said = [device(), tag(1, "model"), resync(epoch, 0, &[]), record(one.0, one.1), watermark(1)];
    assert!(peer.send(&said.concat()));
    wait_for("the first word", || (manager.tracked() == Some(100)).then_some(()));

    // The daemon is killed: packets sent meanwhile wait in the socket.
    first.signal(Signal::KILL);
    first.end();
    let two = allocation(2, 10, 1);
    memory.ring(two);
    assert!(peer.send(&[record(two.0, two.1), watermark(2)].concat()), "nobody has closed it");
    let second = manager.start();
    let epoch = welcome(&peer);
    // The devices have their names before the agent sends anything again.
    wait_for("what waited in the socket", || (manager.tracked() == Some(10)).then_some(()));
    let devices = manager.ask("/v1/runs");
    assert!(!devices.contains("unnamed"), "{devices}");
    let said = [device(), tag(1, "model"), resync(epoch, 2, &[one, two])];
    assert!(peer.send(&said.concat()));
    wait_for("the state after a kill", || (manager.tracked() == Some(110)).then_some(()));

    // On SIGTERM the daemon first stops reading, so nothing is lost, and the same run continues.
    let three = allocation(3, 1, 1);
    memory.ring(three);
    assert!(peer.send(&[record(three.0, three.1), watermark(3)].concat()));
    second.signal(Signal::TERM);
    second.end();
    let third = manager.start();
    let epoch = welcome(&peer);
    assert!(peer.send(&[device(), tag(1, "model"), resync(epoch, 3, &[one, two, three])].concat()));
    wait_for("the state after an end", || (manager.tracked() == Some(111)).then_some(()));
    let runs: serde_json::Value = serde_json::from_str(&manager.ask("/v1/runs")).expect("runs");
    assert_eq!(runs.as_array().map(Vec::len), Some(1), "one run, not one for each daemon");
    // Only records that the killed daemon had not written are missing; the other daemon lost none.
    wait_for("the history of all three", || {
        let runs: serde_json::Value = serde_json::from_str(&manager.ask("/v1/runs")).ok()?;
        (runs[0]["coverage"]["lost"].as_u64()? <= 1).then_some(())
    });

    // A closed connection is removed from the service manager, and closed by the daemon, although others hold it open.
    assert_eq!(rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Write), Ok(()));
    let (text, _) = manager.hear("FDSTOREREMOVE=1");
    assert!(text.contains(&format!("FDNAME={name}\n")), "{text}");
    peer.is_closed();
    third.signal(Signal::TERM);
    third.end();
}

/// exec(): the old program's connection closes, and the new program connects. Unsent records of the old program are read from its
/// memory and belong to it.
#[test]
fn what_a_program_left_is_not_taken_for_that_of_the_one_it_became() {
    let mut manager = Manager::new();
    let life = manager.start();
    let mut memory = Memory::new();
    let (peer, epoch) = Peer::welcomed(&manager.scratch.join("agent.sock"), &memory);
    manager.keep();
    let one = allocation(1, 100, 0);
    memory.ring(one);
    assert!(peer.send(&[device(), resync(epoch, 0, &[]), record(one.0, one.1), watermark(1)].concat()));
    wait_for("the first word", || (manager.tracked() == Some(100)).then_some(()));

    // The daemon may find the end of the old connection first, or the new hello.
    life.signal(Signal::STOP);
    (2..=8).for_each(|seq| memory.ring(allocation(seq, 10, 0)));
    assert_eq!(rustix::net::shutdown(&peer.socket, rustix::net::Shutdown::Both), Ok(()));
    let next = Peer::connect(&manager.scratch.join("agent.sock"));
    let other = Memory::new();
    next.send_with(&hello_of(2), &[other.fd.as_fd()]);
    life.signal(Signal::CONT);
    let epoch = welcome(&next);
    let one = allocation(1, 1000, 0);
    assert!(next.send(&[device(), resync(epoch, 0, &[]), record(one.0, one.1), watermark(1)].concat()));
    wait_for("the new program's word", || {
        let runs: serde_json::Value = serde_json::from_str(&manager.ask("/v1/runs")).ok()?;
        let coverage = &runs[0]["coverage"];
        (coverage["events"] == 9 && manager.tracked() == Some(1000)).then(|| {
            assert_eq!((&coverage["lost"], &coverage["odd"]), (&0.into(), &0.into()), "{coverage}");
        })
    });
    life.signal(Signal::TERM);
    life.end();
}

/// Two exec() before the daemon reads: the records of the program in between precede those of the last one.
#[test]
fn programs_of_one_process_come_in_their_order() {
    let manager = Manager::new();
    let life = manager.start();
    let socket = manager.scratch.join("agent.sock");
    let (mut last, epoch) = Peer::welcomed(&socket, &Memory::new());
    manager.hear("FDSTORE=1");
    assert!(last.send(&[device(), resync(epoch, 0, &[])].concat()));
    for round in 0..20 {
        life.signal(Signal::STOP);
        assert_eq!(rustix::net::shutdown(&last.socket, rustix::net::Shutdown::Both), Ok(()));
        let (between, mut left) = (Peer::connect(&socket), Memory::new());
        (1..=8).for_each(|seq| left.ring(allocation(seq, 10, 0)));
        between.send_with(&hello_of(10 + 2 * round), &[left.fd.as_fd()]);
        assert_eq!(rustix::net::shutdown(&between.socket, rustix::net::Shutdown::Both), Ok(()));
        last = Peer::connect(&socket);
        last.send_with(&hello_of(11 + 2 * round), &[Memory::new().fd.as_fd()]);
        life.signal(Signal::CONT);
        let epoch = welcome(&last);
        // Nothing is kept here, but the messages to the manager must be read.
        (0..2).for_each(|_| drop(manager.hear("FDSTORE=1")));
        let one = allocation(1, 1000, 0);
        assert!(last.send(&[device(), resync(epoch, 0, &[]), record(one.0, one.1), watermark(1)].concat()));
        wait_for("the word of the program that runs", || {
            let runs: serde_json::Value = serde_json::from_str(&manager.ask("/v1/runs")).ok()?;
            let coverage = &runs[0]["coverage"];
            (coverage["events"] == 9 * (u64::from(round) + 1) && manager.tracked() == Some(1000)).then(|| {
                assert_eq!((&coverage["lost"], &coverage["odd"]), (&0.into(), &0.into()), "{coverage}");
            })
        });
    }
    life.signal(Signal::TERM);
    life.end();
}

#[test]
fn after_a_restart_nothing_is_partial_and_reports_have_the_life_before() {
    let mut manager = Manager::with(3600.0);
    let first = manager.start();
    let mut memory = Memory::new();
    let (peer, epoch) = Peer::welcomed(&manager.scratch.join("agent.sock"), &memory);
    manager.keep();
    memory.name(&device());
    let (one, two) = (allocation(1, 100, 0), allocation(2, 10, 0));
    for said in [one, two] {
        memory.ring(said);
    }
    let said = [resync(epoch, 0, &[]), record(one.0, one.1), record(two.0, two.1), watermark(2)];
    assert!(peer.send(&[device(), said.concat()].concat()));
    wait_for("the first life", || (manager.tracked() == Some(110)).then_some(()));
    first.signal(Signal::TERM);
    first.end();

    let _second = manager.start();
    let epoch = welcome(&peer);
    // It holds less memory now; the peak was before.
    assert!(peer.send(&[device(), resync(epoch, 2, &[one])].concat()));
    wait_for("the state of now", || (manager.tracked() == Some(100)).then_some(()));
    let runs: serde_json::Value = serde_json::from_str(&manager.ask("/v1/runs")).expect("runs");
    let (coverage, device) = (&runs[0]["coverage"], &runs[0]["devices"][0]);
    assert_eq!((&coverage["events"], &coverage["lost"]), (&2.into(), &0.into()), "{coverage}");
    assert_eq!((&coverage["partial_state"], &coverage["partial_history"]), (&false.into(), &false.into()));
    assert_eq!(device["peak"]["tracked_bytes"], 110, "though nothing was written in this life");
    let ps = wait_for("flags", || {
        let ps: serde_json::Value = serde_json::from_str(&manager.ask("/v1/ps")).ok()?;
        // The published state may be older.
        ps["processes"][0]["flags"].as_array().filter(|flags| flags.contains(&"restarted".into())).cloned()
    });
    assert!(!ps.contains(&"partial".into()), "{ps:?}");
    let said = manager.ask(&format!("/v1/doctor?pid={}", std::process::id()));
    assert!(said.contains("none lost: 2 of them before gpumemd was restarted"), "{said}");
}

#[test]
fn what_is_of_no_use_is_forgotten() {
    let mut manager = Manager::new();
    let (one, _other) = UnixStream::pair().expect("a pair");
    manager.passed.push(("agent-1-2-3".to_owned(), one.into()));
    let _life = manager.start_unheard();
    let (text, _) = manager.hear("FDSTOREREMOVE=1");
    assert!(text.contains("FDNAME=agent-1-2-3\n"), "{text}");
    manager.hear("READY=1");
    assert!(!manager.ask("/v1/ps").is_empty(), "it serves nevertheless");
}
