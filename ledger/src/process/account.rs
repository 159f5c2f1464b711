//! What a process has on one device beside its book: samples, and the gap that goes with the peak.

use crate::base::recent::LastMinute;
use crate::book::Peak;
use crate::history::trend::GapTrend;
use crate::oom::device::Listing;
use crate::samples::pending::{ClosedSample, PeakGap};
use crate::untrackable::account::Causes;
use gpumem_model::gap::Parts;
use gpumem_wire::Body;
use std::collections::VecDeque;
use std::sync::Arc;

/// Rows that are taken over of which the time is remembered until a reading begins after them.
const MAX_ADOPTIONS: usize = 1 << 14;

#[derive(Debug, Default)]
pub(crate) struct Account {
    pub device: Option<usize>,
    /// Bytes older than the agent, once known.
    pub predates: Option<i64>,
    /// That is the agent's word, or of a sample that was certain: no later one knows better.
    is_settled: bool,
    /// When the agent said it last.
    baseline_ns: u64,
    /// What was older than the agent and is tracked by now, but for what is in `adoptions`.
    adopted: i64,
    /// The latest of it: when, and bytes. A reading may begin while a list is taken over.
    adoptions: VecDeque<(u64, i64)>,
    /// What the program had freed of it by then has left `predates`.
    released_ns: u64,
    pub latest: Option<ClosedSample>,
    /// The latest in which `used` was read, and `tracked` known if there was an agent.
    pub complete: Option<ClosedSample>,
    /// What makes the gap.
    pub causes: Causes,
    /// Whether the gap grows.
    pub gaps: GapTrend,
    /// `used` in the last minute.
    pub last_minute: LastMinute,
    /// Without an agent: the last reading in which it was listed; set with each, goes with the process.
    pub listing: Option<Arc<Listing>>,
    /// Highest `used` and when.
    pub peak_used: Option<(u64, u64)>,
    /// The highest that the driver's own accounting has charged, where it is on.
    pub accounted_peak: Option<u64>,
    /// Part of the newest `used` that confidential computing protects.
    pub protected: Option<u64>,
    /// The last gap before the peak.
    before_peak: Option<SampleGap>,
    /// The first gap after the peak of that epoch, or the first exact one.
    after_peak: Option<(u32, SampleGap)>,
    /// The last gap: the one before the next peak.
    last: Option<SampleGap>,
}

#[derive(Debug, Clone, Copy)]
struct SampleGap {
    t0_ns: u64,
    untrackable: i64,
    predates: i64,
    tracked: i64,
    parts: Option<Parts>,
    /// `tracked` is that of the reading's own moment.
    sharp: bool,
}

impl SampleGap {
    fn is_exact(&self, peak: &Peak) -> bool {
        self.tracked == peak.bytes && self.sharp
    }
}

impl Account {
    pub fn new(device: Option<usize>) -> Self {
        Account { device, ..Account::default() }
    }

    /// Memory that is older than the agent is tracked from then on (or is not, after all).
    pub fn adopt_baseline(&mut self, bytes: i64, time_ns: u64) {
        if time_ns > self.baseline_ns {
            self.predates = self.predates.map(|predates| predates.wrapping_sub(bytes));
        }
        self.adoptions.push_back((time_ns, bytes));
        if self.adoptions.len() > MAX_ADOPTIONS
            && let Some((_, bytes)) = self.adoptions.pop_front()
        {
            self.adopted = self.adopted.wrapping_add(bytes);
        }
    }

    /// Takes what the driver says beside `used`: its own peak, protected bytes.
    pub fn note_driver_reading(&mut self, body: &Body<'_>) {
        match *body {
            Body::AccountedPeak { peak_bytes, .. } => {
                self.accounted_peak = self.accounted_peak.max(Some(peak_bytes));
            }
            Body::ProtectedSample { protected_bytes, .. } => self.protected = Some(protected_bytes),
            _ => {}
        }
    }

    /// What it takes, about.
    pub fn bytes(&self) -> usize {
        (16 << 10) + 2 * self.adoptions.capacity() * size_of::<(u64, i64)>()
    }

    /// What is older than the agent, as it says.
    pub fn baseline(&mut self, bytes: u64, time_ns: u64) {
        self.predates = i64::try_from(bytes).ok();
        (self.is_settled, self.baseline_ns) = (self.predates.is_some(), time_ns);
    }

    /// Of what was taken over, what was not tracked at that moment.
    fn adopted_after(&self, t0_ns: u64) -> i64 {
        let after = self.adoptions.iter().filter(|(time_ns, _)| *time_ns > t0_ns);
        after.fold(0, |sum, (_, bytes)| sum.wrapping_add(*bytes))
    }

    /// Of what is older than the agent, what was tracked at that moment.
    pub fn adopted_at(&self, t0_ns: u64) -> i64 {
        let by_then = self.adoptions.iter().filter(|(time_ns, _)| *time_ns <= t0_ns);
        by_then.fold(self.adopted, |sum, (_, bytes)| sum.wrapping_add(*bytes))
    }

