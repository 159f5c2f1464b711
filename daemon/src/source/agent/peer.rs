//! Identity of the process at the other end of a connection.
//!
//! The identity is fixed when the connection is accepted: the process that called connect(2), its start time, its user. A hello
//! can confirm it and cannot change it. Otherwise a user could take over another user's process: a process connects, hands its
//! socket to another process and ends. The victim gets the same pid. The hello then names the victim's start time, which is
//! public in /proc.
//!
//! The kernel names the process by a pidfd (`SO_PEERPIDFD`, Linux 6.5). Older kernels name a pid, which may be another process's
//! when the connection is accepted. There, a pidfd is opened directly after accept. The process must run as the user who
//! connected, and must not have begun after accept (a socket has no time of its own). Start times have ticks of 10 ms, and a
//! pid can be reused within one tick, so the pidfd is held until the hello.
//!
//! A process may have ended, and been waited for, before its connection is accepted: very short programs, or any program while
//! no daemon ran. Its socket and memory are read nevertheless. The kernel supplies its user. Its hello supplies its start time,
//! which must not be that of a running process or of another user's process.

use crate::descriptors::{pidfd_of_peer, pidfd_of_pid};
use crate::os::is_out_of_descriptors;
use crate::source::process;
use gpumem_ledger::ProcessKey;
use rustix::io::Errno;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use tokio::net::UnixStream;

#[derive(Debug, thiserror::Error)]
pub(crate) enum IdentityError {
    /// The kernel names no process, or pid 0: the peer is in no namespace that is visible to this daemon.
    #[error("the peer has no pid here: its PID namespace is not below the daemon's")]
    NoPid,
    #[error("process {0} is gone")]
    Gone(u32),
    #[error("the connection belongs to process {found}, and the earlier daemon recorded {recorded} for it")]
    OtherProcess { found: u32, recorded: u32 },
    #[error("process {pid} started at {found} ticks, but its hello message claims {claimed}")]
    StartTime { pid: u32, found: u64, claimed: u64 },
    #[error("user {uid} connected, and process {pid} belongs to user {owner}")]
    User {
        pid: u32,
        uid: u32,
        /// Real uid of the process with this pid.
        owner: u32,
    },
    #[error("cannot identify the peer: {0}")]
    System(#[from] std::io::Error),
}

/// The process that made a connection, as found when the connection was accepted.
#[derive(Debug)]
pub(crate) struct Caller {
    pub pid: u32,
    /// Effective uid when the process connected.
    pub uid: u32,
    /// Start time; `None` if the process had ended and its parent had waited for it.
    start_ticks: Option<u64>,
    /// `None` if the process had ended, or the kernel has no pidfds (before Linux 5.3).
    pidfd: Option<OwnedFd>,
}

#[derive(Debug)]
pub(crate) struct Peer {
    pub key: ProcessKey,
    pub uid: u32,
    /// Number of ns to add to the peer's times to convert them to the daemon's clock.
    pub rebase_ns: i64,
    /// Whether the process ended before it was accepted. /proc has no data about it, so its start time is its own claim.
    pub had_ended: bool,
}

impl Caller {
    /// Returns the process that made this connection. Must be called directly after accept.
    /// Errors: [`IdentityError`]: for example [`IdentityError::Gone`] if another process has its pid by now.
    pub(crate) fn of(stream: &UnixStream) -> Result<Self, IdentityError> {
        Caller::accepted(stream, now_ticks(), pidfd_of_peer)
    }

