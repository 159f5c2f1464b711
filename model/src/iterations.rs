//! Memory held in each iteration (step) of a training run, by role, in a bounded table for `gpumemctl report --iterations`.
//!
//! An iteration begins with the program's `Step` record. If the program reports no steps, it begins with the first forward pass
//! after an optimizer step. Rows are in order of time, without gaps. When there are [`MAX_ROWS`] rows, neighbours
//! are merged: the merged row has the higher peak of the two and the last value of the later. The iteration in progress is
//! kept separately and is never in `rows`.
//!
//! In JSON (`details.iterations` of a device) a level (bytes of one kind) is `[peak, last]`, and levels of zero are omitted:
//!
//! ```text
//! {"rows": [{"first": 0, "last": 0, "count": 1, "start_ns": 1000, "end_ns": 2000,
//!            "tracked": [4096, 4096], "pool_reserved": [4096, 4096], "parameters": [1024, 1024]}, ...],
//!  "open": {...}}
//! ```

use crate::fields::{Timed, Window, WindowKind, fields, plain};
use gpumem_wire::Role;
use serde::{Deserialize, Serialize};

/// Maximum number of rows; a row takes about 0.4 KB of JSON.
pub const MAX_ROWS: usize = 256;

fields! {
    /// Iterations on one device of a run.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Iterations {
        /// Completed iterations.
        rows: Vec<Iteration>    => join append, clip within;
        /// The iteration in progress, with its amounts so far.
        #[serde(skip_serializing_if = "Option::is_none")]
        open: Option<Iteration> => join last,   clip open_at_end;
    }
}

/// Keeps the iteration in progress only in a window that reaches to the present.
fn open_at_end(open: &mut Option<Iteration>, window: &Window) {
    open.take_if(|row| row.start_ns > window.to_ns || window.part != WindowKind::Since);
}

plain!(Iteration);

impl Timed for Iteration {
    fn time_ns(&self) -> (u64, u64) {
        (self.start_ns, self.end_ns)
    }
}

/// Declares [`Iteration`] with its levels. A row names a level (highest and last bytes) and the role whose bytes it counts, if
/// any.
macro_rules! iteration {
    ($( $(#[$doc:meta])* $level:ident $(= $role:ident)?; )*) => {
        /// Memory held in one iteration, or in several neighbouring ones that were merged.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct Iteration {
            /// Epoch of the first iteration, as the program numbers it; 0 if the program reports none.
            #[serde(skip_serializing_if = "is_zero")]
            pub epoch: u64,
            /// Number of the first iteration: the program's step number, or counted from 0.
            pub first: u64,
            /// Number of the last iteration; equals `first` for a single one.
            pub last: u64,
            /// Number of iterations in this row. Differs from `last - first + 1` if the program's numbers jump or restart.
            pub count: u64,
            pub start_ns: u64,
            pub end_ns: u64,
            /// Most forward passes with gradients enabled that began without a backward pass between them; 0 in older runs.
            #[serde(skip_serializing_if = "is_zero")]
            pub passes_at_once: u64,
            /// Whether records were lost during the iterations of the row, so that amounts may be incomplete.
            #[serde(skip_serializing_if = "std::ops::Not::not")]
            pub partial: bool,
            $( $(#[$doc])* #[serde(skip_serializing_if = "Level::is_nothing")] pub $level: Level, )*
        }

        impl Iteration {
            /// Returns the level of a role's bytes. `None` for temporary bytes, which have two levels, and for the unknown role.
            pub fn role_mut(&mut self, role: Role) -> Option<&mut Level> {
                match role {
                    $( $( Role::$role => Some(&mut self.$level), )? )*
                    Role::Temporary | Role::Unknown => None,
                }
            }

            /// Merges with a later iteration: keeps the higher peaks and the later last values.
            pub fn join(&mut self, later: Iteration) {
                (self.last, self.end_ns) = (later.last, later.end_ns);
                // The counts of a damaged store may have any value.
                self.count = self.count.saturating_add(later.count);
                self.passes_at_once = self.passes_at_once.max(later.passes_at_once);
                self.partial |= later.partial;
                $( self.$level.join(later.$level); )*
            }
        }
    };
}

iteration! {
    /// Bytes of live driver allocations.
    tracked;
    /// Bytes that pools have reserved: segments of framework pools, and reservations of driver pools.
    pool_reserved;
    /// Bytes of weights.
    parameters = Parameter;
    /// Bytes of gradients of weights.
    gradients = Gradient;
    /// Bytes of gradients that are older than the iteration: those at the begin of its first forward pass.
    kept_gradients;
    /// Bytes that forward passes have kept when another one begins before a backward pass.
    kept_activations;
    /// Bytes of state that optimizers keep.
    optimizer_state = OptimizerState;
    /// Bytes of activations, which forward keeps for backward; known once backward has begun.
    activations = Activation;
    /// Bytes that backward allocated and freed again: `peak_bytes` is their maximum in the iteration, `last_bytes` is 0.
    intermediate_gradients;
    /// Maximum of the bytes that forward or the optimizer allocated and freed again; the last value is 0.
    temporaries;
    /// Bytes of the model's input data.
    inputs = Input;
    /// Bytes of libraries' scratch memory.
    workspace = Workspace;
    /// Bytes of model state that training does not update, such as running means.
    buffers = Buffer;
    /// Bytes of cached keys and values of earlier tokens.
    kv_caches = KvCache;
    /// Bytes of parameters of untrained copies of a trained module.
    parameter_copies = ParameterCopy;
}

/// Highest and last number of bytes of one kind in an iteration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(i64, i64)", into = "(i64, i64)")]
pub struct Level {
    /// Highest value; for a role, the highest of the values measured at phase boundaries.
    pub peak_bytes: i64,
    /// Value at the end of the iteration.
    pub last_bytes: i64,
}

impl Level {
    fn is_nothing(&self) -> bool {
        *self == Level::default()
    }

    /// Sets the present value, and raises the peak to it.
    pub fn set(&mut self, bytes: i64) {
        self.peak_bytes = self.peak_bytes.max(bytes);
        self.last_bytes = bytes;
    }

    /// Raises the peak to `bytes`, which were reached for a time.
    pub fn reach(&mut self, bytes: i64) {
        self.peak_bytes = self.peak_bytes.max(bytes);
    }

    /// Corrects the level: `mistaken` bytes were counted in error, and `bytes` is the present value.
    pub fn correct(&mut self, mistaken: i64, bytes: i64) {
        *self = Level { peak_bytes: (self.peak_bytes - mistaken).max(bytes), last_bytes: bytes };
    }

    /// Merges with the level of a later iteration.
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

pub(crate) fn is_zero(number: &u64) -> bool {
    *number == 0
}