    /// Whether a sample tells what is older than the agent: the first one, by its gap, and until one is certain the next.
    pub fn settles_baseline(&self, sample: &ClosedSample, late: bool) -> bool {
        late && !self.is_settled && (sample.is_certain() || self.predates.is_none())
    }

    /// And what was not.
    pub fn predates_at(&mut self, sample: &ClosedSample, late: bool) -> i64 {
        let not_yet = self.adopted_after(sample.t0_ns);
        if self.settles_baseline(sample, late)
            && let Some(gap) = sample.gap_bytes()
        {
            (self.predates, self.is_settled) = (Some(gap.wrapping_sub(not_yet)), sample.is_certain());
        }
        if !self.adoptions.is_empty() {
            // Later samples begin later.
            self.adopted = self.adopted_at(sample.t0_ns);
            self.adoptions.retain(|(time_ns, _)| *time_ns > sample.t0_ns);
            self.adoptions.shrink_to_fit();
        }
        self.predates.map_or(0, |predates| predates.wrapping_add(not_yet))
    }

    /// Whether there may be anything that is older than the agent and not tracked. (Its own word is of PyTorch's segments alone.)
    pub fn has_older(&self) -> bool {
        self.predates != Some(0) || self.baseline_ns != 0
    }

    /// The program has freed something that is older than the agent: by how much the gap fell, so large it was.
    pub fn release_baseline(&mut self, sample: &mut ClosedSample, freed_ns: u64) {
        if freed_ns <= self.released_ns || sample.t1_ns < freed_ns {
            return;
        }
        let before = self.last.map(|last| last.untrackable);
        let (Some(before), Some(now), Some(predates)) = (before, sample.untrackable_bytes(), self.predates)
        else {
            return;
        };
        let gone = before.wrapping_sub(now).clamp(0, predates.max(0));
        self.predates = Some(predates - gone);
        self.adopted = self.adopted.wrapping_add(gone);
        sample.predates_bytes = sample.predates_bytes.wrapping_sub(gone);
        if sample.t0_ns > freed_ns {
            self.released_ns = freed_ns;
        }
    }

    /// Peaks are those of the time from now on.
    pub fn restart_peaks(&mut self) {
        (self.before_peak, self.after_peak) = (None, None);
        let read = self.latest.as_ref().and_then(|sample| Some((sample.used_bytes.ok()?, sample.t0_ns)));
        self.peak_used = read;
    }

    /// Remembers a sample's gap if it can become the peak's.
    pub fn note_gap(&mut self, sample: &ClosedSample, peak: &Peak) {
        let (Some(untrackable), Some(tracked)) = (sample.untrackable_bytes(), sample.tracked_bytes) else {
            return;
        };
        let gap = SampleGap {
            t0_ns: sample.t0_ns,
            untrackable,
            predates: sample.predates_bytes,
            tracked,
            parts: sample.parts,
            sharp: sample.is_certain(),
        };
        if gap.t0_ns < peak.time_ns {
            self.before_peak = Some(gap);
        } else {
            let of_this_peak = self.after_peak.filter(|(epoch, _)| *epoch == peak.epoch);
            if of_this_peak.is_none() && self.last.is_some_and(|last| last.t0_ns < peak.time_ns) {
                self.before_peak = self.last;
            }
            if of_this_peak.is_none_or(|(_, first)| gap.is_exact(peak) && !first.is_exact(peak)) {
                self.after_peak = Some((peak.epoch, gap));
            }
        }
        self.last = Some(gap);
    }

    /// The gap of the nearest certain sample; of one that saw this very `tracked`, where there is one.
    pub fn peak_gap(&self, peak: &Peak) -> Option<PeakGap> {
        let after = self.after_peak.map(|(_, gap)| gap);
        // A gap that was read while memory moved may be wrong by all that moved.
        let best = |gap: &SampleGap| (!gap.is_exact(peak), !gap.sharp, gap.t0_ns.abs_diff(peak.time_ns));
        let gap = [self.before_peak, after, self.last].into_iter().flatten().min_by_key(best)?;
        Some(PeakGap {
            untrackable_bytes: gap.untrackable,
            predates_bytes: gap.predates,
            distance_ns: gap.t0_ns.wrapping_sub(peak.time_ns) as i64,
            exact: gap.is_exact(peak),
            parts: gap.parts,
        })
    }
}

impl Account {
    /// Remembers a sample's gap if it is beyond doubt; of a process without an agent, `used`.
    pub fn follow_gap(&mut self, sample: &ClosedSample, covered: bool) {
        let is_sharp = sample.is_certain();
        let used = sample.used_bytes.ok().and_then(|used| i64::try_from(used).ok());
        match (sample.untrackable_bytes(), used) {
            (Some(gap), _) if is_sharp => self.gaps.add(sample.t0_ns, gap, false),
            (None, Some(used)) if !covered => self.gaps.add(sample.t0_ns, used, true),
            _ => {}
        }
    }
}