    /// See [`Caller::of`]. `accepted_ticks` is when the connection was accepted; `pidfd_of_peer` returns `ENOPROTOOPT` on kernels
    /// that only name a pid.
    fn accepted(
        stream: &UnixStream,
        accepted_ticks: u64,
        pidfd_of_peer: impl FnOnce(&UnixStream) -> std::io::Result<OwnedFd>,
    ) -> Result<Self, IdentityError> {
        let (pid, uid) = credentials(stream)?;
        let ended = Ok(Caller { pid, uid, start_ticks: None, pidfd: None });
        let mut latest_start = u64::MAX;
        let pidfd = match pidfd_of_peer(stream) {
            Ok(pidfd) => Some(pidfd),
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NOPROTOOPT) => {
                latest_start = accepted_ticks;
                match pidfd_of_pid(pid) {
                    Ok(pidfd) => Some(pidfd),
                    Err(error) if Errno::from_io_error(&error) == Some(Errno::NOSYS) => None,
                    Err(error) if is_out_of_descriptors(&error) => return Err(IdentityError::System(error)),
                    Err(_) => return ended,
                }
            }
            Err(error) if is_out_of_descriptors(&error) => return Err(IdentityError::System(error)),
            Err(_) => return ended,
        };
        // Check the pid: newer kernels (Linux 6.16) also return a pidfd of a process that was waited for.
        if let Some(pidfd) = &pidfd
            && !has_pid(pidfd, pid)?
        {
            return ended;
        }
        match Caller::named(pid, uid, pidfd) {
            Err(IdentityError::Gone(_)) => ended,
            // The process found began after the connection, so the one that connected has ended.
            Ok(Caller { start_ticks: Some(start), .. }) if start > latest_start => ended,
            result => result,
        }
    }

    /// Returns the process with this pid; with `pidfd`, only if the pidfd belongs to it.
    fn named(pid: u32, uid: u32, pidfd: Option<OwnedFd>) -> Result<Self, IdentityError> {
        let start_ticks = start_ticks(pid)?;
        check_user(pid, uid)?;
        // While the pidfd has this pid, no other process can have it, so the start time is that of the connected process.
        let is_it = match &pidfd {
            Some(pidfd) => has_pid(pidfd, pid)?,
            None => self::start_ticks(pid)? == start_ticks,
        };
        let caller = Caller { pid, uid, start_ticks: Some(start_ticks), pidfd };
        if is_it { Ok(caller) } else { Err(IdentityError::Gone(pid)) }
    }

    /// Returns the identity of the peer. `claimed_ticks` is the start time in its hello, by its own clock, if it has one.
    /// Errors: [`IdentityError::StartTime`]. [`IdentityError::User`]: it has executed a program as another user since it
    /// connected. [`IdentityError::Gone`]: another process that began in the same tick has its pid.
    pub(crate) fn peer(self, claimed_ticks: Option<u64>) -> Result<Peer, IdentityError> {
        self.checked_peer(claimed_ticks, check_user)
    }

    /// Implements [`Caller::peer`]; `check_user` checks the user of a running process.
    fn checked_peer(
        self,
        claimed_ticks: Option<u64>,
        check_user: impl FnOnce(u32, u32) -> Result<(), IdentityError>,
    ) -> Result<Peer, IdentityError> {
        let Caller { pid, uid, start_ticks, pidfd } = self;
        let Some(found) = start_ticks else {
            let start_ticks = ended_start(pid, claimed_ticks)?;
            return Ok(Peer { key: ProcessKey { pid, start_ticks }, uid, rebase_ns: 0, had_ended: true });
        };
        let key = ProcessKey { pid, start_ticks: found };
        // A process that has ended meanwhile is accepted too, because its records still count.
        let is_alive = || match &pidfd {
            Some(pidfd) => has_pid(pidfd, pid),
            None => still_exists(key),
        };
        let mut is_running = is_alive()?;
        if is_running && let Err(error) = check_user(pid, uid) {
            // Check again: a short program may have ended since the first check, which explains the failure.
            is_running = is_alive()?;
            if is_running {
                return Err(error);
            }
        }
        if !is_running && pidfd.is_some() && still_exists(key)? {
            return Err(IdentityError::Gone(pid));
        }
        let ahead_ns = |clock| if is_running { time_offset_ns(pid, clock) } else { 0 };
        if let Some(claimed) = claimed_ticks
            && !is_same_start(found, claimed, ahead_ns("boottime"))
        {
            return Err(IdentityError::StartTime { pid, found, claimed });
        }
        Ok(Peer { key, uid, rebase_ns: ahead_ns("monotonic"), had_ended: false })
    }
}

