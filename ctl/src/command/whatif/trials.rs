//! Replays a recording under several settings, and checks that a replay under its own settings reproduces it.

use super::model::{Model, Scale};
use crate::exit::Kind;
use anyhow::Result;
use gpumem_import::torch_snapshot::Requests;
use gpumem_model::units::signed;
use gpumem_replay::{
    Backend, Device, Event, EventReturn, Figures, Options, Release, Replay, SegmentAddresses, Settings,
};
use gpumem_report::advice;
use std::borrow::Borrow;
use std::cmp::Reverse;

/// Assumed size in bytes of a device of unknown size: no request fails.
const UNLIMITED: u64 = 1 << 48;

/// Settings, and the figures of the replay under them.
pub(super) struct Trial {
    /// Settings that differ from the recorded ones, as text.
    pub(super) changes: String,
    /// All settings, as text.
    pub(super) text: String,
    settings: Settings,
    /// Fraction that `set_per_process_memory_fraction` sets.
    fraction: Option<f64>,
    pub(super) figures: Figures,
    /// Number of the event at which the replay ended: a request that failed only in the replay, or only in the recorded program.
    pub(super) ended_at: Option<usize>,
    /// Figures if memory under `record_stream` is available again at once, and only after a synchronisation; `None` if the program
    /// did not use it.
    pub(super) ends: Option<[Figures; 2]>,
}

impl Trial {
    pub(super) fn new(changes: String, text: String, settings: Settings) -> Self {
        let (fraction, figures) = (None, Figures::default());
        Trial { changes, text, settings, fraction, figures, ended_at: None, ends: None }
    }

    pub(super) fn with_fraction(self, fraction: Option<f64>) -> Self {
        Trial { fraction, ..self }
    }

    /// Returns whether a request failed for lack of memory.
    pub(super) fn fails(&self) -> bool {
        self.figures.failure.is_some()
    }

    /// Whether the figures are lower bounds: those of the driver's own allocator.
    pub(super) fn is_bound(&self) -> bool {
        self.settings.backend == Backend::CudaMallocAsync
    }

    /// Returns the sort key, the best first, and bounds at the end: no or late failure; then lowest peak, fewest driver calls, shortest text.
    pub(super) fn rank(&self) -> impl Ord + use<> {
        let figures = &self.figures;
        let failed_at = figures.failure.map_or(u64::MAX, |failure| failure.event);
        let calls = figures.device_allocs + figures.device_frees;
        (self.is_bound(), Reverse(failed_at), figures.reserved.peak, calls, self.changes.len())
    }

    /// Returns the least and the greatest peak of reserved bytes, because `record_stream` may return memory earlier or later.
    pub(super) fn reserved_range(&self) -> (u64, u64) {
        let peak = self.figures.reserved.peak;
        let ends = self.ends.iter().flatten().map(|figures| figures.reserved.peak);
        ends.fold((peak, peak), |(least, most), peak| (least.min(peak), most.max(peak)))
    }

    /// Returns whether memory runs out only if `record_stream` returns memory earlier or later than recorded, or only if it does not.
    pub(super) fn may_fail(&self) -> bool {
        self.ends.iter().flatten().any(|figures| figures.failure.is_some() != self.fails())
    }

    pub(super) fn advice(&self) -> advice::Trial {
        let Figures { reserved, failure, .. } = &self.figures;
        let needed = failure.map_or(0, |failure| failure.reserved_bytes + failure.segment_bytes);
        advice::Trial {
            changes: self.changes.clone(),
            settings: self.text.clone(),
            peak_bytes: signed(reserved.peak.max(needed)),
            fails: self.fails(),
        }
    }

    fn replay(&mut self, requests: &Requests, release: Release, total_bytes: u64) -> Result<()> {
        let run = |returns| self.run(requests.events.iter(), release, total_bytes, returns);
        let (figures, ended_at) = run(EventReturn::AsRecorded)?;
        let is_pending = |event: &Event| matches!(event, Event::Free { is_pending: true, .. });
        if !self.is_bound() && requests.events.iter().any(is_pending) {
            let [first, last] = [EventReturn::AtOnce, EventReturn::AtSynchronisation].map(run);
            self.ends = Some([first?.0, last?.0]);
        }
        (self.figures, self.ended_at) = (figures, ended_at);
        Ok(())
    }

