//! Changes for memory that a line of the program keeps outside of every pass: a data set or a cache, which has its size from the first
//! step on, results that the line collects, and a history, which grows to its size in many passes.

use super::super::item::{Item, Kind, Memory, mib};
use super::cells::{has_forward_pass, is_data, is_of_line, is_role, steps_through};
use super::library;
use super::parts::Parts;
use crate::Report;
use gpumem_model::names::Named;
use gpumem_model::run::{Amounts, Cell, Device, Oom};
use gpumem_model::timeline::Point;
use gpumem_wire::{Phase, Role};
use std::collections::BTreeMap;

/// Minimum share of the process's memory of a history.
const MOST_SHARE: f64 = 0.5;
/// Minimum share of the process's memory from which a data set is named in a program that fits, if no other part is larger.
const DATA_SHARE: f64 = 0.4;
/// Maximum level of a history before its rise, and minimum level after it, as a share of the bytes at the peak.
const EMPTY_SHARE: f64 = 0.2;
const FULL_SHARE: f64 = 0.95;
/// Minimum number of its rises, each during passes of training or inference: data are loaded before these.
const LEAST_RISES: usize = 8;
/// Minimum share of the points of the timeline at which the history is full.
const FULL_POINTS: f64 = 0.1;
/// Minimum number of completed steps through which a data set stays.
const LEAST_STEPS: u64 = 3;
/// Minimum share of its bytes that it has through these steps: it does not grow.
const STEADY_SHARE: f64 = 0.99;
/// Minimum share of the points of the timeline, and minimum number of points, at which it has them without optimizer steps.
const LIFE_SHARE: f64 = 0.5;
const LEAST_POINTS: usize = 8;
/// Divisor: the advice keeps this part of the entries.
const KEPT: i64 = 4;

/// Returns the change for a data set on the device.
pub(super) fn data_set(
    report: &Report<'_>,
    device: &Device,
    parts: &Parts<'_>,
    oom: Option<&Oom>,
) -> Option<Item> {
    let is_checkpoint = |line: &str| parts.checkpoint.is_some_and(|(of, _)| of == line);
    let is_collected = |line: &str| library::keeper_of(line).is_some();
    let (line, bytes) = parts.data.filter(|(line, _)| !is_checkpoint(line) && !is_collected(line))?;
    if !parts.is_large(bytes) || !has_forward_pass(report) {
        return None;
    }
    // A line that makes memory again and again makes no data set.
    let change = match oom.is_some_and(|oom| oom.tag.as_deref() == Some(line)) {
        true => "Move the results that {0} collects to the host in pieces, or keep fewer of them",
        false if oom.is_none() && parts.is_evaluation => {
            "If {0} allocates for more than is in use at one time, such as a cache for the largest number of requests and tokens, allocate less; if it makes a data set, keep that on the host, and move each batch to the GPU"
        }
        false => {
            "If {0} makes a data set or a buffer of which a step uses a part, keep it on the host and move each batch to the GPU, or keep it in a smaller type if its values have one, such as uint8; cut windows of a series for each batch"
        }
    };
    let item = Item::new(Kind::RetainedTensors, Memory::Data, device, change).named(line);
    // The program may use all of it in each step.
    Some(item.estimated([0, bytes], format!("{} that this line allocates, less a batch", mib(bytes))))
}

/// Returns whether the change is for the largest part of the process's memory, which stays through all steps.
pub(super) fn is_most(report: &Report<'_>, device: &Device, item: &Item, parts: &Parts<'_>) -> bool {
    let is_data_set = item.kind == Kind::RetainedTensors && item.memory == Memory::Data;
    let others = [parts.activations, parts.parameters, parts.optimizer, parts.short_lived];
    let is_largest = others.iter().all(|other| *other < item.most());
    let stays = || parts.data.is_some_and(|(line, bytes)| stays(report, device, line, bytes));
    is_data_set && is_largest && item.most() as f64 >= parts.used as f64 * DATA_SHARE && stays()
}

