//! Parts of a life. A process that lives for days is kept in a run per day: each has the resolution that a day has, and is
//! over when its day is.
//!
//! A part begins with what is held at that time. Peaks, series, timeline, iterations, times at which memory ran out and
//! counts are its own; the gap's steps and the points of growth are those of the whole life so far, because they explain
//! what is held now.

use crate::coverage::Coverage;
use serde::{Deserialize, Serialize};

/// Which part of a life a run is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Part {
    /// From 1; the first part has no `Part`.
    pub number: u32,
    /// When it began.
    pub began_ns: u64,
    /// Ordered records, applied or lost, of the parts before.
    pub events_before: u64,
}

/// What was counted before a part began.
#[derive(Debug, Clone)]
pub struct Before {
    part: Part,
    counts: Coverage,
}

impl Before {
    /// At the end of a part, which had this before itself and counted that.
    pub fn after(before: Option<&Before>, coverage: &Coverage, now_ns: u64) -> Self {
        let mut counts = coverage.clone();
        if let Some(before) = before {
            each(&mut counts, &before.counts, u64::saturating_add);
        }
        let part = Part {
            number: before.map_or(1, |before| before.part.number) + 1,
            began_ns: now_ns,
            events_before: counts.events.saturating_add(counts.lost),
        };
        Before { part, counts }
    }

    /// Makes the counts of a life those of the part.
    pub fn leave_out(&self, coverage: &mut Coverage) {
        each(coverage, &self.counts, u64::saturating_sub);
        coverage.blind.retain(|window| window.to_ns.is_none_or(|to_ns| to_ns > self.part.began_ns));
        // Its peak begins with what was known when it began.
        coverage.partial_history =
            coverage.lost > 0 || coverage.partial_state || self.counts.partial_state || coverage.blind_doubt;
        coverage.part = Some(self.part);
    }
}

impl Coverage {
    /// Adds the counts of another part of the same life, or of another process; sums saturate, because a stored run may be damaged.
    /// Marks stay as they are: their count belongs to their list.
    pub fn add_counts(&mut self, other: &Coverage) {
        // Named one by one, so that a new field is a decision here.
        let Coverage {
            covered: _,
            late: _,
            blocked_by: _,
            blocked_code: _,
            blind: _,
            blind_count,
            blind_ns,
            blind_doubt: _,
            partial_state: _,
            partial_history: _,
            events,
            allocations,
            allocated_bytes,
            rejected,
            lost,
            withheld,
            complete: _,
            odd,
            samples,
            torn_samples,
            stale_samples,
            failed_allocations,
            steps,
            layers: _,
            ooms_dropped,
            marks: _,
            marks_dropped: _,
            programs: _,
            part: _,
        } = self;
        for (sum, more) in [
            (blind_count, other.blind_count),
            (blind_ns, other.blind_ns),
            (events, other.events),
            (allocations, other.allocations),
            (allocated_bytes, other.allocated_bytes),
            (rejected, other.rejected),
            (lost, other.lost),
            (withheld, other.withheld),
            (odd, other.odd),
            (samples, other.samples),
            (torn_samples, other.torn_samples),
            (stale_samples, other.stale_samples),
            (failed_allocations, other.failed_allocations),
            (steps, other.steps),
            (ooms_dropped, other.ooms_dropped),
        ] {
            *sum = sum.saturating_add(more);
        }
    }
}

/// Every count of a life; samples begin anew with the series.
fn each(counts: &mut Coverage, other: &Coverage, with: impl Fn(u64, u64) -> u64) {
    let pairs = [
        (&mut counts.blind_count, other.blind_count),
        (&mut counts.blind_ns, other.blind_ns),
        (&mut counts.events, other.events),
        (&mut counts.allocations, other.allocations),
        (&mut counts.allocated_bytes, other.allocated_bytes),
        (&mut counts.rejected, other.rejected),
        (&mut counts.lost, other.lost),
        (&mut counts.withheld, other.withheld),
        (&mut counts.odd, other.odd),
        (&mut counts.stale_samples, other.stale_samples),
        (&mut counts.failed_allocations, other.failed_allocations),
        (&mut counts.steps, other.steps),
    ];
    for (count, other) in pairs {
        *count = with(*count, other);
    }
}
