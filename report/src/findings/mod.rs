//! Conclusions about a run: why memory ran out, which memory grows, which is unused, or that nothing is wrong.
//!
//! A finding explains bytes. The direct cause of an out-of-memory error comes first; the others follow by the bytes that they
//! explain. A finding below [`LEAST_SHARE`] of the process's memory is omitted if there is a larger one. Every form of output
//! shows the same list.
//!
//! ```text
//! growth           growing memory, by the points of steps or, without steps, over time
//! out_of_memory    causes of a failed request
//! steady           unused and unexplained memory, and losses of data
//! text             the conclusions as lines
//! ```

mod growth;
mod out_of_memory;
mod steady;
pub mod text;

pub(crate) use out_of_memory::{FRAGMENTED_SHARE, retained};

use crate::Report;
use gpumem_model::run::{Device, Fate, Oom, State};
use serde::Serialize;
use std::cmp::Reverse;

/// A finding that explains less than this share of the process's memory is omitted if there is a larger one.
const LEAST_SHARE: f64 = 0.02;

/// Kind of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A limit of the framework's pool, not the device, refused the request.
    PoolLimit,
    /// One request is larger than the device can ever serve.
    LargeRequest,
    /// Memory that grows and is not released.
    Growth,
    /// Outputs of forward passes that no backward pass follows keep all activations.
    NoBackward,
    /// Memory of other processes.
    OtherProcesses,
    /// Unused memory of the framework's pool in pieces that are too small for a request.
    Fragmentation,
    /// The memory that the program needs at one time does not fit.
    TooLarge,
    /// Unused memory of the framework's pool.
    UnusedPool,
    /// Memory charged to the process that no record explains.
    Untrackable,
    /// Records are missing, so the numbers are too low.
    Losses,
}

/// Effect of a finding on the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// It ended the program.
    Critical,
    /// The program will end by it, or wastes much memory.
    Warning,
    /// Information only.
    Note,
}

/// One conclusion, with the bytes that it explains.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// The kind of the conclusion.
    pub kind: Kind,
    /// Its effect on the program.
    pub severity: Severity,
    /// NVML index of the device.
    pub device: u16,
    /// The explained bytes.
    pub bytes: i64,
    /// `bytes` as a share of the bytes that the process used at that time, 0 to 1; of the device's size for
    /// [`Kind::OtherProcesses`].
    pub share: f64,
    /// Confidence that it is right, 0 to 1.
    pub confidence: f64,
    /// One sentence.
    pub what: String,
    /// Names with the most explained bytes, largest first.
    pub names: Vec<(String, i64)>,
    /// Recommended change; `None` if there is none, or it is already in force.
    pub advice: Option<String>,
}

/// How the run ended, as far as memory is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It ended because memory ran out.
    OutOfMemory,
    /// It ended, and memory may have run out.
    Suspected,
    /// Memory ran out and the program went on.
    Survived,
    /// It ended otherwise.
    Ended,
    /// It runs.
    Running,
}

/// The conclusions about a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Findings {
    /// How it ended.
    pub outcome: Outcome,
    /// Most important first; empty if nothing is wrong.
    pub findings: Vec<Finding>,
}

/// Returns the record that decides the outcome, with its device: the last fatal one, else the last suspected one, else the last
/// one that the program survived.
fn decisive<'r>(report: &Report<'r>) -> Option<(&'r Device, &'r Oom, Outcome)> {
    let rank = |oom: &Oom| match oom.fate {
        Fate::Fatal { .. } if oom.is_true() => Some(Outcome::OutOfMemory),
        Fate::Fatal { .. } if oom.is_suspected() => Some(Outcome::Suspected),
        _ if oom.is_true() => Some(Outcome::Survived),
        _ => None,
    };
    let all = report.run.devices.iter();
    let all = all.flat_map(|device| device.details.ooms.iter().map(move |oom| (device, oom)));
    let ranked = all.filter_map(|(device, oom)| Some((device, oom, rank(oom)?)));
    ranked.min_by_key(|(_, oom, outcome)| (*outcome as u8, Reverse(oom.time_ns)))
}

impl Findings {
    /// Draws the conclusions about a run.
    pub fn of(report: &Report<'_>) -> Self {
        let decisive = decisive(report);
        let outcome = match (decisive, report.run.state) {
            (Some((.., outcome)), _) => outcome,
            (None, State::Open) => Outcome::Running,
            (None, _) => Outcome::Ended,
        };
        let mut findings = Vec::new();
        for device in &report.run.devices {
            let oom =
                decisive.filter(|(of, ..)| std::ptr::eq(*of, device)).map(|(_, oom, outcome)| (oom, outcome));
            match oom {
                Some((oom, outcome)) if outcome != Outcome::Survived => {
                    findings.extend(out_of_memory::causes(report, device, oom, outcome));
                }
                _ => {
                    findings.extend(growth::finding(report, device));
                    findings.extend(steady::unused_pool(report, device));
                }
            }
            findings.extend(steady::untrackable(report, device));
        }
        findings.sort_by_key(|finding| (finding.severity, Reverse(finding.bytes)));
        findings.truncate_small();
        findings.extend(steady::losses(report));
        Findings { outcome, findings }
    }
}

/// Removes small findings if there are larger ones.
trait TruncateSmall {
    fn truncate_small(&mut self);
}

impl TruncateSmall for Vec<Finding> {
    fn truncate_small(&mut self) {
        let mut is_first = true;
        self.retain(|finding| std::mem::take(&mut is_first) || finding.share >= LEAST_SHARE);
    }
}
