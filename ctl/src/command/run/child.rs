//! The command as a child in our own process group.
//!
//! In the same group it stays in the terminal's foreground: Ctrl-C, Ctrl-Z and a hangup reach it from the
//! kernel, as they would without us, and its shell's job control goes on working. So what the kernel sends
//! is not forwarded; it would arrive twice. What a process sends to us is, unless the command or something
//! that it started sent it (`kill 0` in a script). A signal that somebody sends to the whole group at once
//! (`timeout`) does arrive twice: that it was sent to the group cannot be seen, and one too many is better
//! than none.
//!
//! What was ignored when we started (nohup, a background job of a script) stays ignored, for it too.

use crate::exit;
use gpumem_report::text::clean;
use rustix::process::{Pid, Signal, getpid, kill_process};
use signal_hook::consts::{
    SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH,
};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::iterator::exfiltrator::origin::Origin;
use signal_hook::low_level::siginfo::{Cause, Sent};
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// What people and schedulers send to a training run.
const PASSED_ON: [i32; 9] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT, SIGTSTP];

/// How the command ended.
#[derive(Debug)]
pub(crate) struct End {
    /// Its pid.
    pub pid: u32,
    status: ExitStatus,
}

/// Why it was not run.
#[derive(Debug)]
pub(crate) struct Failure {
    /// To exit with.
    pub code: u8,
    /// What to say.
    pub text: String,
}

impl Failure {
    /// Says it, whatever else is not to be said.
    pub(crate) fn told(&self) -> u8 {
        let _ = writeln!(io::stderr(), "gpumemctl: {}", clean(&self.text));
        self.code
    }
}

/// Why the command cannot be there, without trying it.
pub(crate) fn not_found(command: &[OsString]) -> Option<Failure> {
    let program = command.first()?;
    let there = super::library::in_path(Path::new(program)).is_some_and(|path| path.exists());
    (!there).then(|| missing(program))
}

fn missing(program: &OsString) -> Failure {
    Failure { code: exit::RUN_NOT_FOUND, text: format!("{}: command not found", program.to_string_lossy()) }
}

