//! Memory that ran out, or nearly did, as a run keeps it.

use serde::{Deserialize, Serialize};

/// A process that ends so soon after memory ran out has ended of it; one that goes on for longer has survived.
pub const OPEN_FATE_NS: u64 = 10_000_000_000;

/// What ran out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OomKind {
    /// The driver refused, and nobody said that this was the end: a framework makes room and tries again.
    #[default]
    Pressure,
    /// A framework's pool gave up without asking the driver: a limit of its own.
    Pool,
    /// It gave up after the driver had refused.
    Device,
    /// Nobody said anything: a process without an agent ended while its device was nearly full.
    Suspected,
}

/// What followed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "fate")]
pub enum Fate {
    /// Not known (yet).
    #[default]
    Open,
    /// The process ended with a failure soon after.
    Fatal {
        /// How soon.
        after_ns: u64,
        /// Status as waitpid gives it, where it could be known.
        status: Option<u64>,
    },
    /// It went on.
    Survived,
}

/// One time at which memory ran out. Kept as JSON in the store: fields that are added read as their default from older
/// runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Oom {
    /// What.
    pub kind: OomKind,
    /// What followed.
    pub fate: Fate,
    /// When it was first said.
    pub time_ns: u64,
    /// When it was last said.
    pub last_ns: u64,
    /// How often: the same request at the same place within some seconds is one entry.
    pub count: u64,
    /// Failed driver calls.
    pub refusals: u64,
    /// Of the pool where it gave up, else of the driver; absent in JSON, and 0 here, where it is not known (`suspected`).
    #[serde(skip_serializing_if = "is_unknown")]
    pub asked_bytes: u64,
    /// Of the driver, where it refused.
    pub driver_asked_bytes: Option<u64>,
    /// Free on the device right after the driver had refused; of `suspected`, the least between its last reading and its end.
    pub device_free_bytes: Option<u64>,
    /// The pool's own word of what it had handed out.
    pub pool_used_bytes: Option<u64>,
    /// And of what it held.
    pub pool_reserved_bytes: Option<u64>,
    /// `fatal` or `survived`, where the reporter said so of its request.
    pub said: Option<String>,
    /// The driver's result.
    pub result: u16,
    /// Tag of the request.
    pub tag: Option<String>,
    /// Library that asked.
    pub library: Option<String>,
    /// Frames, one a line, innermost first: `function<TAB>file<TAB>line`.
    pub stack: Option<String>,
    /// When in a step.
    pub phase: Option<String>,
    /// The program's number of the step.
    pub step: Option<u64>,
    /// Sum of `amounts`.
    pub tracked_bytes: i64,
    /// (index in `Run::cells`, bytes), without zeros: what the process held.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub amounts: Vec<(u32, i64)>,
    /// Older than the agent, as at the last sample.
    pub predates_bytes: Option<i64>,
    /// As at the last sample.
    pub untrackable_bytes: Option<i64>,
    /// Idle bytes of framework pools.
    pub idle_bytes: Option<u64>,
    /// Pieces that they are in.
    pub idle_pieces: Option<u64>,
    /// The largest of them.
    pub largest_idle_bytes: Option<u64>,
    /// A segment of those pools grows by mapping: PyTorch's expandable segments are on.
    pub is_expandable: bool,
    /// Absent where NVML was not read.
    pub device: Option<OomDevice>,
    /// No framework of the process said that it would say when it gives up.
    pub is_unheard: bool,
}

/// How often memory ran out in all of these; the sum saturates, because a stored run may be damaged.
pub fn times<'o>(ooms: impl IntoIterator<Item = &'o Oom>) -> u64 {
    ooms.into_iter().fold(0, |sum, oom| sum.saturating_add(oom.count))
}

/// The device then: holders, others, what nobody owns, the driver's share and what is free are its size.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OomDevice {
    /// When NVML was read.
    pub read_ns: u64,
    /// Size.
    pub total_bytes: u64,
    /// Without what the process has allocated since.
    pub free_bytes: i64,
    /// The driver's share, where NVML tells it apart.
    pub system_bytes: Option<u64>,
    /// Device used minus the sum over its processes.
    pub unaccounted_bytes: i64,
    /// Its memory is the host's: what is unaccounted is the rest of the host's.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub unified: bool,
    /// The process itself, then others, the largest first.
    pub holders: Vec<Holder>,
    /// How many more there are, and their used bytes.
    pub others: (u32, i64),
}

/// Who had memory of the device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Holder {
    /// Pid in the daemon's namespace; 0 where it is hidden.
    pub pid: u32,
    /// Its user.
    pub user: Option<String>,
    /// What NVML charged; of the process itself with what it has allocated since.
    pub used_bytes: i64,
    /// What it grew by in the time before.
    pub growth_bytes: Option<i64>,
    /// How long that was: a minute, or as long as it is known.
    pub growth_ns: Option<u64>,
}

impl Oom {
    /// Whether it is one, and not only pressure: a refusal that nobody would have spoken of was one if the process ended
    /// with it.
    pub fn is_true(&self) -> bool {
        match self.kind {
            OomKind::Pool | OomKind::Device => true,
            OomKind::Pressure => self.is_unheard && matches!(self.fate, Fate::Fatal { .. }),
            OomKind::Suspected => false,
        }
    }

    /// Whether it is no more than a suspicion.
    pub fn is_suspected(&self) -> bool {
        self.kind == OomKind::Suspected
    }

    /// Free bytes at the time: the driver's own word, else what NVML said before.
    pub fn free_bytes(&self) -> Option<i64> {
        let said = self.device_free_bytes.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
        said.or(self.device.as_ref().map(|device| device.free_bytes))
    }
}

fn is_unknown(asked_bytes: &u64) -> bool {
    *asked_bytes == 0
}