impl Peer {
    /// Returns the peer of a connection that an earlier daemon accepted as `key`. A process that has ended since is accepted
    /// too, because its unread packets and its memory still count.
    /// Errors: [`IdentityError`]: the kernel names another process.
    pub(crate) fn inherited(stream: &UnixStream, key: ProcessKey) -> Result<Self, IdentityError> {
        let (pid, uid) = credentials(stream)?;
        if pid != key.pid {
            return Err(IdentityError::OtherProcess { found: pid, recorded: key.pid });
        }
        let rebase_ns = if still_exists(key)? { time_offset_ns(pid, "monotonic") } else { 0 };
        Ok(Peer { key, uid, rebase_ns, had_ended: false })
    }
}

/// Returns the start time in the hello of an ended process. It must be in the past, and before the start of any process that has
/// this pid now.
fn ended_start(pid: u32, claimed_ticks: Option<u64>) -> Result<u64, IdentityError> {
    let claimed = claimed_ticks.filter(|&ticks| ticks != 0).ok_or(IdentityError::Gone(pid))?;
    let stat = process::try_read_stat(Path::new("/proc"), pid)?;
    let latest = stat.map_or_else(now_ticks, |stat| stat.start_ticks.saturating_sub(1));
    if claimed <= latest {
        Ok(claimed)
    } else {
        Err(IdentityError::StartTime { pid, found: latest, claimed })
    }
}

/// Returns the length of a tick, the unit of start times in /proc, in ns.
fn tick_ns() -> u64 {
    1_000_000_000 / rustix::param::clock_ticks_per_second().max(1)
}

/// Returns the time since boot in ticks.
fn now_ticks() -> u64 {
    crate::clock::since_boot().as_nanos() as u64 / tick_ns()
}

fn credentials(stream: &UnixStream) -> Result<(u32, u32), IdentityError> {
    let credentials = stream.peer_cred()?;
    let pid = credentials.pid().and_then(|pid| u32::try_from(pid).ok()).filter(|&pid| pid != 0);
    Ok((pid.ok_or(IdentityError::NoPid)?, credentials.uid()))
}

/// Returns whether the process still exists with this pid and start time.
fn still_exists(key: ProcessKey) -> Result<bool, IdentityError> {
    let stat = process::try_read_stat(Path::new("/proc"), key.pid)?;
    Ok(stat.is_some_and(|stat| stat.start_ticks == key.start_ticks))
}

/// Returns whether the pidfd's process has this pid. After it was waited for, the kernel reports pid -1.
fn has_pid(pidfd: &OwnedFd, pid: u32) -> Result<bool, IdentityError> {
    let path = format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd());
    let info = std::fs::read_to_string(path)?;
    let found = info.lines().find_map(|line| line.strip_prefix("Pid:"));
    Ok(found.and_then(|found| found.trim().parse().ok()) == Some(pid))
}

/// Fails unless `uid` is the real or the effective user of the process. The real user owns the process; the effective one
/// connects. The owner of /proc/PID is not checked: that is root for processes that may not be dumped.
fn check_user(pid: u32, uid: u32) -> Result<(), IdentityError> {
    let text = std::fs::read(format!("/proc/{pid}/status")).map_err(|error| {
        // If descriptors have run out, the process may still exist.
        if is_out_of_descriptors(&error) { IdentityError::System(error) } else { IdentityError::Gone(pid) }
    })?;
    let status = process::status(&text);
    let owner = status.uid.and_then(|owner| u32::try_from(owner).ok()).ok_or(IdentityError::Gone(pid))?;
    let is_it = owner == uid || status.effective_uid == Some(uid.into());
    if is_it { Ok(()) } else { Err(IdentityError::User { pid, uid, owner }) }
}

/// Returns whether two start times are equal. /proc shows start times in the time namespace of the reader.
fn is_same_start(found: u64, claimed: u64, ahead_ns: i64) -> bool {
    if ahead_ns == 0 {
        return found == claimed;
    }
    let tick_ns = i128::from(tick_ns());
    let theirs_ns = i128::from(found) * tick_ns - i128::from(ahead_ns);
    // Both times were rounded to ticks, so allow a difference of one tick.
    (i128::from(claimed) * tick_ns - theirs_ns).abs() <= tick_ns
}

