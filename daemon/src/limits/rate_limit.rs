//! Rate limits: bytes per second that a connection may send, and log lines about the peers of one user.

use crate::os::lock;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Limit of bytes per second. A connection over its limit is not read: its socket fills, and the agent keeps further records in
/// its ring.
#[derive(Debug)]
pub(crate) struct RateLimit {
    bytes_per_s: u64,
    since: Instant,
    used: u64,
}

impl RateLimit {
    /// Returns a limit of `bytes_per_s`; 0 means no limit.
    pub(crate) fn new(bytes_per_s: u64) -> Self {
        RateLimit { bytes_per_s, since: Instant::now(), used: 0 }
    }

    /// Counts bytes and waits until the connection is within its limit. Returns whether it has waited.
    pub(crate) async fn acquire(&mut self, bytes: usize) -> bool {
        if self.bytes_per_s == 0 {
            return false;
        }
        self.used += bytes as u64;
        // Check the rate each time a tenth of a second's bytes has arrived, so that bursts of that size do not wait.
        if self.used < self.bytes_per_s / 10 {
            return false;
        }
        let due = Duration::from_secs_f64(self.used as f64 / self.bytes_per_s as f64);
        let wait = due.checked_sub(self.since.elapsed());
        if let Some(wait) = wait {
            tokio::time::sleep(wait).await;
        }
        (self.since, self.used) = (Instant::now(), 0);
        wait.is_some()
    }
}

/// Maximum number of log lines about the peers of one user in each [`LOG_WINDOW`].
const LOG_LINES: u32 = 50;
const LOG_WINDOW: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct LogWindow {
    since: Instant,
    by_uid: HashMap<u32, u32>,
}

/// Limits the log lines about each user's peers. Otherwise a user with many short programs would push the lines about others out
/// of the log.
#[derive(Debug)]
pub(crate) struct LogRateLimit(Mutex<LogWindow>);

impl Default for LogRateLimit {
    fn default() -> Self {
        LogRateLimit(Mutex::new(LogWindow { since: Instant::now(), by_uid: HashMap::new() }))
    }
}

impl LogRateLimit {
    /// Returns whether one more line about a peer of this user may be logged. The last allowed line states that further events
    /// are only counted.
    pub(crate) fn allows(&self, uid: u32) -> bool {
        let mut window = lock(&self.0);
        if window.since.elapsed() >= LOG_WINDOW {
            *window = LogWindow { since: Instant::now(), by_uid: HashMap::new() };
        }
        let lines = window.by_uid.entry(uid).or_default();
        *lines = lines.saturating_add(1);
        if *lines == LOG_LINES {
            tracing::warn!(
                uid,
                "too many log lines about this user's peers: for the rest of {LOG_WINDOW:?} they are only counted"
            );
        }
        *lines < LOG_LINES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_are_limited_for_each_user() {
        let limit = LogRateLimit::default();
        assert_eq!((0..1000).filter(|_| limit.allows(7)).count(), LOG_LINES as usize - 1);
        assert!(limit.allows(8));
    }
}
