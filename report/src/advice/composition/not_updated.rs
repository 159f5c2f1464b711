//! A module that requires gradients, though no optimizer updates it: a whole model, such as a teacher, or a part of one, such as a
//! backbone.

use super::cells::{beyond_others, is_activation, is_inside, is_role, models, parent, steps_through};
use crate::amounts::{is_about, sum};
use crate::model_sizes::ModelSizes;
use crate::{Report, held};
use gpumem_model::cell::without_sum;
use gpumem_model::names::Named;
use gpumem_model::run::{Amounts, Cell, Class, Device};
use gpumem_wire::{Phase, Role};
use std::collections::{BTreeMap, BTreeSet};

/// Minimum number of completed steps through which a module keeps its gradients if no optimizer updates it.
const KEPT_STEPS: u64 = 3;
/// Maximum difference between the parameters that no optimizer updates, as the agent counts them, and those that have a gradient and
/// no optimizer state, as a share of the former.
const SAME_SHARE: f64 = 0.05;

/// Such a module, with its bytes at a moment.
#[derive(Debug, Clone, Copy)]
pub(in crate::advice) struct NotUpdated<'r> {
    /// Path of the module.
    pub path: &'r str,
    pub activations: i64,
    pub gradients: i64,
    /// Whether the agent has found that no optimizer updates the module.
    pub is_certain: bool,
    /// Whether no gradient passes through the module: no backward pass ran over it, or it runs before all trained modules.
    pub is_apart: bool,
    /// Bytes that the moment has beyond all others without the module's activations and gradients.
    pub beyond_others: i64,
}

/// Bytes by parameter's path at a moment.
pub(super) struct Tensors<'p, 'r> {
    pub parameters: &'p BTreeMap<&'r str, i64>,
    pub gradients: &'p BTreeMap<&'r str, i64>,
    pub states: &'p BTreeMap<&'r str, i64>,
}

/// Returns the module with most of the activations, if no optimizer updates it and it requires gradients.
pub(super) fn find<'r>(
    report: &'r Report<'_>,
    device: &Device,
    amounts: &Amounts,
    time_ns: u64,
    tensors: &Tensors<'_, 'r>,
) -> Option<NotUpdated<'r>> {
    let sizes = ModelSizes::of(report.run);
    let (model, _) = models(report, amounts, is_activation).into_iter().max_by_key(|(_, bytes)| *bytes)?;
    let lacks_optimizer = sizes.lacks_optimizer(model);
    let path = match lacks_optimizer {
        Some(true) => Some(model),
        Some(false) => part_of(report, device, model, time_ns, tensors),
        None => Some(model).filter(|model| keeps_gradients(report, device, amounts, model, time_ns)),
    }?;
    let inside = |tag: &str| is_inside(without_sum(tag), path);
    let of = |role: Role| {
        held(report.run, amounts, |cell| is_role(cell, role) && cell.tag.as_deref().is_some_and(inside))
    };
    let is_saved = |cell: &Cell| {
        (is_activation(cell) || is_role(cell, Role::Gradient)) && cell.tag.as_deref().is_some_and(inside)
    };
    let activations = held(report.run, amounts, |cell| is_activation(cell) && is_saved(cell));
    let beyond_others = beyond_others(report, device, amounts, is_saved);
    let is_certain = lacks_optimizer.is_some();
    let is_apart = lacks_backward(report, path) || is_certain && runs_first(report, path, tensors.states);
    Some(NotUpdated { path, activations, gradients: of(Role::Gradient), is_certain, is_apart, beyond_others })
}

/// Returns whether a model that the agent has not described seems to have no optimizer: it has no optimizer state, another model has
/// some, and for [`KEPT_STEPS`] no backward pass ran over it, or it kept its gradients.
fn keeps_gradients(
    report: &Report<'_>,
    device: &Device,
    amounts: &Amounts,
    model: &str,
    time_ns: u64,
) -> bool {
    let states = models(report, amounts, |cell| is_role(cell, Role::OptimizerState));
    !states.is_empty()
        && !states.contains_key(model)
        && (lacks_backward(report, model) && steps_through(device, time_ns, |_| true) >= KEPT_STEPS
            || steps_with_gradients(report, device, model, time_ns) >= KEPT_STEPS)
}

