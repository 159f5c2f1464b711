//! Observations -> ledger -> runs. The one place where a stream becomes runs, for recordings, imports and
//! the daemon alike.

use crate::run::{self, Caveat, Clock, Moment, Run, Source, State};
use crate::series::Series;
use gpumem_ledger::{AccountView, ClosedSample, Ledger, Origin, ProcessKey, ProcessView, Snapshot};
use gpumem_wire::{ClockKind, Record};
use std::collections::BTreeMap;

/// What a reader of files hands its observations to.
pub trait Sink {
    /// Takes one record.
    fn observe(&mut self, origin: Origin, record: &Record<'_>);
    /// Something that readers of the runs must know: a stable code, and a sentence.
    fn caveat(&mut self, code: &str, text: String);
    /// Lines or records that could not be read.
    fn reject(&mut self, count: u64);
}

/// Width of the first buckets of series: finer than NVML's own values move.
const FIRST_WIDTH_NS: u64 = 10_000_000;

/// Feeds a ledger and keeps what a ledger forgets: the series.
#[derive(Debug)]
pub struct RunBuilder {
    ledger: Ledger,
    source: Source,
    caveats: Vec<Caveat>,
    rejected: u64,
    series: BTreeMap<(ProcessKey, usize), Series>,
    /// Samples per process: all, torn.
    samples: BTreeMap<ProcessKey, (u64, u64)>,
    width_ns: u64,
    next_window_ns: u64,
}

impl RunBuilder {
    /// A builder for runs of this source.
    pub fn new(source: Source) -> Self {
        RunBuilder {
            ledger: Ledger::new(),
            source,
            caveats: Vec::new(),
            rejected: 0,
            series: BTreeMap::new(),
            samples: BTreeMap::new(),
            width_ns: FIRST_WIDTH_NS,
            next_window_ns: 0,
        }
    }

    /// The ledger, for views that need more than runs.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }
}

impl Sink for RunBuilder {
    #[inline]
    fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        if let gpumem_wire::Body::ClockAnchor { clock: ClockKind::Ordinal, .. } = record.body {
            self.width_ns = 1;
        }
        self.ledger.observe(origin, record);
        if record.stamp.time_ns >= self.next_window_ns {
            self.take(record.stamp.time_ns);
        }
    }

    fn caveat(&mut self, code: &str, text: String) {
        self.caveats.push(Caveat { code: code.into(), text });
    }

    fn reject(&mut self, count: u64) {
        self.rejected += count;
    }
}

impl RunBuilder {
    /// Moves samples and extremes from the ledger into the series.
    fn take(&mut self, time_ns: u64) {
        for (key, device, window) in self.ledger.take_windows() {
            self.series_of(key, device).add_tracked(time_ns, window);
        }
        for (key, device, sample) in self.ledger.take_samples() {
            let (all, torn) = self.samples.entry(key).or_default();
            *all += 1;
            *torn += u64::from(sample.torn);
            self.series_of(key, device).add_sample(&sample);
        }
        self.width_ns = self.series.values().map(|series| series.width_ns).fold(self.width_ns, u64::max);
        self.next_window_ns = (time_ns / self.width_ns).saturating_add(1).saturating_mul(self.width_ns);
    }

    fn series_of(&mut self, key: ProcessKey, device: usize) -> &mut Series {
        self.series.entry((key, device)).or_insert_with(|| Series::new(self.width_ns))
    }

    /// The runs as they stand; `goes_on` says whether more observations may come.
    pub fn runs(&mut self, goes_on: bool) -> Vec<Run> {
        let snapshot = self.ledger.snapshot();
        self.take(self.next_window_ns.saturating_sub(1));
        snapshot.processes.iter().map(|process| self.run(&snapshot, process, goes_on)).collect()
    }

    fn run(&self, snapshot: &Snapshot, process: &ProcessView, goes_on: bool) -> Run {
        let coverage = &process.coverage;
        let odd = process.odd;
        let (samples, torn_samples) = self.samples.get(&process.key).copied().unwrap_or_default();
        Run {
            source: self.source.clone(),
            clock: Clock::of(snapshot),
            process: run::Process {
                pid: match process.key.pid {
                    // Logs tell the pid only with their first reading.
                    0 => process.facts.seen.get("pid").and_then(|pid| pid.parse().ok()).unwrap_or(0),
                    pid => pid,
                },
                start_ticks: process.key.start_ticks,
                uid: process.facts.uid,
                facts: process.facts.seen.clone(),
                claims: process.facts.claims.clone(),
            },
            state: match process.ended {
                Some((time_ns, status)) => State::Closed { time_ns, status },
                None if goes_on => State::Open,
                None => State::Interrupted,
            },
            coverage: run::Coverage {
                covered: coverage.covered,
                late: coverage.late,
                blocked_by: coverage.blocked.as_ref().map(|blocked| blocked.by.clone()),
                partial_state: coverage.partial.is_some_and(|partial| partial.state),
                partial_history: coverage.partial.is_some(),
                events: coverage.events,
                allocations: coverage.allocations,
                allocated_bytes: coverage.allocated_bytes,
                rejected: self.rejected,
                lost: coverage.lost,
                odd: odd.unknown_frees
                    + odd.unknown_ends
                    + odd.replaced
                    + odd.unknown_handles
                    + odd.impossible
                    + odd.duplicates
                    + odd.overflowed,
                samples,
                torn_samples,
                stale_samples: coverage.stale_samples,
                failed_allocations: coverage.failed_allocations,
                steps: coverage.steps,
            },
            caveats: self.caveats.clone(),
            cells: process.cells.iter().map(run::Cell::from).collect(),
            devices: process
                .accounts
                .iter()
                .filter_map(|account| self.device(snapshot, process, account))
                .collect(),
        }
    }

