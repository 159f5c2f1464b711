//! Out-of-memory (OOM) records of a run: times at which memory ran out or nearly did.

use crate::cell::{Amounts, hide_unknown_phase};
use crate::fields::{Timed, fields, plain};
use crate::keeper::Keeper;
use serde::{Deserialize, Serialize};

/// Maximum time (ns) from an OOM to the failed end of its process; a process that runs longer has survived the OOM, unless it has
/// got no memory since (`is_stalled`) and exits with a failure.
pub const OPEN_FATE_NS: u64 = 10_000_000_000;

/// What ran out of memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OomKind {
    /// The driver refused a request, but no framework reported an error: frameworks often free memory and retry.
    #[default]
    Pressure,
    /// A framework's pool failed without a call of the driver, because it reached its own limit.
    Pool,
    /// A framework's pool failed after the driver had refused.
    Device,
    /// A process without an agent ended while its device was nearly full; nothing was reported.
    Suspected,
}

/// What happened to the process after an OOM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "fate")]
pub enum Fate {
    /// The outcome is unknown or not decided yet.
    #[default]
    Open,
    /// The process ended with a failure soon after.
    Fatal {
        /// Time from the OOM to the end of the process (ns).
        after_ns: u64,
        /// Exit status as waitpid returns it; absent if unknown.
        status: Option<u64>,
    },
    /// The process continued.
    Survived,
}

fields! {
    /// One time at which memory ran out. Kept as JSON in the store: a field that a stored run does not have gets its default.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Oom {
        kind: OomKind                    => redact keep;
        /// What happened to the process afterwards.
        fate: Fate                       => redact keep;
        time_ns: u64                     => redact keep;
        last_ns: u64                     => redact keep;
        /// Number of failures. Repeated failures of the same request within some seconds share one record.
        count: u64                       => redact keep;
        /// Number of failed driver calls.
        refusals: u64                    => redact keep;
        /// Bytes requested of the pool that failed, else of the driver. Unknown for `suspected`: 0 here, absent in JSON.
        #[serde(skip_serializing_if = "is_unknown")]
        asked_bytes: u64                 => redact keep;
        /// Bytes requested of the driver in the failed call, if the driver refused.
        driver_asked_bytes: Option<u64>  => redact keep;
        /// Free device bytes right after the failed driver call; for `suspected`, the fewest from the last reading to the end.
        device_free_bytes: Option<u64>   => redact keep;
        /// Allocated bytes of the pool that failed, as the pool reported them.
        pool_used_bytes: Option<u64>     => redact keep;
        /// Reserved bytes of the pool that failed, as the pool reported them.
        pool_reserved_bytes: Option<u64> => redact keep;
        /// Outcome of the request, `fatal` or `survived`, if the reporter stated it.
        said: Option<String>             => redact hide_unknown_fate;
        result: u16                      => redact keep;
        tag: Option<String>              => redact clear;
        library: Option<String>          => redact clear;
        /// Stack frames, one in each line, innermost first: `function<TAB>file<TAB>line`.
        stack: Option<String>            => redact clear;
        phase: Option<String>            => redact hide_unknown_phase;
        /// Number of the training step, as the program counts.
        step: Option<u64>                => redact keep;
        /// Number of forward passes on the device that began since a backward pass last began; absent in older runs.
        passes_without_backward: Option<u64> => redact keep;
        /// Number of forward passes that have begun after the first one; absent in runs of earlier versions.
        #[serde(skip_serializing_if = "Option::is_none")]
        passes_after_first: Option<u64>      => redact keep;
        /// Bytes that the process held: the sum of `amounts`.
        tracked_bytes: i64               => redact keep;
        /// `tracked_bytes` by cell.
        #[serde(skip_serializing_if = "Amounts::is_none")]
        amounts: Amounts                 => redact keep;
        /// Bytes allocated before the agent started, as of the last sample.
        predates_bytes: Option<i64>      => redact keep;
        /// Untrackable bytes as of the last sample.
        untrackable_bytes: Option<i64>   => redact keep;
        /// Bytes of framework pools that are in no allocated block.
        idle_bytes: Option<u64>          => redact keep;
        /// Number of pieces that the idle bytes are split into.
        idle_pieces: Option<u64>         => redact keep;
        /// Size of the largest idle piece.
        largest_idle_bytes: Option<u64>  => redact keep;
        /// Whether a segment of the framework pools can grow: PyTorch's expandable segments are on.
        is_expandable: bool              => redact keep;
        /// Whether `amounts` lack memory: records were missing, or the agent had not yet sent its earlier state to a new daemon.
        is_partial: bool                 => redact keep;
        /// Names in the program that keep most tensors, the largest first; those found at the last of `count` failures.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        keepers: Vec<Keeper>             => redact clear;
        /// State of the device at that time; absent if NVML was not read.
        device: Option<OomDevice>        => redact keep;
        /// Whether no framework reports the outcome: the request was made outside of a framework, or by one that does not report
        /// its OOMs.
        is_unheard: bool                 => redact keep;
        /// Whether the driver has given the process no memory since the OOM. Known where the record is made; not stored.
        #[serde(skip)]
        is_stalled: bool                 => redact keep;
    }
}

plain!(OomKind, Fate);

fn hide_unknown_fate(said: &mut Option<String>) {
    said.take_if(|said| said != "fatal" && said != "survived");
}

