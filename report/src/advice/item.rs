//! An item of advice, and the advice on a run.

use crate::findings::{self, Outcome};
use gpumem_model::run::{Device, Oom};
use serde::Serialize;

/// Minimum saving for advice that no finding asks for, as a share of the process's memory.
const MATERIAL_SHARE: f64 = 0.05;
/// Minimum saving in bytes for such advice.
const MATERIAL_BYTES: i64 = 32 << 20;

/// Fewer bytes are not stated beside others.
pub(super) const MIB: i64 = 1 << 20;

/// Kind of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    AllocatorSetting,
    RetainedTensors,
    /// Forward passes without a backward pass keep activations.
    EvaluationGradients,
    /// Forward passes without a backward pass need more memory than the training steps.
    EvaluationBatch,
    /// The graphs of several forward passes live until one backward pass.
    GraphsAtOnce,
    /// A line of the program keeps a long history.
    History,
    /// A copy of the model and of its optimizer's state stays on the device.
    StateCopy,
    /// A line makes and frees tensors all the time, and many of them are alive.
    Queue,
    /// The result of a pass is held until the next pass has made its own.
    PreviousResult,
    /// An exception keeps the memory of an attempt that failed.
    FailedAttempt,
    /// One step has many times the activations of the others.
    OutlierBatch,
    /// The program copies a large output to float32.
    OutputCopy,
    /// Several models of the same class and sizes, none of which is trained.
    EqualModels,
    /// Gradients live through the next forward pass.
    KeptGradients,
    OptimizerTemporaries,
    OptimizerState,
    /// The gradients of embedding tables have all rows, though a batch uses few.
    SparseGradients,
    /// Gradients are held twice: as tensors, and in the buckets in which they are sent.
    GradientBuckets,
    /// One layer's output is the largest part of the activations, such as logits.
    LargeOutput,
    /// A module computes by several operations what one does.
    FusedOperation,
    Checkpointing,
    BatchSize,
    ParameterPrecision,
    /// Autocast keeps copies of the weights, in the type in which the program could load them.
    WeightCopies,
    /// The base of a model with adapters is trained, too.
    UnfrozenBase,
    /// A copy of the frozen base of a model with an adapter.
    ModelCopy,
    /// A checkpoint stays on the device beside the model that it was loaded into.
    LoadedCheckpoint,
    /// Scratch memory of cuBLAS.
    Workspace,
    /// Buffers of NCCL.
    Communication,
    GraphPools,
    Streams,
    EagerModules,
    /// A child process has a CUDA context and no memory.
    IdleContext,
    PinnedMemory,
    OtherProcess,
    PoolLimit,
    /// A setting of a library whose functions keep or make much memory.
    LibrarySetting,
    LargeRequest,
    /// The parts of the memory are unknown without an agent.
    Coverage,
}

impl Kind {
    /// Returns whether a change of this kind costs nothing: no time, no accuracy, and nothing that the program may want to keep.
    pub(super) fn costs_nothing(self) -> bool {
        matches!(
            self,
            Kind::EvaluationGradients
                | Kind::PreviousResult
                | Kind::GraphsAtOnce
                | Kind::KeptGradients
                | Kind::OptimizerTemporaries
                | Kind::GradientBuckets
                | Kind::LoadedCheckpoint
                | Kind::ModelCopy
        )
    }

    /// Returns whether a change of this kind is advised to a program that fits, too: its price is small.
    fn is_cheap(self) -> bool {
        let has_small_price = matches!(
            self,
            Kind::EvaluationBatch
                | Kind::History
                | Kind::StateCopy
                | Kind::Queue
                | Kind::OutputCopy
                | Kind::LibrarySetting
                | Kind::WeightCopies
                | Kind::UnfrozenBase
        );
        self.costs_nothing() || has_small_price
    }
}

/// How a saving is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// The recorded requests were replayed with the change.
    Replayed,
    /// Computed from the run by a formula, which is stated.
    Estimated,
    /// The size is unknown.
    Unverified,
}

/// Memory that a change concerns. Savings in the same memory overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    Activations,
    Gradients,
    OptimizerState,
    Parameters,
    /// Tensors that are not part of a model, such as a data set.
    Data,
    /// Memory that the allocator caches.
    Cached,
    Libraries,
    Untrackable,
    /// Page-locked memory of the host.
    Host,
    /// Memory of another process.
    Others,
}

/// A recommended change.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Item {
    pub kind: Kind,
    /// NVML index of the device.
    pub device: Option<u16>,
    /// The change as a sentence. `{0}` stands for the first of `untrusted_names`, `{1}` for the second.
    pub change: String,
    /// Names that the program or another process chose, shortened. They are data, not instructions.
    pub untrusted_names: Vec<String>,
    /// Least and most bytes saved; `None` if unknown.
    pub saves_bytes: Option<[i64; 2]>,
    pub basis: Basis,
    /// For an estimate, the formula with its inputs; else the source of the figure.
    pub formula: String,
    pub memory: Memory,
}

impl Item {
    pub(super) fn new(kind: Kind, memory: Memory, device: &Device, change: impl Into<String>) -> Self {
        Item {
            kind,
            device: Some(device.ordinal),
            change: change.into(),
            untrusted_names: Vec::new(),
            saves_bytes: None,
            basis: Basis::Unverified,
            formula: String::new(),
            memory,
        }
    }

    /// Sets a name that the program chose.
    pub(super) fn named(mut self, name: impl Into<String>) -> Self {
        self.untrusted_names.push(name.into());
        self
    }

    pub(super) fn estimated(mut self, saves_bytes: [i64; 2], formula: impl Into<String>) -> Self {
        (self.saves_bytes, self.basis, self.formula) = (Some(saves_bytes), Basis::Estimated, formula.into());
        self
    }

    /// Returns whether the change has a small price or none, and is known to save memory.
    pub(super) fn is_cheap(&self) -> bool {
        self.kind.is_cheap() && self.saves_bytes.is_some_and(|[least, _]| least > 0)
    }

    /// Returns whether the change costs nothing, and is known to save memory.
    pub(super) fn is_free(&self) -> bool {
        self.kind.costs_nothing() && self.is_cheap()
    }

    /// Returns the most bytes that the change may save.
    pub(super) fn most(&self) -> i64 {
        self.saves_bytes.map_or(0, |[_, most]| most)
    }
}

/// All advice on a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Advice {
    pub outcome: Outcome,
    /// Whether memory ran out, or nearly did.
    pub is_short: bool,
    /// Changes, the most useful first; empty if there is nothing to change.
    pub items: Vec<Item>,
    /// Numbers of the items, from 1, that save different memory of the same device, and their savings together.
    pub together: Option<(Vec<usize>, i64)>,
    /// Settings that were replayed and save nothing.
    pub useless: Vec<String>,
    /// Why the requests were not replayed, if that was tried.
    pub not_replayed: Option<String>,
}

/// Returns whether a saving matters without a finding. `used` is the number of bytes that the process used.
pub(super) fn is_material(bytes: i64, used: i64) -> bool {
    bytes >= MATERIAL_BYTES && bytes as f64 >= used as f64 * MATERIAL_SHARE
}

/// Returns the place of a failed request without its step.
pub(super) fn place_of(oom: &Oom) -> String {
    let place = crate::oom::place(oom);
    let end = [", step ", ", after step "].iter().filter_map(|words| place.find(words)).min();
    place[..end.unwrap_or(place.len())].to_owned()
}

/// Formats bytes in whole MiB.
pub(super) fn mib(bytes: i64) -> String {
    format!("{} MiB", findings::mib(bytes))
}
