//! The only process that opens NVML: `gpumemd nvml-poller`. It has one thread, reads commands from standard input, writes frames
//! to standard output, and ends with its parent.
//!
//! A process that has loaded a driver's library never loads another one, because some libraries cannot be unloaded and the
//! loader remembers missing files. So the poller executes itself again (exec) to reopen the library after a release, a lost
//! driver or a changed partition. Its pid stays the same.
//!
//! Frames are those of recordings, with private uses of some records. A `ProcessFacts` of thread 0 has facts of a device or of
//! the driver. A `Counter` has a total of calls, or a health event if its stamp has a device. The `context` of a `Source` is
//! NVML's code; its `tag` is the number of seconds for which NVML stays closed. The `context` of a `SampleEnd` is the time
//! spent in list calls (ns).

#[cfg(test)]
mod tests;

use super::answer::List;
use super::call_state::{Call, CallStateWriter};
use super::library::{Gpus, Library};
use super::protocol::{Arguments, Command, FLUSH_NS, FrameWriter, SECOND, Target, Uuid};
use super::session::{Next, Session};
use crate::clock::now_ns;
use crate::nvml_status::NvmlCalls;
use crate::os::unmap_code;
use gpumem_wire::{Body, Stamp};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::ExitCode;

/// First interval before the library is opened again after a failure (ns); doubled each time.
const RETRY_NS: u64 = SECOND;
/// Maximum interval before the library is opened again (ns).
const MAX_RETRY_NS: u64 = 30 * SECOND;
/// Time after which an opened library counts as working, so that the retry interval starts small again (ns).
const STABLE_NS: u64 = 10 * SECOND;
/// Time in which a poller normally opens the library and reads all lists once (ns).
const START_NS: u64 = 5 * SECOND;
/// Maximum number of actions before frames are written and commands are read.
const MAX_ACTIONS: u32 = 64;
/// Time for which NVML stays closed while a GPU is being unbound from the driver, in seconds. Guides suggest the same time for
/// `gpumemctl nvml release`.
const UNBIND_S: u64 = 60;
/// Maximum sleep in ns. The poller writes changed totals at least this often, so that the parent sees that it works.
const PULSE_NS: u64 = SECOND;
/// The totals are written early, by up to this time (ns), when the poller is awake anyway.
const PULSE_EARLY_NS: u64 = SECOND / 4;

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

    /// Returns the commands in the lines that these bytes complete.
    fn take(&mut self, bytes: &[u8]) -> Vec<Command> {
        self.pending.extend_from_slice(bytes);
        let Some(end) = self.pending.iter().rposition(|&byte| byte == b'\n') else {
            self.pending.truncate(4096); // no command is that long
            return Vec::new();
        };
        let lines: Vec<u8> = self.pending.drain(..=end).collect();
        lines.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
    }
}

enum LibraryState {
    /// NVML is closed because opening it failed or must be repeated. It is opened at `retry_ns`.
    Closed {
        retry_ns: u64,
    },
    /// NVML is closed on request until `until_ns`, or while a GPU is being unbound from the driver.
    Released {
        until_ns: u64,
    },
    Open(Box<Session>),
}

/// Executes this program again with other arguments. Returns only if that has failed.
type Exec = dyn FnMut(&Arguments) -> io::Error;
/// Opens a library, see [`Library::open`].
type OpenLibrary = dyn FnMut(&Arguments, &mut dyn FnMut(u16)) -> Result<Box<dyn Gpus>, (String, u32)>;

struct Poller {
    /// Arguments of the process. Their `skip` follows the parent's commands.
    arguments: Arguments,
    open: Box<OpenLibrary>,
    /// `None` in tests, where a library may be opened twice.
    exec: Option<Box<Exec>>,
    /// Whether this process has tried to open a library.
    has_opened: bool,
    /// Time at which the current library was opened (ns).
    opened_ns: u64,
    /// Last interval between attempts to open the library (ns).
    wait_ns: u64,
    state: LibraryState,
    out: FrameWriter,
    written_totals: NvmlCalls,
    /// State of the NVML source as last written: whether it is up, and the reason.
    written: Option<(bool, String)>,
    /// Time at which frames were last written to the parent (ns).
    flushed_ns: u64,
    /// Time at which the totals are written next (ns).
    pulse_ns: u64,
    /// Whether pending frames must be written without delay.
    is_urgent: bool,
    /// Time at which code that only the start needed is unmapped (ns); `None`: it was.
    unmap_ns: Option<u64>,
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
    let open = |arguments: &Arguments, enter: &mut dyn FnMut(u16)| {
        Library::open(arguments, enter).map(|library| Box::new(library) as Box<dyn Gpus>)
    };
    // A copy of standard output without the standard library's buffer, which would split frames at newlines.
    let Ok(stdout) = io::stdout().as_fd().try_clone_to_owned() else { return ExitCode::FAILURE };
    let out = FrameWriter::new(Box::new(File::from(stdout)), call_state);
    let mut poller = Poller::new(arguments, Box::new(open), out);
    poller.exec = Some(Box::new(|arguments| {
        // The new program inherits the descriptors of this one.
        let mut command = std::process::Command::new("/proc/self/exe");
        command.arg0("gpumemd").args(arguments.to_args()).exec()
    }));
    let mut reader = CommandReader::default();
    while let Ok(until) = poller.step()
        && let Ok(commands) = reader.wait(until)
    {
        if !commands.into_iter().all(|command| poller.execute(command)) {
            break;
        }
    }
    poller.close();
    ExitCode::SUCCESS
}

