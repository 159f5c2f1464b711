//! Memory that ran out, or nearly did, as a run keeps it.

use crate::cell::{Amounts, hide_unknown_phase};
use crate::fields::{Timed, fields, plain};
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

fields! {
    /// One time at which memory ran out. Kept as JSON in the store: a field that a stored run does not have gets its default.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Oom {
        /// What ran out.
        kind: OomKind                    => redact keep;
        /// What followed.
        fate: Fate                       => redact keep;
        /// First report.
        time_ns: u64                     => redact keep;
        /// Last report.
        last_ns: u64                     => redact keep;
        /// Number of reports: the same request at the same place within some seconds is one record.
        count: u64                       => redact keep;
        /// Failed driver calls.
        refusals: u64                    => redact keep;
        /// Bytes requested of the pool where it gave up, else of the driver; absent in JSON, and 0 here, where unknown (`suspected`).
        #[serde(skip_serializing_if = "is_unknown")]
        asked_bytes: u64                 => redact keep;
        /// Bytes requested of the driver, where it refused.
        driver_asked_bytes: Option<u64>  => redact keep;
        /// Free on the device right after the driver had refused; of `suspected`, the least between its last reading and its end.
        device_free_bytes: Option<u64>   => redact keep;
        /// Bytes that the pool had handed out, as it reported.
        pool_used_bytes: Option<u64>     => redact keep;
        /// Bytes that the pool held, as it reported.
        pool_reserved_bytes: Option<u64> => redact keep;
        /// `fatal` or `survived`, where the reporter said so of its request.
        said: Option<String>             => redact hide_unknown_fate;
        /// The driver's result code.
        result: u16                      => redact keep;
        /// Tag of the request.
        tag: Option<String>              => redact clear;
        /// Library that made the request.
        library: Option<String>          => redact clear;
        /// Frames, one a line, innermost first: `function<TAB>file<TAB>line`.
        stack: Option<String>            => redact clear;
        /// Phase of the step.
        phase: Option<String>            => redact hide_unknown_phase;
        /// The program's number of the step.
        step: Option<u64>                => redact keep;
        /// Sum of `amounts`.
        tracked_bytes: i64               => redact keep;
        /// What the process held.
        #[serde(skip_serializing_if = "Amounts::is_none")]
        amounts: Amounts                 => redact keep;
        /// Bytes older than the agent, as at the last sample.
        predates_bytes: Option<i64>      => redact keep;
        /// As at the last sample.
        untrackable_bytes: Option<i64>   => redact keep;
        /// Idle bytes of framework pools.
        idle_bytes: Option<u64>          => redact keep;
        /// Pieces that they are in.
        idle_pieces: Option<u64>         => redact keep;
        /// Bytes of the largest piece.
        largest_idle_bytes: Option<u64>  => redact keep;
        /// A segment of those pools grows by mapping: PyTorch's expandable segments are on.
        is_expandable: bool              => redact keep;
        /// The device at that time; absent where NVML was not read.
        device: Option<OomDevice>        => redact keep;
        /// No framework of the process announced that it reports when it gives up.
        is_unheard: bool                 => redact keep;
    }
}

plain!(OomKind, Fate);

fn hide_unknown_fate(said: &mut Option<String>) {
    said.take_if(|said| said != "fatal" && said != "survived");
}

impl Timed for Oom {
    fn time_ns(&self) -> (u64, u64) {
        (self.time_ns, self.last_ns)
    }
}

/// How often memory ran out in all of these; the sum saturates, because a stored run may be damaged.
pub fn times<'o>(ooms: impl IntoIterator<Item = &'o Oom>) -> u64 {
    ooms.into_iter().fold(0, |sum, oom| sum.saturating_add(oom.count))
}

fields! {
    /// The device then: holders, others, what nobody owns, the driver's share and what is free are its size.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct OomDevice {
        /// When NVML was read.
        read_ns: u64;
        /// Size.
        total_bytes: u64;
        /// Without what the process has allocated since.
        free_bytes: i64;
        /// The driver's share, where NVML tells it apart.
        system_bytes: Option<u64>;
        /// Device used minus the sum over its processes.
        unaccounted_bytes: i64;
        /// Its memory is the host's: what is unaccounted is the rest of the host's.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        unified: bool;
        /// The process itself, then others, the largest first.
        holders: Vec<Holder>;
        /// How many more there are, and their used bytes.
        others: (u32, i64);
    }
}

fields! {
    /// Who had memory of the device.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Holder {
        /// Pid in the daemon's namespace; 0 where it is hidden.
        pid: u32;
        /// Its user.
        user: Option<String>;
        /// What NVML charged; of the process itself with what it has allocated since.
        used_bytes: i64;
        /// What it grew by in the time before.
        growth_bytes: Option<i64>;
        /// How long that was: a minute, or as long as it is known.
        growth_ns: Option<u64>;
    }
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
