//! What an agent may send.

use std::time::{Duration, Instant};

/// What a connection may send in a second. Spending more waits, the socket fills, and the agent's ring takes it
/// from there.
#[derive(Debug)]
pub(crate) struct Budget {
    bytes_per_s: u64,
    since: Instant,
    spent: u64,
}

impl Budget {
    pub(crate) fn new(bytes_per_s: u64) -> Self {
        Budget { bytes_per_s, since: Instant::now(), spent: 0 }
    }

    /// Whether that was more than there was to spend, and it has waited.
    pub(crate) async fn spend(&mut self, bytes: usize) -> bool {
        if self.bytes_per_s == 0 {
            return false;
        }
        self.spent += bytes as u64;
        // Looked at once in a tenth of a second's worth: bursts of that size are free.
        if self.spent < self.bytes_per_s / 10 {
            return false;
        }
        let due = Duration::from_secs_f64(self.spent as f64 / self.bytes_per_s as f64);
        let wait = due.checked_sub(self.since.elapsed());
        if let Some(wait) = wait {
            tokio::time::sleep(wait).await;
        }
        (self.since, self.spent) = (Instant::now(), 0);
        wait.is_some()
    }
}
