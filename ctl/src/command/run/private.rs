//! Starts a private daemon of the user, without root and systemd. The daemon runs on after the command, for reports, and ends
//! after some idle time.

use super::environment;
use crate::args::Detach;
use crate::client::{Daemon, private_directory, runtime};
use anyhow::Context;
use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for the daemon to become ready, which usually takes 50 ms. The training run starts afterwards in any case.
const DEADLINE: Duration = Duration::from_secs(5);
/// Pause between two attempts to reach the daemon. An attempt costs one failed connect.
const PAUSE: Duration = Duration::from_millis(10);
/// Timeout for the first reply of a daemon that accepts connections. After it the next attempt begins.
const FIRST_REPLY: Duration = Duration::from_millis(1000);

/// Shell script that closes descriptors and starts a program. The daemon must not inherit a script's lock, or a pipe whose reader
/// waits for its end. Safe code cannot close descriptors by number, and a shell can for single-digit numbers.
const CLOSE_AND_START: &str = "exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; exec \"$@\"";

/// Starts a private daemon and waits until it replies. The error is the reason why it does not.
pub(crate) fn start() -> Result<Daemon, String> {
    let program = environment::daemon().ok_or("gpumemd is neither in the folder of gpumemctl nor in PATH")?;
    let directory = private_directory();
    own_directory(&directory)?;
    let log = directory.join("gpumemd.log");
    let this = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut detach = Command::new(this);
    if runtime().is_none() {
        detach.env_remove("XDG_RUNTIME_DIR"); // is not this user's directory, and the daemon would use it
    }
    detach.args(["detach", "--log"]).arg(&log).arg("--").arg(&program).arg("--private");
    let detached =
        detach.current_dir("/").stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    if !detached.status.success() {
        let why = String::from_utf8_lossy(&detached.stderr);
        return Err(why.trim().trim_start_matches("gpumemctl: ").to_owned());
    }
    let pid: Option<u32> = String::from_utf8_lossy(&detached.stdout).trim().parse().ok();
    let since = Instant::now();
    loop {
        let over = since.elapsed() > DEADLINE;
        let gone = pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists());
        // `gone` is read before this attempt: our daemon ends if another one, started at the same time, has taken the socket.
        if let Ok(daemon) = Daemon::find(None)
            && daemon.with_max_timeout(FIRST_REPLY).doctor(None).is_ok()
        {
            return Ok(daemon);
        }
        if over || gone {
            let what = if gone { "it ended at once" } else { "it has not answered for 5 s" };
            let last = last_line(&log).map(|line| format!(": {line}")).unwrap_or_default();
            return Err(format!("{}: {what}{last} (log: {})", program.display(), log.display()));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Starts a program in a new session and prints its pid. Signals of the terminal do not reach the program, and a process that
/// waits for gpumemctl's children does not wait for it. This is a command of its own, because safe code cannot run between fork
/// and exec.
pub(crate) fn detach(args: &Detach) -> anyhow::Result<()> {
    rustix::process::setsid().context("setsid")?;
    let log = open_log(&args.log).with_context(|| args.log.display().to_string())?;
    let mut command = Command::new("/bin/sh");
    // Variables that a service manager has set for gpumemctl must not reach the daemon.
    for name in
        ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"]
    {
        command.env_remove(name);
    }
    command.args(["-c", CLOSE_AND_START, "sh"]).args(&args.command);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let pid = command.spawn().context("/bin/sh")?.id();
    crate::output::print(&format!("{pid}\n"))
}

/// Opens the log to append, or truncates it if it is larger than 1 MiB.
fn open_log(path: &Path) -> std::io::Result<File> {
    const LARGEST: u64 = 1 << 20;
    let grown = std::fs::symlink_metadata(path).is_ok_and(|log| log.len() > LARGEST);
    OpenOptions::new().create(true).append(!grown).write(true).truncate(grown).mode(0o600).open(path)
}

/// Creates a directory if it is missing, and checks that only this user can write to it.
fn own_directory(path: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    let folder = std::fs::symlink_metadata(path).map_err(failed)?;
    let is_user = folder.uid() == rustix::process::getuid().as_raw();
    match folder.is_dir() && is_user && folder.mode() & 0o022 == 0 {
        true => Ok(()),
        false => Err(format!("{}: is not a directory of yours alone", path.display())),
    }
}

fn last_line(path: &Path) -> Option<String> {
    let text = std::fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&text[text.len().saturating_sub(4096)..]).into_owned();
    text.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
}
