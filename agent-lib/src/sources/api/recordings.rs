//! Requests for recordings, dumps and muting, made by the program, or by the daemon for a user; and the limits of recordings. The
//! sender carries out the requests; the requesting thread waits with a timeout. Nothing here is for callbacks: it locks and
//! allocates.
//!
//! **Muting** differs from pausing. A muted agent keeps observing and updates its live table, but sends nothing. Afterwards it
//! sends the number of withheld records, and its state again. A paused agent (sources/cupti/subscribe.rs) observes nothing.
//!
//! **A recording of certain steps** is begun and ended by the thread that calls `gpumem_step`. That thread waits at most a second
//! for the sender to record the state. If the sender replies in time, the recording begins and ends exactly at the step. Other
//! steps only cost one more load.

use crate::base::locks::ForkMutex;
use crate::base::own_thread::{self, Uncancelled};
use crate::driver::core::Core;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use std::sync::{Condvar, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// Default file name of a recording; `create` explains the placeholders (`%h`, ...).
const DEFAULT_NAME: &str = "gpumem-%h-%r%p-%n.gpumem";
/// Timeout of the lock. If it is held for longer, the process is taken for a forked child, in which the thread that held it does
/// not exist.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum number of names that `create` tries.
const NAMES: u32 = 10_000;

/// Number of calls of `mute` without a matching `unmute`.
pub(crate) static MUTES: AtomicU32 = AtomicU32::new(0);
/// Not 0 while `configure` has switched memory events off.
pub(crate) static MEMORY_OFF: AtomicU32 = AtomicU32::new(0);
/// Period of periodic dumps in ns; 0 for none.
pub(crate) static DUMP_PERIOD_NS: AtomicU64 = AtomicU64::new(0);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RecordingLimits {
    /// Numbers of the first and the last step to record.
    pub steps: Option<(u64, u64)>,
    /// Maximum duration of the recording in ns.
    pub for_ns: Option<u64>,
    /// Maximum size of the file in bytes.
    pub max_bytes: Option<u64>,
}

impl RecordingLimits {
    /// Sets the limit `steps` (`100:110`), `for` (seconds) or `max_size` (bytes); an empty value removes it. Returns false for
    /// an unknown key or an invalid value.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> bool {
        let steps = || {
            let (first, last) = value.split_once(':')?;
            let (first, last) = (first.parse().ok()?, last.parse::<u64>().ok()?);
            (first <= last && last < u64::MAX).then_some((first, last))
        };
        let seconds = || value.parse::<f64>().ok().filter(|seconds| *seconds > 0.0 && *seconds <= 1e9);
        match key {
            "steps" => replace(&mut self.steps, value, steps()),
            "for" => replace(&mut self.for_ns, value, seconds().map(|seconds| (seconds * 1e9) as u64)),
            "max_size" => replace(&mut self.max_bytes, value, value.parse().ok().filter(|bytes| *bytes > 0)),
            _ => false,
        }
    }

    /// Parses a file and limits from the daemon: `FILE\0key=value\0...`. `None` for an unknown key or a bad value.
    pub fn of_command(payload: &str) -> Option<(String, RecordingLimits)> {
        let mut parts = payload.split('\0');
        let path = parts.next()?.to_owned();
        let mut limits = RecordingLimits::default();
        let is_known =
            parts.all(|part| part.split_once('=').is_some_and(|(key, value)| limits.set(key, value)));
        is_known.then_some((path, limits))
    }
}

/// Sets a limit, or removes it for an empty value. Keeps it for an invalid value and returns false.
fn replace<T>(limit: &mut Option<T>, value: &str, parsed: Option<T>) -> bool {
    let is_valid = value.is_empty() || parsed.is_some();
    if is_valid {
        *limit = parsed;
    }
    is_valid
}

/// Number of the next step at which a recording begins or ends; `u64::MAX` for none.
static NEXT_STEP: AtomicU64 = AtomicU64::new(u64::MAX);

