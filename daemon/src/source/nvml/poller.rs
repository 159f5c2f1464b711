//! The only process that opens NVML: `gpumemd nvml-poller`. It has one thread, reads commands from standard input, writes frames
//! to standard output, and ends with its parent.
//!
//! A process that has loaded a driver's library never loads another one, because some libraries cannot be unloaded and the
//! loader remembers missing files. So the poller executes itself again (exec) to reopen the library after a release, a lost
//! driver or a changed partition. Its pid stays the same.
//!
//! Frames are those of recordings, with four private uses. A `ProcessFacts` of thread 0 has facts of a device or of the driver.
//! The `context` of a `Source` is NVML's code; its `tag` is the number of seconds for which NVML stays closed. The `context` of
//! a `SampleEnd` is the time spent in list calls (ns).
//!
//! ```text
//! list UUID                 read the lists of this device soon
//! skip UUID SECONDS         skip this device; 0: no longer
//! skip-lists UUID SECONDS   skip the lists of this device
//! skip-index N SECONDS      skip the GPU with this NVML index
//! release SECONDS           close NVML, open it again after that time
//! resume                    open it again now
//! quit                      end
//! ```

#[cfg(test)]
mod tests;

use super::answer::List;
use super::call_state::{Call, CallStateWriter};
use super::library::{Avoid, Gpus, Library};
use super::protocol::{Arguments, FrameWriter, SECOND, Target, Uuid, parse_uuid};
use super::session::{Next, Session};
use crate::clock::now_ns;
use crate::nvml_status::NvmlCalls;
use gpumem_ledger::DeviceName;
use gpumem_wire::{Body, Stamp};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::ExitCode;

/// First interval before the library is opened again after a failure, and the maximum; doubled each time.
const RETRY_NS: u64 = SECOND;
const RETRY_MOST_NS: u64 = 30 * SECOND;
/// Time after which an opened library counts as working, so that the retry interval starts small again.
const LIVED_NS: u64 = 10 * SECOND;
/// Maximum delay of memory samples before they are written, in ns.
const FLUSH_NS: u64 = 50_000_000;
/// Maximum number of actions before frames are written and commands are read.
const ACTS_AT_ONCE: u32 = 64;
/// Time for which NVML stays closed while a GPU is being unbound from the driver, in seconds. Guides suggest the same time for
/// `gpumemctl nvml release`.
const UNBIND_S: u64 = 60;
/// Maximum sleep in ns. The poller writes changed totals at least this often, so that the parent sees that it works.
const PULSE_NS: u64 = SECOND;

/// Prefix of the reason for a temporarily closed NVML; the number of seconds follows.
const RELEASED: &str = "nvml: released for ";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Command {
    List(DeviceName),
    Skip(DeviceName, u64),
    SkipLists(DeviceName, u64),
    SkipIndex(u16, u64),
    Release(u64),
    Resume,
    Quit,
}

impl Command {
    fn parse(line: &str) -> Option<Command> {
        let mut words = line.split_ascii_whitespace();
        let order = match words.next()? {
            "list" => Command::List(parse_uuid(words.next()?)?),
            "skip" => Command::Skip(parse_uuid(words.next()?)?, words.next()?.parse().ok()?),
            "skip-lists" => Command::SkipLists(parse_uuid(words.next()?)?, words.next()?.parse().ok()?),
            "skip-index" => Command::SkipIndex(words.next()?.parse().ok()?, words.next()?.parse().ok()?),
            "release" => Command::Release(words.next()?.parse().ok()?),
            "resume" => Command::Resume,
            "quit" => Command::Quit,
            _ => return None,
        };
        words.next().is_none().then_some(order)
    }
}

/// Reads commands from standard input; keeps a line that has not arrived completely.
#[derive(Debug, Default)]
struct CommandReader {
    pending: Vec<u8>,
}