    fn device(
        &self,
        snapshot: &Snapshot,
        process: &ProcessView,
        account: &AccountView,
    ) -> Option<run::Device> {
        let index = account.device?;
        let device = &snapshot.devices[index];
        // Others count where NVML listed them together with this process.
        let number = account.latest.as_ref().map(|sample| sample.number);
        let agreed = device.agreed.filter(|agreed| Some(agreed.number) == number);
        let used_beside = |other: &ProcessView| {
            let account = other.accounts.iter().find(|account| account.device == Some(index))?;
            let sample = account.latest.as_ref().filter(|sample| Some(sample.number) == number)?;
            Some((other.key.pid, sample.used_bytes.ok()))
        };
        let others = snapshot.processes.iter().filter(|other| other.key != process.key);
        Some(run::Device {
            name: device.name.to_string(),
            ordinal: device.ordinal,
            model: device.model.clone(),
            total_bytes: device.total_bytes,
            last: last_moment(process.coverage.covered, account, snapshot.now_ns),
            peak: peak_moment(process.coverage.covered, account),
            peak_used: account.peak_used,
            beside: (&account.beside).into(),
            reading: agreed.map(|agreed| agreed.reading).or(device.latest).map(Into::into),
            unaccounted_bytes: agreed.map(|agreed| agreed.unaccounted_bytes),
            tenants: others.filter_map(used_beside).collect(),
            series: self
                .series
                .get(&(process.key, index))
                .cloned()
                .unwrap_or_else(|| Series::new(self.width_ns)),
        })
    }
}

fn sparse(amounts: &[i64]) -> Vec<(u32, i64)> {
    let indexed = amounts.iter().enumerate().map(|(index, &bytes)| (index as u32, bytes));
    indexed.filter(|&(_, bytes)| bytes != 0).collect()
}

/// The identity at the last sample, where everything was known at one time; without one, what is tracked
/// now.
fn last_moment(covered: bool, account: &AccountView, now_ns: u64) -> Moment {
    match &account.latest {
        Some(sample) if sample.used_bytes.is_ok() => at_sample(sample),
        _ if covered => Moment {
            time_ns: now_ns.max(account.peak.time_ns),
            tracked_bytes: Some(account.tracked_bytes),
            amounts: sparse(&account.amounts),
            predates_bytes: account.predates_bytes.unwrap_or(0),
            ..Moment::default()
        },
        _ => Moment { time_ns: now_ns, ..Moment::default() },
    }
}

fn at_sample(sample: &ClosedSample) -> Moment {
    Moment {
        time_ns: sample.t0_ns,
        tracked_bytes: sample.tracked_bytes,
        amounts: sparse(&sample.amounts),
        predates_bytes: sample.predates_bytes,
        untrackable_bytes: sample.untrackable_bytes(),
        uncovered_used_bytes: sample.used_bytes.ok(),
        gap_distance_ns: 0,
        torn: sample.tracked_range.filter(|(min, max)| min != max),
        stale: sample.stale,
        partial: sample.partial,
    }
}

fn peak_moment(covered: bool, account: &AccountView) -> Moment {
    if !covered {
        let (used, time_ns) = account.peak_used.unzip();
        return Moment { time_ns: time_ns.unwrap_or(0), uncovered_used_bytes: used, ..Moment::default() };
    }
    let peak = &account.peak;
    Moment {
        time_ns: peak.time_ns,
        tracked_bytes: Some(peak.tracked_bytes),
        amounts: sparse(&peak.amounts),
        predates_bytes: peak.gap.map_or(account.predates_bytes.unwrap_or(0), |gap| gap.predates_bytes),
        untrackable_bytes: peak.gap.map(|gap| gap.untrackable_bytes),
        gap_distance_ns: peak.gap.map_or(0, |gap| if gap.exact { 0 } else { gap.distance_ns }),
        ..Moment::default()
    }
}
