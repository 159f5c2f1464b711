//! Replays of a recording under several settings, and the check that the replay of its own settings repeats what happened.

use crate::exit::Kind;
use anyhow::Result;
use gpumem_import::torch_snapshot::Requests;
use gpumem_replay::{Device, EventReturn, Figures, Options, Release, Replay, SegmentAddresses, Settings};
use std::cmp::Reverse;

/// Bytes of a device whose size is unknown: no request fails.
const UNLIMITED: u64 = 1 << 48;

/// Settings, and what the allocator would have done under them.
pub(super) struct Trial {
    /// What differs from the recorded settings.
    pub(super) changes: String,
    /// The whole text of the settings.
    pub(super) text: String,
    settings: Settings,
    pub(super) figures: Figures,
    /// Number of the event at which the replay ended: a request without memory, or one that has memory only here.
    pub(super) ended_at: Option<usize>,
}

impl Trial {
    pub(super) fn new(changes: String, text: String, settings: Settings) -> Self {
        Trial { changes, text, settings, figures: Figures::default(), ended_at: None }
    }

    /// Whether a request had no memory.
    pub(super) fn fails(&self) -> bool {
        self.figures.failure.is_some()
    }

    /// Best first: those that fit, or fail last; then the lowest peak, the fewest driver calls, the shortest text.
    pub(super) fn rank(&self) -> impl Ord + use<> {
        let figures = &self.figures;
        let failed_at = figures.failure.map_or(u64::MAX, |failure| failure.event);
        let calls = figures.device_allocs + figures.device_frees;
        (Reverse(failed_at), figures.reserved.peak, calls, self.changes.len())
    }

    fn replay(&mut self, requests: &Requests, release: Release, total_bytes: u64) -> Result<()> {
        let mut replay = Replay::new(Options {
            release,
            settings: self.settings.clone(),
            device: Device { total_bytes, other_bytes: 0 },
            addresses: SegmentAddresses::LowestFree,
            returns: EventReturn::AsRecorded,
        })
        .map_err(|fault| Kind::Usage.error(fault.to_string()))?;
        for (number, event) in requests.events.iter().enumerate() {
            replay.apply(event)?;
            if replay.has_ended() {
                self.ended_at = Some(number);
                break;
            }
        }
        self.figures = replay.figures().clone();
        Ok(())
    }
}

/// A recording with the replay of its own settings.
pub(super) struct Recorded {
    pub(super) requests: Requests,
    pub(super) own: Trial,
    /// The replay has the recorded peak and number of driver calls.
    pub(super) is_exact: bool,
}

impl Recorded {
    /// Replays the recorded settings. A release of memory directly before a request that needed some may have been the request's
    /// own, or the program's `empty_cache()`: the reading that repeats the recording counts.
    pub(super) fn new(requests: Requests, release: Release) -> Result<Self> {
        let text = requests.settings.clone();
        let settings = Settings::parse(&text, release).map_err(|error| {
            Kind::Usage.error(format!("the recorded settings: {error}; --torch names the program's release"))
        })?;
        let total_bytes = requests.capacity.unwrap_or(UNLIMITED);
        let read = |requests: Requests| -> Result<Recorded> {
            let mut own = Trial::new(String::new(), text.clone(), settings.clone());
            own.replay(&requests, release, total_bytes)?;
            let calls = (own.figures.device_allocs, own.figures.device_frees);
            let is_exact = requests.older.0 == 0
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

    /// Replays other settings, each on a thread of its own.
    pub(super) fn replay(&self, trials: &mut [Trial], release: Release, memory: Option<u64>) -> Result<()> {
        let total_bytes = memory.or(self.requests.capacity).unwrap_or(UNLIMITED);
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
