//! Compares a ledger's replay of a recording, sample by sample, with the machine's truth.

use super::truth::Truth;
use gpumem_ledger::{Class, ClosedSample, Ledger, Origin, ProcessKey, ProcessView, Snapshot};
use gpumem_runs::builder::Sink;
use gpumem_runs::input::{self, Input};
use gpumem_runs::recording;
use gpumem_wire::{Body, Flags, Record, Stamp};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// Largest difference between the agent's clock, which is the processor's counter, and the kernel's clock
/// (agent-lib/src/base/clock.rs).
const CLOCK_NS: u64 = 50_000;

/// Longest time after a sample at which a call that belongs to it may be recorded without the sample waiting for it.
const STOP_NS: u64 = 200_000_000;
/// Longest duration of a context's end.
const END_NS: u64 = 500_000_000;
/// Longest time that a sample waits for a call in flight (ledger/src/process/samples.rs).
const PATIENCE_NS: u64 = 200_000_000;
/// Longest time between a call's record and its effect on NVML's figures (ledger/src/untrackable/event.rs).
const CALL_NS: u64 = 20_000_000;

/// Granularity of the machine's charges in bytes.
const GRANULE: i64 = 2 << 20;

/// Every closed sample of a recording, and the ledger's state at its end.
pub struct Replay {
    /// Process, device in the snapshot, sample.
    pub samples: Vec<(ProcessKey, usize, ClosedSample)>,
    /// The ledger's state at the end.
    pub snapshot: Snapshot,
    /// Records that could not be read.
    pub rejected: u64,
    /// Activity of each process, as intervals from the entry of a call to its record.
    moves: BTreeMap<ProcessKey, Vec<(u64, u64)>>,
    /// Ends of allocations that took longer than a record can express.
    long: BTreeMap<ProcessKey, Vec<u64>>,
    /// Times at which contexts began to end.
    ends: BTreeMap<ProcessKey, Vec<u64>>,
    /// Times and sizes of allocations.
    given: BTreeMap<ProcessKey, Vec<(u64, i64)>>,
}

struct Collector {
    ledger: Ledger,
    moves: BTreeMap<ProcessKey, Vec<(u64, u64)>>,
    long: BTreeMap<ProcessKey, Vec<u64>>,
    ends: BTreeMap<ProcessKey, Vec<u64>>,
    given: BTreeMap<ProcessKey, Vec<(u64, i64)>>,
    /// Entry times of frees, by process and seq.
    entered: BTreeMap<(ProcessKey, u64), u64>,
    samples: Vec<(ProcessKey, usize, ClosedSample)>,
    rejected: u64,
}

impl Collector {
    fn note(&mut self, key: ProcessKey, record: &Record<'_>) {
        let Stamp { seq, time_ns, context, .. } = record.stamp;
        if let Body::AllocEnd { took_us: u16::MAX, .. } = record.body {
            self.long.entry(key).or_default().push(time_ns);
        }
        if let Body::AllocEnd { bytes, .. } | Body::VmmCreate { bytes, .. } = record.body {
            self.given.entry(key).or_default().push((time_ns, bytes as i64));
        }
        if let Body::ContextDestroy { .. } = record.body {
            self.ends.entry(key).or_default().push(time_ns);
        }
        let began_ns = match record.body {
            Body::AllocEnd { took_us, .. } => time_ns.saturating_sub(u64::from(took_us) * 1000),
            Body::VmmCreate { .. } => time_ns.saturating_sub(u64::from(context) * 1000),
            Body::FreeEnd { begin_seq, .. } => self.entered.remove(&(key, begin_seq)).unwrap_or(time_ns),
            Body::FreeBegin { .. } | Body::VmmUnmap { .. } | Body::VmmRelease { .. } => {
                self.entered.insert((key, seq), time_ns);
                time_ns
            }
            _ => time_ns,
        };
        self.moves.entry(key).or_default().push((began_ns, time_ns));
    }
}

impl Sink for Collector {
    fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        self.ledger.observe(origin, record);
        if let Origin::Process(key) = origin
            && record.stamp.seq != 0
            && !record.stamp.flags.has(Flags::RESTATED)
        {
            self.note(key, record);
        }
        if self.ledger.has_output() {
            let taken = self.ledger.take_samples();
            self.samples
                .extend(taken.map(|(key, device, sample)| (key, device, Arc::unwrap_or_clone(sample))));
            self.ledger.take_windows();
        }
    }
    fn reject(&mut self, count: u64) {
        self.rejected += count;
    }
}

/// Replays a daemon's recording.
///
/// # Panics
/// If it cannot be read.
pub fn replay(path: &Path) -> Replay {
    try_replay(path).unwrap_or_else(|error| panic!("{error}"))
}

