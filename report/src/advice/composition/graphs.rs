//! Graphs of forward passes that no backward pass needs, or that are alive together.

use super::activations::repeated;
use super::cells::is_role;
use super::parts::Parts;
use crate::amounts::sum;
use crate::autocast;
use crate::model_sizes::ModelSizes;
use crate::{Report, findings, held};
use gpumem_model::cell::without_sum;
use gpumem_model::growth::{Axis, LEAST_POINTS};
use gpumem_model::names::Named;
use gpumem_model::run::{Amounts, Cell, Class, Device, Iteration};
use gpumem_wire::{Phase, Role};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum share of one module in the memory of a forward pass that keeps its graph.
const MODULE_OF_GRAPH_SHARE: f64 = 0.25;
/// Maximum memory of backward passes, as a share of that memory, outside of a backward pass.
const BACKWARD_SHARE: f64 = 0.02;
/// Minimum number of forward passes without a backward pass between them. Losses of a few passes, such as those of a pair or triplet
/// of samples, need all graphs.
const LEAST_PASSES: u64 = 4;
/// Maximum share of the graphs at the peak that lives when a forward pass begins, if the graphs are dropped: a loop that keeps the
/// last output until the next one is made has two graphs at the peak, and one when a pass begins.
const DROPPED_SHARE: f64 = 0.6;
/// Minimum share of the graphs of all passes but one that lives when the last pass begins, if the graphs are kept.
const KEPT_SHARE: f64 = 0.9;
/// Minimum share of the graph of one pass in the process's memory. Steps of a sequence keep less, and each needs those before it.
const PASS_SHARE: f64 = 0.01;
/// Minimum share of graphs that wait for one backward pass in the memory, and of the graph of one pass, for advice to a program that
/// fits.
const MOST_SHARE: f64 = 0.5;
const PASS_OF_MOST_SHARE: f64 = 0.03;
/// Minimum number of repeated modules from which it matters how many of them hold bytes.
const LEAST_LAYERS: usize = 6;
/// Maximum of the bytes that outlive optimizer steps, as a factor of their median, if they do not grow.
const STEADY: f64 = 1.5;
/// Maximum share of one module in these bytes.
const MODULE_OF_KEPT_SHARE: f64 = 0.75;

/// Graphs of forward passes that wait for one backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GraphsAtOnce {
    pub passes: u64,
    /// Bytes of all graphs but the last one.
    pub bytes: i64,
    /// Whether a backward pass has followed.
    pub is_trained: bool,
}

/// Returns the step in progress at `time_ns`.
pub(super) fn step_at(device: &Device, time_ns: u64) -> Option<&Iteration> {
    let iterations = &device.details.iterations;
    iterations.rows.iter().chain(&iterations.open).rev().find(|row| row.start_ns <= time_ns)
}

/// Returns the graphs of several forward passes that one backward pass follows, if `parts` have them.
pub(super) fn at_once(device: &Device, parts: &Parts<'_>) -> Option<GraphsAtOnce> {
    let step = step_at(device, parts.time_ns)?;
    let passes = step.passes_at_once;
    let others = passes.checked_sub(1)? as f64;
    let expected = parts.activations as f64 * others / passes as f64;
    // A loss that is a module has the last pass, in which all graphs are there.
    let most = if step.activations.peak_bytes > 0 { expected as i64 } else { parts.activations };
    let bytes = step.kept_activations.peak_bytes.min(most);
    let is_kept = bytes as f64 >= expected * KEPT_SHARE;
    let is_much = bytes as f64 >= parts.used as f64 * PASS_SHARE * others;
    let iterations = &device.details.iterations;
    let has_backward = |row: &Iteration| row.activations.peak_bytes > 0;
    // Activations are known from their backward pass. At a failure in a forward pass, earlier steps show that one follows.
    let is_trained =
        iterations.rows.iter().any(|row| row.passes_at_once >= LEAST_PASSES && has_backward(row))
            || has_backward(step);
    (passes >= LEAST_PASSES && is_kept && is_much).then_some(GraphsAtOnce { passes, bytes, is_trained })
}

