//! What the program, or the daemon in somebody's name, wants of the agent: what to record, and where to. The sender does it; who asked waits
//! for what becomes of it, for a moment. Nothing here is for hooks: it locks and allocates.
//!
//! ```text
//! configure   keys and values
//! post        a wish to the sender, and its answer
//! create      a file for a recording: never one that is there already
//! ```
//!
//! **Muting** is not pausing. While the agent is muted it goes on watching and keeps its balances, but tells nobody; afterwards
//! it says how much it did not tell, and its state anew. While it is paused (sources/cupti/subscribe.rs) it sees nothing.

use crate::base::locks::ForkMutex;
use crate::base::own_thread;
use crate::base::own_thread::Uncancelled;
use crate::driver::core::Core;
use crate::record::recorder;
use crate::sender;
use crate::sources::api::window::Limits;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use std::sync::{Condvar, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// Names of recordings that nobody named.
const USUAL: &str = "gpumem-%h-%r%p-%n.gpumem";
/// A wish is waited for that long.
const PATIENCE: Duration = Duration::from_secs(5);
/// A lock that somebody holds for longer was held by a thread that is not there any more: this is a forked child.
const LOCKED: Duration = Duration::from_millis(500);
/// Names that are tried before a recording gives up.
const NAMES: u32 = 10_000;
/// Least time between two dumps by themselves.
const LEAST_PERIOD_S: f64 = 0.1;

/// How often `mute` was called without `unmute`.
static MUTES: AtomicU32 = AtomicU32::new(0);
/// Memory events are switched off by `configure`.
static MEMORY_OFF: AtomicU32 = AtomicU32::new(0);
/// Between dumps by themselves; 0: none.
static DUMP_PERIOD_NS: AtomicU64 = AtomicU64::new(0);

/// To be done by the sender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    /// Write a recording to a file of this name, empty for a usual one.
    Start(String, Limits),
    /// A step begins that a window waits for.
    Step(u64),
    /// No longer.
    Stop,
    /// See [`is_muted`] and act.
    Mute,
    /// Write the state to a file of this name; empty: to the recording that goes on, or to one of a usual name.
    Dump {
        /// The name.
        path: String,
        /// End the recording that goes on with it.
        finished: bool,
    },
}

/// What became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// 0 or an errno.
    pub errno: u16,
    /// The file, or what is wrong.
    pub told: String,
}

impl Outcome {
    /// It is done; the file, where there is one.
    pub fn done(path: &Path) -> Self {
        Outcome { errno: 0, told: path.to_string_lossy().into_owned() }
    }

    /// It could not be done.
    pub fn failed(path: &Path, error: &std::io::Error) -> Self {
        let errno = error.raw_os_error().and_then(|errno| u16::try_from(errno).ok()).unwrap_or(5);
        Outcome { errno, told: format!("{}: {error}", path.display()) }
    }
}

#[derive(Debug)]
struct Desk {
    last: u64,
    wishes: Vec<(u64, Wish)>,
    outcomes: Vec<(u64, Outcome)>,
    record_file: String,
    dump_file: String,
    limits: Limits,
}

static DESK: ForkMutex<Desk> = ForkMutex::new(|| Desk {
    last: 0,
    wishes: Vec::new(),
    outcomes: Vec::new(),
    record_file: String::new(),
    dump_file: String::new(),
    limits: Limits { steps: None, for_ns: None, max_bytes: None },
});
static DONE: Condvar = Condvar::new();

/// In a child that starts anew.
pub fn renew() {
    DESK.reset_after_fork();
}

fn desk() -> Option<MutexGuard<'static, Desk>> {
    let _uncancelled = Uncancelled::now();
    let start = Instant::now();
    loop {
        match DESK.try_lock() {
            Ok(desk) => return Some(desk),
            Err(TryLockError::Poisoned(desk)) => return Some(desk.into_inner()),
            Err(TryLockError::WouldBlock) if start.elapsed() > LOCKED => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(100)),
        }
    }
}