/// Returns the module that contains all parameters of a model that have a gradient and no optimizer state, if the agent has found as
/// many bytes of parameters that no optimizer updates.
fn part_of<'r>(
    report: &Report<'_>,
    device: &Device,
    model: &str,
    time_ns: u64,
    tensors: &Tensors<'_, 'r>,
) -> Option<&'r str> {
    let not_updated = ModelSizes::of(report.run).not_updated(model);
    let parameters = || tensors.parameters.iter().filter(|(tag, _)| is_inside(tag, model));
    let without: Vec<(&'r str, i64)> = parameters()
        .filter(|(tag, _)| tensors.gradients.contains_key(*tag) && !tensors.states.contains_key(*tag))
        .map(|(tag, bytes)| (*tag, *bytes))
        .collect();
    let bytes = sum(without.iter().map(|(_, bytes)| *bytes));
    let is_same = is_about(bytes, not_updated, SAME_SHARE);
    let path = without.iter().map(|(tag, _)| parent(tag)).reduce(common)?;
    let is_trained = parameters().any(|(tag, _)| is_inside(tag, path) && tensors.states.contains_key(tag));
    // The peak may lie in an early step.
    let until_ns = device.details.iterations.rows.last().map_or(time_ns, |row| row.end_ns.max(time_ns));
    let is_kept = || steps_with_gradients(report, device, path, until_ns) >= KEPT_STEPS;
    (not_updated > 0 && is_same && !path.is_empty() && !is_trained && is_kept()).then_some(path)
}

/// Returns the longest path of a module that contains both.
fn common<'r>(path: &'r str, other: &str) -> &'r str {
    let mut path = path;
    while !is_inside(other, path) {
        path = parent(path);
    }
    path
}

/// Returns whether backward passes ran over other modules, and none over this one.
fn lacks_backward(report: &Report<'_>, path: &str) -> bool {
    let backward = report.run.cells.iter().filter(|cell| cell.phase.as_deref() == Phase::Backward.name());
    let mut tags = backward.filter_map(|cell| Some(without_sum(cell.tag.as_deref()?))).peekable();
    tags.peek().is_some() && !tags.any(|tag| is_inside(tag, path))
}

/// Returns the number of completed steps before `until_ns` through which a module kept gradients without interruption. A module that
/// an optimizer without state updates clears them in each step.
fn steps_with_gradients(report: &Report<'_>, device: &Device, path: &str, until_ns: u64) -> u64 {
    steps_through(device, until_ns, |point| {
        held(report.run, &point.amounts, |cell| {
            is_role(cell, Role::Gradient) && cell.tag.as_deref().is_some_and(|tag| is_inside(tag, path))
        }) > 0
    })
}

/// Returns whether, in the first step, all of the module has made memory in a forward pass before a trained module made any: then its
/// input depends on no parameter that an optimizer updates. Each trained module must have made some, because another one may use the
/// parameter of a module that is never called. A run's cells are in the order in which they were first used.
///
/// The module may be called again in the same step, such as a network for a perceptual loss: with the target under
/// `torch.no_grad()`, and then with the output of a trained module. The activations of the first backward pass show the second call:
/// they got their role in the order in which they were made.
fn runs_first(report: &Report<'_>, path: &str, states: &BTreeMap<&str, i64>) -> bool {
    let trained: BTreeSet<&str> = states.keys().map(|tag| parent(tag)).collect();
    let tags = |fits: fn(&Cell) -> bool| -> Vec<&str> {
        let is_of = |cell: &Cell, phase: Phase| cell.phase.as_deref() == phase.name();
        let before = report.run.cells.iter().take_while(|cell| !is_of(cell, Phase::Backward));
        let cells =
            before.filter(|cell| cell.class == Class::Block && is_of(cell, Phase::Forward) && fits(cell));
        cells.filter_map(|cell| Some(without_sum(cell.tag.as_deref()?))).collect()
    };
    let last_inside = |tags: &[&str]| tags.iter().rposition(|tag| is_inside(tag, path));
    let first_trained = |tags: &[&str]| tags.iter().position(|tag| trained.contains(tag));
    let made = tags(|cell| cell.role.is_none());
    let activations = tags(|cell| is_role(cell, Role::Activation));
    let is_made_first =
        last_inside(&made).zip(first_trained(&made)).is_some_and(|(last, first)| last < first);
    let is_called_again =
        last_inside(&activations).zip(first_trained(&activations)).is_some_and(|(last, first)| first < last);
    is_made_first && !is_called_again && trained.iter().all(|tag| made.contains(tag))
}