/// Runs the command to its end.
pub(crate) fn run(command: &[OsString], variables: &[(&'static str, OsString)]) -> Result<End, Failure> {
    let own = |error: io::Error| Failure { code: exit::RUN_OWN, text: format!("signals: {error}") };
    let ignored = ignored();
    let passed_on = PASSED_ON.into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
    let mut signals =
        SignalsInfo::<WithOrigin>::new(passed_on.chain([SIGCHLD]).collect::<Vec<_>>()).map_err(own)?;
    let mut child = spawn(command, variables)?;
    let pid = child.id();
    let ended = |child: &mut Child| {
        let status = child.try_wait().map_err(own)?;
        Ok(status.map(|status| End { pid, status }))
    };
    // It may have ended before anybody listened.
    if let Some(end) = ended(&mut child)? {
        return Ok(end);
    }
    for origin in &mut signals {
        if origin.signal == SIGCHLD {
            if let Some(end) = ended(&mut child)? {
                return Ok(end);
            }
        } else {
            pass_on(&origin, pid);
        }
    }
    let status = child.wait().map_err(own)?;
    Ok(End { pid, status })
}

fn spawn(command: &[OsString], variables: &[(&'static str, OsString)]) -> Result<Child, Failure> {
    const NO_EXEC_FORMAT: i32 = 8; // ENOEXEC
    let program = command.first().cloned().unwrap_or_default();
    let start = |program: &OsString, before: &[OsString]| {
        let arguments = command.get(1..).unwrap_or_default();
        let variables = variables.iter().map(|(name, value)| (name, value));
        Command::new(program).args(before).args(arguments).envs(variables).spawn()
    };
    let mut child = start(&program, &[]);
    // A script without #! is the shell's, as execvp(3) has it.
    if child.as_ref().is_err_and(|error| error.raw_os_error() == Some(NO_EXEC_FORMAT))
        && let Some(script) = super::library::in_path(Path::new(&program))
    {
        child = start(&"/bin/sh".into(), &[script.into()]);
    }
    child.map_err(|error| {
        let name = program.to_string_lossy();
        match error.kind() {
            io::ErrorKind::NotFound => missing(&program),
            io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory => {
                Failure { code: exit::RUN_OWN, text: format!("{name}: cannot start a process: {error}") }
            }
            _ => Failure { code: exit::RUN_CANNOT_EXECUTE, text: format!("{name}: cannot execute: {error}") },
        }
    })
}

/// Signals that were ignored when we started, bit 0 for signal 1. Rust has SIGPIPE ignored and gives it
/// back to children.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

fn pass_on(origin: &Origin, child: u32) {
    let by_kernel = origin.cause == Cause::Kernel;
    let by_itself = match (origin.cause, origin.process) {
        (Cause::Sent(Sent::User | Sent::TKill | Sent::Queue), Some(process)) => {
            u32::try_from(process.pid).is_ok_and(|pid| descends(pid, child))
        }
        _ => false,
    };
    // On a hangup the kernel tells the session's leader alone, and the others when that one ends.
    let own = std::process::id();
    let leader_alone =
        by_kernel && origin.signal == SIGHUP && stat(own).is_some_and(|stat| stat.session == own);
    if (!by_kernel && !by_itself) || leader_alone {
        send(child, origin.signal);
    }
    if origin.signal == SIGTSTP && stops(child) {
        // The shell sees us stop, as it would see the command. Goes on when SIGCONT arrives.
        let _ = signal_hook::low_level::raise(signal_hook::consts::SIGSTOP);
    }
}

fn send(child: u32, signal: i32) {
    let pid = i32::try_from(child).ok().and_then(Pid::from_raw);
    if let (Some(pid), Some(signal)) = (pid, Signal::from_named_raw(signal)) {
        // It has not been waited for: the number is its own, if only as a zombie's.
        let _ = kill_process(pid, signal);
    }
}

/// Whether the command stops, now that it was told to; it may catch the signal, or ignore it, and then we
/// stay with it. A handler that puts the terminal in order first needs a moment.
fn stops(child: u32) -> bool {
    const MOMENT: Duration = Duration::from_millis(200);
    let since = Instant::now();
    loop {
        if stat(child).is_some_and(|stat| stat.state == 'T') {
            return true;
        }
        if since.elapsed() > MOMENT {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether a process is another or was started by it, by way of processes that live.
fn descends(pid: u32, from: u32) -> bool {
    const DEEPEST: usize = 64;
    let mut pid = pid;
    for _ in 0..DEEPEST {
        if pid == from {
            return true;
        }
        match stat(pid) {
            Some(stat) if stat.parent > 1 => pid = stat.parent,
            _ => return false,
        }
    }
    false
}

/// What of /proc/PID/stat is needed here.
struct Stat {
    state: char,
    parent: u32,
    /// 0: it began outside this PID namespace.
    session: u32,
}

fn stat(pid: u32) -> Option<Stat> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name between the brackets may hold anything, brackets too.
    let text = String::from_utf8_lossy(&text);
    let mut fields = text.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?.chars().next()?;
    let parent = fields.next()?.parse().ok()?;
    Some(Stat { state, parent, session: fields.nth(1)?.parse().ok()? })
}

impl End {
    /// Ends this process as the command ended: with its code, or by the same signal, so that whoever waits
    /// for us sees what they would have seen.
    pub(crate) fn finish(&self) -> u8 {
        if let Some(code) = self.status.code() {
            return u8::try_from(code & 0xff).unwrap_or(exit::RUN_OWN);
        }
        let signal = self.status.signal().unwrap_or(0);
        // Process 1 of a container cannot be ended by a signal of its own.
        if !getpid().is_init() {
            let no_core = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
            // The command has dumped its core, if it was to.
            let _ = rustix::process::setrlimit(rustix::process::Resource::Core, no_core);
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
        u8::try_from(i32::from(exit::RUN_SIGNAL) + signal).unwrap_or(exit::RUN_OWN)
    }
}
