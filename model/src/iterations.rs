//! What each iteration of a training run held, by what the bytes are for: a bounded table, for
//! `gpumemctl report --iterations`.
//!
//! An iteration begins with the program's `Step` record; of a program that says none, with the first forward pass
//! after an optimizer's step. Rows are in the order of time, without gaps. When there are [`MAX_ROWS`], neighbours
//! become one: peaks are the higher of the two, last values those of the later. The iteration that is under way is
//! apart and never in `rows`.
//!
//! In JSON (`details.iterations` of a device) a level is `[peak, last]`, and levels that are nothing are left out:
//!
//! ```text
//! {"rows": [{"first": 0, "last": 0, "count": 1, "start_ns": 1000, "end_ns": 2000,
//!            "tracked": [4096, 4096], "pool_reserved": [4096, 4096], "parameters": [1024, 1024]}, ...],
//!  "open": {...}}
//! ```

use crate::fields::{Timed, Window, WindowKind, fields, plain};
use serde::{Deserialize, Serialize};

/// Rows that a table has at most; a row is about 0.4 KB of JSON.
pub const MAX_ROWS: usize = 256;

fields! {
    /// The iterations of one device of a run.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Iterations {
        /// Those that are over.
        rows: Vec<Iteration>    => join append, clip within;
        /// The one that is under way, as far as it got.
        #[serde(skip_serializing_if = "Option::is_none")]
        open: Option<Iteration> => join last,   clip open_at_end;
    }
}

/// The iteration that is under way lies in a window that ends now.
fn open_at_end(open: &mut Option<Iteration>, window: &Window) {
    open.take_if(|row| row.start_ns > window.to_ns || window.part != WindowKind::Since);
}

plain!(Iteration);

impl Timed for Iteration {
    fn time_ns(&self) -> (u64, u64) {
        (self.start_ns, self.end_ns)
    }
}

/// One iteration, or several neighbours.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Iteration {
    /// The program's number of the epoch that the first one is of; 0 where it says none.
    #[serde(skip_serializing_if = "is_zero")]
    pub epoch: u64,
    /// Number of the first one: the program's own number of its step, or counted from 0.
    pub first: u64,
    /// Number of the last one: `first` unless there are several.
    pub last: u64,
    /// How many there are in this row. Not `last - first + 1` where the program's numbers jump or begin anew.
    pub count: u64,
    /// When the first began.
    pub start_ns: u64,
    /// When the last was over.
    pub end_ns: u64,
    /// Records were lost in it: amounts are what is known.
    #[serde(skip_serializing_if = "is_false")]
    pub partial: bool,
    /// Live driver allocations.
    #[serde(skip_serializing_if = "Level::is_nothing")]
    pub tracked: Level,
    /// What pools hold in segments, or reserve: `cached` in PyTorch's words.
    #[serde(skip_serializing_if = "Level::is_nothing")]
    pub pool_reserved: Level,
    /// Weights.
    #[serde(skip_serializing_if = "Level::is_nothing")]
    pub parameters: Level,
    /// Gradients of weights.
    #[serde(skip_serializing_if = "Level::is_nothing")]
    pub gradients: Level,
    /// What optimizers keep.
    #[serde(skip_serializing_if = "Level::is_nothing")]
    pub optimizer_state: Level,
    /// What forward kept for backward (feature maps), once backward has begun and it is known.
    #[serde(skip_serializing_if = "Level::is_nothing")]
    pub activations: Level,
    /// What backward made and freed again, where it was most. `last` is 0.
    #[serde(skip_serializing_if = "Level::is_nothing")]
    pub intermediate_gradients: Level,
    /// The same of forward and of the optimizer. `last` is 0.
    #[serde(skip_serializing_if = "Level::is_nothing")]
    pub temporaries: Level,
    /// Data handed to the model.
    #[serde(skip_serializing_if = "Level::is_nothing")]
    pub inputs: Level,
    /// Scratch of libraries.
    #[serde(skip_serializing_if = "Level::is_nothing")]
    pub workspace: Level,
    /// State that is not trained.
    #[serde(skip_serializing_if = "Level::is_nothing")]
    pub buffers: Level,
    /// Keys and values of earlier tokens.
    #[serde(skip_serializing_if = "Level::is_nothing")]
    pub kv_caches: Level,
    /// Parameters of untrained copies of a trained module.
    #[serde(skip_serializing_if = "Level::is_nothing")]
    pub parameter_copies: Level,
}

/// An amount in an iteration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(i64, i64)", into = "(i64, i64)")]
pub struct Level {
    /// Highest that was seen; of roles at edges of phases, where they are known.
    pub peak_bytes: i64,
    /// At the end.
    pub last_bytes: i64,
}

impl Level {
    fn is_nothing(&self) -> bool {
        *self == Level::default()
    }

    /// It is this much now.
    pub fn set(&mut self, bytes: i64) {
        self.peak_bytes = self.peak_bytes.max(bytes);
        self.last_bytes = bytes;
    }

    /// It was this much for a while.
    pub fn reach(&mut self, bytes: i64) {
        self.peak_bytes = self.peak_bytes.max(bytes);
    }

    /// So many bytes were counted by mistake; it is this much now.
    pub fn correct(&mut self, mistaken: i64, bytes: i64) {
        *self = Level { peak_bytes: (self.peak_bytes - mistaken).max(bytes), last_bytes: bytes };
    }

    /// That of two iterations, one after the other.
    pub fn join(&mut self, later: Level) {
        *self = Level { peak_bytes: self.peak_bytes.max(later.peak_bytes), last_bytes: later.last_bytes };
    }
}

impl From<(i64, i64)> for Level {
    fn from((peak_bytes, last_bytes): (i64, i64)) -> Self {
        Level { peak_bytes, last_bytes }
    }
}

impl From<Level> for (i64, i64) {
    fn from(level: Level) -> Self {
        (level.peak_bytes, level.last_bytes)
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

fn is_false(flag: &bool) -> bool {
    !flag
}
