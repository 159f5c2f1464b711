//! Who is at the other end of a connection. The kernel says pid and uid; the start time in /proc tells this
//! process from another one that had the pid before or has it after.

use crate::descriptors;
use gpumem_ledger::ProcessKey;
use tokio::net::UnixStream;

/// Why a peer is not known.
#[derive(Debug, thiserror::Error)]
pub enum Unknown {
    /// The kernel does not say, or says 0: the peer is in no namespace that this daemon sees.
    #[error("the peer has no pid here: its PID namespace is not below the daemon's")]
    NoPid,
    /// It is gone.
    #[error("process {0} is gone")]
    Gone(u32),
    /// It says that it started at another time than the process with its pid.
    #[error("process {pid} started at {found} ticks, and says {claimed}")]
    StartTime {
        /// Its pid.
        pid: u32,
        /// What /proc says.
        found: u64,
        /// What it says.
        claimed: u64,
    },
    /// The system said no.
    #[error("looking at the peer: {0}")]
    System(#[from] std::io::Error),
}

/// A process at the other end.
#[derive(Debug)]
pub struct Peer {
    /// Which.
    pub key: ProcessKey,
    /// Whose.
    pub uid: u32,
    /// To be added to its times to get ours.
    pub rebase_ns: i64,
}

impl Peer {
    /// The peer of a connection that says nothing of its start. The pid may be another process's by now, but then it is one of the
    /// same user's, who could ask about it anyway.
    ///
    /// # Errors
    /// [`Unknown`].
    pub fn unclaimed(stream: &UnixStream) -> Result<Self, Unknown> {
        let credentials = stream.peer_cred()?;
        let pid = credentials.pid().and_then(|pid| u32::try_from(pid).ok()).filter(|&pid| pid != 0);
        let pid = pid.ok_or(Unknown::NoPid)?;
        let owner = std::fs::metadata(format!("/proc/{pid}")).map_err(|error| unread(pid, error))?;
        let found = start_ticks(pid)?;
        if std::os::unix::fs::MetadataExt::uid(&owner) != credentials.uid() {
            return Err(Unknown::StartTime { pid, found, claimed: 0 });
        }
        Peer::of(stream, found)
    }

    /// The peer of a connection that says it started at `claimed_ticks`.
    ///
    /// # Errors
    /// [`Unknown`].
    pub fn of(stream: &UnixStream, claimed_ticks: u64) -> Result<Self, Unknown> {
        let credentials = stream.peer_cred()?;
        let pid = credentials.pid().and_then(|pid| u32::try_from(pid).ok()).filter(|&pid| pid != 0);
        let pid = pid.ok_or(Unknown::NoPid)?;
        // The pid may be another process's by now, but then not with the start time that the peer had.
        let found = start_ticks(pid)?;
        let boot = time_offset_ns(pid, "boottime");
        if !is_same_start(found, claimed_ticks, boot) {
            return Err(Unknown::StartTime { pid, found, claimed: claimed_ticks });
        }
        Ok(Peer {
            key: ProcessKey { pid, start_ticks: found },
            uid: credentials.uid(),
            rebase_ns: time_offset_ns(pid, "monotonic"),
        })
    }

    /// The peer of a connection that was welcomed in an earlier life of this daemon as `key`. It may have ended since: what
    /// it had sent and kept is still its own.
    ///
    /// # Errors
    /// [`Unknown`]: the kernel names another process.
    pub fn kept(stream: &UnixStream, key: ProcessKey) -> Result<Self, Unknown> {
        match Peer::of(stream, key.start_ticks) {
            Ok(peer) if peer.key == key => return Ok(peer),
            Err(Unknown::System(error)) => return Err(error.into()),
            Ok(_) | Err(Unknown::NoPid) => return Err(Unknown::NoPid),
            Err(Unknown::Gone(_) | Unknown::StartTime { .. }) => {}
        }
        let credentials = stream.peer_cred()?;
        let is_same = credentials.pid().and_then(|pid| u32::try_from(pid).ok()) == Some(key.pid);
        if is_same { Ok(Peer { key, uid: credentials.uid(), rebase_ns: 0 }) } else { Err(Unknown::NoPid) }
    }
}

/// Whether both are the same start: /proc says it by the clock of the time namespace from which it is read.
fn is_same_start(found: u64, claimed: u64, ahead_ns: i64) -> bool {
    if ahead_ns == 0 {
        return found == claimed;
    }
    let tick_ns = 1_000_000_000 / i128::from(rustix::param::clock_ticks_per_second().max(1));
    let theirs_ns = i128::from(found) * tick_ns - i128::from(ahead_ns);
    // Rounded to ticks on both sides.
    (i128::from(claimed) * tick_ns - theirs_ns).abs() <= tick_ns
}

/// How far our clock of that name is ahead of that of a process in another time namespace; 0 in the same one, and where it
/// cannot be known.
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

/// Field 22 of /proc/PID/stat; a process that was killed and not waited for still has it. The name before it
/// may hold anything, so fields are counted from the last `)`.
fn start_ticks(pid: u32) -> Result<u64, Unknown> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).map_err(|error| unread(pid, error))?;
    let ticks = || {
        let end = stat.iter().rposition(|&byte| byte == b')')?;
        std::str::from_utf8(&stat[end + 1..]).ok()?.split_ascii_whitespace().nth(19)?.parse().ok()
    };
    ticks().ok_or(Unknown::Gone(pid))
}

/// What could not be read of it: who has no descriptor left knows nothing of the process.
fn unread(pid: u32, error: std::io::Error) -> Unknown {
    if descriptors::is_lack(&error) { Unknown::System(error) } else { Unknown::Gone(pid) }
}

#[cfg(test)]
mod tests {
    use super::is_same_start;

    #[test]
    fn a_start_is_told_by_each_ones_clock() {
        let tick_ns = 1_000_000_000 / i64::try_from(rustix::param::clock_ticks_per_second()).unwrap();
        assert!(is_same_start(5000, 5000, 0) && !is_same_start(5000, 5001, 0));
        // Their clock is a thousand ticks ahead, or behind, and a little.
        for (ahead, claimed) in [(-1000, 6000), (1000, 4000)] {
            assert!(is_same_start(5000, claimed, ahead * tick_ns));
            assert!(is_same_start(5000, claimed, ahead * tick_ns + tick_ns / 3));
            assert!(!is_same_start(5000, claimed + 2, ahead * tick_ns));
            assert!(!is_same_start(5000, 5000, ahead * tick_ns));
        }
        assert!(!is_same_start(u64::MAX, 0, i64::MIN));
    }
}