/// Whether history is kept back.
pub fn is_muted() -> bool {
    MUTES.load(Acquire) > 0 || MEMORY_OFF.load(Acquire) > 0
}

/// How often a dump is wanted; 0: not.
pub fn dump_period_ns() -> u64 {
    DUMP_PERIOD_NS.load(Relaxed)
}

/// Where dumps by themselves go.
pub fn dump_file() -> String {
    desk().map(|desk| desk.dump_file.clone()).unwrap_or_default()
}

fn switch(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" | "on" | "yes" => Some(true),
        "0" | "false" | "off" | "no" => Some(false),
        _ => None,
    }
}

/// Sets a key; false if there is no such key or the value is none for it.
pub fn configure(core: &'static Core, key: &str, value: &str) -> bool {
    let class = match key {
        "marks" => recorder::MARKS,
        "ranges" => recorder::RANGES,
        "api" => recorder::API,
        "memory" => {
            let Some(on) = switch(value) else { return false };
            let off = u32::from(!on);
            return MEMORY_OFF.swap(off, AcqRel) == off || post(core, Wish::Mute).errno == 0;
        }
        "record_file" | "dump_file" => {
            let Some(mut desk) = desk() else { return false };
            let place = if key == "record_file" { &mut desk.record_file } else { &mut desk.dump_file };
            value.clone_into(place);
            return !value.contains('\0');
        }
        "record_steps" | "record_for" | "record_max_size" => {
            let Some(mut desk) = desk() else { return false };
            return desk.limits.set(key.trim_start_matches("record_"), value);
        }
        "dump_period" => {
            let seconds =
                value.parse::<f64>().ok().filter(|seconds| *seconds == 0.0 || *seconds >= LEAST_PERIOD_S);
            let Some(seconds) = seconds.filter(|seconds| *seconds <= 1e6) else { return false };
            DUMP_PERIOD_NS.store((seconds * 1e9) as u64, Relaxed);
            sender::start(core);
            return true;
        }
        _ => return false,
    };
    let is_on = switch(value);
    if let Some(is_on) = is_on {
        recorder::set_recorded(class, is_on);
    }
    is_on.is_some()
}

/// Begins a recording where `configure` said.
pub fn start(core: &'static Core) -> bool {
    let wish = desk().map(|desk| Wish::Start(desk.record_file.clone(), desk.limits));
    wish.is_some_and(|wish| post(core, wish).errno == 0)
}

/// History is kept back from now on; calls nest.
pub fn mute(core: &'static Core) {
    if MUTES.fetch_add(1, AcqRel) == 0 {
        post(core, Wish::Mute);
    }
}

/// It is told again.
pub fn unmute(core: &'static Core) {
    let less = MUTES.fetch_update(AcqRel, Acquire, |mutes| mutes.checked_sub(1));
    if less == Ok(1) {
        post(core, Wish::Mute);
    }
}

/// Has the sender do it; what became of it.
pub fn post(core: &'static Core, wish: Wish) -> Outcome {
    post_within(core, wish, PATIENCE)
}

/// The same, waiting no longer than so.
pub fn post_within(core: &'static Core, wish: Wish, patience: Duration) -> Outcome {
    let _uncancelled = Uncancelled::now();
    sender::start(core);
    let late = || Outcome { errno: libc::ETIMEDOUT as u16, told: "the agent's thread is busy".to_owned() };
    let Some(mut desk) = desk() else { return late() };
    desk.last += 1;
    let number = desk.last;
    desk.wishes.push((number, wish));
    drop(desk);
    crate::base::wake::wake();
    let start = Instant::now();
    let Some(mut desk) = self::desk() else { return late() };
    loop {
        if let Some(at) = desk.outcomes.iter().position(|(known, _)| *known == number) {
            return desk.outcomes.swap_remove(at).1;
        }
        let Some(left) = patience.checked_sub(start.elapsed()).filter(|_| own_thread::is_running()) else {
            desk.wishes.retain(|(known, _)| *known != number);
            return late();
        };
        let waited = DONE.wait_timeout(desk, left.min(Duration::from_millis(100)));
        desk = match waited {
            Ok((desk, _)) => desk,
            Err(poisoned) => poisoned.into_inner().0,
        };
    }
}

