//! Runs the command as a child in our own process group.
//!
//! In the same group it stays in the terminal's foreground. So Ctrl-C, Ctrl-Z and a hangup reach it from the kernel, and its
//! shell's job control works. Therefore signals from the kernel are not forwarded, because they would arrive twice. Signals that
//! a process sends to us are forwarded, unless the sender is the command or a process that it started (`kill 0` in a script). A
//! signal that is sent to the whole group (by `timeout`) arrives twice: the receiver cannot see that it went to the group, and a
//! duplicate is better than a lost signal.
//!
//! Signals that were ignored at our start (nohup, a background job of a script) stay ignored, also for the command.

use crate::exit;
use gpumem_report::text::escape;
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

/// Signals that users and schedulers send to a training run.
const PASSED_ON: [i32; 9] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT, SIGTSTP];

#[derive(Debug)]
pub(crate) struct End {
    pub pid: u32,
    status: ExitStatus,
}

#[derive(Debug)]
pub(crate) struct Failure {
    pub code: u8,
    pub text: String,
}

impl Failure {
    /// Prints the message even with `--quiet`, and returns the exit code.
    pub(crate) fn print(&self) -> u8 {
        let _ = writeln!(io::stderr(), "gpumemctl: {}", escape(&self.text));
        self.code
    }
}

/// Returns the failure if the command cannot be found, without running it.
pub(crate) fn not_found(command: &[OsString]) -> Option<Failure> {
    let program = command.first()?;
    let there = super::environment::in_path(Path::new(program)).is_some_and(|path| path.exists());
    (!there).then(|| missing(program))
}

fn missing(program: &OsString) -> Failure {
    Failure { code: exit::RUN_NOT_FOUND, text: format!("{}: command not found", program.to_string_lossy()) }
}

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
    // It may have ended before the signal handlers saw it.
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
    // A script without #! is run by the shell, as execvp(3) does.
    if child.as_ref().is_err_and(|error| error.raw_os_error() == Some(NO_EXEC_FORMAT))
        && let Some(script) = super::environment::in_path(Path::new(&program))
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

/// Returns the signals that were ignored at our start, as a mask with bit 0 for signal 1. Rust ignores SIGPIPE, and restores it
/// for children.
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
    // On a hangup the kernel signals only the session's leader at first, and the others when the leader ends.
    let own = std::process::id();
    let leader_alone =
        by_kernel && origin.signal == SIGHUP && stat(own).is_some_and(|stat| stat.session == own);
    if (!by_kernel && !by_itself) || leader_alone {
        send(child, origin.signal);
    }
    if origin.signal == SIGTSTP && stops(child) {
        // The shell sees us stop as it would see the command stop. Execution continues with SIGCONT.
        let _ = signal_hook::low_level::raise(signal_hook::consts::SIGSTOP);
    }
}

fn send(child: u32, signal: i32) {
    let pid = i32::try_from(child).ok().and_then(Pid::from_raw);
    if let (Some(pid), Some(signal)) = (pid, Signal::from_named_raw(signal)) {
        // The child has not been waited for, so its pid cannot have been reused.
        let _ = kill_process(pid, signal);
    }
}

/// Returns whether the command stops after SIGTSTP. It may catch or ignore the signal; then we keep running too. A handler that
/// restores the terminal first needs a moment.
fn stops(child: u32) -> bool {
    const MOMENT: Duration = Duration::from_millis(200);
    let since = Instant::now();
    let is_stopped = || stat(child).is_some_and(|stat| stat.state == 'T');
    while !is_stopped() && since.elapsed() < MOMENT {
        std::thread::sleep(Duration::from_millis(2));
    }
    is_stopped()
}

/// Returns whether a process is `from` or was started by it, through processes that are still alive.
fn descends(pid: u32, from: u32) -> bool {
    const DEEPEST: usize = 64;
    let parent = |pid: &u32| stat(*pid).map(|stat| stat.parent).filter(|parent| *parent > 1);
    std::iter::successors(Some(pid), parent).take(DEEPEST).any(|pid| pid == from)
}

pub(super) struct Stat {
    state: char,
    parent: u32,
    /// 0 if it began outside this PID namespace.
    session: u32,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
}

pub(super) fn stat(pid: u32) -> Option<Stat> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain any character, including parentheses.
    let text = String::from_utf8_lossy(&text);
    let mut fields = text.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?.chars().next()?;
    let parent = fields.next()?.parse().ok()?;
    let session = fields.nth(1)?.parse().ok()?;
    Some(Stat { state, parent, session, start_ticks: fields.nth(15)?.parse().ok()? })
}

impl End {
    /// Ends this process like the command: with its exit code, or by the same signal. So a waiting process sees the same result.
    pub(crate) fn finish(&self) -> u8 {
        if let Some(code) = self.status.code() {
            return u8::try_from(code & 0xff).unwrap_or(exit::RUN_OWN);
        }
        let signal = self.status.signal().unwrap_or(0);
        // Process 1 of a container cannot end itself by a signal.
        if !getpid().is_init() {
            let no_core = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
            // The command has already dumped its core, if enabled.
            let _ = rustix::process::setrlimit(rustix::process::Resource::Core, no_core);
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
        u8::try_from(i32::from(exit::RUN_SIGNAL) + signal).unwrap_or(exit::RUN_OWN)
    }
}
