//! Open files, of which there are only so many. Agents take most; what the daemon itself needs to see, store and serve must not
//! be theirs.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit, setrlimit};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// A connection, the agent's memory, the pidfd.
const PER_AGENT: usize = 3;
/// What is not theirs: about 30 are the daemon's, with store and poller, a dozen more while it starts a process; 64 connections each
/// for metrics and control; the rest is for pidfds of processes without an agent.
const OWN: usize = 224;
/// A shortage is told in the log that often.
const TOLD: Duration = Duration::from_secs(60);

/// The limit that shells set is for programs of the last century.
pub fn raise() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "the limit of open files stays");
    }
}

/// Returns the number of agents' connections, lowered so that descriptors are left for everything else.
pub(crate) fn fit(connections: usize) -> usize {
    let files = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |files| files as usize);
    connections.min(agents(files))
}

fn agents(files: usize) -> usize {
    (files.saturating_sub(OWN) / PER_AGENT).max(1)
}

/// Whether this is for want of descriptors, and says nothing of what was asked for.
pub(crate) fn is_lack(error: &std::io::Error) -> bool {
    let lacks = [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|error| lacks.contains(&error))
}

/// Tells of a shortage now and then, however often it is met.
#[derive(Debug, Default)]
pub(crate) struct Shortage(Mutex<Option<Instant>>);

impl Shortage {
    /// It was met.
    pub(crate) fn note(&self, what: &str, error: &dyn std::fmt::Display) {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if told.is_none_or(|told| told.elapsed() >= TOLD) {
            *told = Some(Instant::now());
            tracing::warn!(%error, "{what}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_leave_descriptors_to_the_rest() {
        assert_eq!((agents(65_536), agents(1024)), (21_770, 266));
        for files in [0, 24, 224, 227] {
            assert_eq!(agents(files), 1, "{files}");
        }
        assert!(agents(usize::MAX) > 1 << 60);
    }
}