/// What is wanted; for the sender.
pub fn next() -> Option<(u64, Wish)> {
    let Ok(mut desk) = DESK.try_lock() else { return None };
    (!desk.wishes.is_empty()).then(|| desk.wishes.remove(0))
}

/// What became of it; for the sender.
pub fn done(number: u64, outcome: Outcome) {
    if let Some(mut desk) = desk() {
        // Of those who did not wait.
        if desk.outcomes.len() > 64 {
            desk.outcomes.remove(0);
        }
        desk.outcomes.push((number, outcome));
        DONE.notify_all();
    }
}

/// Fails unless a file of this name lies below a directory in which the daemon may have files created. Links are followed first.
pub fn permitted(core: &Core, name: &str) -> Result<(), Outcome> {
    let path = if name.is_empty() { PathBuf::from(".") } else { PathBuf::from(name) };
    let directory = if path.is_dir() { path.as_path() } else { path.parent().unwrap_or(Path::new("/")) };
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let real = std::fs::canonicalize(directory).map_err(|error| Outcome::failed(&path, &error))?;
    let dirs = &core.settings.record_dirs;
    if dirs.iter().any(|dir| real.starts_with(dir)) {
        return Ok(());
    }
    let dirs: Vec<_> = dirs.iter().map(|dir| dir.to_string_lossy()).collect();
    let told = format!(
        "{}: on request, this program creates files below {} only; GPUMEM_RECORD_DIRS in its environment names other directories",
        path.display(),
        if dirs.is_empty() { "no directory".to_owned() } else { dirs.join(", ") }
    );
    Err(Outcome { errno: libc::EACCES as u16, told })
}

/// A new file for a recording, and its absolute path. In its name, `%h` is the host, `%r` `r` and the rank and `-` (nothing without one), `%p`
/// `p` and the pid, `%n` a number that makes it new. A folder gets a usual name. A file that is there is left alone.
pub fn create(core: &Core, name: &str) -> Result<(File, PathBuf), Outcome> {
    let asked = Path::new(name);
    let pattern = match name {
        "" => PathBuf::from(USUAL),
        _ if asked.is_dir() => asked.join(USUAL),
        _ => asked.to_owned(),
    };
    let pattern = std::path::absolute(&pattern).unwrap_or(pattern);
    let rank = core.settings.claims.lines().find_map(|line| line.strip_prefix("rank="));
    let rank = rank.filter(|rank| !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_alphanumeric()));
    let text = pattern.to_string_lossy();
    let is_numbered = text.contains("%n");
    for number in 1..=NAMES {
        let path = PathBuf::from(
            text.replace("%h", &host())
                .replace("%r", &rank.map_or(String::new(), |rank| format!("r{rank}-")))
                .replace("%p", &format!("p{}", core.pid))
                .replace("%n", &number.to_string()),
        );
        let path = if text.contains('%') { path } else { pattern.clone() };
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => return Ok((file, path)),
            Err(error) if is_numbered && error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(Outcome::failed(&path, &error)),
        }
    }
    Err(Outcome::failed(&pattern, &std::io::Error::from_raw_os_error(libc::EEXIST)))
}

/// As far as it can stand in a file's name.
fn host() -> String {
    let mut name = [0_u8; 65];
    // SAFETY: a buffer of this length; the last byte stays 0.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
    let plain = |character: char| {
        if character.is_ascii_alphanumeric() || "-_.".contains(character) { character } else { '_' }
    };
    let name: String = String::from_utf8_lossy(name).chars().map(plain).collect();
    if name.is_empty() { "host".to_owned() } else { name }
}
