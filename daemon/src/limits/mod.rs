//! What one user may take from the others: connections, bytes in a second, log lines, time for answers.

pub(crate) mod connection_slots;
pub(crate) mod idle_slots;
pub(crate) mod log_rate_limit;
pub(crate) mod rate_limit;
pub(crate) mod user_queue;
pub(crate) mod user_share;
