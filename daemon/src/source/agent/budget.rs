//! What an agent may send.

use std::time::{Duration, Instant};

/// What a connection may send in a second. Spending more waits, the socket fills, and the agent's ring takes it
/// from there.
#[derive(Debug)]
pub(super) struct Budget {
    bytes_per_s: u64,
    since: Instant,
    spent: u64,
}

impl Budget {
    pub fn new(bytes_per_s: u64) -> Self {
        Budget { bytes_per_s, since: Instant::now(), spent: 0 }
    }

    pub async fn spend(&mut self, bytes: usize) {
        if self.bytes_per_s == 0 {
            return;
        }
        self.spent += bytes as u64;
        // Looked at once in a tenth of a second's worth: bursts of that size are free.
        if self.spent < self.bytes_per_s / 10 {
            return;
        }
        let due = Duration::from_secs_f64(self.spent as f64 / self.bytes_per_s as f64);
        if let Some(wait) = due.checked_sub(self.since.elapsed()) {
            tokio::time::sleep(wait).await;
        }
        (self.since, self.spent) = (Instant::now(), 0);
    }
}
