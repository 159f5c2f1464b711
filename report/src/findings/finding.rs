//! A finding: one conclusion about a run, with the bytes that it explains.

use gpumem_model::cell::HIDDEN_TAG;
use gpumem_model::keeper::Keeper;
use gpumem_model::run::Device;
use gpumem_model::units::thousands;
use serde::Serialize;
use std::cmp::Reverse;

/// A finding that explains less than this share of the process's memory is omitted, unless it is the first one.
pub(super) const LEAST_SHARE: f64 = 0.02;
/// So is one that explains less than this share of the bytes of the first one.
const LEAST_OF_FIRST: f64 = 0.03;

/// Kind of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A limit of the framework's pool, not the device, refused the request.
    PoolLimit,
    /// One request is larger than the memory of the device.
    LargeRequest,
    /// Memory that grows and is not released.
    Growth,
    /// Activations are kept because no backward pass follows the forward passes.
    NoBackward,
    /// Memory of other processes.
    OtherProcesses,
    /// Unused memory of the framework's pool in pieces that the request cannot use, because they are too small or of another
    /// stream.
    Fragmentation,
    /// The memory that the program needs at one time is larger than the device.
    TooLarge,
    /// Unused memory of the framework's pool.
    UnusedPool,
    /// Memory that NVML charges to the process and no record of the agent explains.
    Untrackable,
    /// Records are missing, so the numbers are too low.
    Losses,
}

/// Effect of a finding on the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The finding is a cause of the out-of-memory error that ended the program.
    Critical,
    /// The program may run out of memory because of the finding, or wastes much memory. Also: cause of a survived or suspected
    /// error.
    Warning,
    /// Information only.
    Note,
}

/// What keeps growing memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KeptBy {
    /// A function whose local tensors grow together, so each of its frames is kept: by the traceback of an exception, or by a list
    /// of all of them.
    Frames(String),
    /// The first of several like modules makes tensors of changing sizes, and the others make none: a cache with an entry for each
    /// size, which the others use.
    CacheOfSizes,
    /// Each forward pass has its backward pass, and yet its activations stay: the graph is retained.
    RetainedGraphs,
    /// Gradients that are many times the parameters grow: they were made with their graphs.
    GradientGraphs,
}

/// [`Finding::structures`] of pinned host memory.
pub(crate) const PINNED: &str = "pinned host memory";

/// Rate at which memory grows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rate {
    pub text: String,
    /// Bytes that are added in each step, forward pass, period or second.
    pub bytes_per_unit: i64,
    /// Whether the unit is a second, and not a step, forward pass or period.
    pub is_over_time: bool,
    /// Bytes that were added since the start of the process, if it always grew at this rate.
    pub whole_bytes: i64,
}

/// One conclusion, with the bytes that it explains.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    pub kind: Kind,
    pub severity: Severity,
    /// NVML index of the device; `None` if the finding is about the whole run.
    pub device: Option<u16>,
    pub bytes: i64,
    /// `bytes` divided by the used bytes of the process, at most 1; for [`Kind::OtherProcesses`], `bytes` divided by the size of
    /// the device.
    pub share: f64,
    /// Confidence of the statistical test, 0 to 1; `None` if no test was needed.
    pub confidence: Option<f64>,
    /// For growth of a live process: seconds until the free bytes of the device are used up at this rate.
    pub full_in_s: Option<u64>,
    /// Bytes that would have been free after the failed request without `bytes`; `None` if the finding is not about a request, if
    /// the size of the request is unknown, or if it would not have fitted.
    pub spare_bytes: Option<i64>,
    pub what: String,
    /// Tags or categories with the most of `bytes`, and their bytes; the largest first.
    pub names: Vec<(String, i64)>,
    /// Whether the only name is the path of many modules, each with a part of `bytes`.
    #[serde(skip)]
    pub is_in_many: bool,
    /// Whether memory grew in the minority of the steps or forward passes.
    #[serde(skip)]
    pub is_in_few_steps: bool,
    /// The name in the program that keeps most of the memory, if the agent found it when memory ran out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keeper: Option<Keeper>,
    /// What keeps growing memory, if the amounts show it.
    #[serde(skip)]
    pub(crate) kept_by: Option<KeptBy>,
    /// Categories that contain most of the bytes of growing memory, the one that grows most first.
    #[serde(skip)]
    pub structures: Vec<String>,
    /// Rate of growing memory.
    #[serde(skip)]
    pub rate: Option<Rate>,
    /// Recommended change; `None` if there is none, or if the program has already made it.
    pub advice: Option<String>,
}