/// Replays a recording that may still be empty.
///
/// # Errors
/// If it cannot be read.
pub fn try_replay(path: &Path) -> Result<Replay, input::Error> {
    let mut sink = Collector {
        ledger: Ledger::new(),
        moves: BTreeMap::new(),
        long: BTreeMap::new(),
        ends: BTreeMap::new(),
        given: BTreeMap::new(),
        entered: BTreeMap::new(),
        samples: Vec::new(),
        rejected: 0,
    };
    recording::read(Input::open(path)?, &mut sink)?;
    Ok(Replay {
        samples: sink.samples,
        snapshot: sink.ledger.snapshot(),
        rejected: sink.rejected,
        moves: sink.moves,
        long: sink.long,
        ends: sink.ends,
        given: sink.given,
    })
}

/// Numbers of samples that were compared with the truth, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Compared {
    /// Memory did not change: every number must equal the machine's.
    pub exact: u64,
    /// Exact samples without any event between the start of the reading and the machine's list: here names must match
    /// too. (Blocks are allocated and freed without changing `tracked`, so these tear no sample.)
    pub named: u64,
    /// Memory changed while NVML was read: the truth must lie within the sample's bounds.
    pub torn: u64,
    /// The truth is larger: an allocation was in flight whose bytes were unknown, or a context was being destroyed,
    /// whose memory counts as freed when that begins.
    pub open: u64,
    /// Memory changed so close to the reading that the agent's clock cannot order the two.
    pub close: u64,
    /// After a loss, or without the agent's report: the sample itself is marked as possibly wrong.
    pub excused: u64,
    /// Without an agent: only what NVML charges can be compared.
    pub uncovered: u64,
    /// NVML did not list the process, or the machine has no entry for that moment.
    pub unmatched: u64,
}

impl Replay {
    /// Returns the ledger's state of a process at the end.
    ///
    /// # Panics
    /// If it has none.
    pub fn process(&self, pid: u32) -> &ProcessView {
        let found = self.snapshot.processes.iter().find(|process| process.key.pid == pid);
        found.unwrap_or_else(|| panic!("the recording has no process {pid}"))
    }

    /// Returns bytes by tag and idle bytes of a sample.
    pub fn composition(&self, key: ProcessKey, sample: &ClosedSample) -> (BTreeMap<String, i64>, i64) {
        let process = self.snapshot.processes.iter().find(|process| process.key == key);
        let cells = &process.expect("a sample's process").cells;
        let (mut tags, mut idle) = (BTreeMap::new(), 0);
        for (cell, &bytes) in cells.iter().zip(sample.amounts.iter()).filter(|(_, bytes)| **bytes != 0) {
            match cell.class {
                Class::PoolIdle => idle += bytes,
                _ => *tags.entry(cell.tag.as_deref().unwrap_or("").to_owned()).or_insert(0) += bytes,
            }
        }
        (tags, idle)
    }

    /// Returns the names of opaque pools in a sample, and their bytes.
    fn opaque(&self, key: ProcessKey, sample: &ClosedSample) -> (BTreeSet<String>, i64) {
        let cells = self.process(key.pid).cells.iter().zip(sample.amounts.iter());
        let opaque = cells.filter(|(cell, bytes)| cell.class == Class::Opaque && **bytes != 0);
        let name = |tag: &Option<std::sync::Arc<str>>| tag.as_deref().unwrap_or("").to_owned();
        opaque.fold((BTreeSet::new(), 0), |(mut names, sum), (cell, bytes)| {
            names.insert(name(&cell.tag));
            (names, sum + bytes)
        })
    }

    /// Compares every sample of `pid` (or of all processes) with the machine's truth.
    ///
    /// # Panics
    /// If a sample differs.
    pub fn compare(&self, truths: &[Truth], pid: Option<u32>) -> Compared {
        self.compare_where(truths, pid, |_| true)
    }

