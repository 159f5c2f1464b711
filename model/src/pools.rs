//! The pools of a device as a run tells them: what they have, what lives in it, and what their owners say themselves.

use serde::{Deserialize, Serialize};

/// One pool, at the time of the run's last record (a moment's idle bytes are those of its sample).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pool {
    /// The owner's number for it.
    pub id: u64,
    /// The owner's name for it.
    pub name: Option<String>,
    /// `driver`, `graph` or `framework`.
    pub owner: Option<String>,
    /// Pool whose blocks its segments lie in.
    pub parent: Option<u64>,
    /// It reports no blocks: `block_bytes` is then what its owner last said to be in use, 0 if it never did.
    pub opaque: bool,
    /// Bytes of its segments (a framework's), or reserved (the driver's).
    pub segment_bytes: u64,
    /// Of those, bytes that are booked; less where segments predate the agent, or records were lost.
    pub booked_bytes: u64,
    /// Bytes of live blocks, pending ones included.
    pub block_bytes: u64,
    /// Of those, bytes whose owner let go and that wait for a stream: PyTorch counts them as active, not as allocated.
    pub pending_bytes: u64,
    /// What its owner last said to have reserved and handed out (a framework's; nobody asks the driver's).
    pub own: Option<(u64, u64)>,
    /// The owner's total of live blocks and ours, when it last compared.
    pub check: Option<(u64, u64)>,
}

impl Pool {
    /// Segment bytes that no live block covers. Negative where blocks lie in segments that nobody told of.
    pub fn idle_bytes(&self) -> i64 {
        self.segment_bytes.wrapping_sub(self.block_bytes) as i64
    }

    /// What the owner calls allocated: live blocks without those that wait for a stream.
    pub fn allocated_bytes(&self) -> u64 {
        self.block_bytes.saturating_sub(self.pending_bytes)
    }

    /// The owner's total minus ours when it last compared; `None` if it never did, or if both are the same.
    pub fn disagreement(&self) -> Option<i64> {
        let (own, ours) = self.check?;
        (own != ours).then_some(own.wrapping_sub(ours) as i64)
    }
}
