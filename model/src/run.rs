//! A run: the life of one process on its GPUs, as it is stored and reported.
//!
//! All sums of a [`Moment`] are exact: `tracked` is the sum of its amounts, and `used` is
//! `predates + tracked + untrackable` wherever all of them are known.

pub use crate::blind::BlindWindow;
pub use crate::ending::{Cause, Ending};
pub use crate::gap::{Parts, Step};
use crate::growth::Growth;
pub use crate::iterations::{Iteration, Iterations, Level};
pub use crate::layers::LayerSaid;
pub use crate::marks::Mark;
pub use crate::oom::{Fate, Holder, Oom, OomDevice, OomKind};
pub use crate::own::Own;
pub use crate::parameters::Parameters;
pub use crate::part::Part;
pub use crate::pools::Pool;
use crate::series::Series;
pub use crate::timeline::Timeline;
use gpumem_wire::{Absence, Phase, Role};
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

/// Something a reader must know.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Caveat {
    /// Stable word for programs: `no_frees`, `rejected_lines`, ...
    pub code: String,
    /// One sentence.
    pub text: String,
}

/// Name of a cell.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Cell {
    /// `direct`, `block`, `pool_idle` or `opaque`.
    pub class: Class,
    /// Tag path.
    pub tag: Option<String>,
    /// First tag, if a later one replaced it.
    pub origin: Option<String>,
    /// What for; absent where not known.
    pub role: Option<String>,
    /// When in a step; absent where not known.
    pub phase: Option<String>,
    /// Library that asked.
    pub library: Option<String>,
    /// Name of the framework's pool that the bytes are of.
    #[serde(default)]
    pub pool: Option<String>,
    /// Blocks that their owner has let go, which a stream may still use: of class `pool_idle`.
    #[serde(default)]
    pub pending: bool,
    /// The tag is that of the process: the thread that allocated had none.
    #[serde(default)]
    pub inherited: bool,
}

/// Part of the identity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    #[default]
    /// Driver allocations that no pool carves.
    Direct,
    /// What pools handed out.
    Block,
    /// Segments that no block covers.
    PoolIdle,
    /// Segments of pools that report no blocks.
    Opaque,
}

/// Other processes that a device names.
pub const MAX_TENANTS: usize = 16;

/// One device of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// UUID as NVML writes it, `ordinal-N`, or `unnamed-N` where the agent has not named its slot.
    pub name: String,
    /// NVML's index, or the import's number.
    pub ordinal: u16,
    /// Product name; empty where not known.
    pub model: String,
    /// Size.
    pub total_bytes: Option<u64>,
    /// The latest moment at which everything that can be known was known.
    pub last: Moment,
    /// The highest `tracked`.
    pub peak: Moment,
    /// Highest `used` that was read, and when.
    pub peak_used: Option<(u64, u64)>,
    /// Host and foreign memory, and blocks outside the book: never in a sum.
    pub beside: Beside,
    /// Device memory: together with the last sample where `unaccounted_bytes` is known, else as last read.
    pub reading: Option<DeviceReading>,
    /// Device used minus all its processes, where device memory agreed before and after their list.
    pub unaccounted_bytes: Option<i64>,
    /// Other processes in the same list: pid and used bytes, the largest first, at most [`MAX_TENANTS`].
    pub tenants: Vec<(u32, Option<u64>)>,
    /// How many more there are, and their used bytes.
    #[serde(default)]
    pub other_tenants: (u32, u64),
    /// used, tracked and gap over time.
    pub series: Series,
    /// What explains the rest.
    #[serde(default)]
    pub details: Details,
}

