//! Starts and ends the daemon: with its sockets and connections kept, as by systemd, or without.

use crate::live::daemon::Daemon;
use crate::live::machine::{Job, Machine};
use crate::live::mixer::now_ns;
use crate::live::programs::programs;
use crate::live::until;
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix, SocketFlags,
    SocketType, bind, listen, recvmsg, socket_with,
};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// How a life of the daemon begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// With its sockets, and the connections that an earlier life had kept.
    Kept,
    /// It creates its sockets; connected clients must reconnect.
    Bare,
}

/// How a life of the daemon ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// SIGTERM.
    Told,
    /// SIGKILL.
    Killed,
}

#[derive(Debug, Default)]
struct Kept {
    /// Connections are kept at all.
    open: AtomicBool,
    ready: AtomicU64,
    fds: Mutex<Vec<(String, OwnedFd)>>,
}

impl Kept {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(String, OwnedFd)>> {
        self.fds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles a notification message.
    fn hear(&self, text: &str, fds: Vec<OwnedFd>) {
        let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap_or_default();
        for word in text.lines() {
            match word {
                "READY=1" => drop(self.ready.fetch_add(1, Ordering::AcqRel)),
                "FDSTOREREMOVE=1" => self.lock().retain(|(kept, _)| kept != name),
                _ => {}
            }
        }
        if text.lines().any(|word| word == "FDSTORE=1") && self.open.load(Ordering::Acquire) {
            self.lock().extend(fds.into_iter().map(|fd| (name.to_owned(), fd)));
        }
    }
}

/// A time without a daemon, or the end of one.
#[derive(Debug, Clone, Copy)]
pub struct Gap {
    /// Time of the signal.
    pub from_ns: u64,
    /// Time at which the next one was ready.
    pub to_ns: u64,
    /// How the previous life ended.
    pub end: End,
    /// How the previous life began.
    pub was: Start,
    /// How the next life began.
    pub start: Start,
}

impl Gap {
    /// Whether data may be lost: data that the daemon had not written, data from agents that it had not read, and
    /// processes that ended in between, unless the connections were kept throughout.
    pub fn loses(&self) -> bool {
        self.end == End::Killed || self.was == Start::Bare || self.start == Start::Bare
    }
}

/// The manager.
#[derive(Debug)]
pub struct Manager {
    dir: PathBuf,
    kept: Arc<Kept>,
    listeners: Vec<(String, OwnedFd)>,
    /// A library that makes the daemon's disk fail, and the file that controls it.
    faults: PathBuf,
    /// The running daemon.
    pub daemon: Option<Daemon>,
    /// How it was started.
    how: Start,
    /// Number of lives so far.
    pub lives: u64,
    /// Intervals without a daemon.
    pub gaps: Vec<Gap>,
    /// Intervals in which the daemon was stopped.
    pub stops: Vec<(u64, u64)>,
}

impl Manager {
    /// Creates the manager without a daemon.
    ///
    /// # Panics
    /// If a socket or the library cannot be created.
    pub fn new(machine: &Machine, config: &str, listen: SocketAddr) -> Self {
        let dir = machine.dir.clone();
        let notify = UnixDatagram::bind(dir.join("notify")).expect("a socket");
        let kept = Arc::new(Kept::default());
        let heard = Arc::clone(&kept);
        std::thread::spawn(move || {
            while let Some((text, fds)) = hear(&notify) {
                heard.hear(&text, fds);
            }
        });
        let faults = dir.join("faults.so");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../daemon/tests/suite/store/faults.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-o"]).args([&faults, Path::new(source)]).arg("-ldl");
        assert!(compiler.status().expect("a C compiler").success());
        let manager = Manager {
            dir,
            kept,
            listeners: Vec::new(),
            faults,
            daemon: None,
            how: Start::Bare,
            lives: 0,
            gaps: Vec::new(),
            stops: Vec::new(),
        };
        let store = manager.store();
        let runtime = manager.runtime();
        let text = format!(
            "runtime_dir = {runtime:?}\n{config}\n[runs]\nstore = {store:?}\ncheckpoint_every_s = 0.5\n\
             [metrics]\nlisten = \"{listen}\"\nfold_younger_s = 0.0\n"
        );
        std::fs::write(manager.config(), text).expect("written");
        manager
    }

    /// Returns the path of its configuration.
    pub fn config(&self) -> PathBuf {
        self.dir.join("gpumemd.toml")
    }

    /// Returns the path of its store.
    pub fn store(&self) -> PathBuf {
        self.dir.join("runs.sqlite")
    }

    /// Returns its runtime directory.
    pub fn runtime(&self) -> PathBuf {
        self.dir.join("run")
    }

    /// Returns the agent socket.
    pub fn socket(&self) -> PathBuf {
        self.runtime().join("agent/agent.sock")
    }

    /// Returns the path of a life's log; lives count from 1.
    pub fn log(&self, life: u64) -> PathBuf {
        self.dir.join(format!("gpumemd-{life}.log"))
    }

    /// Returns the running daemon.
    ///
    /// # Panics
    /// If none is running.
    pub fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("a daemon")
    }