impl CommandReader {
    /// Waits for commands until `until_ns`. Fails if standard input is closed.
    fn wait(&mut self, until_ns: u64) -> io::Result<Vec<Command>> {
        let left = until_ns.saturating_sub(now_ns());
        let timeout = Timespec { tv_sec: (left / SECOND) as i64, tv_nsec: (left % SECOND) as i64 };
        let stdin = io::stdin();
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let mut bytes = [0; 4096];
        match rustix::io::read(stdin.as_fd(), &mut bytes) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => Ok(self.take(&bytes[..count])),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        }
    }

    fn take(&mut self, bytes: &[u8]) -> Vec<Command> {
        self.pending.extend_from_slice(bytes);
        let Some(end) = self.pending.iter().rposition(|&byte| byte == b'\n') else {
            self.pending.truncate(4096); // no command is that long
            return Vec::new();
        };
        let lines: Vec<u8> = self.pending.drain(..=end).collect();
        lines
            .split(|&byte| byte == b'\n')
            .filter_map(|line| Command::parse(std::str::from_utf8(line).ok()?))
            .collect()
    }
}

/// Standard output without the standard library's buffer, which would split frames at newlines.
struct Stdout;

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(io::stdout().as_fd(), bytes)?)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

enum State {
    Closed { retry_ns: u64 },
    Released { until_ns: u64 },
    Open(Box<Session>),
}

/// Executes this program again with other arguments. Returns only if that has failed.
pub(crate) type Renew = dyn FnMut(&Arguments) -> io::Error;
/// Opens a library. Takes what must not be called, and a callback that gets each GPU's index before the GPU is opened.
pub(crate) type Open = dyn FnMut(&Avoid, &mut dyn FnMut(u16)) -> Result<Box<dyn Gpus>, (String, u32)>;

struct Poller {
    arguments: Arguments,
    open: Box<Open>,
    /// `None` in tests, where a library may be opened twice.
    renew: Option<Box<Renew>>,
    has_opened: bool,
    /// Time at which the current library was opened, and the last retry interval.
    opened_ns: u64,
    wait_ns: u64,
    state: State,
    out: FrameWriter,
    totals: NvmlCalls,
    written_totals: NvmlCalls,
    written: Option<(bool, String)>,
    avoid: Vec<(DeviceName, u64)>,
    avoid_lists: Vec<(DeviceName, u64)>,
    avoid_index: Vec<(u16, u64)>,
    flushed_ns: u64,
    pulse_ns: u64,
    /// Whether pending frames must be written without delay.
    is_urgent: bool,
}

/// Runs the subcommand until its parent has ended or sends `quit`.
pub fn poller_main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    // A killed parent cannot send `quit`, so end with it. If it is already dead, standard input is closed.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let _ = rustix::thread::set_name(c"gpumemd-nvml");
    let Some(arguments) = Arguments::parse(args) else {
        eprintln!("gpumemd nvml-poller: internal command, started by gpumemd itself");
        return ExitCode::from(2);
    };
    let call_state = arguments.call_state.and_then(|number| CallStateWriter::inherited(number).ok());
    if let Some(target) = arguments.probe {
        return probe(&arguments, target, call_state);
    }
    let settings = arguments.settings.clone();
    let open = move |avoid: &Avoid, enter: &mut dyn FnMut(u16)| {
        Library::open(settings.library.as_deref(), settings.trust_pids, avoid, enter)
            .map(|library| Box::new(library) as Box<dyn Gpus>)
    };
    let mut poller = Poller::new(arguments, Box::new(open), FrameWriter::new(Box::new(Stdout), call_state));
    poller.renew = Some(Box::new(|arguments| {
        // The new program inherits the descriptors of this one.
        let mut command = std::process::Command::new("/proc/self/exe");
        command.arg0("gpumemd").args(arguments.to_args()).exec()
    }));
    let mut orders = CommandReader::default();
    while let Ok(until) = poller.step() {
        match orders.wait(until) {
            Ok(orders) => {
                if !orders.into_iter().all(|order| poller.execute(order)) {
                    break;
                }
            }
            Err(_) => break,
        }
    }
    poller.close();
    ExitCode::SUCCESS
}