/// What explains a device's numbers. Kept as JSON in the store: fields that are added read as their default from
/// older runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Details {
    /// The highest that the driver's own accounting charged to the process, where it is on.
    pub accounted_peak_bytes: Option<u64>,
    /// How the gap came to be what it is: in the order of time, but the smallest of many are one and come first.
    pub steps: Vec<Step>,
    /// Points by which growth is judged.
    pub growth: Growth,
    /// What was held over time, by cell; empty in runs of older versions.
    pub timeline: Timeline,
    /// What each training step held.
    pub iterations: Iterations,
    /// Parameters and gradients one by one.
    pub parameters: Parameters,
    /// Pools that lived when the run was told.
    pub pools: Vec<Pool>,
    /// Times at which memory ran out or nearly did, in their order.
    pub ooms: Vec<Oom>,
    /// Faults that the driver told of the device shortly before the end of the process: when, and which (Xid).
    pub faults: Vec<(u64, u64)>,
}

/// What the driver's own accounting and we say of the highest `used`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Accounting {
    /// The driver's, which sees every allocation of video memory.
    pub driver_bytes: u64,
    /// Ours: the highest that was read, or the peak of `tracked` with its gap.
    pub our_bytes: Option<u64>,
}

impl Accounting {
    /// What the driver allocates at once: less is no disagreement.
    pub const GRANULE_BYTES: u64 = 2 << 20;

    /// How much the driver's exceeds ours, if that is more than a granule, in either direction.
    pub fn disagreement(&self) -> Option<i64> {
        let ours = self.our_bytes?;
        (self.driver_bytes.abs_diff(ours) > Self::GRANULE_BYTES).then(|| {
            (i128::from(self.driver_bytes) - i128::from(ours)).clamp(i64::MIN.into(), i64::MAX.into()) as i64
        })
    }
}

impl Device {
    /// The driver's word and ours, where accounting mode is on.
    pub fn accounting(&self) -> Option<Accounting> {
        let driver_bytes = self.details.accounted_peak_bytes?;
        let read = self.peak_used.map(|(bytes, _)| bytes);
        let summed = self.peak.used_bytes().and_then(|bytes| u64::try_from(bytes).ok());
        Some(Accounting { driver_bytes, our_bytes: read.max(summed) })
    }
}

/// One identity.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Moment {
    /// When.
    pub time_ns: u64,
    /// Sum of `amounts`; absent for a process without an agent.
    pub tracked_bytes: Option<i64>,
    /// (index in [`Run::cells`], bytes), without zeros.
    pub amounts: Vec<(u32, i64)>,
    /// Bytes older than the agent; absent where it came late and nothing has told them yet.
    pub predates_bytes: Option<i64>,
    /// What NVML charges beyond that; absent without a sample.
    pub untrackable_bytes: Option<i64>,
    /// Why `untrackable_bytes` is what it is; absent where nothing tells.
    #[serde(default)]
    pub parts: Option<Parts>,
    /// Why the newest sample had no `used`, see [`absence_name`]: the moment is then an older sample's.
    #[serde(default)]
    pub used_absence: Option<String>,
    /// For processes without an agent: what NVML charges.
    pub uncovered_used_bytes: Option<u64>,
    /// The gap was taken from a sample this far away; 0: it was measured at this moment.
    pub gap_distance_ns: i64,
    /// Memory moved while NVML was read: lowest and highest `tracked`. Equal ones are a lower bound: a call was under way whose
    /// bytes nobody knew.
    pub torn: Option<(i64, i64)>,
    /// The sample was closed without the agent's word.
    pub stale: bool,
    /// Records had been lost and no resync had ended.
    pub partial: bool,
}

impl Moment {
    /// The parts of the gap; all of it is unexplained where nothing told them (runs of older versions).
    pub fn gap_parts(&self) -> Option<Parts> {
        let untrackable = self.untrackable_bytes?;
        Some(self.parts.filter(|parts| parts.sum() == untrackable).unwrap_or(Parts::unknown(untrackable)))
    }

    /// What NVML charges (or, with a gap from elsewhere, would have charged).
    pub fn used_bytes(&self) -> Option<i64> {
        match self.tracked_bytes {
            Some(tracked) => Some(self.predates_bytes? + tracked + self.untrackable_bytes?),
            None => self.uncovered_used_bytes.and_then(|used| i64::try_from(used).ok()),
        }
    }
}