impl Finding {
    /// Returns a finding without names, advice and confidence. Its `share` is `bytes` divided by `used`.
    pub(crate) fn new(
        kind: Kind,
        severity: Severity,
        device: Option<&Device>,
        (bytes, used): (i64, i64),
        what: String,
    ) -> Self {
        Finding {
            kind,
            severity,
            device: device.map(|device| device.ordinal),
            bytes,
            share: (bytes as f64 / used.max(1) as f64).min(1.0),
            confidence: None,
            full_in_s: None,
            spare_bytes: None,
            what,
            names: Vec::new(),
            is_in_many: false,
            is_in_few_steps: false,
            keeper: None,
            kept_by: None,
            structures: Vec::new(),
            rate: None,
            advice: None,
        }
    }

    /// Returns whether whole models grow: only their gradients or their optimizer's state grow more than their parameters.
    pub(crate) fn is_of_whole_models(&self) -> bool {
        let of_training = |name: &&String| matches!(name.as_str(), "gradients" | "optimizer state");
        let first_other = self.structures.iter().find(|name| !of_training(name));
        first_other.is_some_and(|name| name == "parameters")
    }

    /// Returns the sentence on the finding, with the recommended change in brackets.
    pub fn sentence(&self) -> String {
        let advice = self.advice.as_ref().map(|advice| format!(" ({advice})")).unwrap_or_default();
        let what = self.what.replace(HIDDEN_TAG, "memory whose name is not shown here");
        format!("{what}{advice}")
    }

    /// Returns a sentence without names that the program or another process chose, for readers who may not see them.
    pub fn anonymous_sentence(&self) -> String {
        let kind = self.kind.name().replace('_', " ");
        let share = 100.0 * self.share;
        let forecast = self.forecast().map(|forecast| format!("; {forecast}")).unwrap_or_default();
        let whole = if self.kind == Kind::OtherProcesses { "device" } else { "process" };
        format!("{kind}: {} MiB, {share:.0} % of the {whole}'s memory{forecast}", mib(self.bytes))
    }

    pub(super) fn forecast(&self) -> Option<String> {
        let seconds = self.full_in_s?;
        let time = match seconds {
            0..120 => format!("{seconds} s"),
            120..7_200 => format!("{} min", seconds / 60),
            7_200..172_800 => format!("{} hours", seconds / 3_600),
            _ => format!("{} days", seconds / 86_400),
        };
        Some(format!("the GPU is full in {time}"))
    }
}

impl Kind {
    /// Returns the kind's name in JSON and metrics.
    pub fn name(self) -> String {
        encoded(self)
    }
}

impl Severity {
    /// Returns the name in JSON and metrics.
    pub fn name(self) -> String {
        encoded(self)
    }
}

/// Returns the name of an enum's value in JSON.
fn encoded(value: impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

/// Formats bytes in MiB, rounded to whole ones as in the table of a report, with thousands separators.
pub(crate) fn mib(bytes: i64) -> String {
    thousands((bytes.max(0) as u64).saturating_add(1 << 19) >> 20)
}

/// Sorts findings by severity and bytes, and removes those below [`LEAST_SHARE`] and [`LEAST_OF_FIRST`], except the first one.
pub(super) fn rank(findings: &mut Vec<Finding>) {
    findings.sort_by_key(|finding| (finding.severity, Reverse(finding.bytes)));
    let least = findings.first().map_or(0.0, |first| first.bytes as f64 * LEAST_OF_FIRST);
    let mut is_first = true;
    findings.retain(|finding| {
        std::mem::take(&mut is_first) || finding.share >= LEAST_SHARE && finding.bytes as f64 >= least
    });
}
