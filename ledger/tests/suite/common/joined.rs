//! Short form of a closed sample.

use super::*;
use gpumem_ledger::ClosedSample;

/// (tracked, range, torn, stale)
pub fn join(sample: &ClosedSample) -> (Option<i64>, Option<(i64, i64)>, bool, bool) {
    (sample.tracked_bytes, sample.tracked_range, sample.torn, sample.stale)
}

pub fn exactly(bytes: i64) -> (Option<i64>, Option<(i64, i64)>, bool, bool) {
    (Some(bytes), Some((bytes, bytes)), false, false)
}

pub fn torn(bytes: i64, low: i64, high: i64) -> (Option<i64>, Option<(i64, i64)>, bool, bool) {
    (Some(bytes), Some((low, high)), true, false)
}

pub fn with_hundred() -> Script {
    let mut s = Script::new();
    s.at(0).tag("a").alloc(0x1000, 100); // at 10
    s
}
