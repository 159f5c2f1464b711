//! A run: the life of one process on its GPUs, as it is stored and reported.
//!
//! All sums of a [`Moment`] are exact: `tracked` is the sum of its amounts, and `used` is
//! `predates + tracked + untrackable` wherever all of them are known.

pub use crate::cell::{
    Cell, Class, phase_name, phase_names, phase_of_name, role_name, role_names, role_of_name,
};
pub use crate::coverage::{BlindWindow, Coverage, Mark, Program};
pub use crate::device::{Accounting, Beside, Details, Device, DeviceReading, MAX_TENANTS, Pool};
pub use crate::ending::{Cause, Ending};
pub use crate::gap::{Parts, Step};
pub use crate::iterations::{Iteration, Iterations, Level};
pub use crate::layers::LayerSaid;
pub use crate::moment::{Moment, absence_name};
pub use crate::oom::{Fate, Holder, OPEN_FATE_NS, Oom, OomDevice, OomKind};
pub use crate::own::Own;
pub use crate::parameters::Parameters;
pub use crate::part::Part;
pub use crate::timeline::Timeline;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The life of one process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Where the run came from.
    pub source: Source,
    /// What its times mean.
    pub clock: Clock,
    /// Whose life it is.
    pub process: Process,
    /// How it ended, or that it has not.
    pub state: State,
    /// How much of the truth its numbers are.
    pub coverage: Coverage,
    /// What a reader must know beside the numbers, in words, most important first.
    pub caveats: Vec<Caveat>,
    /// Names of cells; amounts are by index here.
    pub cells: Vec<Cell>,
    /// One per GPU or MIG instance.
    pub devices: Vec<Device>,
    /// What the program says of itself beside memory.
    #[serde(default, skip_serializing_if = "Own::is_empty")]
    pub own: Own,
}

/// [`Source::kind`] of a run that was exported on another machine.
pub const EXPORT_FORMAT: &str = "gpumem-run";

/// Where a run came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// `daemon`, `recording`, or an import format such as `tbd-log`.
    pub kind: String,
    /// File name of a recording or import; host name for the daemon.
    pub origin: String,
    /// Preset of rules that goes with the format, if any.
    pub preset: Option<String>,
}

impl Source {
    /// A daemon watched the process, here or on another machine: `origin` is the machine.
    pub fn is_watched(&self) -> bool {
        self.kind == "daemon" || self.kind == EXPORT_FORMAT
    }

    /// Agents and daemons of ours told it, and not a file of another tool.
    pub fn is_own(&self) -> bool {
        self.is_watched() || self.kind == "recording"
    }
}

/// What record times mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Clock {
    /// Nanoseconds of the host's monotonic clock; wall clock of its zero, where an anchor was seen.
    Monotonic {
        /// Nanoseconds since 1970 at time 0.
        wall_offset_ns: Option<i64>,
    },
    /// Lines of a log: only the order means anything.
    Lines,
}

/// Whose life it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Pid in the daemon's namespace; 0 where it is not known.
    pub pid: u32,
    /// Start time from /proc, in clock ticks; 0 where it is not known.
    pub start_ticks: u64,
    /// Owner's uid.
    pub uid: Option<u64>,
    /// Command, comm, user, cgroup: what /proc said.
    pub facts: BTreeMap<String, String>,
    /// Rank and job: what the agent's environment said.
    pub claims: BTreeMap<String, String>,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum State {
    /// It goes on: these are the numbers so far.
    Open,
    /// The process ended.
    Closed {
        /// When.
        time_ns: u64,
        /// Status as waitpid gives it, where it could be known.
        status: Option<u64>,
    },
    /// Nobody watches any more: the daemon died, or the recording stops. The numbers are those of the
    /// last checkpoint or record.
    Interrupted,
    /// The process went on: a run that lasts for days is kept in parts, and the next part begins here.
    Rolled {
        /// When.
        time_ns: u64,
    },
}

/// Something a reader must know.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Caveat {
    /// Stable word for programs: `no_frees`, `rejected_lines`, ...
    pub code: String,
    /// One sentence.
    pub text: String,
}

/// Whether a job that claims this id is meant by `job`: the id, or the name that `gpumemctl run --name` put in front of it.
pub fn is_job(claim: &str, job: &str) -> bool {
    claim == job || claim.rsplit_once('.').is_some_and(|(name, _)| name == job)
}
