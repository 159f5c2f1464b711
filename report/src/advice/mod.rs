//! Advice on a run: what to change, how many bytes that saves, and how the saving is known.
//!
//! Made from the run and its findings alone, and from a replay of its requests if the caller has one. Each item belongs to one kind
//! of memory; savings in the same kind overlap and are not added. Settings that are in force are not recommended.

mod composition;
mod finding;
mod item;
mod outside;
mod settings;
#[cfg(test)]
mod tests;
mod text;

pub use composition::library::{LIBRARY_FRAMES, LibraryFrame};
pub use item::{Advice, Basis, Item, Kind, Memory};
pub use settings::{Replay, Trial};
pub use text::{json, text};

use crate::findings::{self, Findings, Outcome, Severity};
use crate::{Report, most_used};
use gpumem_model::run::{Device, Run};
use gpumem_model::units::plural;

const MOST_ITEMS: usize = 5;
/// A device is short of memory if at least this share of it was in use.
const SHORT_SHARE: f64 = 0.9;

/// Data that the run does not have.
#[derive(Debug, Default)]
pub struct Evidence<'a> {
    /// A replay of the run's requests, or the reason why there is none; `None` if the run has no requests.
    pub replay: Option<Result<Replay, String>>,
    /// Runs of processes that this one has started; of an ended process, those of its job.
    pub children: &'a [Run],
}

/// Whether a replay can give advice: memory is short, or the allocator caches much.
pub fn needs_replay(report: &Report<'_>) -> bool {
    let findings = Findings::of(report);
    let is_of_pool = |kind| matches!(kind, findings::Kind::UnusedPool | findings::Kind::Fragmentation);
    is_short(report, findings.outcome) || findings.findings.iter().any(|finding| is_of_pool(finding.kind))
}

fn is_short(report: &Report<'_>, outcome: Outcome) -> bool {
    outcome == Outcome::OutOfMemory || report.run.devices.iter().any(is_full)
}

/// Returns whether a device was nearly full, now or at the peak of the process.
fn is_full(device: &Device) -> bool {
    let free = device.reading.map(|reading| reading.free_bytes);
    let own = most_used(device).unwrap_or(0) as f64;
    device.total_bytes.is_some_and(|total| {
        let is_low = free.is_some_and(|free| (free as f64) < total as f64 * (1.0 - SHORT_SHARE));
        is_low || own >= total as f64 * SHORT_SHARE
    })
}

/// Returns the advice on a run.
pub fn advise(report: &Report<'_>, evidence: &Evidence<'_>) -> Advice {
    let found = Findings::of(report);
    let is_short = is_short(report, found.outcome);
    let decisive = findings::decisive(report).filter(|(.., outcome)| *outcome != Outcome::Survived);
    let replay = evidence.replay.as_ref().and_then(|replay| replay.as_ref().ok());
    let mut items = Vec::new();
    for finding in &found.findings {
        let device = report.run.devices.iter().find(|device| Some(device.ordinal) == finding.device);
        if let Some(device) = device {
            let oom = decisive.filter(|(of, ..)| std::ptr::eq(*of, device)).map(|(_, oom, _)| oom);
            let evidence = (replay.is_some(), evidence.children);
            items.extend(finding::items(report, device, oom, finding, evidence));
        }
    }
    // Without a cause that ends or wastes much, memory that the program needs is the subject.
    let has_cause = found.findings.iter().any(|finding| finding.severity != Severity::Note);
    for device in &report.run.devices {
        // Other devices of the process may have much free memory.
        let is_short = is_full(device) || decisive.is_some_and(|(of, ..)| std::ptr::eq(of, device));
        if is_short && !has_cause {
            items.extend(outside::tenant(report, device, evidence.children));
            items.extend(composition::parts(report, device, None));
        } else if !has_cause {
            items.splice(..0, composition::cheap(report, device));
        }
        items.extend(outside::libraries(report, device, is_short));
    }
    items.extend(outside::idle(evidence.children));
    let fullest = report.run.devices.iter().max_by_key(|device| most_used(device));
    if let Some((replay, device)) = replay.zip(fullest) {
        for item in replay.items(device, report.run.devices.len() == 1) {
            let at = items.iter().position(|other: &Item| other.most() < item.most());
            items.insert(at.unwrap_or(items.len()), item);
        }
    }
    merge(&mut items);
    items.truncate(MOST_ITEMS);
    Advice {
        outcome: found.outcome,
        is_short,
        together: together(report, &items),
        items,
        useless: replay.map(Replay::useless).unwrap_or_default(),
        not_replayed: evidence.replay.as_ref().and_then(|replay| replay.as_ref().err()).cloned(),
    }
}

