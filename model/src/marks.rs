//! Moments that somebody gave a name.

use serde::{Deserialize, Serialize};

/// A moment with a name: times can be told by it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Mark {
    /// When.
    pub time_ns: u64,
    /// Its name; absent if a loss took it.
    pub name: Option<String>,
    /// Who made it: `program` (`gpumem.mark` and the like), or `gpumemctl`.
    pub by: String,
}