impl Oom {
    /// Decides the fate, if that is possible by `now_ns`. `ended`: time of the process's end, and its status if known. A process
    /// that got no memory after the OOM and exits with a failure was ended by the OOM, however long its exit took.
    pub fn decide(&mut self, ended: Option<(u64, Option<u64>)>, now_ns: u64) {
        let after = |time_ns: u64| time_ns.saturating_sub(self.last_ns);
        let has_exited = |status: Option<u64>| status.is_some_and(|status| status != 0 && status & 0x7f == 0);
        self.fate = match ended {
            _ if self.fate == Fate::Survived => Fate::Survived,
            Some((time_ns, status))
                if status != Some(0) && after(time_ns) <= OPEN_FATE_NS
                    || self.is_stalled && has_exited(status) =>
            {
                Fate::Fatal { after_ns: after(time_ns), status }
            }
            None if after(now_ns) <= OPEN_FATE_NS => Fate::Open,
            _ => Fate::Survived,
        };
    }
}

impl Timed for Oom {
    fn time_ns(&self) -> (u64, u64) {
        (self.time_ns, self.last_ns)
    }
}

/// Appends the records of a later part of a life. A record that was undecided when the part began is in both parts; the later
/// copy replaces the earlier one.
pub(crate) fn join_ooms(earlier: &mut Vec<Oom>, later: Vec<Oom>) {
    earlier.retain(|oom| !later.iter().any(|copy| (copy.time_ns, copy.kind) == (oom.time_ns, oom.kind)));
    earlier.extend(later);
}

/// Returns the total number of OOMs in the records; the sum saturates, because a stored run may be damaged.
pub fn times<'o>(ooms: impl IntoIterator<Item = &'o Oom>) -> u64 {
    ooms.into_iter().fold(0, |sum, oom| sum.saturating_add(oom.count))
}

fields! {
    /// The device at the time of an OOM. The bytes of holders and others, and unaccounted, system and free bytes sum to the size of
    /// the device.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct OomDevice {
        read_ns: u64;
        total_bytes: u64;
        /// Free bytes of the device, less the bytes that the process has allocated since the reading.
        free_bytes: i64;
        /// Bytes that the driver reserves for itself; absent where NVML does not report them.
        system_bytes: Option<u64>;
        /// Used bytes of the device minus those of all processes on it.
        unaccounted_bytes: i64;
        /// Whether the device uses the host's memory; unaccounted bytes are then those of the rest of the host.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        unified: bool;
        /// The process itself, then others, largest first.
        holders: Vec<Holder>;
        /// Number of processes that `holders` does not list, and the sum of their used bytes.
        others: (u32, i64);
    }
}

fields! {
    /// A process that held memory of the device.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Holder {
        /// Pid in the daemon's namespace; 0 where it is hidden.
        pid: u32;
        user: Option<String>;
        /// Bytes that NVML charged; for the process with the OOM, including bytes that it has allocated since.
        used_bytes: i64;
        /// Growth of `used_bytes` in the last `growth_ns`.
        growth_bytes: Option<i64>;
        /// Time that `growth_bytes` covers (ns): a minute, or less for a younger process.
        growth_ns: Option<u64>;
        /// Time of the daemon's first reading that listed the process on the device (ns). The process may have been there before the
        /// daemon started.
        #[serde(skip_serializing_if = "Option::is_none")]
        since_ns: Option<u64>;
    }
}

impl Oom {
    /// Whether memory ran out, as opposed to pressure (failed driver calls) that the process survived. Pressure counts if no
    /// framework would have reported a failure and the process ended soon after.
    pub fn is_out_of_memory(&self) -> bool {
        match self.kind {
            OomKind::Pool | OomKind::Device => true,
            OomKind::Pressure => self.is_unheard && matches!(self.fate, Fate::Fatal { .. }),
            OomKind::Suspected => false,
        }
    }

    pub fn is_suspected(&self) -> bool {
        self.kind == OomKind::Suspected
    }

    /// Returns the free device bytes at the OOM: those after the failed driver call, else those of the NVML reading.
    pub fn free_bytes(&self) -> Option<i64> {
        let free = self.device_free_bytes.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
        free.or(self.device.as_ref().map(|device| device.free_bytes))
    }
}

fn is_unknown(asked_bytes: &u64) -> bool {
    *asked_bytes == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the fate of an OOM whose process ended after so many seconds with that status of waitpid.
    fn fate(is_stalled: bool, seconds: u64, status: Option<u64>) -> Fate {
        let mut oom = Oom { is_stalled, ..Oom::default() };
        oom.decide(Some((seconds * 1_000_000_000, status)), u64::MAX);
        oom.fate
    }

    #[test]
    fn slow_exit_after_the_failed_request_is_fatal() {
        let fatal = |seconds: u64, status| Fate::Fatal { after_ns: seconds * 1_000_000_000, status };
        let (failure, success, terminated) = (Some(1 << 8), Some(0), Some(15));
        assert_eq!(fate(false, 9, failure), fatal(9, failure));
        assert_eq!(fate(false, 11, failure), Fate::Survived, "it got memory since");
        assert_eq!(fate(true, 11, failure), fatal(11, failure));
        assert_eq!(fate(true, 9, terminated), fatal(9, terminated));
        assert_eq!(fate(true, 11, terminated), Fate::Survived, "somebody ended it");
        assert_eq!(fate(true, 11, success), Fate::Survived);
        assert_eq!(fate(true, 11, None), Fate::Survived);
    }
}
