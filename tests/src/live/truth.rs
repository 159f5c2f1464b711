//! The truth journal of the simulated machine: memory by process at each moment at which NVML was asked for a list
//! (tests/fake-gpu/README.md).

use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// A process on a device, at the time of a list.
#[derive(Debug, Clone, Deserialize)]
pub struct Truth {
    /// CLOCK_MONOTONIC ns.
    pub t: u64,
    /// Number of the list.
    pub list: u64,
    /// `compute`, `graphics` or `mps`; `end` for a process's memory at its end, with its pid in its own namespace.
    pub call: String,
    /// UUID of the device.
    pub device: String,
    /// Pid in the namespace of the caller.
    pub pid: u32,
    /// NVML's value.
    pub used: u64,
    /// Cost of contexts, a part of `used`.
    pub context: i64,
    /// Loaded code and globals.
    pub modules: i64,
    /// Stacks above the default limit.
    pub local: i64,
    /// FIFO of printf and heap of malloc above their defaults.
    #[serde(default)]
    pub heaps: i64,
    /// Memory that the driver reserves for itself, and growth that no call explains.
    pub other: i64,
    /// The driver's rounding of sizes.
    pub rounding: i64,
    /// Live driver allocations, and reserved bytes of pools.
    pub tracked: i64,
    /// Pool bytes without blocks.
    pub idle: i64,
    /// Bytes by tag, "" for none; `tags` plus `idle` is `tracked`.
    pub tags: BTreeMap<String, i64>,
    /// Memory outside the sum: managed, pinned, imported.
    #[serde(default)]
    pub beside: BTreeMap<String, i64>,
}

impl Truth {
    /// Used bytes beyond `tracked`.
    pub fn parts(&self) -> i64 {
        [self.context, self.modules, self.local, self.heaps, self.other, self.rounding].iter().sum()
    }

    /// Returns whether the entry is a process's memory at its end.
    pub fn is_end(&self) -> bool {
        self.call == "end"
    }
}

/// Reads every complete line of a journal.
///
/// # Panics
/// If a line is malformed: the oracle itself would be wrong.
pub fn read(path: &Path) -> Vec<Truth> {
    parse(&std::fs::read_to_string(path).unwrap_or_default())
}

/// Returns the memory of processes at their ends. Processes killed in the middle of a call are left out, because their sums do
/// not add up.
pub fn ends(path: &Path) -> Vec<Truth> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let of_ends = text.lines().filter(|line| line.contains("\"call\":\"end\""));
    let adds_up = |end: &Truth| end.tags.values().sum::<i64>() + end.idle == end.tracked;
    of_ends.filter_map(|line| serde_json::from_str(line).ok()).filter(adds_up).collect()
}

/// Returns the last lines, at least a few dozen.
///
/// # Panics
/// As [`read`] does.
pub fn read_end(path: &Path) -> Vec<Truth> {
    const ENOUGH: u64 = 256 << 10;
    let mut bytes = Vec::new();
    if let Ok(mut file) = File::open(path) {
        let length = file.metadata().map_or(0, |data| data.len());
        let from = length.saturating_sub(ENOUGH);
        let read = file.seek(SeekFrom::Start(from)).and_then(|_| file.read_to_end(&mut bytes));
        read.expect("read");
        if from > 0 {
            let first = bytes.iter().position(|&byte| byte == b'\n').map_or(bytes.len(), |at| at + 1);
            bytes.drain(..first);
        }
    }
    parse(&String::from_utf8_lossy(&bytes))
}

fn parse(text: &str) -> Vec<Truth> {
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let parse = |line: &str| -> Truth {
        let truth: Truth = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        let sum = truth.tags.values().sum::<i64>() + truth.idle;
        assert_eq!(sum, truth.tracked, "the machine's own sums do not add up: {line}");
        assert_eq!(
            truth.parts() + truth.tracked,
            i64::try_from(truth.used).unwrap_or(i64::MAX),
            "nor its parts: {line}"
        );
        truth
    };
    whole.lines().map(parse).collect()
}