/// Returns how far the daemon's clock with this name is ahead of the process's clock, in ns. Returns 0 in the same time
/// namespace, and if unknown.
fn time_offset_ns(pid: u32, clock: &str) -> i64 {
    let offset = |of: &str| {
        let text = std::fs::read_to_string(format!("/proc/{of}/timens_offsets")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(clock))?;
        let mut numbers = line.split_ascii_whitespace().map(|word| word.parse::<i64>().ok());
        let (seconds, nanos) = (numbers.next()??, numbers.next()??);
        seconds.checked_mul(1_000_000_000)?.checked_add(nanos)
    };
    match (offset("self"), offset(&pid.to_string())) {
        (Some(ours), Some(theirs)) => ours.saturating_sub(theirs),
        _ => 0,
    }
}

/// Reads the start time in /proc/PID/stat, which also exists for a zombie.
fn start_ticks(pid: u32) -> Result<u64, IdentityError> {
    let stat = process::try_read_stat(Path::new("/proc"), pid)?;
    stat.map(|stat| stat.start_ticks).ok_or(IdentityError::Gone(pid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caller_is_a_process_of_the_user_who_connected() {
        let (pid, uid) = (std::process::id(), rustix::process::geteuid().as_raw());
        let caller = || Caller::named(pid, uid, None).expect("this process");
        let key = ProcessKey { pid, start_ticks: start_ticks(pid).expect("a start") };
        assert_eq!(caller().start_ticks, Some(key.start_ticks));
        assert_eq!(caller().peer(None).expect("this process").key, key);
        let later = caller().peer(Some(key.start_ticks + 1));
        assert!(matches!(later, Err(IdentityError::StartTime { .. })), "{later:?}");
        // As on a kernel without SO_PEERPIDFD: the pid is another user's by now.
        let other = Caller::named(pid, uid + 1, None);
        assert!(matches!(other, Err(IdentityError::User { owner, .. }) if owner == uid), "{other:?}");
    }

    /// As on a kernel without `SO_PEERPIDFD`, where only a pid names the process that connected.
    #[tokio::test]
    async fn process_that_began_after_the_connection_did_not_make_it() {
        let (_client, stream) = UnixStream::pair().expect("two sockets");
        let (pid, uid) = (std::process::id(), rustix::process::geteuid().as_raw());
        let start = start_ticks(pid).expect("a start");
        let caller = |accepted_ticks| {
            Caller::accepted(&stream, accepted_ticks, |_| Err(Errno::NOPROTOOPT.into())).expect("a caller")
        };
        for accepted_ticks in [now_ticks(), start] {
            let caller = caller(accepted_ticks);
            assert_eq!(caller.start_ticks, Some(start));
            let peer = caller.peer(Some(start)).expect("this process");
            assert!(!peer.had_ended && peer.key == ProcessKey { pid, start_ticks: start } && peer.uid == uid);
        }
        // Accepted before this process began: an earlier process with its pid connected, and has ended.
        let (early, named) = (caller(start - 1), caller(start - 1).peer(Some(start)));
        assert_eq!(early.start_ticks, None);
        assert!(
            matches!(named, Err(IdentityError::StartTime { claimed, .. }) if claimed == start),
            "{named:?}"
        );
        let peer = caller(start - 1).peer(Some(start - 1)).expect("the earlier process");
        assert!(peer.had_ended && peer.key == ProcessKey { pid, start_ticks: start - 1 });
    }

    #[test]
    fn pidfd_of_another_process_is_not_this_one() {
        let uid = rustix::process::geteuid().as_raw();
        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("a process");
        let open = || pidfd_of_pid(child.id()).expect("a pidfd");
        let (pidfd, other) = (open(), open());
        assert!(Caller::named(child.id(), uid, Some(other)).is_ok());
        child.kill().and_then(|()| child.wait()).expect("its end");
        // As if this process had got the pid.
        let reused = Caller::named(std::process::id(), uid, Some(pidfd));
        assert!(matches!(reused, Err(IdentityError::Gone(_))), "{reused:?}");
    }

    #[test]
    fn caller_that_has_ended_stays_who_it_was() {
        let uid = rustix::process::geteuid().as_raw();
        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("a process");
        let caller = |pidfd| Caller::named(child.id(), uid, pidfd).expect("a process");
        let callers = [caller(None), caller(pidfd_of_pid(child.id()).ok()), caller(None)];
        let key = ProcessKey { pid: child.id(), start_ticks: start_ticks(child.id()).expect("a start") };
        child.kill().and_then(|()| child.wait()).expect("its end");
        let [without, with, other] = callers;
        assert_eq!(without.peer(Some(key.start_ticks)).expect("the same").key, key);
        assert_eq!(with.peer(Some(key.start_ticks)).expect("the same").key, key);
        assert!(other.peer(Some(key.start_ticks + 1)).is_err());
    }

    #[test]
    fn caller_that_ends_while_its_user_is_looked_at_stays_who_it_was() {
        let uid = rustix::process::geteuid().as_raw();
        for with_pidfd in [true, false] {
            let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("a process");
            let pidfd = with_pidfd.then(|| pidfd_of_pid(child.id()).ok()).flatten();
            let caller = Caller::named(child.id(), uid, pidfd).expect("a process");
            let key = ProcessKey { pid: child.id(), start_ticks: start_ticks(child.id()).expect("a start") };
            let peer = caller.checked_peer(Some(key.start_ticks), |pid, uid| {
                child.kill().and_then(|()| child.wait()).expect("its end");
                check_user(pid, uid)
            });
            assert_eq!(peer.expect("the same").key, key);
        }
    }

    #[test]
    fn another_process_that_began_in_the_same_tick_is_not_the_caller() {
        let (pid, uid) = (std::process::id(), rustix::process::geteuid().as_raw());
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        let pidfd = pidfd_of_pid(child.id()).ok();
        child.wait().expect("its end");
        // As if that child had connected, with this process's pid and start tick.
        let key = ProcessKey { pid, start_ticks: start_ticks(pid).expect("a start") };
        let caller = Caller { pid, uid, start_ticks: Some(key.start_ticks), pidfd };
        let peer = caller.peer(Some(key.start_ticks));
        assert!(matches!(peer, Err(IdentityError::Gone(_))), "{peer:?}");
    }

    #[test]
    fn caller_that_was_gone_is_whom_its_hello_names_unless_another_process_can_be_meant() {
        let uid = rustix::process::geteuid().as_raw();
        let ended = |pid| Caller { pid, uid, start_ticks: None, pidfd: None };
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        let pid = child.id();
        let ticks = start_ticks(pid).expect("a start");
        // While a process has the pid, only an older one can be meant.
        assert!(matches!(ended(pid).peer(Some(ticks)), Err(IdentityError::StartTime { .. })));
        assert!(matches!(ended(pid).peer(Some(ticks + 1)), Err(IdentityError::StartTime { .. })));
        assert_eq!(ended(pid).peer(Some(ticks - 1)).expect("an older one").key.start_ticks, ticks - 1);
        child.wait().expect("its end");
        let peer = ended(pid).peer(Some(ticks)).expect("its own");
        assert!(peer.had_ended && peer.key == ProcessKey { pid, start_ticks: ticks } && peer.uid == uid);
        for claimed in [None, Some(0), Some(u64::MAX)] {
            assert!(ended(pid).peer(claimed).is_err(), "{claimed:?}");
        }
    }

    #[test]
    fn a_start_is_told_by_each_ones_clock() {
        let tick_ns = 1_000_000_000 / i64::try_from(rustix::param::clock_ticks_per_second()).unwrap();
        assert!(is_same_start(5000, 5000, 0) && !is_same_start(5000, 5001, 0));
        // The peer's clock is a thousand ticks ahead, or behind, plus a fraction of a tick.
        for (ahead, claimed) in [(-1000, 6000), (1000, 4000)] {
            assert!(is_same_start(5000, claimed, ahead * tick_ns));
            assert!(is_same_start(5000, claimed, ahead * tick_ns + tick_ns / 3));
            assert!(!is_same_start(5000, claimed + 2, ahead * tick_ns));
            assert!(!is_same_start(5000, 5000, ahead * tick_ns));
        }
        assert!(!is_same_start(u64::MAX, 0, i64::MIN));
    }
}