/// Tries the calls of one hung device, and publishes which call is running. Succeeds if all calls return, whatever their
/// results.
fn probe(arguments: &Arguments, target: Target, mut lamp: Option<CallStateWriter>) -> ExitCode {
    let mut doing = |what| {
        if let Some(lamp) = &mut lamp {
            lamp.set(what);
        }
    };
    doing(Call::Library);
    let indices = arguments.skip_index.iter().map(|&(index, _)| index).collect();
    let avoid = Avoid { indices, events: true };
    let settings = &arguments.settings;
    let enter = &mut |index| doing(Call::Index(index));
    let Ok(mut library) = Library::open(settings.library.as_deref(), settings.trust_pids, &avoid, enter)
    else {
        return ExitCode::FAILURE;
    };
    for place in 0..library.devices().len() {
        let device = &library.devices()[place];
        let is_meant = match target {
            Target::Name(Uuid(name)) => device.name == name,
            Target::Index(index) => device.index == index,
        };
        if is_meant {
            doing(Call::Device(place as u8));
            let _ = library.memory(place);
            doing(Call::Lists(place as u8));
            let mut charges = Vec::new();
            for list in List::ALL {
                let _ = library.list(place, list, &mut charges);
            }
        }
    }
    doing(Call::Library);
    ExitCode::SUCCESS
}

impl Poller {
    fn new(arguments: Arguments, open: Box<Open>, out: FrameWriter) -> Poller {
        let now = now_ns();
        let until = |seconds: u64| now.saturating_add(seconds.saturating_mul(SECOND));
        let state = match arguments.released_s {
            0 => State::Closed { retry_ns: now },
            seconds => State::Released { until_ns: until(seconds) },
        };
        let avoid = arguments.skip.iter().map(|&(Uuid(name), seconds)| (name, until(seconds))).collect();
        let avoid_lists =
            arguments.skip_lists.iter().map(|&(Uuid(name), seconds)| (name, until(seconds))).collect();
        let avoid_index =
            arguments.skip_index.iter().map(|&(index, seconds)| (index, until(seconds))).collect();
        let (totals, wait_ns) = (arguments.totals, arguments.wait_ms.saturating_mul(1_000_000));
        Poller {
            arguments,
            open,
            renew: None,
            has_opened: false,
            opened_ns: now,
            wait_ns,
            state,
            out,
            totals,
            written_totals: totals,
            written: None,
            avoid,
            avoid_lists,
            avoid_index,
            flushed_ns: 0,
            pulse_ns: now,
            is_urgent: false,
        }
    }

    /// Does all actions that are due and writes the frames. Returns the time of the next action.
    fn step(&mut self) -> io::Result<u64> {
        let mut wait = self.act()?;
        // Write the results of actions due together at once. Their number is limited, because the parent may be waiting.
        for _ in 0..ACTS_AT_ONCE {
            if wait > now_ns() {
                break;
            }
            wait = self.act()?;
        }
        let now = now_ns();
        if self.is_urgent || now.saturating_sub(self.flushed_ns) >= FLUSH_NS {
            self.out.flush()?;
            (self.flushed_ns, self.is_urgent) = (now, false);
        } else if wait > now {
            self.out.doing(Call::Nothing);
            if !self.out.frames.is_empty() {
                wait = wait.min(self.flushed_ns + FLUSH_NS);
            }
        }
        Ok(wait.min(self.pulse_ns))
    }

