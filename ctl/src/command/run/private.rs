//! Starts a private daemon of the user, without root and systemd. It continues after the command has ended, for reports, and ends
//! when it was idle for some time.

use super::environment;
use crate::args::Detach;
use crate::client::{Daemon, private_directory, runtime};
use crate::exit;
use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Timeout for the daemon to become ready. It usually takes 50 ms, but longer on a machine that swaps. A training run must not
/// wait longer than this.
const DEADLINE: Duration = Duration::from_secs(5);
/// Interval of polling. An attempt costs one failed connect.
const PAUSE: Duration = Duration::from_millis(10);
/// Timeout for its first reply after it accepts connections, before the next attempt.
const TRY: Duration = Duration::from_millis(1000);

/// The daemon must not inherit open descriptors, such as a lock of a script or a pipe whose reader waits for its end. Safe code
/// cannot close descriptors by number, so a shell does it, for single-digit numbers.
const CLOSE_AND_START: &str = "exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; exec \"$@\"";

pub(crate) fn start() -> Result<Daemon, String> {
    let program = environment::daemon().ok_or("gpumemd is neither beside gpumemctl nor in PATH")?;
    let directory = private_directory();
    own_directory(&directory)?;
    let log = directory.join("gpumemd.log");
    let this = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut detach = Command::new(this);
    if runtime().is_none() {
        detach.env_remove("XDG_RUNTIME_DIR"); // the daemon would use it
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
        // The check for its process comes first, because another daemon that was started at the same time may have won.
        if let Ok(daemon) = Daemon::find(None)
            && daemon.hurried(TRY).doctor(None).is_ok()
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

/// Starts a program in its own session and prints its pid. Terminal signals do not reach it, and a process that waits for our
/// children does not wait for it. This is a separate process, because the steps between fork and exec are not possible in safe
/// code.
pub(crate) fn detach(args: &Detach) -> u8 {
    match try_detach(args) {
        Ok(pid) => crate::output::print(&format!("{pid}\n")).map_or(exit::FAILURE, |()| exit::OK),
        Err(error) => crate::output::complain(&error),
    }
}

fn try_detach(args: &Detach) -> anyhow::Result<u32> {
    use anyhow::Context;
    rustix::process::setsid().context("setsid")?;
    let log = open_log(&args.log).with_context(|| args.log.display().to_string())?;
    let mut command = Command::new("/bin/sh");
    // A service manager's variables are meant for this process only.
    for name in
        ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"]
    {
        command.env_remove(name);
    }
    command.args(["-c", CLOSE_AND_START, "sh"]).args(&args.command);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    Ok(command.spawn().context("/bin/sh")?.id())
}

/// Opens the log to append, or truncates it if it is larger than 1 MiB.
fn open_log(path: &Path) -> std::io::Result<File> {
    const LARGEST: u64 = 1 << 20;
    let grown = std::fs::symlink_metadata(path).is_ok_and(|log| log.len() > LARGEST);
    OpenOptions::new().create(true).append(!grown).write(true).truncate(grown).mode(0o600).open(path)
}

/// Creates a directory if it is missing, and checks that only the user can write to it.
fn own_directory(path: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    let there = std::fs::symlink_metadata(path).map_err(failed)?;
    let own =
        there.is_dir() && there.uid() == rustix::process::getuid().as_raw() && there.mode() & 0o022 == 0;
    if own { Ok(()) } else { Err(format!("{}: is not a directory of yours alone", path.display())) }
}

fn last_line(path: &Path) -> Option<String> {
    let text = std::fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&text[text.len().saturating_sub(4096)..]).into_owned();
    text.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
}