/// Tries the calls of one hung device, and publishes which call is running. Succeeds if all calls return, whatever their
/// results.
fn probe(arguments: &Arguments, target: Target, mut call_state: Option<CallStateWriter>) -> ExitCode {
    let mut set_call = |call| {
        if let Some(call_state) = &mut call_state {
            call_state.set(call);
        }
    };
    set_call(Call::Library);
    let Ok(mut library) = Library::open(arguments, &mut |index| set_call(Call::Index(index))) else {
        return ExitCode::FAILURE;
    };
    for place in 0..library.inventory().devices.len() {
        let device = &library.inventory().devices[place];
        if target.name.map_or(device.index == target.index, |Uuid(name)| device.name == name) {
            set_call(Call::Device(place as u8));
            let _ = library.memory(place);
            set_call(Call::Lists(place as u8));
            for list in List::ALL {
                let _ = library.list(place, list, &mut Vec::new());
            }
        }
    }
    set_call(Call::Library);
    ExitCode::SUCCESS
}

impl Poller {
    fn new(arguments: Arguments, open: Box<OpenLibrary>, mut out: FrameWriter) -> Poller {
        let (now, released_s) = (now_ns(), arguments.released_s);
        out.totals = arguments.totals;
        let mut poller = Poller {
            open,
            exec: None,
            has_opened: false,
            opened_ns: now,
            wait_ns: arguments.wait_ms.saturating_mul(1_000_000),
            state: LibraryState::Closed { retry_ns: now },
            out,
            written_totals: arguments.totals,
            written: None,
            flushed_ns: 0,
            pulse_ns: now,
            is_urgent: false,
            unmap_ns: Some(now + START_NS),
            arguments,
        };
        if released_s > 0 {
            poller.release(released_s, "on request");
        }
        poller
    }

    /// Does all actions that are due and writes the frames. Returns the time of the next action.
    fn step(&mut self) -> io::Result<u64> {
        let mut wait = self.act()?;
        // Write the results of actions due together at once. Their number is limited, because the parent may be waiting.
        for _ in 0..MAX_ACTIONS {
            if wait > now_ns() {
                break;
            }
            wait = self.act()?;
        }
        wait = wait.min(self.pulse_ns);
        let now = now_ns();
        if wait > now {
            self.out.sleep_until(wait);
        }
        if self.is_urgent || wait > self.flushed_ns.saturating_add(FLUSH_NS) {
            self.out.flush()?;
            (self.flushed_ns, self.is_urgent) = (now, false);
        }
        Ok(wait)
    }

    /// Does the next action. Returns the time of the one after it (ns).
    fn act(&mut self) -> io::Result<u64> {
        let now = now_ns();
        if now.saturating_add(PULSE_EARLY_NS) >= self.pulse_ns {
            self.pulse_ns = now + PULSE_NS;
            self.write_totals(now);
            self.is_urgent = true;
            if self.unmap_ns.take_if(|time_ns| *time_ns <= now).is_some() {
                unmap_code();
            }
        }
        match &mut self.state {
            LibraryState::Closed { retry_ns: until } | LibraryState::Released { until_ns: until }
                if *until > now =>
            {
                Ok(*until)
            }
            LibraryState::Closed { .. } | LibraryState::Released { .. } => {
                self.open();
                Ok(now)
            }
            LibraryState::Open(session) => {
                let before = (self.out.totals.list_calls, self.out.totals.failed_calls);
                let next = session.act(&mut self.out)?;
                self.is_urgent |= before != (self.out.totals.list_calls, self.out.totals.failed_calls);
                match next {
                    Next::Again => return Ok(now),
                    Next::Wait(until) => return Ok(until),
                    Next::Release(gpu) => {
                        let why = format!("the driver is being unbound from GPU {gpu:#x}");
                        self.release(UNBIND_S, &why);
                    }
                    Next::Reopen(None) => self.close(),
                    Next::Reopen(Some(code)) => {
                        self.close();
                        if now.saturating_sub(self.opened_ns) >= STABLE_NS {
                            self.wait_ns = 0;
                        }
                        self.retry_later(now, &code.to_string(), code.0);
                    }
                }
                Ok(now)
            }
        }
    }

