//! The change for results of many passes that the program collects, and drops when it has used them all: outputs of an evaluation that
//! are joined at its end, the outputs of an epoch, or a loss that is added up with its graph. Growth has no end, and is a finding.

use super::super::item::{Item, Kind, Memory, mib};
use super::activations::repeated;
use super::cells::beyond_others;
use super::graphs::step_at;
use super::parts::Parts;
use crate::amounts::{largest_first, sum, sums};
use crate::{Report, held};
use gpumem_model::cell::without_sum;
use gpumem_model::names::Named;
use gpumem_model::run::{Amounts, Cell, Class, Device};
use gpumem_model::units::{plural, signed};
use gpumem_wire::Phase;
use std::collections::BTreeSet;

/// Maximum level before the rise, as a share of the bytes at the peak.
const EMPTY_SHARE: f64 = 0.2;
/// Minimum number of times that the level rises. Passes are shorter than the slots of the timeline, so one rise has several results.
const LEAST_RISES: usize = 8;
/// Maximum bytes by which the level falls during the rise, as a share of the bytes at the peak.
const FALLEN_SHARE: f64 = 0.1;
/// Maximum share of a single rise. One pass, or the beginning of another phase, makes that much at once.
const ONE_RISE: f64 = 0.4;
/// Minimum number of forward passes, or of steps, during the rise. Within one pass, the memory of its modules rises, too.
const LEAST_PASSES: u64 = 8;
/// Minimum share of the tags with the most bytes for these to be the results, ...
const RESULT_SHARE: f64 = 0.75;
/// ... and their maximum number: more kinds of modules have the memory of graphs.
const MOST_RESULTS: usize = 2;

/// Number of passes whose results the advice leaves at most.
const LEFT: i64 = 2;

/// Returns whether a cell has results of modules that no backward pass has freed.
fn is_result(cell: &Cell) -> bool {
    let is_of_pass =
        matches!(cell.phase.as_deref().and_then(Phase::from_name), Some(Phase::Forward | Phase::Evaluation));
    cell.class == Class::Block && cell.role.is_none() && is_of_pass
}

/// Returns the change for results of passes that are most of what rose before the peak of a program that fits.
pub(super) fn item(report: &Report<'_>, device: &Device, parts: &Parts<'_>) -> Option<Item> {
    let amounts = &device.peak.amounts;
    let bytes = held(report.run, amounts, is_result);
    if !parts.is_large(bytes) {
        return None;
    }
    let passes = passes_of_rise(report, device, bytes, is_result)?;
    let tags = report.by_tag(amounts, is_result);
    let kinds = sums(tags.iter().map(|(tag, bytes)| (kind_of(tag), *bytes)));
    let ranked = largest_first(&kinds);
    let most = sum(ranked.iter().take(MOST_RESULTS).map(|(_, bytes)| **bytes));
    let largest = ranked.first()?.0;
    let of_largest = tags.keys().filter(|tag| kind_of(tag) == *largest);
    let modules: BTreeSet<&str> = of_largest.map(|tag| without_sum(tag)).collect();
    let is_few = most as f64 >= bytes as f64 * RESULT_SHARE;
    let (kind, change) = match is_few {
        // The layers of a decoder keep the keys and values of all tokens.
        true if modules.len() > 1 => return None,
        true => (
            Kind::RetainedTensors,
            "Do not collect the outputs of {0} on the GPU, unless later passes read them there: keep .detach().cpu() of each, or only what is computed of it, such as a metric",
        ),
        false => (
            Kind::EvaluationGradients,
            "Run the forward passes that have no backward pass under torch.no_grad(), or keep .item() or .detach() of their results: a sum or list of them keeps their graphs; if they have no graphs, keep .cpu() of them",
        ),
    };
    let item = Item::new(kind, Memory::Activations, device, change);
    let item = if is_few { item.named(modules.into_iter().collect::<String>()) } else { item };
    // The results of a pass are held while they are used, and those of the next one are made meanwhile.
    let of_passes = bytes / signed(passes) * LEFT;
    let least = beyond_others(report, device, amounts, is_result).min(bytes - of_passes).max(0);
    let formula = format!(
        "{} that rose during {} before the peak; the least: without those of {LEFT}, or what the peak has beyond all other moments",
        mib(bytes),
        plural(passes, "pass")
    );
    Some(item.estimated([least, bytes], formula))
}

/// Returns whether the change is for results that the program collects.
pub(super) fn is_of_results(item: &Item) -> bool {
    item.kind == Kind::RetainedTensors && item.memory == Memory::Activations
}

/// Returns a module's path with `*` in place of its first number.
fn kind_of(tag: &str) -> String {
    let path = without_sum(tag);
    repeated(path).map_or_else(|| path.to_owned(), |(starred, own)| starred + &path[own.len()..])
}

/// Returns the number of forward passes, or else of steps, in which the bytes of some cells rose to those of the peak; `None` if they
/// did not rise in small parts during many.
fn passes_of_rise(
    report: &Report<'_>,
    device: &Device,
    bytes: i64,
    fits: impl Fn(&Cell) -> bool,
) -> Option<u64> {
    let peak_ns = device.peak.time_ns;
    let level = |amounts: &Amounts| held(report.run, amounts, &fits);
    let points = device.details.timeline.points.iter().filter(|point| point.time_ns < peak_ns);
    let mut levels: Vec<(u64, i64)> = points.map(|point| (point.time_ns, level(&point.amounts))).collect();
    levels.push((peak_ns, bytes));
    let is_low = |(_, level): &(u64, i64)| *level as f64 <= bytes as f64 * EMPTY_SHARE;
    let rise = &levels[levels.iter().rposition(is_low)?..];
    let changes: Vec<i64> = rise.windows(2).map(|pair| pair[1].1 - pair[0].1).collect();
    let rises = changes.iter().filter(|change| **change > 0);
    let fallen = sum(changes.iter().filter(|change| **change < 0).map(|change| -change));
    let is_share = |part: i64, share: f64| part as f64 <= bytes as f64 * share;
    let is_in_parts = rises.clone().count() >= LEAST_RISES
        && is_share(fallen, FALLEN_SHARE)
        && rises.clone().all(|change| is_share(*change, ONE_RISE));
    let since_ns = rise.first()?.0;
    let iterations = &device.details.iterations;
    let steps = iterations.rows.iter().filter(|row| row.start_ns >= since_ns && row.start_ns <= peak_ns);
    let steps = steps.map(|row| row.count).sum::<u64>();
    let passes = step_at(device, peak_ns).map_or(0, |row| row.passes_at_once).max(steps);
    (is_in_parts && passes >= LEAST_PASSES).then_some(passes)
}
