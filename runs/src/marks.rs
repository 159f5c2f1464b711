//! Moments that somebody gave a name.

use gpumem_ledger::MarkView;
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

impl From<&MarkView> for Mark {
    fn from(mark: &MarkView) -> Self {
        let by = if mark.from_outside { "gpumemctl" } else { "program" };
        Mark { time_ns: mark.time_ns, name: mark.name.as_deref().map(str::to_owned), by: by.to_owned() }
    }
}