    /// Compares the selected samples.
    ///
    /// # Panics
    /// If a sample differs.
    pub fn compare_where(
        &self,
        truths: &[Truth],
        pid: Option<u32>,
        wanted: impl Fn(&ClosedSample) -> bool,
    ) -> Compared {
        let mut compared = Compared::default();
        for (key, device, sample) in &self.samples {
            if pid.is_some_and(|pid| pid != key.pid) || !wanted(sample) {
                continue;
            }
            let uuid = self.snapshot.devices[*device].name.to_string();
            let of_sample = |truth: &&Truth| {
                truth.pid == key.pid
                    && !truth.is_end()
                    && truth.device == uuid
                    && (sample.t0_ns..=sample.t1_ns).contains(&truth.t)
            };
            let found: Vec<&Truth> = truths.iter().filter(of_sample).collect();
            let (Some(truth), Ok(used)) = (found.first(), sample.used_bytes) else {
                compared.unmatched += 1;
                continue;
            };
            let say = |what: &str| self.describe(what, *key, sample, truth);
            assert!(found.iter().any(|truth| truth.used == used), "{}", say("used"));
            let Some(tracked) = sample.tracked_bytes else {
                compared.uncovered += 1;
                continue;
            };
            let (low, high) = sample.tracked_range.expect("a covered sample has bounds");
            if sample.stale || sample.partial {
                compared.excused += 1;
                if compared.excused <= 3 {
                    println!("{}", say("excused"));
                }
            } else if sample.torn {
                let within = (low..=high).contains(&truth.tracked);
                if !within && truth.tracked > high && self.outlived(*key, sample.t1_ns) {
                    compared.open += 1;
                    continue;
                }
                assert!(within, "{}", say("the truth lies outside of a torn sample's bounds"));
                compared.torn += 1;
            } else {
                assert_eq!(tracked, truth.tracked, "{}", say("tracked"));
                let gap = truth.used as i64 - truth.tracked;
                assert_eq!(sample.untrackable_bytes(), Some(gap - sample.predates_bytes), "{}", say("gap"));
                let parts = sample.parts.expect("a covered sample has parts");
                assert_eq!(parts.sum(), gap - sample.predates_bytes, "{}", say("parts"));
                // The model has no fragmentation: small allocations may occupy more granules than they would fill.
                let holes = truth.rounding - parts.rounding_bytes;
                let is_model = holes >= 0 && holes % GRANULE == 0;
                assert!(is_model || sample.predates_bytes != 0, "{}", say("rounding"));
                compared.exact += 1;
                if self.moved(*key, sample.t0_ns, truth.t) {
                    continue;
                }
                compared.named += 1;
                let mut true_tags = truth.tags.clone();
                true_tags.retain(|_, bytes| *bytes != 0);
                let (mut tags, mut idle) = self.composition(*key, sample);
                if idle != truth.idle {
                    // A pool that has not handed out its first block is opaque; the machine calls it idle.
                    let (names, bytes) = self.opaque(*key, sample);
                    tags.retain(|tag, _| !names.contains(tag));
                    idle += bytes;
                }
                tags.retain(|_, bytes| *bytes != 0);
                assert_eq!(idle, truth.idle, "{}", say("idle"));
                assert_eq!(tags, true_tags, "{}", say("tags"));
            }
        }
        compared
    }

    /// Compares the sums of the selected samples of `pid` with the machine's truth, without names.
    ///
    /// # Panics
    /// If a sample differs.
    pub fn compare_sums(
        &self,
        truths: &[Truth],
        pid: u32,
        wanted: impl Fn(&ClosedSample) -> bool,
    ) -> Compared {
        let mut compared = Compared::default();
        let mut by_device: BTreeMap<&str, Vec<&Truth>> = BTreeMap::new();
        for truth in truths.iter().filter(|truth| truth.pid == pid && !truth.is_end()) {
            by_device.entry(&truth.device).or_default().push(truth);
        }
        for (key, device, sample) in self.samples.iter().filter(|(key, ..)| key.pid == pid) {
            if !wanted(sample) {
                continue;
            }
            let uuid = self.snapshot.devices[*device].name.to_string();
            let all = by_device.get(uuid.as_str()).map_or(&[][..], Vec::as_slice);
            let from = all.partition_point(|truth| truth.t < sample.t0_ns);
            let truth = all.get(from).filter(|truth| truth.t <= sample.t1_ns);
            let (Some(truth), Some(tracked), Some((low, high))) =
                (truth, sample.tracked_bytes, sample.tracked_range)
            else {
                compared.unmatched += 1;
                continue;
            };
            if sample.stale || sample.partial {
                compared.excused += 1;
            } else if truth.tracked > high && self.was_ending(*key, truth.t) {
                compared.open += 1;
            } else if !sample.torn && tracked != truth.tracked {
                let is_close = self.moved(*key, sample.t0_ns, truth.t);
                assert!(is_close, "{}", self.describe("tracked", *key, sample, truth));
                compared.close += 1;
            } else if !sample.torn {
                compared.exact += 1;
            } else if (low..=high).contains(&truth.tracked) {
                compared.torn += 1;
            } else {
                let is_open = truth.tracked > high
                    && (self.outlived(*key, sample.t1_ns)
                        || self.was_recorded_later(*key, sample.t1_ns, truth.tracked, (low, high)));
                assert!(
                    is_open,
                    "{}",
                    self.describe("outside of a torn sample's bounds", *key, sample, truth)
                );
                compared.open += 1;
            }
        }
        compared
    }

