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
