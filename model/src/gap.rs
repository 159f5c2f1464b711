//! Parts of a run's untrackable bytes, and changes of these bytes. NVML charges untrackable bytes, but no allocation has them.

use crate::fields::{Timed, fields, plain};
use crate::names::named;
use serde::{Deserialize, Serialize};

/// Untrackable bytes by cause. `unexplained` is the remainder, so the parts sum to the whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UntrackableParts {
    /// Untrackable bytes that creating CUDA contexts took; measured.
    #[serde(skip_serializing_if = "is_zero")]
    pub context_bytes: i64,
    /// Untrackable bytes of modules (code and globals); at most the size of their loadable sections.
    #[serde(skip_serializing_if = "is_zero")]
    pub modules_bytes: i64,
    /// Bytes of stacks of kernels; from a model, or measured if NVML showed a change for them.
    #[serde(skip_serializing_if = "is_zero")]
    pub local_memory_bytes: i64,
    /// Bytes of the device-side printf FIFO and malloc heap; computed by a model.
    #[serde(skip_serializing_if = "is_zero")]
    pub heaps_bytes: i64,
    /// Bytes that the driver adds by rounding up allocation sizes; from a model.
    #[serde(skip_serializing_if = "is_zero")]
    pub rounding_bytes: i64,
    /// Untrackable bytes without a known cause.
    #[serde(skip_serializing_if = "is_zero")]
    pub unexplained_bytes: i64,
}

fn is_zero(bytes: &i64) -> bool {
    *bytes == 0
}

impl UntrackableParts {
    pub fn sum(&self) -> i64 {
        self.each().iter().fold(0, |sum, (_, _, bytes)| sum.wrapping_add(*bytes))
    }

    /// Returns name, kind and bytes of each part, as in JSON.
    pub fn each(&self) -> [(&'static str, &'static str, i64); 6] {
        [
            ("context", "measured", self.context_bytes),
            ("modules", "upper_bound", self.modules_bytes),
            ("local_memory", "model", self.local_memory_bytes),
            ("heaps", "model", self.heaps_bytes),
            ("rounding", "model", self.rounding_bytes),
            ("unexplained", "at_least", self.unexplained_bytes),
        ]
    }

    pub fn plus(self, other: UntrackableParts) -> Self {
        self.combine(other, i64::saturating_add)
    }

    /// Combines two sets of parts with `with`, part by part.
    pub fn combine(self, other: UntrackableParts, with: fn(i64, i64) -> i64) -> Self {
        UntrackableParts {
            context_bytes: with(self.context_bytes, other.context_bytes),
            modules_bytes: with(self.modules_bytes, other.modules_bytes),
            local_memory_bytes: with(self.local_memory_bytes, other.local_memory_bytes),
            heaps_bytes: with(self.heaps_bytes, other.heaps_bytes),
            rounding_bytes: with(self.rounding_bytes, other.rounding_bytes),
            unexplained_bytes: with(self.unexplained_bytes, other.unexplained_bytes),
        }
    }

    /// Returns parts in which all of `untrackable_bytes` is unexplained.
    pub fn unknown(untrackable_bytes: i64) -> Self {
        UntrackableParts { unexplained_bytes: untrackable_bytes, ..UntrackableParts::default() }
    }
}

fields! {
    /// A change of the untrackable bytes between two NVML samples. Absent values are not stored, because a run may have hundreds
    /// of changes.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct UntrackableChange {
        /// Time of the sample before the change; 0 for the start of the process.
        from_ns: u64                => redact keep;
        /// Time of the event that caused the change; without an event, time of the sample that shows the change.
        time_ns: u64                => redact keep;
        /// Size of the change, without the change of the driver's rounding: the sum of `parts`.
        bytes: i64                  => redact keep;
        /// The change by cause.
        parts: UntrackableParts                => redact keep;
        /// Cause of the largest part, in words: `context created`, `between events`, ...
        cause: String               => redact keep;
        /// Other causes between the two samples.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        also: Vec<String>           => redact keep;
        /// Number of events between the samples; for the cause `smaller steps`, number of merged changes.
        events: u64                 => redact keep;
        /// How the size was determined: `measured`, `model` or `upper_bound`; `none` without a cause.
        kind: String                => redact keep;
        /// Tag of the event; without an event, tag of the last record before the sample.
        #[serde(skip_serializing_if = "Option::is_none")]
        tag: Option<String>         => redact clear;
        /// File name of the library that made the call which caused the change.
        #[serde(skip_serializing_if = "Option::is_none")]
        library: Option<String>     => redact clear;
        /// Change that the model or the upper bound predicts for the cause (bytes).
        #[serde(skip_serializing_if = "Option::is_none")]
        expected_bytes: Option<i64> => redact keep;
        /// Explanation of the change for the reader.
        #[serde(skip_serializing_if = "Option::is_none")]
        note: Option<String>        => redact keep;
    }
}

plain!(UntrackableParts);

named! {
    /// Why untrackable memory changed.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Cause {
        ContextCreated = "context created",
        /// A context was destroyed, or the device was reset.
        ContextDestroyed = "context destroyed",
        ModuleLoaded = "module loaded",
        ModuleUnloaded = "module unloaded",
        /// The limit of kernel stacks was set.
        StackLimit = "stack limit",
        /// The size of the printf FIFO was set.
        PrintfLimit = "printf limit",
        /// The size of the device-side malloc heap was set.
        HeapLimit = "heap limit",
        GraphInstantiated = "graph instantiated",
        GraphDestroyed = "graph destroyed",
        StreamCreated = "stream created",
        PeerAccess = "peer access",
        LibraryLoaded = "library loaded",
        GreenContextCreated = "green context created",
        /// Memory of another process was imported.
        MemoryImported = "memory imported",
        /// No event was reported between the samples.
        BetweenEvents = "between events",
        /// The agent was blind (saw no driver calls) for a part of the time.
        Blind = "blind",
        /// Records were lost, or the process became another program.
        HistoryLost = "history lost",
        /// More driver events happened in this time than are stored.
        EventsLost = "events lost",
        /// Several small changes merged into one; [`UntrackableChange::events`] is their number.
        Smaller = "smaller steps",
    }
}

impl Timed for UntrackableChange {
    fn time_ns(&self) -> (u64, u64) {
        (self.time_ns, self.time_ns)
    }
}
