//! Data of a process on one device apart from its book: samples, the baseline, and the gap at the peak.

use crate::base::device::Recent;
use crate::book::timeline::Moment;
use crate::history::trend::GapTrend;
use crate::oom::device::Listing;
use crate::samples::pending::{ClosedSample, PeakGap};
use crate::untrackable::account::Causes;
use gpumem_wire::Body;
use std::collections::VecDeque;
use std::sync::Arc;

/// Maximum number of adoptions whose times are kept until a reading begins after them.
const MAX_ADOPTIONS: usize = 1 << 14;

#[derive(Debug, Default)]
pub(crate) struct Account {
    pub device: Option<usize>,
    /// Bytes allocated before the agent started that are not tracked; `None` until known.
    pub predates: Option<i64>,
    /// `predates` was reported by the agent or comes from a certain sample: later samples do not change it.
    is_settled: bool,
    /// Time of the agent's last baseline report.
    baseline_ns: u64,
    /// Bytes allocated before the agent started that are tracked by now, without those in `adoptions`.
    adopted: i64,
    /// The latest adoptions: time and bytes. Kept because a reading may begin while a list is adopted.
    adoptions: VecDeque<(u64, i64)>,
    /// Time up to which freed baseline memory has been subtracted from `predates`.
    released_ns: u64,
    pub latest: Option<ClosedSample>,
    /// The latest sample with a known `used`; if there is an agent, with a known `tracked`, too.
    pub complete: Option<ClosedSample>,
    pub causes: Causes,
    /// Points of the gap, for judging its growth.
    pub gaps: GapTrend,
    /// `used`.
    pub last_minute: Recent,
    /// The last reading that listed the process; only without an agent.
    pub listing: Option<Arc<Listing>>,
    pub peak_used: Option<(u64, u64)>,
    /// Highest `used` according to the driver's accounting mode, if that is on.
    pub accounted_peak: Option<u64>,
    /// Bytes of the newest `used` that confidential computing protects.
    pub protected: Option<u64>,
    before_peak: Option<SampleGap>,
    /// The first gap after the peak of that epoch, or the first exact one.
    after_peak: Option<(u32, SampleGap)>,
    /// The last gap; if a peak follows, it becomes the gap before that peak.
    last: Option<SampleGap>,
}

/// The gap of a sample; its distance from a peak is set by [`Account::peak_gap`].
#[derive(Debug, Clone, Copy)]
struct SampleGap {
    t0_ns: u64,
    tracked: i64,
    gap: PeakGap,
    /// `tracked` is exactly that of the reading.
    sharp: bool,
}

impl SampleGap {
    fn is_exact(&self, peak: &Moment) -> bool {
        self.tracked == peak.bytes && self.sharp
    }
}

impl Account {
    pub fn new(device: Option<usize>) -> Self {
        Account { device, ..Account::default() }
    }

    /// Counts memory allocated before the agent started as tracked. Negative bytes reverse an adoption.
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

    /// Stores other readings of the driver: the peak from its accounting, and protected bytes.
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

    /// Sets the bytes allocated before the agent started, as the agent reports them.
    pub fn baseline(&mut self, bytes: u64, time_ns: u64) {
        self.predates = i64::try_from(bytes).ok();
        (self.is_settled, self.baseline_ns) = (self.predates.is_some(), time_ns);
    }

    /// Returns the adopted bytes that were not tracked yet at a time.
    fn adopted_after(&self, t0_ns: u64) -> i64 {
        let after = self.adoptions.iter().filter(|(time_ns, _)| *time_ns > t0_ns);
        after.fold(0, |sum, (_, bytes)| sum.wrapping_add(*bytes))
    }

    /// Returns the baseline bytes that were tracked at a time.
    pub fn adopted_at(&self, t0_ns: u64) -> i64 {
        let by_then = self.adoptions.iter().filter(|(time_ns, _)| *time_ns <= t0_ns);
        by_then.fold(self.adopted, |sum, (_, bytes)| sum.wrapping_add(*bytes))
    }

    /// Whether a sample determines the baseline bytes: the first sample does, and later ones until one is certain.
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
            // Later samples begin later, so earlier adoptions need no times.
            self.adopted = self.adopted_at(sample.t0_ns);
            self.adoptions.retain(|(time_ns, _)| *time_ns > sample.t0_ns);
            self.adoptions.shrink_to_fit();
        }
        self.predates.map_or(0, |predates| predates.wrapping_add(not_yet))
    }

    /// Whether there may be untracked memory from before the agent. (The agent reports its size only for PyTorch's segments.)
    pub fn has_older(&self) -> bool {
        self.predates != Some(0) || self.baseline_ns != 0
    }

    /// Subtracts baseline memory that the program has freed: the gap fell by its size.
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

    pub fn restart_peaks(&mut self) {
        (self.before_peak, self.after_peak) = (None, None);
        let read = self.latest.as_ref().and_then(|sample| Some((sample.used_bytes.ok()?, sample.t0_ns)));
        self.peak_used = read;
    }

    /// Keeps a sample's gap if it can become that of the peak.
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
        let gap = SampleGap { t0_ns: sample.t0_ns, tracked, gap, sharp: sample.is_certain() };
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

    /// Returns the gap for a peak: from a sample with the peak's own `tracked` if there is one, else from the nearest certain
    /// sample.
    pub fn peak_gap(&self, peak: &Moment) -> Option<PeakGap> {
        let after = self.after_peak.map(|(_, gap)| gap);
        // A gap that was read while memory changed may be wrong by the size of the changes.
        let best = |gap: &SampleGap| (!gap.is_exact(peak), !gap.sharp, gap.t0_ns.abs_diff(peak.time_ns));
        let gap = [self.before_peak, after, self.last].into_iter().flatten().min_by_key(best)?;
        let distance_ns = gap.t0_ns.wrapping_sub(peak.time_ns) as i64;
        Some(PeakGap { distance_ns, exact: gap.is_exact(peak), ..gap.gap })
    }
}

impl Account {
    /// Adds a sample's gap to the trend if it is certain; for a process without an agent, its `used`.
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
