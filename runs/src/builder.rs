//! Builds runs from records: passes the records to a ledger, and makes runs of the ledger's state. Recordings, imports and the
//! daemon use it. A cell of a run is one kind of memory (one tag, role, phase, ...); a moment is the state of a device at one
//! time.

use crate::readings::{ProcessSeries, Processes, RecentReadings, complete};
use crate::tenants::Tenants;
use gpumem_ledger::{
    AccountRef, AccountView, CellView, ClosedSample, DeviceView, Ledger, Limits, Origin, ProcessKey,
    ProcessView, Snapshot, WINDOW_NS, Window, sparse,
};
use gpumem_model::coverage::PartStart;
use gpumem_model::program_data::{ProgramData, SnapshotFigures};
use gpumem_model::run::{self, Caveat, Moment, OomKind, Run, Source, State, absence_name};
use gpumem_model::series::{Extremes, Series};
use gpumem_model::units::thousands;
use gpumem_wire::{Absence, ByeReason, ClockKind, Record};
use std::collections::HashSet;
use std::sync::Arc;

/// Receives the records that a reader of a file produces.
pub trait Sink {
    fn observe(&mut self, origin: Origin, record: &Record<'_>);
    /// Takes some records of one origin, in their order. [`PRELOADED`](gpumem_ledger::PRELOADED) records at once are cheapest.
    fn observe_all(&mut self, origin: Origin, records: &[Record<'_>]) {
        records.iter().for_each(|record| self.observe(origin, record));
    }
    /// Takes a caveat, a note for readers of the runs: a stable code, and a sentence.
    fn caveat(&mut self, _code: &str, _text: String) {}
    /// Counts lines or records that could not be read.
    fn reject(&mut self, _count: u64) {}
    /// Takes the totals that a PyTorch snapshot states.
    fn figures(&mut self, _figures: SnapshotFigures) {}
}

impl<S: Sink> Sink for &mut S {
    fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        (**self).observe(origin, record);
    }

    fn observe_all(&mut self, origin: Origin, records: &[Record<'_>]) {
        (**self).observe_all(origin, records);
    }

    fn caveat(&mut self, code: &str, text: String) {
        (**self).caveat(code, text);
    }

    fn reject(&mut self, count: u64) {
        (**self).reject(count);
    }

    fn figures(&mut self, figures: SnapshotFigures) {
        (**self).figures(figures);
    }
}

/// Passes records to a ledger, keeps the series of each process, and makes runs.
#[derive(Debug)]
pub struct RunBuilder {
    ledger: Ledger,
    source: Source,
    caveats: Vec<Caveat>,
    rejected: u64,
    snapshot: Option<SnapshotFigures>,
    processes: Processes,
    readings: RecentReadings,
    /// Bucket width of new series in ns, the same as the ledger's windows.
    width_ns: u64,
}

impl RunBuilder {
    pub fn new(source: Source) -> Self {
        RunBuilder {
            ledger: Ledger::new(),
            source,
            caveats: Vec::new(),
            rejected: 0,
            snapshot: None,
            processes: Processes::default(),
            readings: RecentReadings::default(),
            width_ns: WINDOW_NS,
        }
    }

    /// Stores the device reading with this number, which is now complete.
    fn note_reading(&mut self, number: u64) {
        let agreed = |device: &DeviceView| device.agreed.filter(|agreed| agreed.number == number);
        let mut devices = self.ledger.devices().iter().enumerate();
        let Some((device, agreed)) = devices.find_map(|(index, device)| Some((index, agreed(device)?)))
        else {
            return;
        };
        // The samples of this reading are complete only after their agents sent all records up to it; NVML's list is complete now.
        if let Some(listed) = self.ledger.listed(device, number)
            && let Some(reading) = self.readings.entry(device, number)
        {
            reading.agreed = Some((agreed, Arc::clone(listed)));
            reading.sampled = Vec::new();
        }
    }

    /// Moves finished samples and windows from the ledger into the series.
    fn take_finished(&mut self) {
        let width_ns = self.width_ns;
        for (key, place, window) in self.ledger.take_windows() {
            let Window { start_ns, min, max, last } = window;
            let series = self.processes.entry(key).or_default().series_mut(place, width_ns);
            series.add_tracked(start_ns, Extremes { min, max, last });
        }
        for repeated in self.ledger.take_repeated() {
            let process = self.processes.entry(repeated.key).or_default();
            process.samples += repeated.t0_ns.len() as u64;
            let used = repeated.used_bytes.ok().and_then(|used| i64::try_from(used).ok());
            let series = process.series_mut(AccountRef::Device(repeated.device), width_ns);
            for t0_ns in repeated.t0_ns {
                series.add_sample(t0_ns, used, None, None, false);
            }
        }
        for (key, device, sample) in self.ledger.take_samples() {
            if sample.used_bytes != Err(Absence::NotListed)
                && let Some(reading) = self.readings.entry(device, sample.number)
                && reading.agreed.is_none()
            {
                reading.sampled.push((sample.used_bytes.ok(), key));
            }
            let process = self.processes.entry(key).or_default();
            process.samples += 1;
            process.torn += u64::from(sample.torn);
            let used = sample.used_bytes.ok().and_then(|used| i64::try_from(used).ok());
            let untrackable = sample.untrackable_bytes();
            let series = process.series_mut(AccountRef::Device(device), width_ns);
            series.add_sample(
                sample.t0_ns,
                used,
                sample.tracked_bytes,
                untrackable,
                sample.torn || sample.stale,
            );
        }
    }

    /// Returns the ledger, for views of the current state.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Lets the runs of later processes have their last blocks.
    #[must_use]
    pub fn with_blocks(mut self) -> Self {
        self.ledger.keep_blocks();
        self
    }

    /// Sets the limits of the ledger's memory; see [`Ledger::set_limits`].
    pub fn limit(&mut self, limits: Limits) {
        self.ledger.set_limits(limits);
    }

    /// Drops all data of a process, for example because its run is in a store.
    pub fn forget(&mut self, key: ProcessKey) {
        self.ledger.remove_process(key);
        self.processes.remove(&key);
    }

    /// Returns runs of some processes in their present state, sorted by the start of the process. `is_live` states whether more
    /// records may come.
    pub fn runs_of(&mut self, keys: &[ProcessKey], is_live: bool) -> Vec<(ProcessKey, Run)> {
        let keys: HashSet<ProcessKey> = keys.iter().copied().collect();
        let mut runs = self.runs_where(|key| keys.contains(&key), is_live);
        runs.sort_by_key(|(key, _)| (key.start_ticks, key.pid));
        runs
    }

    fn runs_where(&mut self, wanted: impl Fn(ProcessKey) -> bool, is_live: bool) -> Vec<(ProcessKey, Run)> {
        self.ledger.catch_up_with(&wanted);
        self.ledger.end_windows();
        self.take_finished();
        let snapshot = self.ledger.snapshot();
        let wanted: Vec<_> = snapshot.processes.iter().filter(|process| wanted(process.key)).collect();
        let tenants = Tenants::new(&snapshot, &wanted, &self.readings);
        wanted.iter().map(|process| (process.key, self.run(&snapshot, &tenants, process, is_live))).collect()
    }

    /// Ends the present parts of some processes' lives and begins new parts, whose peaks and counts start again. Returns the runs
    /// of the ended parts.
    pub fn roll(&mut self, keys: &[ProcessKey], now_ns: u64) -> Vec<(ProcessKey, Run)> {
        let mut runs = self.runs_of(keys, true);
        for (key, run) in &mut runs {
            run.state = State::Rolled { time_ns: now_ns };
            let before = self.processes.get(key).and_then(|kept| kept.before.as_deref());
            let before = PartStart::after(before, &run.coverage, now_ns);
            self.processes.insert(*key, ProcessSeries::new_part(before));
            self.ledger.begin_part(*key, now_ns);
        }
        let keys: HashSet<ProcessKey> = keys.iter().copied().collect();
        // The series of the new part starts with the present bytes. Otherwise it would be empty until the next change.
        for process in self.ledger.snapshot().processes.iter().filter(|process| keys.contains(&process.key)) {
            let Some(kept) = self.processes.get_mut(&process.key).filter(|_| process.coverage.covered) else {
                continue;
            };
            for (index, account) in process.accounts.iter().enumerate() {
                let place = account.device.map_or(AccountRef::Unnamed(index), AccountRef::Device);
                let held = Extremes::at(account.tracked_bytes);
                kept.series_mut(place, self.width_ns).add_tracked(now_ns, held);
            }
        }
        runs
    }

    /// Returns the present runs of all processes. `is_live` states whether more records may come.
    pub fn runs(&mut self, is_live: bool) -> Vec<Run> {
        self.runs_where(|_| true, is_live).into_iter().map(|(_, run)| run).collect()
    }

    fn run(&self, snapshot: &Snapshot, tenants: &Tenants, process: &ProcessView, is_live: bool) -> Run {
        let coverage = &process.coverage;
        let kept = self.processes.get(&process.key);
        let (samples, torn_samples) = kept.map(|kept| (kept.samples, kept.torn)).unwrap_or_default();
        let devices: Vec<run::Device> = (0..process.accounts.len())
            .filter_map(|account| self.device(snapshot, tenants, process, account))
            .collect();
        let before_recording = self.before_recording(coverage);
        let lost = coverage.lost - before_recording;
        let is_complete =
            self.snapshot.is_some() || process.bye.is_some_and(|(_, why)| why == ByeReason::Requested);
        let own = caveats_of(process)
            .into_iter()
            .chain(late_recording(before_recording, coverage))
            .chain(devices.iter().filter_map(disagreement));
        let before = kept.and_then(|kept| kept.before.as_deref());
        let mut run = Run {
            source: self.source.clone(),
            clock: snapshot.run_clock(),
            process: run::Process {
                pid: match process.key.pid {
                    // The importer of a log learns the pid only from the first reading, and then emits it as a fact.
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
                None if is_live => State::Open,
                None if self.snapshot.is_some() => State::Closed { time_ns: process.heard_ns, status: None },
                None => match process.bye.filter(|_| self.is_file()) {
                    Some((time_ns, _)) => {
                        State::Closed { time_ns: time_ns.max(process.heard_ns), status: None }
                    }
                    None => State::Interrupted,
                },
            },
            coverage: run::Coverage {
                late: coverage.late || before_recording > 0,
                partial_history: coverage.partial_history
                    && (coverage.partial_state || before_recording == 0 || lost + coverage.withheld > 0),
                rejected: self.rejected,
                lost,
                complete: !is_live && process.ended.is_none() && self.is_file() && is_complete,
                samples,
                torn_samples,
                ..coverage.run.clone()
            },
            caveats: own.chain(self.caveats.iter().cloned()).collect(),
            cells: process.cells.iter().map(CellView::to_cell).collect(),
            devices,
            own: ProgramData { snapshot: self.snapshot, ..self.ledger.own(process.key) },
        };
        if let Some(before) = before {
            before.subtract(&mut run.coverage);
            let text = "the process began earlier: peaks, series and counts are those since its run rolled; \
                        gpumemctl runs lists the parts before";
            run.caveats.insert(0, Caveat { code: "part".into(), text: text.into() });
        }
        run
    }

    /// Returns whether the source is a recording or a snapshot: a file that was ended on purpose, unless it is incomplete.
    fn is_file(&self) -> bool {
        self.source.kind == "recording" || self.snapshot.is_some()
    }

    /// Returns the number of records that the process emitted before its recording began. The recording lacks these, but they are
    /// not lost. Returns 0 if the recording began before the process.
    fn before_recording(&self, coverage: &gpumem_ledger::Coverage) -> u64 {
        if self.source.kind == "recording" && coverage.held_before.is_some() { coverage.before } else { 0 }
    }

    fn device(
        &self,
        snapshot: &Snapshot,
        tenants: &Tenants,
        process: &ProcessView,
        index: usize,
    ) -> Option<run::Device> {
        let account = &process.accounts[index];
        let covered = process.coverage.covered;
        let last = complete(covered, account);
        let mut last_moment = last_moment(covered, account, snapshot.now_ns);
        // The driver frees the memory of a process before the ledger learns of the process's end. A reading between these does
        // not list the process; the last sample is valid nevertheless.
        let is_listed = |sample: &ClosedSample| sample.used_bytes != Err(Absence::NotListed);
        if process.ended.is_some() && last.is_some() && !account.latest.as_deref().is_none_or(is_listed) {
            last_moment.used_absence = None;
        }
        let mut run_device = run::Device {
            name: format!("unnamed-{index}"),
            ordinal: index as u16,
            last: last_moment,
            peak: peak_moment(covered, account, snapshot.now_ns),
            peak_used: account.peak_used,
            beside: account.beside,
            series: Series::new(self.width_ns),
            details: run::Details {
                steps: account.steps.to_vec(),
                graphs: account.graphs,
                growth: self.ledger.trend(process.key, index).growth(),
                timeline: self.ledger.timeline(process.key, index),
                iterations: self.ledger.iterations(process.key, index),
                parameters: self.ledger.parameters(process.key, index),
                pools: account.pools.clone(),
                blocks: self.ledger.blocks(process.key, index),
                ooms: ooms_of(process, index, snapshot.now_ns),
                ..run::Details::default()
            },
            ..run::Device::default()
        };
        let kept = self.processes.get(&process.key);
        // The driver's peak is that of the whole process. It would seem to contradict the peak of a part of its life.
        let is_whole = kept.is_none_or(|kept| kept.before.is_none());
        run_device.details.accounted_peak_bytes = account.accounted_peak_bytes.filter(|_| is_whole);
        // While the device's name was unknown, its values went to a separate series, which is added here.
        let places = [AccountRef::Unnamed(index)].into_iter().chain(account.device.map(AccountRef::Device));
        for series in places.filter_map(|place| kept?.series(place)) {
            run_device.series.absorb(&series.to_series());
        }
        let Some(index) = account.device else { return has_bytes(account).then_some(run_device) };
        let device = &snapshot.devices[index];
        run_device.details.faults = faults_of(process, device);
        // The other processes on the device are those that NVML listed in the reading of this process's last sample.
        let number = last.map(|sample| sample.number);
        let remembered = number.and_then(|number| self.readings.get(index, number)?.agreed.as_ref());
        let remembered = remembered.map(|(agreed, _)| *agreed);
        let agreed = remembered.or(device.agreed.filter(|agreed| Some(agreed.number) == number));
        if let Some(number) = number {
            tenants.fill_in(&self.ledger, (index, number), process, &mut run_device);
        }
        Some(run::Device {
            name: device.name.to_string(),
            ordinal: device.ordinal,
            model: device.model.clone(),
            total_bytes: device.total_bytes,
            reading: agreed.map(|agreed| agreed.reading).or(device.latest),
            unaccounted_bytes: agreed.map(|agreed| agreed.unaccounted_bytes),
            ..run_device
        })
    }
}

impl Sink for RunBuilder {
    #[inline]
    fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        if let gpumem_wire::Body::ClockAnchor { clock: ClockKind::Ordinal, .. } = record.body {
            self.width_ns = 1;
        }
        self.ledger.observe(origin, record);
        // A reading that is noted first needs no list of its samples.
        if let gpumem_wire::Body::SampleEnd { number, .. } = record.body {
            self.note_reading(number);
        }
        if self.ledger.has_output() {
            self.take_finished();
        }
    }

    fn observe_all(&mut self, origin: Origin, records: &[Record<'_>]) {
        self.ledger.preload(origin, records.iter());
        records.iter().for_each(|record| self.observe(origin, record));
    }

    fn caveat(&mut self, code: &str, text: String) {
        self.caveats.push(Caveat { code: code.into(), text });
    }

    fn reject(&mut self, count: u64) {
        self.rejected += count;
    }

    fn figures(&mut self, figures: SnapshotFigures) {
        self.snapshot = Some(figures);
    }
}

/// Returns a caveat if a recording began while the process ran; `records` is the number of records before it.
fn late_recording(records: u64, coverage: &gpumem_ledger::Coverage) -> Option<Caveat> {
    let bytes = coverage.held_before.filter(|_| records > 0)?;
    let bytes = thousands(u64::try_from(bytes).unwrap_or(0));
    let text =
        format!("late: {bytes} bytes existed before the recording began; peaks and counts are those since");
    Some(Caveat { code: "late".into(), text })
}

fn ooms_of(process: &ProcessView, account: usize, now_ns: u64) -> Vec<run::Oom> {
    let here = process.ooms.iter().filter(|(of, _)| *of == account).map(|(_, oom)| oom.clone());
    let mut ooms: Vec<run::Oom> = here.collect();
    let ending =
        |(time_ns, status)| gpumem_model::ending::Ending::of_facts(&process.facts.seen, time_ns, status);
    let (mut ended, mut now_ns) = (process.ended, now_ns.max(process.heard_ns));
    if ended.and_then(ending).is_some_and(|ending| ending.is_named) {
        // The process ended for another known reason. So it survived each OOM, and no OOM is suspected.
        ooms.retain(|oom| oom.kind != OomKind::Suspected);
        (ended, now_ns) = (None, u64::MAX);
    }
    ooms.iter_mut().for_each(|oom| oom.decide(ended, now_ns));
    ooms
}

/// Returns the latest faults of a device from [`gpumem_ledger::RECENT_NS`] before the end of a process to a second after it.
fn faults_of(process: &ProcessView, device: &DeviceView) -> Vec<(u64, u64)> {
    let Some((ended_ns, _)) = process.ended else { return Vec::new() };
    let near = device.faults.latest().iter().filter(|fault| {
        fault.time_ns <= ended_ns.saturating_add(1_000_000_000)
            && ended_ns.saturating_sub(fault.time_ns) <= gpumem_ledger::RECENT_NS
    });
    near.map(|fault| (fault.time_ns, fault.xid)).collect()
}

/// Returns whether an account (memory of a process on one device) has bytes to report.
fn has_bytes(account: &AccountView) -> bool {
    account.tracked_bytes != 0
        || account.peak.tracked_bytes != 0
        || account.beside != gpumem_ledger::SideMemory::default()
}

fn caveats_of(process: &ProcessView) -> Vec<Caveat> {
    let mut caveats = Vec::new();
    for (index, account) in process.accounts.iter().enumerate() {
        if account.device.is_some() || !has_bytes(account) {
            continue;
        }
        let (code, why) = if account.is_beyond {
            ("devices_beyond", "is the sum of all devices above the limit for a process")
        } else {
            ("unnamed_device", "is a device that the process never named")
        };
        let text = format!("unnamed-{index} {why}: tracked {} bytes", account.tracked_bytes);
        caveats.push(Caveat { code: code.into(), text });
    }
    if process.coverage.withheld > 0 {
        let count = thousands(process.coverage.withheld);
        let text =
            format!("{count} records were withheld on request (pause): peaks in that time are unknown");
        caveats.push(Caveat { code: "withheld".into(), text });
    }
    caveats
}

/// Returns a caveat if the process's peak in the driver's own accounting differs from the peak that gpumemd computed.
fn disagreement(device: &run::Device) -> Option<Caveat> {
    let accounting = device.accounting()?;
    let bytes = accounting.disagreement()?;
    let (side, why) = if bytes > 0 {
        ("more", "memory that is not tracked had a peak between two readings")
    } else {
        (
            "less",
            "memory of other processes that it shares is not in the driver's number, or accounting was switched on late",
        )
    };
    let elsewhere = if device.peak.gap_distance_ns == 0 {
        ""
    } else {
        "Untrackable at the peak shown was measured at another time, or "
    };
    let text = format!(
        "the driver's own accounting has a peak that is {} bytes {side} than the one shown, on {}: {elsewhere}{why}",
        thousands(bytes.unsigned_abs()),
        device.name
    );
    Some(Caveat { code: "accounting_disagrees".into(), text })
}

/// Returns the moment of the last complete sample; without one, the bytes tracked now.
fn last_moment(covered: bool, account: &AccountView, now_ns: u64) -> Moment {
    let moment = match complete(covered, account) {
        Some(sample) => at_sample(sample),
        None if covered => Moment {
            time_ns: now_ns.max(account.peak.time_ns),
            tracked_bytes: Some(account.tracked_bytes),
            amounts: sparse(&account.amounts),
            predates_bytes: account.predates_bytes,
            ..Moment::default()
        },
        None => Moment { time_ns: now_ns, ..Moment::default() },
    };
    let absence = |sample: &ClosedSample| Some(absence_name(sample.used_bytes.err()?, sample.list_failed));
    let used_absence = account.latest.as_deref().and_then(absence).map(str::to_owned);
    Moment { used_absence, ..moment }
}

fn at_sample(sample: &ClosedSample) -> Moment {
    Moment {
        time_ns: sample.t0_ns,
        tracked_bytes: sample.tracked_bytes,
        amounts: sparse(&sample.amounts),
        predates_bytes: sample.tracked_bytes.map(|_| sample.predates_bytes),
        untrackable_bytes: sample.untrackable_bytes(),
        parts: sample.parts,
        used_absence: None,
        uncovered_used_bytes: sample.used_bytes.ok(),
        gap_distance_ns: 0,
        torn: sample.tracked_range.filter(|_| sample.torn),
        stale: sample.stale,
        partial: sample.partial,
    }
}

/// Returns the moment with the highest tracked bytes; if nothing was ever tracked, the last moment. Without an agent, returns the
/// moment with the highest bytes that NVML charged.
fn peak_moment(covered: bool, account: &AccountView, now_ns: u64) -> Moment {
    if !covered {
        let (used, time_ns) = account.peak_used.unzip();
        return Moment { time_ns: time_ns.unwrap_or(0), uncovered_used_bytes: used, ..Moment::default() };
    }
    let peak = &account.peak;
    if peak.time_ns == 0 && peak.tracked_bytes == 0 {
        // Nothing was ever tracked. Time 0 is not a valid time of a peak, because it is the start of the host.
        return Moment { used_absence: None, ..last_moment(covered, account, now_ns) };
    }
    Moment {
        time_ns: peak.time_ns,
        tracked_bytes: Some(peak.tracked_bytes),
        amounts: sparse(&peak.amounts),
        predates_bytes: peak.gap.map(|gap| gap.predates_bytes).or(account.predates_bytes),
        untrackable_bytes: peak.gap.map(|gap| gap.untrackable_bytes),
        parts: peak.gap.and_then(|gap| gap.parts),
        gap_distance_ns: peak.gap.map_or(0, |gap| if gap.exact { 0 } else { gap.distance_ns }),
        ..Moment::default()
    }
}
