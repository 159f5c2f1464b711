//! Times in which the agent saw nothing, as a run keeps them.

use serde::{Deserialize, Serialize};

/// A time in which the agent saw nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlindWindow {
    /// From when.
    pub from_ns: u64,
    /// Until when; absent while it lasts.
    pub to_ns: Option<u64>,
    /// Why, in words.
    pub why: String,
}
