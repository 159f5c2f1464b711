//! Account: data of a process on one device apart from its book. An account has the NVML samples, the *baseline* (memory allocated
//! before the agent started), and the gap (used minus tracked bytes) at the peak.

use crate::base::device::LastMinute;
use crate::book::timeline::Moment;
use crate::history::trend::GapTrend;
use crate::oom::device::Listing;
use crate::samples::pending::{ClosedSample, PeakGap};
use crate::untrackable::account::Causes;
use gpumem_wire::Body;
use std::collections::VecDeque;
use std::sync::Arc;

/// Maximum number of entries in `Account::adoptions`; of more, the oldest are only summed.
const MAX_ADOPTIONS: usize = 1 << 14;

#[derive(Debug, Default)]
pub(crate) struct Account {
    pub device: Option<usize>,
    /// Used bytes that are older than the agent and not tracked; `None` until known.
    pub predates: Option<i64>,
    /// Whether `predates` is final: the agent reported it, or it comes from a sample during which no memory changed.
    is_settled: bool,
    /// Time of the agent's last `Baseline` record (ns).
    baseline_ns: u64,
    /// Baseline bytes that became tracked because the agent reported them later, without those in `adoptions`.
    adopted: i64,
    /// Time (ns) and bytes of the latest reports of baseline memory that became tracked. An NVML reading may begin between two
    /// reports.
    adoptions: VecDeque<(u64, i64)>,
    /// Time of the last free that was subtracted from `predates` (ns).
    released_ns: u64,
    pub latest: Option<Arc<ClosedSample>>,
    /// Position of the last reading in which the account was sampled, among the completed readings of its device.
    pub position: u64,
    /// The latest sample with known `used` bytes; with an agent, also with known `tracked` bytes.
    pub complete: Option<Arc<ClosedSample>>,
    pub causes: Causes,
    /// Untrackable bytes over time, for detecting growth.
    pub gaps: GapTrend,
    pub last_minute: LastMinute,
    /// Time of the first NVML reading that listed the process (ns).
    pub listed_since_ns: Option<u64>,
    /// The last NVML reading that listed the process; only without an agent.
    pub listing: Option<Arc<Listing>>,
    /// Highest `used` bytes of all samples, and their time (ns).
    pub peak_used: Option<(u64, u64)>,
    /// Highest `used` bytes according to the driver's accounting mode; `None` while that mode is off.
    pub accounted_peak: Option<u64>,
    /// Part of the newest `used` bytes that confidential computing protects.
    pub protected: Option<u64>,
    before_peak: Option<SampleGap>,
    /// Epoch of a peak, and the first gap after that peak; an exact gap (with the same `tracked`) is preferred.
    after_peak: Option<(u32, SampleGap)>,
    /// Gap of the last sample; if a peak follows, it becomes `before_peak`.
    last: Option<SampleGap>,
}

/// The gap (used minus tracked bytes) of a sample. [`Account::peak_gap`] sets its distance from the peak.
#[derive(Debug, Clone, Copy)]
struct SampleGap {
    t0_ns: u64,
    tracked: i64,
    gap: PeakGap,
    /// Whether no memory changed during the reading.
    is_certain: bool,
}

impl SampleGap {
    fn is_exact(&self, peak: &Moment) -> bool {
        self.tracked == peak.bytes && self.is_certain
    }
}

impl Account {
    pub fn new(device: Option<usize>) -> Self {
        Account { device, ..Account::default() }
    }

    /// Counts baseline bytes as tracked from `time_ns` on; negative bytes reverse that.
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

    /// Stores the peak of the driver's accounting mode, or the protected bytes.
    pub fn note_driver_reading(&mut self, body: &Body<'_>) {
        match *body {
            Body::AccountedPeak { peak_bytes, .. } => {
                self.accounted_peak = self.accounted_peak.max(Some(peak_bytes));
            }
            Body::ProtectedSample { protected_bytes, .. } => self.protected = Some(protected_bytes),
            _ => {}
        }
    }

    pub fn bytes(&self) -> usize {
        (16 << 10) + 2 * self.adoptions.capacity() * size_of::<(u64, i64)>()
    }

    pub fn set_baseline(&mut self, bytes: u64, time_ns: u64) {
        self.predates = i64::try_from(bytes).ok();
        (self.is_settled, self.baseline_ns) = (self.predates.is_some(), time_ns);
    }

    /// Returns the baseline bytes that became tracked after `t0_ns`.
    fn adopted_after(&self, t0_ns: u64) -> i64 {
        let after = self.adoptions.iter().filter(|(time_ns, _)| *time_ns > t0_ns);
        after.fold(0, |sum, (_, bytes)| sum.wrapping_add(*bytes))
    }