    fn act(&mut self) -> io::Result<u64> {
        let now = now_ns();
        if now >= self.pulse_ns {
            self.pulse_ns = now + PULSE_NS;
            self.write_totals(now);
            self.take_back_avoided(now);
            self.is_urgent = true;
        }
        match &mut self.state {
            State::Closed { retry_ns } if *retry_ns > now => Ok(*retry_ns),
            State::Released { until_ns } if *until_ns > now => {
                let until = *until_ns;
                if self.written.as_ref().is_none_or(|(_, told)| !told.starts_with(RELEASED)) {
                    let seconds = (until - now).div_ceil(SECOND);
                    self.write_released(seconds, "on request");
                }
                Ok(until)
            }
            State::Closed { .. } | State::Released { .. } => {
                self.open();
                Ok(now)
            }
            State::Open(session) => {
                let before = (self.totals.list_calls, self.totals.failed_calls);
                let next = session.turn(&mut self.totals, &mut self.out)?;
                self.is_urgent |= before != (self.totals.list_calls, self.totals.failed_calls);
                match next {
                    Next::Again => Ok(now),
                    Next::Wait(until) => Ok(until),
                    Next::Release(gpu) => {
                        self.close();
                        self.state = State::Released { until_ns: now.saturating_add(UNBIND_S * SECOND) };
                        let of = format!("the driver is being unbound from GPU {gpu:#x}");
                        self.write_released(UNBIND_S, &of);
                        Ok(now)
                    }
                    Next::Reopen(code) => {
                        self.close();
                        if let Some(code) = code {
                            if now.saturating_sub(self.opened_ns) >= LIVED_NS {
                                self.wait_ns = 0;
                            }
                            self.refused(now, code.to_string(), code.0);
                        }
                        Ok(now)
                    }
                }
            }
        }
    }

    /// Reports that the library is unusable now, and schedules a retry, after a longer interval each time.
    fn refused(&mut self, now: u64, reason: String, code: u32) {
        self.tell(false, format!("nvml: {reason}"), code);
        self.wait_ns = self.wait_ns.saturating_mul(2).clamp(RETRY_NS, RETRY_MOST_NS);
        self.state = State::Closed { retry_ns: now.saturating_add(self.wait_ns) };
    }

    fn arguments(&self, now: u64) -> Arguments {
        let left = |until: u64| until.saturating_sub(now).div_ceil(SECOND);
        let of = |avoid: &[(DeviceName, u64)]| {
            avoid.iter().map(|&(name, until)| (Uuid(name), left(until))).collect()
        };
        Arguments {
            skip: of(&self.avoid),
            skip_lists: of(&self.avoid_lists),
            skip_index: self.avoid_index.iter().map(|&(index, until)| (index, left(until))).collect(),
            released_s: 0,
            totals: self.totals,
            wait_ms: self.wait_ns / 1_000_000,
            ..self.arguments.clone()
        }
    }

    fn open(&mut self) {
        let now = now_ns();
        if std::mem::replace(&mut self.has_opened, true) && self.renew.is_some() {
            self.write_totals(now);
            let arguments = self.arguments(now);
            // Write the pending frames now, because the new program starts without them.
            if self.out.flush().is_ok()
                && let Some(renew) = &mut self.renew
            {
                let error = renew(&arguments);
                self.refused(now, format!("the poller cannot restart itself: {error}"), 0);
                return;
            }
        }
        let avoid = Avoid {
            indices: self
                .avoid_index
                .iter()
                .filter(|(_, until)| *until > now)
                .map(|&(index, _)| index)
                .collect(),
            events: self.arguments.no_events,
        };
        self.out.doing(Call::Library);
        let out = &mut self.out;
        match (self.open)(&avoid, &mut |index| out.doing(Call::Index(index))) {
            Ok(gpus) => {
                let mut session = Session::begin(gpus, &self.arguments.settings, &self.avoid, &mut self.out);
                if let Some(code) = session.broken() {
                    drop(session);
                    self.refused(now, code.to_string(), code.0);
                    return;
                }
                self.opened_ns = now;
                for &(name, until) in &self.avoid_lists {
                    session.skip_lists(name, until);
                }
                session.stay_until(self.avoid_index.iter().map(|&(_, until)| until).max().unwrap_or(0));
                self.tell(true, format!("nvml: {}", session.description()), 0);
                self.state = State::Open(Box::new(session));
            }
            Err((reason, code)) => self.refused(now, reason, code),
        }
    }

