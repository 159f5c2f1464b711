//! How complete the numbers of a process are.

use crate::layers::LayerSaid;
use crate::part::Part;
use serde::{Deserialize, Serialize};

/// How much of the truth the numbers are. Kept as JSON in the store: fields that are added read as their
/// default from older runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Coverage {
    /// An agent or a log spoke for the process.
    pub covered: bool,
    /// It began after allocations.
    pub late: bool,
    /// Who blocks the agent, if somebody does; with a `blocked_code` other than 39, why it is not let in.
    pub blocked_by: Option<String>,
    /// CUPTI's result then.
    pub blocked_code: Option<u16>,
    /// When the agent saw nothing; of many, the longest.
    pub blind: Vec<BlindWindow>,
    /// How many such times there were.
    pub blind_count: u64,
    /// How long those were that have ended.
    pub blind_ns: u64,
    /// The agent had seen memory before one of them: sums and peaks are not exact since then, and no resync heals that.
    pub blind_doubt: bool,
    /// The state of now is not wholly known.
    pub partial_state: bool,
    /// Something was lost at some time: peaks are lower bounds.
    pub partial_history: bool,
    /// Ordered records applied.
    pub events: u64,
    /// Of those, driver allocations that succeeded.
    pub allocations: u64,
    /// Their bytes, frees not taken off.
    pub allocated_bytes: u64,
    /// Lines or records of the input that could not be read.
    pub rejected: u64,
    /// Ordered records lost.
    pub lost: u64,
    /// Ordered records that were kept back on request (pause, mute): no losses.
    pub withheld: u64,
    /// The source ends here on purpose, a snapshot or a recording that was stopped; the process may have gone on.
    pub complete: bool,
    /// Records that did not fit what was known.
    pub odd: u64,
    /// Samples of NVML.
    pub samples: u64,
    /// Of those, taken while memory moved.
    pub torn_samples: u64,
    /// Of those, closed without the agent's word.
    pub stale_samples: u64,
    /// Driver allocations that failed.
    pub failed_allocations: u64,
    /// Steps that the process reported.
    pub steps: u64,
    /// How each way of naming memory is, as the agent said last.
    pub layers: Vec<LayerSaid>,
    /// Times at which memory ran out that are in no device's list: there were too many.
    pub ooms_dropped: u64,
    /// Moments that somebody gave a name, by time.
    pub marks: Vec<Mark>,
    /// More of them: there were too many.
    pub marks_dropped: u64,
    /// The programs that spoke, oldest first: the first and the latest.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<Program>,
    /// The run is not the first part of its process's life; absent for one that is the whole of it, or its beginning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
}

/// Of the programs that a process was, one after another by exec(), one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// As its agent numbers it.
    pub instance: u16,
    /// Up to which of its records, counted from 1, it was heard.
    pub heard: u64,
}

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
