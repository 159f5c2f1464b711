//! A program with random actions: mostly tests/mixer, which gets one command at a time and waits in between.

use super::Random;
use crate::live::Machine;
use crate::live::programs::programs;
use gpumem_ledger::ProcessKey;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Timeout of a call on a busy machine; no call waits for the daemon.
const PATIENCE: Duration = Duration::from_secs(60);
/// Most objects that an actor holds.
const PLACES: usize = 10;
/// Number of blocks in a segment; each has the size `BLOCK`.
const BLOCKS: usize = 4;
const BLOCK: u64 = 3 << 20;

/// Kind of program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Has the agent.
    Covered,
    /// Has the agent, with a small ring that loses many records.
    Narrow,
    /// Has no agent.
    Bare,
    /// tests/trainer, which runs its loop and then waits.
    Trainer,
}

impl Kind {
    /// Returns whether the program has the agent.
    pub fn is_covered(self) -> bool {
        self != Kind::Bare
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    Nothing,
    Direct,
    Async,
    Managed,
    Pinned,
    Registered,
    /// A mapping of this many bytes, with its handle and address.
    Mapped(u64),
    Segment([bool; BLOCKS]),
    Module,
}

/// How an actor is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// By exit with this status.
    Quit(u64),
    /// By exit with this status, without exit handlers.
    Leave(u64),
    /// By a crash.
    Crash(u64),
    /// By SIGKILL.
    Kill,
    /// By SIGKILL in the middle of a call.
    KillAtWork,
}

/// A running program.
#[derive(Debug)]
pub struct Actor {
    /// Kind of program.
    pub kind: Kind,
    /// Its process.
    pub key: ProcessKey,
    /// Devices that it uses.
    pub devices: Vec<usize>,
    /// It is stopped by SIGSTOP.
    pub is_stopped: bool,
    /// Number of programs that it executed in place of itself.
    pub images: u32,
    /// Whether it uses the driver's pool, which is polled.
    pub is_polled: bool,
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    held: [(Held, usize); PLACES],
    /// The current device.
    device: Option<usize>,
    /// Whether it works without commands until it is joined.
    is_busy: bool,
}

impl Actor {
    /// Starts an actor; the caller must then wait with [`Actor::is_ready`].
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(machine: &Machine, socket: &Path, kind: Kind, random: &mut Random, devices: usize) -> Self {
        let mut of_it: Vec<usize> = (0..devices).collect();
        random.shuffle(&mut of_it);
        of_it.truncate(1 + random.below(2) as usize);
        let mut command = match kind {
            Kind::Trainer => {
                let mut command = machine.command(programs().fake.join("bin/trainer"));
                let list: Vec<String> = of_it.iter().map(usize::to_string).collect();
                let steps = (1 + random.below(6)).to_string();
                command.args(["--step-ms", "5", "--hold", "100000", "--steps", &steps]);
                command.args(["--threads", "1", "--seed", &random.below(1000).to_string()]);
                command.args(["--devices", &list.join(",")]);
                command
            }
            _ => machine.command(programs().fake.join("bin/mixer")),
        };
        if kind.is_covered() {
            command.env("CUDA_INJECTION64_PATH", programs().ours.join("libgpumem.so"));
            command.env("GPUMEM_SOCKET", socket);
        }
        if kind == Kind::Narrow {
            command.env("GPUMEM_RING_SLOTS", "64");
        }
        let (child, stdin, lines) = spawn(&mut command);
        let pid = child.id();
        let key =
            ProcessKey { pid, start_ticks: start_ticks(pid).expect("it runs, or waits to be waited for") };
        Actor {
            kind,
            key,
            devices: of_it,
            is_stopped: false,
            images: 0,
            is_polled: false,
            child,
            stdin,
            lines,
            held: [(Held::Nothing, 0); PLACES],
            device: None,
            is_busy: false,
        }
    }

    /// Waits until it accepts a command.
    ///
    /// # Panics
    /// If it does not.
    pub fn is_ready(&mut self) {
        if self.kind == Kind::Trainer {
            while self.hear() != "holding" {}
            return;
        }
        let line = self.hear();
        assert!(line.starts_with("ready"), "{line:?}");
        for device in self.devices.clone() {
            self.on(device);
            self.ok(&format!("pool-default pool{device}"));
            self.ok(&format!("pool-keeps pool{device} 0xffffffffffffffff"));
            self.ok(&format!("caching own{device}"));
        }
    }

