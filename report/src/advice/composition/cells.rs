//! What a cell or a path is of, and sums over cells and steps.

use crate::amounts::sums;
use crate::{Report, held, names};
use gpumem_model::cell::without_sum;
use gpumem_model::names::Named;
use gpumem_model::run::{Amounts, Cell, Class, Device, Iteration};
use gpumem_model::timeline::Point;
use gpumem_wire::{Phase, Role};
use std::collections::BTreeMap;

pub(super) fn is_role(cell: &Cell, role: Role) -> bool {
    cell.role.as_deref() == role.name()
}

/// Returns whether a cell has activations. Before the first backward pass, blocks of the forward pass count.
pub(super) fn is_activation(cell: &Cell) -> bool {
    let is_unknown = cell.role.is_none() && cell.phase.as_deref() == Phase::Forward.name();
    cell.class == Class::Block && (is_role(cell, Role::Activation) || is_unknown)
}

/// Returns the model of a path. The layers of a model that is a `Sequential` have paths such as `Sequential.0`.
pub(super) fn root(path: &str) -> &str {
    path.split(['/', '.']).next().unwrap_or(path)
}

/// Returns the module that contains a module or a parameter: `Net/layers` of `Net/layers/gelu`; empty for a root.
pub(super) fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

/// Returns whether a path is that of `module`, or of a part of it.
pub(super) fn is_inside(path: &str, module: &str) -> bool {
    module.is_empty()
        || path.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '.']))
}

/// Returns the number of completed steps before `until_ns` through which `holds` was true of all points of the timeline.
pub(super) fn steps_through(device: &Device, until_ns: u64, holds: impl Fn(&Point) -> bool) -> u64 {
    let points = device.details.timeline.points.iter().rev();
    let kept = points.skip_while(|point| point.time_ns > until_ns).take_while(|point| holds(point));
    let Some(since) = kept.last() else { return 0 };
    let is_inside = |row: &&Iteration| row.start_ns >= since.time_ns && row.end_ns <= until_ns;
    let rows = device.details.iterations.rows.iter().filter(is_inside);
    rows.fold(0, |count, row| count.saturating_add(row.count))
}

/// Returns how much more a moment has in use than every point of the timeline has without certain cells: a change that saves their
/// memory at all times saves at least as much.
pub(super) fn beyond_others(
    report: &Report<'_>,
    device: &Device,
    amounts: &Amounts,
    is_saved: impl Fn(&Cell) -> bool,
) -> i64 {
    let is_kept = |cell: &Cell| cell.class != Class::PoolIdle && !is_saved(cell);
    let in_use = held(report.run, amounts, |cell| cell.class != Class::PoolIdle);
    let points = device.details.timeline.points.iter();
    let others =
        points.map(|point| held(report.run, &point.amounts, is_kept).saturating_add(point.rest_bytes));
    in_use.saturating_sub(others.fold(held(report.run, amounts, is_kept), i64::max))
}

/// Returns whether a line of the program has allocated a cell's blocks.
pub(super) fn is_of_line(cell: &Cell) -> bool {
    cell.class == Class::Block && cell.tag.as_deref().is_some_and(names::is_line)
}

/// Returns whether a line of the program has allocated a cell's blocks outside of every step, and they have no role.
pub(super) fn is_data(cell: &Cell) -> bool {
    let is_of_step = cell.phase.is_some() && cell.phase.as_deref() != Phase::Setup.name();
    is_of_line(cell) && cell.role.is_none() && !is_of_step
}

/// Returns the bytes of certain cells by model. Lines of the program are not models.
pub(super) fn models<'r>(
    report: &'r Report<'_>,
    amounts: &Amounts,
    fits: impl Fn(&Cell) -> bool,
) -> BTreeMap<&'r str, i64> {
    let tags = report.by_tag(amounts, fits).into_iter().filter(|(tag, _)| !names::is_line(tag));
    sums(tags.map(|(tag, bytes)| (root(without_sum(tag)), bytes)))
}

/// Returns whether the program has begun a forward pass, or another phase of a step. Making and loading a model is none.
pub(super) fn has_forward_pass(report: &Report<'_>) -> bool {
    report.run.cells.iter().any(|cell| {
        let phase = cell.phase.as_deref().and_then(Phase::from_name);
        phase.is_some_and(|phase| !matches!(phase, Phase::Unknown | Phase::Between | Phase::Setup))
    })
}