/// Sets the number of the next step of which the sender must be notified; `u64::MAX` for none.
pub(crate) fn set_next_step(number: u64) {
    NEXT_STEP.store(number, Release);
}

#[inline(always)]
pub(crate) fn concerns_step(number: u64) -> bool {
    number >= NEXT_STEP.load(Relaxed)
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RecordingRequest {
    /// Start a recording in a file of this name, or of the default name if it is empty.
    Start(String, RecordingLimits),
    /// The step of this number begins, and a recording has to begin or end with it.
    Step(u64),
    Stop,
    /// Apply a change of [`is_muted`]; with a value, mute or unmute for the daemon.
    Mute(Option<bool>),
    /// Write the state to the file at `path`. If `path` is empty: to the current recording, or else to a file of the default
    /// name. With `finished`, also end the current recording.
    Dump {
        path: String,
        finished: bool,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecordingReply {
    /// Error number (errno) of the request; 0 for success.
    pub errno: u16,
    /// The file's path, or the error message.
    pub told: String,
}

impl RecordingReply {
    /// Returns the reply for success, with the file's path if there is one.
    pub(crate) fn done(path: &Path) -> Self {
        RecordingReply { errno: 0, told: path.to_string_lossy().into_owned() }
    }

    /// Returns the reply for a failure. Its errno is EIO if the error has no number.
    pub(crate) fn failed(path: &Path, error: &std::io::Error) -> Self {
        let errno = error.raw_os_error().unwrap_or(libc::EIO) as u16;
        let reason = match error.kind() {
            std::io::ErrorKind::AlreadyExists => "exists already: give another name".to_owned(),
            _ => error.to_string(),
        };
        RecordingReply { errno, told: format!("{}: {reason}", path.display()) }
    }
}

/// Requests to the sender with their replies, and the settings of recordings.
#[derive(Debug, Default)]
pub(crate) struct RequestSlot {
    last: u64,
    requests: Vec<(u64, RecordingRequest)>,
    replies: Vec<(u64, RecordingReply)>,
    /// Settings that the program has made with `gpumem_configure`: two paths, and the limits of recordings.
    pub(crate) record_file: String,
    pub(crate) dump_file: String,
    pub(crate) limits: RecordingLimits,
}

static SLOT: ForkMutex<RequestSlot> = ForkMutex::new(RequestSlot::default);
/// Notified when there is a reply.
static DONE: Condvar = Condvar::new();

/// Locks the slot in which threads request recordings and the sender replies; `None` after `LOCK_TIMEOUT`.
pub(crate) fn slot() -> Option<MutexGuard<'static, RequestSlot>> {
    let _uncancelled = Uncancelled::now();
    let start = Instant::now();
    loop {
        match SLOT.try_lock() {
            Ok(slot) => return Some(slot),
            Err(TryLockError::Poisoned(slot)) => return Some(slot.into_inner()),
            Err(TryLockError::WouldBlock) if start.elapsed() > LOCK_TIMEOUT => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(100)),
        }
    }
}

pub(crate) fn is_muted() -> bool {
    MUTES.load(Acquire) > 0 || MEMORY_OFF.load(Acquire) > 0
}

pub(crate) fn dump_file() -> String {
    slot().map(|slot| slot.dump_file.clone()).unwrap_or_default()
}

/// Returns the sender's reply to a request, or ETIMEDOUT after `timeout`. The sender must have been started.
pub(crate) fn request_with_timeout(request: RecordingRequest, timeout: Duration) -> RecordingReply {
    let late =
        || RecordingReply { errno: libc::ETIMEDOUT as u16, told: "the agent's thread is busy".to_owned() };
    let Some(mut slot) = slot() else { return late() };
    slot.last += 1;
    let number = slot.last;
    slot.requests.push((number, request));
    drop(slot);
    crate::base::wake::wake();
    let start = Instant::now();
    let Some(mut slot) = self::slot() else { return late() };
    loop {
        if let Some(at) = slot.replies.iter().position(|(known, _)| *known == number) {
            return slot.replies.swap_remove(at).1;
        }
        let Some(left) = timeout.checked_sub(start.elapsed()).filter(|_| own_thread::is_running()) else {
            slot.requests.retain(|(known, _)| *known != number);
            return late();
        };
        let waited = DONE.wait_timeout(slot, left.min(Duration::from_millis(100)));
        slot = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
    }
}

pub(crate) fn next_request() -> Option<(u64, RecordingRequest)> {
    let Ok(mut slot) = SLOT.try_lock() else { return None };
    (!slot.requests.is_empty()).then(|| slot.requests.remove(0))
}

/// Stores the reply to a request; for the sender.
pub(crate) fn done(number: u64, reply: RecordingReply) {
    if let Some(mut slot) = slot() {
        // Replies to requests that have timed out are never fetched.
        if slot.replies.len() > 64 {
            slot.replies.remove(0);
        }
        slot.replies.push((number, reply));
        DONE.notify_all();
    }
}

/// Checks that a file of this name lies below a directory in which the daemon may have files created. Resolves symbolic links
/// first. The error is the reply with the reason.
pub(crate) fn check_permitted(core: &Core, name: &str) -> Result<(), RecordingReply> {
    let path = Path::new(if name.is_empty() { "." } else { name });
    let directory = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("/")) };
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let real = std::fs::canonicalize(directory).map_err(|error| RecordingReply::failed(path, &error))?;
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
    Err(RecordingReply { errno: libc::EACCES as u16, told })
}