/// Returns whether these bytes of a line stayed, and did not grow, from the first completed step on, or, in a program without
/// optimizer steps, through most of its life.
fn stays(report: &Report<'_>, device: &Device, line: &str, bytes: i64) -> bool {
    let is_whole = |point: &Point| {
        let of_line = report.by_tag(&point.amounts, is_data).get(line).copied().unwrap_or(0);
        of_line as f64 >= bytes as f64 * STEADY_SHARE
    };
    let rows = &device.details.iterations.rows;
    let Some(last) = rows.last() else {
        let points = &device.details.timeline.points;
        let whole = points.iter().filter(|point| is_whole(point)).count();
        return whole >= LEAST_POINTS && whole as f64 >= points.len() as f64 * LIFE_SHARE;
    };
    let steps = rows.iter().map(|row| row.count).sum::<u64>();
    let kept = steps_through(device, last.end_ns, is_whole);
    // The first step may begin before the first point of the timeline.
    steps >= LEAST_STEPS && kept.saturating_add(1) >= steps
}

/// Returns the change for a history that has most of the memory: memory that rose in many passes to a level at which it stays, such as
/// the pairs of L-BFGS, or a memory bank with a limit. It may have the role of temporary memory, because no pass of a module ended the
/// phase in which its blocks were made. A cache of a data set that the first epoch fills looks alike.
pub(super) fn history(report: &Report<'_>, device: &Device, parts: &Parts<'_>) -> Option<Item> {
    let lines = lines(report, &device.peak.amounts);
    let (line, bytes) = lines.into_iter().max_by_key(|(_, bytes)| *bytes)?;
    if (bytes as f64) < parts.used as f64 * MOST_SHARE || !rises_and_stays(report, device, line, bytes) {
        return None;
    }
    let change = "If {0} keeps a history, such as that of L-BFGS or a memory bank, let it have fewer entries; if it caches a data set, keep that on the host";
    let item = Item::new(Kind::History, Memory::Data, device, change).named(line);
    let saved = bytes / KEPT * (KEPT - 1);
    let formula = format!(
        "{}/{KEPT} x {} that this line allocated in many passes and keeps, with 1/{KEPT} of the entries; all but a batch of a data set",
        KEPT - 1,
        mib(bytes)
    );
    Some(item.estimated([saved, bytes], formula))
}

/// Returns whether a line of the program has allocated a cell's blocks outside of every pass, and they have no role of a model.
pub(super) fn is_of_lines(cell: &Cell) -> bool {
    is_of_line(cell) && cell.phase.is_none() && (cell.role.is_none() || is_role(cell, Role::Temporary))
}

/// Returns the bytes by line of the program of memory that was made outside of every pass and has no role of a model.
pub(super) fn lines<'r>(report: &'r Report<'_>, amounts: &Amounts) -> BTreeMap<&'r str, i64> {
    report.by_tag(amounts, is_of_lines)
}

/// Returns whether a line's memory rose in many passes to these bytes, and stayed.
fn rises_and_stays(report: &Report<'_>, device: &Device, line: &str, bytes: i64) -> bool {
    let points = &device.details.timeline.points;
    let level = |amounts: &Amounts| {
        lines(report, amounts).get(line).copied().unwrap_or(0) as f64 / bytes.max(1) as f64
    };
    let levels: Vec<f64> = points.iter().map(|point| level(&point.amounts)).collect();
    let Some(full) = levels.iter().position(|level| *level >= FULL_SHARE) else { return false };
    let is_pass = |amounts: &Amounts| {
        let has_phase = |cell: &Cell| {
            let phase = cell.phase.as_deref().and_then(Phase::from_name);
            matches!(phase, Some(Phase::Forward | Phase::Backward | Phase::Evaluation))
        };
        amounts.iter().any(|(cell, bytes)| *bytes > 0 && report.cell(*cell).is_some_and(has_phase))
    };
    let rises = (1..=full).filter(|at| levels[*at] > levels[at - 1] && is_pass(&points[*at].amounts)).count();
    // The end of the program frees all.
    let last = levels.iter().rposition(|level| *level > 0.0).unwrap_or(full);
    let stays = levels[full..=last].iter().all(|level| *level >= FULL_SHARE);
    let is_long = (last - full + 1) as f64 >= levels.len() as f64 * FULL_POINTS;
    levels[0] <= EMPTY_SHARE && rises >= LEAST_RISES && stays && is_long
}