/// Returns whether the graphs of several passes that one backward pass follows are most of the memory of a program, and each of them
/// is a considerable part of it. The steps of a sequence, which need each other's graphs, are many.
pub(super) fn are_most(device: &Device, parts: &Parts<'_>) -> bool {
    at_once(device, parts).is_some_and(|graphs| {
        let share = graphs.bytes as f64 / parts.used as f64;
        share >= MOST_SHARE && share / (graphs.passes - 1) as f64 >= PASS_OF_MOST_SHARE
    })
}

/// Returns the least and most bytes that forward passes kept at the peak for a backward pass that did not follow. `None` if a
/// backward pass may follow; during a backward pass, which may repeat a forward pass; and if few modules have the bytes, because
/// outputs of these exist without gradients, too.
pub(super) fn without_backward(
    report: &Report<'_>,
    device: &Device,
    parameters: &BTreeMap<&str, i64>,
    sizes: &ModelSizes<'_>,
) -> Option<[i64; 2]> {
    let peak = &device.peak;
    let is_in =
        |cell: &Cell, phase: Phase| cell.class == Class::Block && cell.phase.as_deref() == phase.name();
    let of_backward = |cell: &Cell| {
        is_role(cell, Role::Activation) || is_in(cell, Phase::Backward) && !is_role(cell, Role::Gradient)
    };
    let mut tags = report.by_tag(&peak.amounts, |cell| {
        is_in(cell, Phase::Forward) && (cell.role.is_none() || is_role(cell, Role::Temporary))
    });
    let copies = autocast::copies(&tags, parameters, sizes);
    tags.retain(|tag, _| !copies.contains_key(tag));
    if skips_layers(&tags, parameters) {
        return None;
    }
    let (bytes, largest) = (sum(tags.values().copied()), tags.values().copied().max()?);
    let is_small = |part: i64, share: f64| part as f64 <= bytes as f64 * share;
    let is_graph = is_small(held(report.run, &peak.amounts, of_backward), BACKWARD_SHARE);
    // Activations are known from their backward pass, so at the end of the step those of the peak were none.
    let has_ended = device.details.iterations.rows.iter().any(|row: &Iteration| row.end_ns > peak.time_ns);
    let is_dropped = step_at(device, peak.time_ns).is_some_and(|step| {
        step.passes_at_once >= LEAST_PASSES && is_small(step.kept_activations.peak_bytes, DROPPED_SHARE)
    });
    (is_graph && is_small(largest, MODULE_OF_GRAPH_SHARE) && (has_ended || is_dropped))
        .then(|| [bytes.saturating_sub(largest.saturating_mul(2)), bytes])
}

/// Returns whether less than half of a model's layers, which are repeated modules, hold any bytes of a forward pass. A graph is
/// largest at the end of the pass, when all layers hold some.
fn skips_layers(of_forward: &BTreeMap<&str, i64>, parameters: &BTreeMap<&str, i64>) -> bool {
    let mut layers: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for (group, layer) in parameters.keys().filter_map(|tag| repeated(without_sum(tag))) {
        layers.entry(group).or_default().insert(layer);
    }
    let Some(all) = layers.into_values().max_by_key(BTreeSet::len) else { return false };
    let holding: BTreeSet<&str> =
        of_forward.keys().filter_map(|tag| Some(repeated(without_sum(tag))?.1)).collect();
    all.len() >= LEAST_LAYERS && all.intersection(&holding).count() < all.len() / 2
}

/// Returns the bytes by tag of forward passes at a moment: those that have no role, and the activations. A block that outlives
/// whole steps loses its role.
fn of_passes<'r>(report: &'r Report<'_>, amounts: &Amounts) -> [BTreeMap<&'r str, i64>; 2] {
    let by_tag =
        |fits: &dyn Fn(&Cell) -> bool| report.by_tag(amounts, |cell| is_of_forward(cell) && fits(cell));
    [by_tag(&|cell| cell.role.is_none()), by_tag(&|cell| is_role(cell, Role::Activation))]
}