/// Creates a file that does not exist, readable by the user only.
pub(crate) fn create_new(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Creates a file for a recording and returns it with its absolute path, or a reply with the errno.
///
/// In the name, `%h` becomes the host, `%p` becomes `p` and the pid, and `%n` the first number that gives a new name. `%r`
/// becomes `r`, the rank and `-`, or nothing without a rank. If the name is a folder, a file of the default name is created in
/// it. Existing files are never overwritten.
pub(crate) fn create(core: &Core, name: &str) -> Result<(File, PathBuf), RecordingReply> {
    let requested = Path::new(name);
    let pattern = match name {
        "" => PathBuf::from(DEFAULT_NAME),
        _ if requested.is_dir() => requested.join(DEFAULT_NAME),
        _ => requested.to_owned(),
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
        match create_new(&path) {
            Ok(file) => return Ok((file, path)),
            Err(error) if is_numbered && error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(RecordingReply::failed(&path, &error)),
        }
    }
    Err(RecordingReply::failed(&pattern, &std::io::Error::from_raw_os_error(libc::EEXIST)))
}

/// Returns the host's name, with `_` for characters that file names should not have.
fn host() -> String {
    let mut name = [0_u8; 65];
    // SAFETY: the buffer has this length; its last byte stays 0.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
    let plain = |character: char| {
        if character.is_ascii_alphanumeric() || "-_.".contains(character) { character } else { '_' }
    };
    let name: String = String::from_utf8_lossy(name).chars().map(plain).collect();
    if name.is_empty() { "host".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_what_they_say() {
        let of = |payload: &str| RecordingLimits::of_command(payload);
        assert_eq!(of(""), Some((String::new(), RecordingLimits::default())));
        let steps =
            RecordingLimits { steps: Some((100, 110)), for_ns: Some(1_500_000_000), max_bytes: Some(7) };
        assert_eq!(of("/a b\0steps=100:110\0for=1.5\0max_size=7"), Some(("/a b".into(), steps)));
        for bad in [
            "\0steps=110:100",
            "\0steps=1",
            "\0steps=a:b",
            "\0for=0",
            "\0for=-1",
            "\0max_size=x",
            "\0other=1",
            "\0x",
        ] {
            assert_eq!(of(bad), None, "{bad:?}");
        }
        let mut limits = steps;
        assert!(limits.set("steps", "") && limits.steps.is_none());
        assert!(!limits.set("for", "x") && limits.for_ns == steps.for_ns, "what is wrong changes nothing");
    }
}