/// Memory outside the sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct Beside {
    pub managed_bytes: i64,
    pub pinned_bytes: i64,
    pub registered_bytes: i64,
    pub imported_bytes: i64,
    pub host_vmm_bytes: i64,
    /// Live blocks in memory that is not booked.
    pub unbooked_block_bytes: i64,
    /// Blocks that wait for a stream; inside the sum as blocks.
    pub pending_block_bytes: i64,
}

/// Device memory at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct DeviceReading {
    pub time_ns: u64,
    pub used_bytes: u64,
    pub free_bytes: u64,
    pub system_reserved_bytes: Option<u64>,
    #[serde(default)]
    pub unified: bool,
}

/// A process that ends so soon after memory ran out has ended of it; one that goes on for longer has survived.
pub const OPEN_FATE_NS: u64 = 10_000_000_000;

const ROLES: [(&str, Role); 10] = [
    ("parameter", Role::Parameter),
    ("gradient", Role::Gradient),
    ("optimizer state", Role::OptimizerState),
    ("activation", Role::Activation),
    ("input", Role::Input),
    ("temporary", Role::Temporary),
    ("workspace", Role::Workspace),
    ("buffer", Role::Buffer),
    ("kv cache", Role::KvCache),
    ("parameter copy", Role::ParameterCopy),
];
const PHASES: [(&str, Phase); 5] = [
    ("setup", Phase::Setup),
    ("forward", Phase::Forward),
    ("backward", Phase::Backward),
    ("optimizer", Phase::Optimizer),
    ("evaluation", Phase::Evaluation),
];
/// What a process was doing, but not what a block is named after: no rule matches it.
const BETWEEN: (&str, Phase) = ("between", Phase::Between);

/// Why a sample has no `used`, in words.
pub fn absence_name(absence: Absence, list_failed: bool) -> &'static str {
    match absence {
        Absence::NotAvailable => "not available",
        Absence::NoPermission => "no permission",
        Absence::NotListed => "not listed",
        Absence::GpuLost => "gpu lost",
        Absence::Timeout => "timeout",
        Absence::NotSupported => "not supported",
        Absence::WrongNamespace => "wrong namespace",
        Absence::Impossible => "impossible value",
        _ if list_failed => "list failed",
        _ => "unknown",
    }
}

/// How a role is written; `None` for unknown.
pub fn role_name(role: Role) -> Option<&'static str> {
    ROLES.iter().find(|(_, other)| *other == role).map(|(name, _)| *name)
}

/// The role of that name.
pub fn role_of_name(name: &str) -> Option<Role> {
    ROLES.iter().find(|(other, _)| *other == name).map(|(_, role)| *role)
}

/// All names of roles.
pub fn role_names() -> impl Iterator<Item = &'static str> {
    ROLES.iter().map(|(name, _)| *name)
}

/// How a phase is written; `None` for unknown.
pub fn phase_name(phase: Phase) -> Option<&'static str> {
    PHASES.iter().chain([&BETWEEN]).find(|(_, other)| *other == phase).map(|(name, _)| *name)
}

/// The phase of that name.
pub fn phase_of_name(name: &str) -> Option<Phase> {
    PHASES.iter().chain([&BETWEEN]).find(|(other, _)| *other == name).map(|(_, phase)| *phase)
}

/// All names of phases.
pub fn phase_names() -> impl Iterator<Item = &'static str> {
    PHASES.iter().map(|(name, _)| *name)
}

/// Whether a job that claims this id is meant by `job`: the id, or the name that `gpumemctl run --name` put in front of it.
pub fn is_job(claim: &str, job: &str) -> bool {
    claim == job || claim.rsplit_once('.').is_some_and(|(name, _)| name == job)
}