    /// Reports that the library is unusable now, and schedules a retry, after a longer interval each time.
    fn retry_later(&mut self, now: u64, reason: &str, code: u32) {
        self.write_source(false, format!("nvml: {reason}"), code, 0);
        self.wait_ns = self.wait_ns.saturating_mul(2).clamp(RETRY_NS, MAX_RETRY_NS);
        self.state = LibraryState::Closed { retry_ns: now.saturating_add(self.wait_ns) };
    }

    /// Opens the library. If this process has opened one before, executes the program again instead.
    fn open(&mut self) {
        let now = now_ns();
        if std::mem::replace(&mut self.has_opened, true) && self.exec.is_some() {
            self.write_totals(now);
            let (totals, wait_ms) = (self.out.totals, self.wait_ns / 1_000_000);
            let arguments = Arguments { released_s: 0, totals, wait_ms, ..self.arguments.clone() };
            // Write the pending frames now, because the new program starts without them.
            if self.out.flush().is_ok()
                && let Some(exec) = &mut self.exec
            {
                let error = exec(&arguments);
                self.retry_later(now, &format!("the poller cannot restart itself: {error}"), 0);
                return;
            }
        }
        let out = &mut self.out;
        out.set_call(Call::Library);
        match (self.open)(&self.arguments, &mut |index| out.set_call(Call::Index(index))) {
            Ok(gpus) => {
                let session = Session::begin(gpus, &self.arguments, out);
                if let Some(code) = session.broken {
                    drop(session);
                    return self.retry_later(now, &code.to_string(), code.0);
                }
                self.opened_ns = now;
                self.write_source(true, format!("nvml: {}", session.description()), 0, 0);
                self.state = LibraryState::Open(Box::new(session));
            }
            Err((reason, code)) => self.retry_later(now, &reason, code),
        }
    }

    /// Shuts NVML down and unloads the library.
    fn close(&mut self) {
        self.out.set_call(Call::Library);
        self.state = LibraryState::Closed { retry_ns: now_ns() };
        self.out.set_call(Call::Nothing);
    }

    /// Writes the state of the NVML source if it has changed. `code` is NVML's error code, or 0. `closed_s` is the number of
    /// seconds for which NVML stays closed, or 0.
    fn write_source(&mut self, up: bool, reason: String, code: u32, closed_s: u64) {
        let source = (up, reason);
        if self.written.as_ref() != Some(&source) {
            let tag = u32::try_from(closed_s).unwrap_or(u32::MAX);
            let stamp = Stamp { time_ns: now_ns(), context: code, tag, ..Stamp::default() };
            self.out.write(stamp, Body::Source { up, reason: &source.1 });
            self.written = Some(source);
            self.is_urgent = true;
        }
    }

    /// Closes NVML for a number of seconds, and writes that.
    fn release(&mut self, seconds: u64, why: &str) {
        self.close();
        self.state = LibraryState::Released { until_ns: after(now_ns(), seconds) };
        self.written = None;
        self.write_source(false, format!("nvml: released for {seconds} s: {why}"), 0, seconds);
    }

    /// Writes changed call totals as `Counter` records. The `tag` is the position in [`NvmlCalls::fields_mut`] plus one.
    fn write_totals(&mut self, now: u64) {
        let mut totals = self.out.totals;
        let mut written = std::mem::replace(&mut self.written_totals, totals);
        for ((tag, total), written) in (1..).zip(totals.fields_mut()).zip(written.fields_mut()) {
            if total != written {
                let stamp = Stamp { time_ns: now, tag, ..Stamp::default() };
                self.out.write(stamp, Body::Counter { value: *total as i64 });
            }
        }
    }

    /// Executes a command of the parent. Returns whether to continue.
    fn execute(&mut self, command: Command) -> bool {
        match (command, &mut self.state) {
            (Command::Quit, _) => return false,
            (Command::List(Uuid(name)), LibraryState::Open(session)) => session.request(name),
            (Command::Skip(uuid, skip), state) => {
                self.arguments.skip.retain(|(skipped, _)| *skipped != uuid);
                self.arguments.skip.push((uuid, skip));
                if let LibraryState::Open(session) = state {
                    session.set_skip(uuid.0, skip);
                }
            }
            (Command::Release(seconds), _) => self.release(seconds, "on request"),
            (Command::Resume, LibraryState::Released { until_ns }) => *until_ns = 0,
            (Command::List(_) | Command::Resume, _) => {}
        }
        true
    }
}

/// Returns the time (ns) this number of seconds after `now`.
fn after(now: u64, seconds: u64) -> u64 {
    now.saturating_add(seconds.saturating_mul(SECOND))
}