fn is_of_forward(cell: &Cell) -> bool {
    cell.class == Class::Block && cell.phase.as_deref() == Phase::Forward.name()
}

/// Returns the least and most bytes of graphs that stay through most optimizer steps, because no backward pass frees them, and
/// that do not grow. Outputs without a graph stay in the same way, but they are those of few modules. So the bytes must come from
/// several passes, and be divided among the modules like the activations of the passes that have a backward pass.
pub(super) fn kept(report: &Report<'_>, device: &Device) -> Option<[i64; 2]> {
    let growth = &device.details.growth;
    if growth.axis != Axis::Step || growth.points.len() < LEAST_POINTS {
        return None;
    }
    let is_kept = |cell: &Cell| is_of_forward(cell) && cell.role.is_none();
    let columns = growth.cells.iter().filter(|(cell, _)| report.cell(*cell).is_some_and(is_kept));
    let columns: Vec<&Vec<i64>> = columns.map(|(_, column)| column).collect();
    let at_point = |at: usize| sum(columns.iter().filter_map(|column| column.get(at).copied()));
    let mut points: Vec<i64> = (0..growth.points.len()).map(at_point).collect();
    points.sort_unstable();
    let bytes = *points.get((points.len() - 1) / 2)?;
    let is_steady = points.last().is_some_and(|most| *most as f64 <= bytes as f64 * STEADY);
    let iterations = &device.details.iterations;
    let is_of_passes = iterations.rows.iter().chain(&iterations.open).any(|row| {
        row.passes_at_once >= LEAST_PASSES
            && row.kept_activations.peak_bytes as f64 >= bytes as f64 * KEPT_SHARE
    });
    if bytes <= 0 || !is_steady || !is_of_passes {
        return None;
    }
    let moments = [&device.peak.amounts].into_iter();
    let moments = moments.chain(device.details.timeline.points.iter().map(|point| &point.amounts));
    let with_both = moments.map(|amounts| of_passes(report, amounts)).filter(|[kept, _]| {
        let total = sum(kept.values().copied());
        total >= bytes / 2
    });
    // Most modules are known at the peak and during a backward pass.
    let [kept, activations] = with_both
        .max_by_key(|[kept, activations]| kept.keys().filter(|tag| activations.contains_key(*tag)).count())?;
    let largest = kept.values().copied().max()? as f64 / sum(kept.values().copied()).max(1) as f64;
    let is_same = findings::is_divided_alike(&kept, &activations);
    if largest > MODULE_OF_KEPT_SHARE || !is_same && !outlives_steps(device) {
        return None;
    }
    // The graphs of new passes may be beside the old ones at the peak.
    let is_of_new_passes = step_at(device, device.peak.time_ns)
        .is_some_and(|step| step.passes_at_once >= LEAST_PASSES && outlives_steps(device));
    let at_peak =
        if is_of_new_passes { sum(of_passes(report, &device.peak.amounts)[0].values().copied()) } else { 0 };
    let bytes = bytes.max(at_peak);
    Some([(bytes as f64 * (1.0 - largest)) as i64, bytes])
}

/// Returns whether the memory of each series of at least [`LEAST_PASSES`] forward passes with gradients enabled stayed through the
/// backward passes and the ends of two steps. Passes whose graphs are needed for a backward pass lose most of it there.
fn outlives_steps(device: &Device) -> bool {
    let rows = &device.details.iterations.rows;
    let is_kept = |of: &Iteration, until: &Iteration| {
        until.activations.last_bytes as f64 >= of.kept_activations.peak_bytes as f64 * KEPT_SHARE
    };
    let mut series = rows.windows(2).filter(|rows| rows[0].passes_at_once >= LEAST_PASSES).peekable();
    let is_any = series.peek().is_some();
    is_any && series.all(|rows| rows.iter().all(|row| is_kept(&rows[0], row)))
}
