//! Why the gap of a run is what it is: parts of it, and the steps in which they came.

use crate::fields::{Timed, fields, plain};
use serde::{Deserialize, Serialize};

/// Parts of an untrackable, in bytes: they sum to it, because `unexplained` is what the others leave.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Parts {
    /// What creating contexts cost: measured.
    #[serde(skip_serializing_if = "is_zero")]
    pub context_bytes: i64,
    /// Code and globals of modules: at most their loadable sections.
    #[serde(skip_serializing_if = "is_zero")]
    pub modules_bytes: i64,
    /// Stacks of kernels: a model, or the measured step where there is one.
    #[serde(skip_serializing_if = "is_zero")]
    pub local_memory_bytes: i64,
    /// The FIFO of printf and the heap of malloc on the device: a model.
    #[serde(skip_serializing_if = "is_zero")]
    pub heaps_bytes: i64,
    /// What the driver adds to the sizes that were asked for: a model.
    #[serde(skip_serializing_if = "is_zero")]
    pub rounding_bytes: i64,
    /// The rest.
    #[serde(skip_serializing_if = "is_zero")]
    pub unexplained_bytes: i64,
}

fn is_zero(bytes: &i64) -> bool {
    *bytes == 0
}

impl Parts {
    /// What they are the parts of.
    pub fn sum(&self) -> i64 {
        self.each().iter().fold(0, |sum, (_, _, bytes)| sum.wrapping_add(*bytes))
    }

    /// Name, kind and bytes of each, as programs read them.
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

    /// Both.
    pub fn plus(self, other: Parts) -> Self {
        Parts {
            context_bytes: self.context_bytes.saturating_add(other.context_bytes),
            modules_bytes: self.modules_bytes.saturating_add(other.modules_bytes),
            local_memory_bytes: self.local_memory_bytes.saturating_add(other.local_memory_bytes),
            heaps_bytes: self.heaps_bytes.saturating_add(other.heaps_bytes),
            rounding_bytes: self.rounding_bytes.saturating_add(other.rounding_bytes),
            unexplained_bytes: self.unexplained_bytes.saturating_add(other.unexplained_bytes),
        }
    }

    /// Parts of `untrackable_bytes` of which nothing is known.
    pub fn unknown(untrackable_bytes: i64) -> Self {
        Parts { unexplained_bytes: untrackable_bytes, ..Parts::default() }
    }
}

fields! {
    /// A change of the gap between two samples. Absent values are left out of the store: a run may have hundreds of changes.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct Step {
        /// When the sample before it was taken; 0 for the beginning of the process.
        from_ns: u64                => redact keep;
        /// When its event happened; without one in its time, when the sample was taken that shows it.
        time_ns: u64                => redact keep;
        /// The change without rounding: the sum of `parts`.
        bytes: i64                  => redact keep;
        /// The parts that it was booked to.
        parts: Parts                => redact keep;
        /// What got most of it, in words: `context created`, `between events`, ...
        cause: String               => redact keep;
        /// Other causes in its time.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        also: Vec<String>           => redact keep;
        /// Number of events; of `smaller steps`, of steps.
        events: u64                 => redact keep;
        /// `measured`, `model`, `upper_bound`; `none` without a cause.
        kind: String                => redact keep;
        /// Tag in force at the event; without one, that of the last record before the sample.
        #[serde(skip_serializing_if = "Option::is_none")]
        tag: Option<String>         => redact clear;
        /// File name of the library that made the call.
        #[serde(skip_serializing_if = "Option::is_none")]
        library: Option<String>     => redact clear;
        /// Bytes that the model or the bound gives for the cause.
        #[serde(skip_serializing_if = "Option::is_none")]
        expected_bytes: Option<i64> => redact keep;
        /// What a reader must know of it.
        #[serde(skip_serializing_if = "Option::is_none")]
        note: Option<String>        => redact keep;
    }
}

plain!(Parts);

impl Timed for Step {
    fn time_ns(&self) -> (u64, u64) {
        (self.time_ns, self.time_ns)
    }
}
