//! A daemon of the user's own: no root, no systemd. It stays when the command has ended, for the report, and
//! goes when nobody has used it for a while.

use super::library;
use crate::args::Detach;
use crate::client::{Daemon, private_directory, runtime};
use crate::exit;
use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A daemon is ready in 50 ms; on a machine that swaps it may take longer, but no training waits longer
/// than this for being watched.
const DEADLINE: Duration = Duration::from_secs(5);
/// Looked at so often. A try is one failed connect.
const PAUSE: Duration = Duration::from_millis(10);
/// One that takes connections has this long for its first answer, until it is tried again.
const TRY: Duration = Duration::from_millis(1000);

/// A lock that a script holds on a descriptor, or a pipe that somebody reads to its end, must not stay open
/// with the daemon. Descriptors cannot be closed by number in safe code; a shell's have one digit.
const CLOSE_AND_START: &str = "exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; exec \"$@\"";

/// Starts one and waits until it answers.
pub(crate) fn start() -> Result<Daemon, String> {
    let program = library::daemon().ok_or("gpumemd is neither beside gpumemctl nor in PATH")?;
    let directory = private_directory();
    own_directory(&directory)?;
    let log = directory.join("gpumemd.log");
    let this = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut detach = Command::new(this);
    if runtime().is_none() {
        detach.env_remove("XDG_RUNTIME_DIR"); // it would look there
    }
    let detached = detach
        .arg("detach")
        .arg("--log")
        .arg(&log)
        .arg("--")
        .arg(&program)
        .arg("--private")
        .current_dir("/")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| error.to_string())?;
    if !detached.status.success() {
        return Err(String::from_utf8_lossy(&detached.stderr)
            .trim()
            .trim_start_matches("gpumemctl: ")
            .to_owned());
    }
    let pid: Option<u32> = String::from_utf8_lossy(&detached.stdout).trim().parse().ok();
    let since = Instant::now();
    loop {
        let over = since.elapsed() > DEADLINE;
        let gone = pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists());
        // Asked after looking whether it lives: another that was started at the same time may have won.
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

/// Starts a program in a session of its own and tells its pid: no signal of the terminal reaches it, and
/// whoever waits for our children does not wait for it. A program of its own, because what has to be done
/// between fork and exec cannot be done safely in this one.
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
    // What a service manager gave is for us and not for it.
    for name in
        ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"]
    {
        command.env_remove(name);
    }
    let child = command
        .args(["-c", CLOSE_AND_START, "sh"])
        .args(&args.command)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .context("/bin/sh")?;
    Ok(child.id())
}

/// Appended to, and begun anew when it has grown.
fn open_log(path: &Path) -> std::io::Result<File> {
    const LARGEST: u64 = 1 << 20;
    let grown = std::fs::symlink_metadata(path).is_ok_and(|log| log.len() > LARGEST);
    OpenOptions::new().create(true).append(!grown).write(true).truncate(grown).mode(0o600).open(path)
}

/// A directory that nobody else can write in, made if it is missing.
fn own_directory(path: &Path) -> Result<(), String> {
    let made = DirBuilder::new().mode(0o700).create(path);
    match made {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(format!("{}: {error}", path.display()));
        }
        _ => {}
    }
    let there = std::fs::symlink_metadata(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let own =
        there.is_dir() && there.uid() == rustix::process::getuid().as_raw() && there.mode() & 0o022 == 0;
    if own { Ok(()) } else { Err(format!("{}: is not a directory of yours alone", path.display())) }
}

fn last_line(path: &Path) -> Option<String> {
    let text = std::fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&text[text.len().saturating_sub(4096)..]).into_owned();
    text.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
}
