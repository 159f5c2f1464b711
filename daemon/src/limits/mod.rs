//! What one user may take from the others: connections, bytes in a second, log lines, time for answers.
//!
//! ```text
//! connection_slots  connections at once, in all and of one user, with eviction of idle ones
//! agent_slots       the same for the agent socket, where peers that have not said hello are limited further
//! rate_limit        bytes in a second; log lines about a user's peers
//! user_queue        slots in the aggregator's inbox
//! user_share        processor time for answers
//! ```

pub mod agent_slots;
pub(crate) mod connection_slots;
pub(crate) mod rate_limit;
pub mod user_queue;
pub mod user_share;

/// Limits of the control socket.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ControlLimits {
    /// Connections at once.
    pub connections: usize,
    /// Connections of one user at once, so that no user can lock out the others.
    pub connections_per_uid: usize,
    /// Share of a processor that the answers to one user may take.
    pub share_per_uid: f64,
}

impl Default for ControlLimits {
    fn default() -> Self {
        ControlLimits { connections: 64, connections_per_uid: 16, share_per_uid: 0.2 }
    }
}