/// Returns what `gpumemctl why` advises without a replay. Whether another process is a child of this one is not known here, so
/// advice on other processes is left out.
pub(crate) fn own_advice(report: &Report<'_>) -> Vec<Item> {
    let mut items = advise(report, &Evidence::default()).items;
    items.retain(|item| item.kind != Kind::OtherProcess);
    items
}

/// Returns the line described at [`saving_line`], for a report of which nothing is computed yet.
pub(crate) fn first_line(report: &Report<'_>) -> Option<String> {
    saving_line(report, &Findings::of(report), &own_advice(report))
}

/// Returns a line on the advice, which [`own_advice`] gave. For a program that fits and has no finding: the largest saving by a
/// change that costs nothing, or else by one with a small price, or else the first advice for a device that is nearly full.
/// Otherwise: the first advice.
pub(crate) fn saving_line(report: &Report<'_>, found: &Findings, advised: &[Item]) -> Option<String> {
    let why = match advised.len() {
        0 | 1 => "gpumemctl why".to_owned(),
        count => format!("gpumemctl why: {}", plural(count as u64, "suggestion")),
    };
    let first = |heading| {
        // The finding on a limit has its change.
        let first = advised.first().filter(|item| item.kind != Kind::PoolLimit);
        first.map(|item| item.line(heading, &why))
    };
    let is_well = matches!(found.outcome, Outcome::Ended | Outcome::Running);
    if !is_well || found.findings.iter().any(|finding| finding.kind != findings::Kind::Losses) {
        return first("first change");
    }
    let cheap = report.run.devices.iter().flat_map(|device| composition::cheap(report, device));
    match cheap.max_by_key(|item| (item.is_free(), item.most())) {
        Some(item) => {
            let heading = if item.is_free() { "free to save" } else { "could save" };
            Some(item.line(heading, &why))
        }
        None => first("memory is short"),
    }
}

/// Removes items that recommend the change of an earlier item. Items of these kinds have one change for a device, in several words
/// and with several figures; the one with the largest saving is first.
fn merge(items: &mut Vec<Item>) {
    let is_one_change =
        |kind| matches!(kind, Kind::ParameterPrecision | Kind::AllocatorSetting | Kind::BatchSize);
    let mut seen = Vec::new();
    items.retain(|item| {
        let change = Some(item.change.clone()).filter(|_| !is_one_change(item.kind));
        let key = (item.kind, item.device, change);
        let is_new = !seen.contains(&key);
        seen.push(key);
        is_new
    });
}

/// Returns the items that save different memory of one device, and the sum of their savings, at most what the process used; `None` if
/// these are fewer than two.
fn together(report: &Report<'_>, items: &[Item]) -> Option<(Vec<usize>, i64)> {
    let mut chosen: Vec<(usize, &Item)> = Vec::new();
    for (number, item) in (1..).zip(items) {
        // Fewer bits for the whole model save memory of every kind.
        let is_own =
            !matches!(item.memory, Memory::Host | Memory::Others) && item.kind != Kind::ParameterPrecision;
        let is_apart =
            chosen.iter().all(|(_, other)| other.memory != item.memory && other.device == item.device);
        if is_own && is_apart && item.most() > 0 {
            chosen.push((number, item));
        }
    }
    let of_device =
        |device: &&Device| chosen.first().is_some_and(|(_, item)| item.device == Some(device.ordinal));
    // The memory of the driver for the process stays.
    let tracked = report.run.devices.iter().find(of_device).and_then(|device| device.peak.tracked_bytes);
    let sum =
        crate::amounts::sum(chosen.iter().map(|(_, item)| item.most())).min(tracked.unwrap_or(i64::MAX));
    (chosen.len() > 1).then(|| (chosen.into_iter().map(|(number, _)| number).collect(), sum))
}
