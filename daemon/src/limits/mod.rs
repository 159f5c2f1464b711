//! Limits that keep one user from blocking others: connections, bytes per second, log lines, processor time for answers.
//!
//! ```text
//! connection_slots  limits of connections, in total and for each user, with eviction of idle ones
//! agent_slots       slots of the agent socket, with a further limit for peers without a hello
//! rate_limit        bytes per second of a connection; log lines about a user's peers
//! user_queue        slots in the aggregator's inbox
//! user_share        processor time for answers
//! ```

pub mod agent_slots;
pub(crate) mod connection_slots;
pub(crate) mod rate_limit;
pub mod user_queue;
pub mod user_share;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ControlLimits {
    /// Maximum number of connections at one time.
    pub connections: usize,
    /// Maximum number of connections of one user at one time, so that no user can lock out others.
    pub connections_per_uid: usize,
    /// Share of one processor that the answers to one user may take.
    pub share_per_uid: f64,
}

impl Default for ControlLimits {
    fn default() -> Self {
        ControlLimits { connections: 64, connections_per_uid: 16, share_per_uid: 0.2 }
    }
}