    /// Makes the store fail in this way, or work again.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn disk(&self, fault: Option<&str>) {
        // The file is replaced atomically.
        let (control, new) = (self.dir.join("fault"), self.dir.join("fault.new"));
        match fault {
            Some(fault) => {
                std::fs::write(&new, fault).expect("written");
                std::fs::rename(new, control).expect("renamed");
            }
            None => std::fs::remove_file(control).expect("removed"),
        }
    }

    /// Starts a daemon, and waits until it is ready.
    ///
    /// # Panics
    /// If it does not become ready.
    pub fn start(&mut self, machine: &Machine, how: Start) {
        match how {
            Start::Kept if self.listeners.is_empty() => {
                std::fs::create_dir_all(self.runtime().join("agent")).expect("a folder");
                self.listeners = vec![
                    listener("agent", &self.socket(), SocketType::SEQPACKET),
                    listener("control", &self.runtime().join("control.sock"), SocketType::STREAM),
                ];
            }
            Start::Kept => {}
            Start::Bare => {
                self.listeners.clear();
                self.kept.lock().clear();
            }
        }
        self.how = how;
        self.kept.open.store(how == Start::Kept, Ordering::Release);
        self.lives += 1;
        let before = self.kept.ready.load(Ordering::Acquire);
        let mut command = self.command(machine);
        command.stderr(std::fs::File::create(self.log(self.lives)).expect("a log"));
        let mut job = Job::start(&mut command);
        until(60, "a daemon that is ready", || {
            assert!(
                job.is_running(),
                "it ended: {}",
                std::fs::read_to_string(self.log(self.lives)).unwrap_or_default()
            );
            (self.kept.ready.load(Ordering::Acquire) > before).then_some(())
        });
        self.daemon = Some(Daemon { job, runtime: self.runtime(), recording: self.dir.join("none") });
    }

    /// Returns the daemon's command, with the passed descriptors from number 3 on.
    fn command(&self, machine: &Machine) -> Command {
        let kept = self.kept.lock();
        // Duplicates the descriptors to high numbers, away from their final ones.
        let passed: Vec<(&str, OwnedFd)> = self
            .listeners
            .iter()
            .chain(kept.iter())
            .map(|(name, fd)| (name.as_str(), fcntl_dupfd_cloexec(fd, 1000).expect("a descriptor")))
            .collect();
        let names: Vec<&str> = passed.iter().map(|(name, _)| *name).collect();
        let places = (3..).zip(passed.iter().map(|(_, fd)| fd.as_raw_fd()));
        let places: Vec<String> = places.map(|(at, fd)| format!("{at}<&{fd} {fd}<&-")).collect();
        let handed = match passed.len() {
            0 => String::new(),
            count => {
                format!("export LISTEN_PID=$$ LISTEN_FDS={count} LISTEN_FDNAMES={};", names.join(":"))
            }
        };
        let script = format!("{handed} export LD_PRELOAD=$FAULTS; exec \"$@\" {}", places.join(" "));
        let mut command = machine.command("bash");
        command.args(["-c", &script, "bash"]).arg(programs().ours.join("gpumemd"));
        command.arg("--config").arg(self.config());
        command.env("NOTIFY_SOCKET", self.dir.join("notify")).env("FAULTS", &self.faults);
        command.env("GPUMEM_TEST_FAULT", self.dir.join("fault"));
        // The descriptors are close-on-exec until exec, so that children of other threads do not inherit them.
        let fds: Vec<OwnedFd> = passed.into_iter().map(|(_, fd)| fd).collect();
        // SAFETY: fcntl() is async-signal-safe, and nothing is allocated.
        unsafe {
            command.pre_exec(move || Ok(fds.iter().try_for_each(|fd| fcntl_setfd(fd, FdFlags::empty()))?));
        }
        command
    }

    /// Ends the running daemon.
    ///
    /// # Panics
    /// If it does not end successfully.
    pub fn end(&mut self, how: End) {
        let mut daemon = self.daemon.take().expect("a daemon");
        let from_ns = now_ns();
        match how {
            End::Told => daemon.stop(),
            End::Killed => {
                daemon.job.signal("KILL");
                daemon.job.end();
            }
        }
        self.gaps.push(Gap { from_ns, to_ns: u64::MAX, end: how, was: self.how, start: Start::Bare });
    }

    /// Starts the next daemon.
    pub fn follow(&mut self, machine: &Machine, start: Start) {
        self.start(machine, start);
        if let Some(gap) = self.gaps.last_mut() {
            (gap.to_ns, gap.start) = (now_ns(), start);
        }
    }

    /// Returns intervals without a listening daemon.
    pub fn silences(&self) -> impl Iterator<Item = (u64, u64)> {
        self.gaps.iter().map(|gap| (gap.from_ns, gap.to_ns)).chain(self.stops.iter().copied())
    }

    /// Stops or continues the daemon.
    pub fn stop(&mut self, stop: bool) {
        self.daemon().job.signal(if stop { "STOP" } else { "CONT" });
        match stop {
            true => self.stops.push((now_ns(), u64::MAX)),
            false => self.stops.last_mut().into_iter().for_each(|stop| stop.1 = now_ns()),
        }
    }

    /// Returns the number of kept descriptors: three for each connection.
    pub fn kept(&self) -> usize {
        self.kept.lock().len()
    }
}

fn listener(name: &str, path: &Path, kind: SocketType) -> (String, OwnedFd) {
    let _ = std::fs::remove_file(path);
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).expect("a socket");
    bind(&socket, &SocketAddrUnix::new(path).expect("a path")).expect("bound");
    listen(&socket, 1024).expect("listens");
    (name.to_owned(), socket)
}

fn hear(notify: &UnixDatagram) -> Option<(String, Vec<OwnedFd>)> {
    let mut bytes = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let parts = &mut [IoSliceMut::new(&mut bytes)];
    let len = recvmsg(notify, parts, &mut beside, RecvFlags::CMSG_CLOEXEC).ok()?.bytes;
    let mut fds = Vec::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    Some((String::from_utf8_lossy(&bytes[..len]).into_owned(), fds))
}
