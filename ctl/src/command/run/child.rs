//! Runs the command as a child in the process group of gpumemctl.
//!
//! In this group the command stays in the terminal's foreground. So Ctrl-C, Ctrl-Z and a hangup reach it from the kernel, and the
//! shell's job control works. Signals from the kernel are not forwarded, because they would arrive twice. Signals that a process
//! sends to gpumemctl are forwarded, unless the sender is the command or a process that it started (`kill 0` in a script). A
//! signal to the whole group (by `timeout`) arrives twice: a receiver cannot see that the group is the target, and a duplicate is
//! better than a lost signal.
//!
//! Signals that were ignored when gpumemctl started (nohup, a background job of a script) stay ignored, also for the command.

use crate::exit::{self, Kind};
use crate::proc::{Stat, status_field};
use anyhow::Result;
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
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// Signals that users and schedulers send to a training run, and that are forwarded to it.
const FORWARDED: [i32; 9] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT, SIGTSTP];

#[derive(Debug)]
pub(crate) struct End {
    pub pid: u32,
    status: ExitStatus,
}

/// Fails if the program of a command does not exist.
pub(crate) fn check_exists(command: &[OsString]) -> Result<()> {
    let Some(program) = command.first() else { return Ok(()) };
    let exists = super::environment::in_path(Path::new(program)).is_some_and(|path| path.exists());
    if exists { Ok(()) } else { Err(not_found(&escape(&program.to_string_lossy()))) }
}

fn not_found(program: &str) -> anyhow::Error {
    Kind::RunNotFound.error(format!("{program}: command not found"))
}

/// Starts the command with the variables, forwards signals to it, and waits for its end.
pub(crate) fn run(command: &[OsString], variables: &[(&'static str, OsString)]) -> Result<End> {
    let own =
        |error: io::Error| Kind::RunFailed.error(format!("cannot set the handling of signals: {error}"));
    let ignored = ignored();
    let forwarded = FORWARDED.into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
    let mut signals =
        SignalsInfo::<WithOrigin>::new(forwarded.chain([SIGCHLD]).collect::<Vec<_>>()).map_err(own)?;
    let mut child = spawn(command, variables)?;
    let pid = child.id();
    let ended = |child: &mut Child| {
        let status = child.try_wait().map_err(own)?;
        anyhow::Ok(status.map(|status| End { pid, status }))
    };
    // The child may have ended before this process could receive SIGCHLD for it.
    if let Some(end) = ended(&mut child)? {
        return Ok(end);
    }
    for origin in &mut signals {
        if origin.signal == SIGCHLD {
            if let Some(end) = ended(&mut child)? {
                return Ok(end);
            }
        } else {
            forward(&origin, pid);
        }
    }
    let status = child.wait().map_err(own)?;
    Ok(End { pid, status })
}

fn spawn(command: &[OsString], variables: &[(&'static str, OsString)]) -> Result<Child> {
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
        let name = escape(&program.to_string_lossy());
        match error.kind() {
            io::ErrorKind::NotFound => not_found(&name),
            io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory => {
                Kind::RunFailed.error(format!("{name}: cannot start a process: {error}"))
            }
            _ => Kind::RunCannotExecute.error(format!(
                "{name}: cannot execute: {error}; give a program, or make the file executable (chmod +x)"
            )),
        }
    })
}

/// Returns the signals that this process ignores, as a mask with bit 0 for signal 1. Rust adds SIGPIPE, but not for children.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    u64::from_str_radix(status_field(&status, "SigIgn"), 16).unwrap_or(0)
}

/// Forwards a signal to the child, unless the kernel or the signal's sender has sent it to the child too.
fn forward(origin: &Origin, child: u32) {
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
        by_kernel && origin.signal == SIGHUP && Stat::of_pid(own).is_some_and(|stat| stat.session == own);
    if (!by_kernel && !by_itself) || leader_alone {
        send(child, origin.signal);
    }
    if origin.signal == SIGTSTP && stops(child) {
        // The shell must see this process stop, as it would see the command stop. SIGCONT continues this process.
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

/// Returns whether the command stops after SIGTSTP, which it may also catch or ignore. Waits up to 200 ms, because a handler may
/// restore the terminal before the command stops.
fn stops(child: u32) -> bool {
    const TIMEOUT: Duration = Duration::from_millis(200);
    let since = Instant::now();
    let is_stopped = || Stat::of_pid(child).is_some_and(|stat| stat.state == 'T');
    while !is_stopped() && since.elapsed() < TIMEOUT {
        std::thread::sleep(Duration::from_millis(2));
    }
    is_stopped()
}

/// Returns whether a process is `ancestor` or descends from it, through processes that are still alive.
fn descends(pid: u32, ancestor: u32) -> bool {
    const MAX_DEPTH: usize = 64;
    let parent = |pid: &u32| Stat::of_pid(*pid).map(|stat| stat.parent).filter(|parent| *parent > 1);
    std::iter::successors(Some(pid), parent).take(MAX_DEPTH).any(|pid| pid == ancestor)
}

impl End {
    /// Returns the command's exit code. If a signal ended the command, this process ends by that signal, as its parent expects.
    pub(crate) fn finish(&self) -> u8 {
        if let Some(code) = self.status.code() {
            return u8::try_from(code & 0xff).unwrap_or(exit::RUN_FAILED);
        }
        let signal = self.status.signal().unwrap_or(0);
        // Process 1 of a container cannot end itself by a signal.
        if !getpid().is_init() {
            let no_core = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
            // The command has dumped its own core, if that is enabled; gpumemctl must not dump a second one.
            let _ = rustix::process::setrlimit(rustix::process::Resource::Core, no_core);
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
        u8::try_from(i32::from(exit::RUN_SIGNAL) + signal).unwrap_or(exit::RUN_FAILED)
    }
}