    /// Shuts NVML down and unloads the library.
    fn close(&mut self) {
        self.out.doing(Call::Library);
        self.state = State::Closed { retry_ns: now_ns() };
        self.out.doing(Call::Nothing);
    }

    /// Ends the skipping of devices whose time is over. Closes the library if a GPU among them must be opened first.
    fn take_back_avoided(&mut self, now: u64) {
        let count = self.avoid_index.len();
        self.avoid_index.retain(|&(_, until)| until > now);
        self.avoid.retain(|&(_, until)| until > now);
        self.avoid_lists.retain(|&(_, until)| until > now);
        if self.avoid_index.len() < count && matches!(self.state, State::Open(_)) {
            self.close();
        }
    }

    fn tell(&mut self, up: bool, reason: String, code: u32) {
        self.write_source(up, reason, (code, 0));
    }

    fn write_source(&mut self, up: bool, reason: String, (code, closed_s): (u32, u64)) {
        let said = (up, reason);
        if self.written.as_ref() != Some(&said) {
            let tag = u32::try_from(closed_s).unwrap_or(u32::MAX);
            let stamp = Stamp { time_ns: now_ns(), context: code, tag, ..Stamp::default() };
            self.out.write(stamp, Body::Source { up, reason: &said.1 });
            self.written = Some(said);
            self.is_urgent = true;
        }
    }

    fn write_released(&mut self, seconds: u64, why: &str) {
        self.write_source(false, format!("{RELEASED}{seconds} s: {why}"), (0, seconds));
    }

    /// Writes changed call totals as `Counter` records. The `tag` is the position in [`NvmlCalls::fields_mut`] plus one.
    fn write_totals(&mut self, now: u64) {
        let mut told = std::mem::replace(&mut self.written_totals, self.totals);
        for ((tag, value), told) in (1..).zip(self.totals.fields_mut()).zip(told.fields_mut()) {
            if value != told {
                let stamp = Stamp { time_ns: now, tag, ..Stamp::default() };
                self.out.write(stamp, Body::Counter { value: *value as i64 });
            }
        }
    }

    /// Executes a command of the parent. Returns whether to continue.
    fn execute(&mut self, order: Command) -> bool {
        let until = |seconds: u64| now_ns().saturating_add(seconds.saturating_mul(SECOND));
        match (order, &mut self.state) {
            (Command::Quit, _) => return false,
            (Command::List(name), State::Open(session)) => session.ask(name),
            (Command::SkipIndex(index, seconds), _) => {
                // The first pulse after that time reopens the library with this GPU.
                self.avoid_index
                    .iter_mut()
                    .filter(|(at, _)| *at == index)
                    .for_each(|at| at.1 = until(seconds));
            }
            (Command::SkipLists(name, seconds), state) => {
                self.avoid_lists.retain(|(avoided, _)| *avoided != name);
                self.avoid_lists.push((name, until(seconds)));
                if let State::Open(session) = state {
                    session.skip_lists(name, until(seconds));
                }
            }
            (Command::Skip(name, seconds), state) => {
                self.avoid.retain(|(avoided, _)| *avoided != name);
                self.avoid.push((name, until(seconds)));
                if let State::Open(session) = state {
                    session.skip(name, until(seconds));
                }
            }
            (Command::Release(seconds), _) => {
                self.close();
                self.written = None;
                self.state = State::Released { until_ns: until(seconds) };
            }
            (Command::Resume, State::Released { until_ns }) => *until_ns = 0,
            (Command::List(_) | Command::Resume, _) => {}
        }
        true
    }
}