    /// Compares the parts of every certain sample of `pid` with the machine's truth, unless an event with a cost happened so
    /// close to the sample that it may not be booked yet. Returns the number of compared samples.
    ///
    /// # Panics
    /// If a sample's parts differ.
    pub fn compare_parts(&self, truths: &[Truth], pid: u32) -> u64 {
        let mut compared = 0;
        for (key, _, sample) in self.samples.iter().filter(|(key, ..)| key.pid == pid) {
            let is_certain = !sample.torn && !sample.stale && !sample.partial;
            let (Some(parts), true) = (sample.parts, is_certain) else { continue };
            assert_eq!(Some(parts.sum()), sample.untrackable_bytes(), "parts sum to untrackable");
            let near = (sample.t0_ns.saturating_sub(CALL_NS), sample.t1_ns + CALL_NS);
            let of_sample =
                |truth: &&Truth| truth.pid == pid && (sample.t0_ns..=sample.t1_ns).contains(&truth.t);
            let Some(truth) = truths.iter().find(of_sample).filter(|_| !self.moved(*key, near.0, near.1))
            else {
                continue;
            };
            let ours = [
                parts.context_bytes,
                parts.modules_bytes,
                parts.local_memory_bytes,
                parts.heaps_bytes,
                parts.rounding_bytes,
            ];
            let theirs = [truth.context, truth.modules, truth.local, truth.heaps, truth.rounding];
            assert_eq!(ours, theirs, "context, modules, local memory, heaps, rounding: {parts:?} {truth:?}");
            assert_eq!(parts.unexplained_bytes, truth.other, "the rest: {parts:?} {truth:?}");
            compared += 1;
        }
        compared
    }

    /// Returns a readable description of the difference.
    fn describe(&self, what: &str, key: ProcessKey, sample: &ClosedSample, truth: &Truth) -> String {
        let (tags, idle) = self.composition(key, sample);
        let names: BTreeSet<&String> = tags.keys().chain(truth.tags.keys()).collect();
        let of = |tags: &BTreeMap<String, i64>, name: &str| tags.get(name).copied().unwrap_or(0);
        let differ: Vec<String> = names
            .into_iter()
            .map(|name| (name, of(&tags, name), of(&truth.tags, name)))
            .filter(|(_, ours, theirs)| ours != theirs)
            .map(|(name, ours, theirs)| format!("{name:?} {ours} not {theirs}"))
            .collect();
        format!(
            "{what}: pid {} reading {} of {} ns, torn {} stale {} partial {}\n\
             used {:?}, tracked {:?} in {:?}, idle {idle}\n\
             true at +{} ns (list {}): used {}, tracked {}, idle {}\nnames: {}",
            key.pid,
            sample.number,
            sample.t1_ns - sample.t0_ns,
            sample.torn,
            sample.stale,
            sample.partial,
            sample.used_bytes,
            sample.tracked_bytes,
            sample.tracked_range,
            truth.t - sample.t0_ns,
            truth.list,
            truth.used,
            truth.tracked,
            truth.idle,
            differ.join(", "),
        )
    }

    /// Returns whether a call may have run at that time for longer than the sample could wait.
    fn outlived(&self, key: ProcessKey, time_ns: u64) -> bool {
        let moves = self.moves.get(&key).map_or(&[][..], Vec::as_slice);
        let long = self.long.get(&key).map_or(&[][..], Vec::as_slice);
        moves.iter().any(|&(began, ended)| began < time_ns && ended > began + PATIENCE_NS)
            || long.iter().any(|&ended| ended > time_ns)
    }

    /// Returns whether the difference lies within the range if one or two allocations that were recorded a little later are
    /// excluded.
    fn was_recorded_later(&self, key: ProcessKey, time_ns: u64, bytes: i64, (low, high): (i64, i64)) -> bool {
        let given = self.given.get(&key).map_or(&[][..], Vec::as_slice);
        let from = given.partition_point(|&(at, _)| at < time_ns);
        let later = given[from..].iter().take_while(|(at, _)| *at < time_ns + STOP_NS);
        let sizes: BTreeSet<i64> = later.map(|&(_, bytes)| bytes).collect();
        let fits = |bytes: i64| sizes.range(bytes - high..=bytes - low).next().is_some();
        fits(bytes) || sizes.iter().any(|one| fits(bytes - one))
    }

    /// Returns whether a context may have been ending at that time.
    fn was_ending(&self, key: ProcessKey, time_ns: u64) -> bool {
        let ends = self.ends.get(&key).map_or(&[][..], Vec::as_slice);
        ends.iter().any(|&began| (began..began + END_NS).contains(&time_ns))
    }

    /// Returns whether the process reported anything in [from, to], within the accuracy of its clock.
    fn moved(&self, key: ProcessKey, from_ns: u64, to_ns: u64) -> bool {
        let (from_ns, to_ns) = (from_ns.saturating_sub(CLOCK_NS), to_ns + CLOCK_NS);
        let moves = self.moves.get(&key).map_or(&[][..], Vec::as_slice);
        moves.iter().any(|&(began, ended)| began <= to_ns && ended >= from_ns)
    }
}