    /// Returns the baseline bytes that were tracked at `t0_ns`.
    pub fn adopted_at(&self, t0_ns: u64) -> i64 {
        let by_then = self.adoptions.iter().filter(|(time_ns, _)| *time_ns <= t0_ns);
        by_then.fold(self.adopted, |sum, (_, bytes)| sum.wrapping_add(*bytes))
    }

    /// Whether a sample determines the baseline bytes: the first sample does, and later the first certain one. No sample does if
    /// the agent started before the first allocation (`late` is false), or if it reported the baseline bytes.
    pub fn settles_baseline(&self, sample: &ClosedSample, late: bool) -> bool {
        late && !self.is_settled && (sample.is_certain() || self.predates.is_none())
    }

    /// Returns the baseline bytes that were not tracked at the sample.
    pub fn predates_at(&mut self, sample: &ClosedSample, late: bool) -> i64 {
        let not_yet = self.adopted_after(sample.t0_ns);
        if self.settles_baseline(sample, late)
            && let Some(gap) = sample.gap_bytes()
        {
            (self.predates, self.is_settled) = (Some(gap.wrapping_sub(not_yet)), sample.is_certain());
        }
        if !self.adoptions.is_empty() {
            // Later samples begin later, so the times of earlier adoptions are no longer needed.
            self.adopted = self.adopted_at(sample.t0_ns);
            self.adoptions.retain(|(time_ns, _)| *time_ns > sample.t0_ns);
            self.adoptions.shrink_to_fit();
        }
        self.predates.map_or(0, |predates| predates.wrapping_add(not_yet))
    }

    /// Whether untracked baseline memory may exist. A `Baseline` record covers only PyTorch's segments, so other memory may exist
    /// even if it reports 0 bytes.
    pub fn has_older(&self) -> bool {
        self.predates != Some(0) || self.baseline_ns != 0
    }

    /// Subtracts baseline memory that the program freed at `freed_ns`: the gap has fallen by its size.
    pub fn release_baseline(&mut self, sample: &mut ClosedSample, freed_ns: u64) {
        if freed_ns <= self.released_ns || sample.t1_ns < freed_ns {
            return;
        }
        let before = self.last.map(|last| last.gap.untrackable_bytes);
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

    /// Restarts the peaks; the peak of `used` restarts with the latest sample.
    pub fn restart_peaks(&mut self) {
        (self.before_peak, self.after_peak) = (None, None);
        let read = self.latest.as_ref().and_then(|sample| Some((sample.used_bytes.ok()?, sample.t0_ns)));
        self.peak_used = read;
    }

    /// Keeps the gap (used minus tracked bytes) of a sample if it may become the gap at the peak.
    pub fn note_gap(&mut self, sample: &ClosedSample, peak: &Moment) {
        let (Some(untrackable), Some(tracked)) = (sample.untrackable_bytes(), sample.tracked_bytes) else {
            return;
        };
        let gap = PeakGap {
            untrackable_bytes: untrackable,
            predates_bytes: sample.predates_bytes,
            distance_ns: 0,
            exact: false,
            parts: sample.parts,
        };
        let gap = SampleGap { t0_ns: sample.t0_ns, tracked, gap, is_certain: sample.is_certain() };
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

    /// Returns the gap at a peak: that of a certain sample with the same `tracked` bytes, else of the nearest certain sample, else
    /// of the nearest one.
    pub fn peak_gap(&self, peak: &Moment) -> Option<PeakGap> {
        let after = self.after_peak.map(|(_, gap)| gap);
        // If memory changed during a reading, its gap may be wrong by the size of the changes.
        let best = |gap: &SampleGap| (!gap.is_exact(peak), !gap.is_certain, gap.t0_ns.abs_diff(peak.time_ns));
        let gap = [self.before_peak, after, self.last].into_iter().flatten().min_by_key(best)?;
        let distance_ns = gap.t0_ns.wrapping_sub(peak.time_ns) as i64;
        Some(PeakGap { distance_ns, exact: gap.is_exact(peak), ..gap.gap })
    }

    /// Adds the untrackable bytes of a certain sample to the points over time; for a process without an agent, its `used` bytes.
    pub fn add_gap_point(&mut self, sample: &ClosedSample, covered: bool) {
        let used = sample.used_bytes.ok().and_then(|used| i64::try_from(used).ok());
        match (sample.untrackable_bytes(), used) {
            (Some(gap), _) if sample.is_certain() => self.gaps.add(sample.t0_ns, gap, false),
            (None, Some(used)) if !covered => self.gaps.add(sample.t0_ns, used, true),
            _ => {}
        }
    }
}