    /// Returns the figures, and the number of the event at which the replay ended early.
    fn run(
        &self,
        events: impl Iterator<Item: Borrow<Event>>,
        release: Release,
        total_bytes: u64,
        returns: EventReturn,
    ) -> Result<(Figures, Option<usize>)> {
        let mut replay = Replay::new(Options {
            release,
            settings: self.settings.clone(),
            fraction: self.fraction,
            device: Device { total_bytes, other_bytes: 0 },
            addresses: SegmentAddresses::LowestFree,
            returns,
        });
        for (number, event) in events.enumerate() {
            replay.apply(event.borrow())?;
            if replay.has_ended() {
                return Ok((replay.figures().clone(), Some(number)));
            }
        }
        Ok((replay.figures().clone(), None))
    }
}

/// A recording, and its replay under the recorded settings.
pub(super) struct Recorded {
    pub(super) requests: Requests,
    pub(super) own: Trial,
    /// Whether the replay has the recorded peak and numbers of driver calls.
    pub(super) is_exact: bool,
}

impl Recorded {
    /// Replays the recorded settings. Memory that was returned to the driver directly before a request may have been returned for
    /// it, or by `empty_cache()`. The second is assumed if the first does not reproduce the recording.
    pub(super) fn new(requests: Requests, release: Release) -> Result<Self> {
        let text = requests.settings.clone();
        let settings = Settings::parse(&text, release).map_err(|error| {
            Kind::Usage.error(format!("the recorded settings: {error}; --torch names the program's release"))
        })?;
        if settings.backend != Backend::Native {
            let text = "the program ran with backend:cudaMallocAsync, so its requests to PyTorch's allocator are unknown";
            return Err(Kind::BadInput.error(text));
        }
        let total_bytes = requests.capacity.unwrap_or(UNLIMITED).min(UNLIMITED);
        let read = |requests: Requests| -> Result<Recorded> {
            let mut own = Trial::new(String::new(), text.clone(), settings.clone());
            own.replay(&requests, release, total_bytes)?;
            let calls = (own.figures.device_allocs, own.figures.device_frees);
            let is_exact = requests.older.0 == 0
                && requests.block_sizes == 0
                && calls == requests.driver_calls
                && own.figures.reserved.peak == requests.reserved.0;
            Ok(Recorded { requests, own, is_exact })
        };
        let first = read(requests)?;
        if first.is_exact || first.requests.uncertain_releases.is_empty() {
            return Ok(first);
        }
        read(first.requests.with_uncertain_releases())
    }

    /// Replays a changed program under the settings of `trial`. Returns `None` if no memory has the name.
    pub(super) fn model<'a>(
        &self,
        scale: Scale<'a>,
        trial: &Trial,
        release: Release,
        memory: Option<u64>,
    ) -> Result<Option<Model<'a>>> {
        if trial.is_bound() {
            return Err(
                Kind::Usage.error("--drop and --scale need backend:native: cudaMallocAsync is not replayed")
            );
        }
        let total_bytes = self.total_bytes(memory);
        let ends = scale.apply(&self.requests, |events| {
            Ok(trial.run(events, release, total_bytes, EventReturn::AsRecorded)?.0)
        })?;
        let without_role = || {
            let bytes = self.requests.bytes_of_roles();
            let unknown = bytes.get("").copied().unwrap_or_default();
            let all = bytes.values().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
            unknown as f64 / all.max(1) as f64
        };
        Ok(ends.map(|(is_role, ends)| Model { ends, without_role: is_role.then(without_role), scale }))
    }

    /// Returns by how much the peak of the replay differs from the recorded one.
    pub(super) fn error_bytes(&self) -> u64 {
        self.own.figures.reserved.peak.abs_diff(self.requests.reserved.0)
    }

    fn total_bytes(&self, memory: Option<u64>) -> u64 {
        memory.or(self.requests.capacity).unwrap_or(UNLIMITED).min(UNLIMITED)
    }

    /// Whether the recording has sizes of blocks in place of requests, and the peak of the replay differs from the recorded one by
    /// more than 1 %. Then the program used several streams or private pools, which such a recording does not contain.
    pub(super) fn lacks_streams(&self) -> bool {
        self.requests.block_sizes > 0 && self.error_bytes() > self.requests.reserved.0 / 100
    }

    /// Replays other settings, on several threads.
    pub(super) fn replay(&self, trials: &mut [Trial], release: Release, memory: Option<u64>) -> Result<()> {
        let total_bytes = self.total_bytes(memory);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let share = trials.len().div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            let replay = |trials: &mut [Trial]| {
                trials.iter_mut().try_for_each(|trial| trial.replay(&self.requests, release, total_bytes))
            };
            let workers: Vec<_> =
                trials.chunks_mut(share).map(|share| scope.spawn(move || replay(share))).collect();
            workers
                .into_iter()
                .try_for_each(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }
}