    fn hear(&mut self) -> String {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => line,
            Err(error) => panic!("{:?} says nothing ({error}): {:?}", self.key, self.child.try_wait()),
        }
    }

    fn tell(&mut self, command: &str) {
        let stdin = self.stdin.as_mut().expect("it listens");
        stdin.write_all(format!("{command}\n").as_bytes()).expect("it reads");
    }

    /// Sends a command, and returns the driver's result and the number.
    fn say(&mut self, command: &str) -> (i64, u64) {
        self.tell(command);
        self.answer()
    }

    fn answer(&mut self) -> (i64, u64) {
        let line = self.hear();
        let mut words = line.split(' ');
        let result = words.next().and_then(|word| word.parse().ok());
        let number = words.nth(2).and_then(|word| word.parse().ok());
        result.zip(number).unwrap_or_else(|| panic!("{:?}: {line:?}", self.key))
    }

    fn ok(&mut self, command: &str) -> u64 {
        let (result, number) = self.say(command);
        assert_eq!(result, 0, "{:?}: {command}", self.key);
        number
    }

    fn on(&mut self, device: usize) {
        if self.device != Some(device) {
            self.ok(&format!("device {device}"));
            self.device = Some(device);
        }
    }

    /// Performs an action. Returns the pid of a child that it started, which ends without a command, and whether that
    /// is another program.
    pub fn act(&mut self, random: &mut Random) -> Option<(u32, bool)> {
        if self.kind == Kind::Trainer || self.is_stopped {
            return None;
        }
        self.rest();
        match random.below(100) {
            0..60 => self.take_or_give(random),
            60..72 => self.retag(random),
            72..78 => self.carve(random),
            78..82 => self.is_refused(random),
            82..88 => self.churn(random),
            88..90 => return self.child(random),
            90..92 => {
                let pid = self.ok(&format!("brief {}", 1 + random.below(40)));
                return u32::try_from(pid).ok().map(|pid| (pid, true));
            }
            92..94 => self.again(),
            _ => drop(self.ok("synchronize")),
        }
        None
    }

    fn name(&mut self, random: &mut Random) {
        let (layer, part) = (random.below(8), random.below(4));
        let path = format!("soak/layer.{layer}/part.{part}");
        self.ok(&format!("tag {}", if random.below(8) == 0 { "" } else { &path }));
    }

    fn take_or_give(&mut self, random: &mut Random) {
        let at = random.below(PLACES as u64) as usize;
        let (held, device) = self.held[at];
        if held != Held::Nothing {
            self.on(device);
            self.give(at, held);
            return;
        }
        let device = random.one_of(&self.devices);
        self.on(device);
        self.name(random);
        let bytes = 1 + random.below(5 << 20);
        let new = match random.below(16) {
            0..7 => (Held::Direct, format!("alloc m{at} {bytes}")),
            7..9 => (Held::Async, format!("async m{at} {bytes}")),
            9 => (Held::Managed, format!("managed m{at} {bytes}")),
            10 => (Held::Pinned, format!("pinned m{at} {bytes}")),
            11 => (Held::Registered, format!("register m{at} {}", bytes.next_multiple_of(4096))),
            12 => (Held::Module, format!("module m{at}")),
            13 => {
                let bytes = bytes.next_multiple_of(2 << 20);
                self.ok(&format!("reserve m{at} {bytes}"));
                self.ok(&format!("create h{at} {bytes}"));
                (Held::Mapped(bytes), format!("map m{at} 0 {bytes} h{at}"))
            }
            _ => {
                self.ok(&format!("alloc m{at} {}", BLOCKS as u64 * BLOCK));
                let size = BLOCKS as u64 * BLOCK;
                (Held::Segment([false; BLOCKS]), format!("segment own{device} m{at} {size}"))
            }
        };
        self.is_polled |= new.0 == Held::Async;
        self.ok(&new.1);
        self.held[at] = (new.0, device);
    }

    fn give(&mut self, at: usize, held: Held) {
        let device = self.held[at].1;
        match held {
            Held::Nothing => {}
            Held::Direct | Held::Managed => drop(self.ok(&format!("free m{at}"))),
            Held::Async => drop(self.ok(&format!("async-end m{at}"))),
            Held::Pinned => drop(self.ok(&format!("pinned-end m{at}"))),
            Held::Registered => drop(self.ok(&format!("register-end m{at}"))),
            Held::Module => drop(self.ok(&format!("module-end m{at}"))),
            Held::Mapped(bytes) => {
                self.ok(&format!("unmap m{at} 0 {bytes}"));
                self.ok(&format!("release h{at}"));
                self.ok(&format!("reserve-end m{at} {bytes}"));
            }
            Held::Segment(blocks) => {
                for (block, _) in (0u64..).zip(blocks).filter(|(_, is_there)| *is_there) {
                    self.ok(&format!("block-end own{device} m{at} {}", block * BLOCK));
                }
                self.ok(&format!("segment-end own{device} m{at} {}", BLOCKS as u64 * BLOCK));
                self.ok(&format!("free m{at}"));
            }
        }
        self.held[at] = (Held::Nothing, 0);
    }

    /// Renames an allocation.
    fn retag(&mut self, random: &mut Random) {
        let of: Vec<usize> = (0..PLACES).filter(|&at| self.held[at].0 == Held::Direct).collect();
        if !of.is_empty() {
            let at = random.one_of(&of);
            self.ok(&format!("retag m{at} soak/later.{}", random.below(6)));
        }
    }

    /// Allocates or frees a block.
    fn carve(&mut self, random: &mut Random) {
        let of: Vec<usize> = (0..PLACES).filter(|&at| matches!(self.held[at].0, Held::Segment(_))).collect();
        if of.is_empty() {
            return;
        }
        let at = random.one_of(&of);
        let (Held::Segment(mut blocks), device) = self.held[at] else { return };
        let block = random.below(BLOCKS as u64) as usize;
        let offset = block as u64 * BLOCK;
        self.on(device);
        if blocks[block] {
            self.ok(&format!("block-end own{device} m{at} {offset}"));
        } else {
            self.name(random);
            self.ok(&format!("block own{device} m{at} {offset} {}", 1 + random.below(BLOCK)));
        }
        blocks[block] = !blocks[block];
        self.held[at] = (Held::Segment(blocks), device);
    }

    fn is_refused(&mut self, random: &mut Random) {
        let device = random.one_of(&self.devices);
        self.on(device);
        let (result, _) = self.say("alloc nothing 1024G");
        assert_eq!(result, 2, "out of memory");
    }

    fn churn(&mut self, random: &mut Random) {
        let device = random.one_of(&self.devices);
        self.on(device);
        let (count, bytes) = (1 + random.below(400), 512 + random.below(1 << 20));
        let later = if random.below(2) == 0 { "later " } else { "" };
        let refused = self.ok(&format!("{later}churn {count} {bytes}"));
        assert_eq!(refused, 0, "there is room");
        self.is_busy = !later.is_empty();
    }

    fn child(&mut self, random: &mut Random) -> Option<(u32, bool)> {
        if random.below(2) == 0 {
            assert_eq!(self.ok("child"), 0, "a child of {:?} came to a good end", self.key);
            return None;
        }
        let pid = self.ok(&format!("orphan {}", random.below(3000)));
        u32::try_from(pid).ok().map(|pid| (pid, false))
    }

    /// Executes another program in the same process.
    fn again(&mut self) {
        self.tell("again");
        self.held = [(Held::Nothing, 0); PLACES];
        (self.device, self.is_polled) = (None, false);
        self.images += 1;
        self.is_ready();
    }

    /// Waits for its uncommanded work to finish.
    pub fn rest(&mut self) {
        if self.is_busy {
            self.is_busy = false;
            assert_eq!(self.ok("join"), 0, "there is room");
        }
    }

    /// Uses the driver's pools once more, because their reserved bytes are read at a call.
    pub fn settle(&mut self) {
        if self.is_polled {
            for device in self.devices.clone() {
                self.on(device);
                self.ok("tag ");
                self.ok("async settle 512");
                self.ok("async-end settle");
            }
        }
    }

    /// Stops or continues it by a signal. Only possible while it is idle, because a process stopped within a call blocks the
    /// machine.
    ///
    /// # Panics
    /// If it is gone.
    pub fn stop(&mut self, stop: bool) {
        self.rest();
        let signal = if stop { Signal::STOP } else { Signal::CONT };
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
        self.is_stopped = stop;
    }

    /// Ends it, and returns its status.
    ///
    /// # Panics
    /// If it ends in another way.
    pub fn end(&mut self, way: Way) -> ExitStatus {
        let way = if self.kind == Kind::Trainer || self.is_stopped { Way::Kill } else { way };
        match way {
            Way::Kill => {}
            Way::KillAtWork => {
                self.rest();
                self.on(self.devices[0]);
                self.tell("later churn 100000 65536");
                let _ = self.hear();
            }
            _ => self.rest(),
        }
        match way {
            Way::Kill | Way::KillAtWork => self.child.kill().expect("killed"),
            Way::Quit(status) => self.tell(&format!("quit {status}")),
            Way::Leave(status) => self.tell(&format!("leave {status}")),
            Way::Crash(signal) => self.tell(&format!("crash {signal}")),
        }
        crate::live::until(60, &format!("the end of {:?} by {way:?}", self.key), || {
            self.child.try_wait().expect("waited for")
        })
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(command: &mut Command) -> (Child, Option<ChildStdin>, Receiver<String>) {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started");
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take().expect("piped"));
    let (send, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                break;
            }
        }
    });
    (child, stdin, lines)
}

/// Returns field 22 of its stat.
pub fn start_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}
