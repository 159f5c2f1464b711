//! Changes for memory that the program needs: by role and module at the failed request, or else at the peak.

mod activations;
mod model;

use super::item::{Item, Kind, Memory, mib, place_of};
use crate::model_sizes::ModelSizes;
use crate::names;
use crate::{Report, held, most_used, sum, sums};
use gpumem_model::cell::without_sum;
use gpumem_model::names::Named;
use gpumem_model::run::{Amounts, Cell, Class, Device, Iteration, Oom};
use gpumem_model::timeline::Point;
use gpumem_wire::{Phase, Role};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Minimum share of a part of the process's memory for advice on it.
const PART_SHARE: f64 = 0.2;
/// Minimum number of completed steps through which a model keeps its gradients if no optimizer updates it.
const KEPT_STEPS: u64 = 3;
/// Maximum share of one module in the memory of a forward pass that keeps its graph.
const MODULE_OF_GRAPH_SHARE: f64 = 0.25;
/// Maximum memory of backward passes, as a share of that memory, outside of a backward pass.
const BACKWARD_SHARE: f64 = 0.02;

/// Bytes of a process by their purpose.
struct Parts<'r> {
    /// Time at which the process held these bytes.
    time_ns: u64,
    parameters: i64,
    optimizer: i64,
    activations: i64,
    optimizer_temporaries: i64,
    /// Temporaries, and what the backward pass has made so far except gradients of parameters.
    short_lived: i64,
    used: i64,
    by_tag: BTreeMap<&'r str, i64>,
    /// Parameters, by their paths in the model.
    parameters_by_tag: BTreeMap<&'r str, i64>,
    /// Gradients with a parameter's path, of models that an optimizer updates.
    gradients: i64,
    /// Other gradients, such as buckets of DDP, which are never cleared.
    buckets: i64,
    /// Parameters that have optimizer state. State in float32 is at least as large.
    updated: i64,
    /// Parameters for which a first optimizer step makes state: at most as many bytes as there are gradients, because frozen
    /// parameters have none. All parameters if no gradients are known.
    trained: i64,
    /// Whether an optimizer with 8-bit state, by its name, made memory.
    has_small_state: bool,
    sizes: ModelSizes<'r>,
    /// Whether the failed request was made under `torch.no_grad()`, or the program never ran a backward pass.
    is_inference: bool,
    /// The model with most of the activations, and its bytes of them, if no optimizer updates it; see [`not_updated`].
    not_updated: Option<(&'r str, i64)>,
    /// Gradients of that model.
    unused_gradients: i64,
    /// Value of [`without_backward`] at the peak.
    without_backward: Option<[i64; 2]>,
    /// The program's line with the most memory that has no role and was not made in a step, and its bytes.
    data: Option<(&'r str, i64)>,
}

fn is_role(cell: &Cell, role: Role) -> bool {
    cell.role.as_deref() == role.name()
}

/// Returns whether a tag is that of an optimizer such as `AdamW8bit.step`.
fn is_small_state(tag: &str) -> bool {
    tag.ends_with("bit.step")
}

/// Returns whether a cell has activations. Before the first backward pass, blocks of the forward pass count.
fn is_activation(cell: &Cell) -> bool {
    let is_unknown = cell.role.is_none() && cell.phase.as_deref() == Phase::Forward.name();
    cell.class == Class::Block && (is_role(cell, Role::Activation) || is_unknown)
}

/// Returns the bytes of certain cells by model.
fn models<'r>(
    report: &'r Report<'_>,
    amounts: &Amounts,
    fits: impl Fn(&Cell) -> bool,
) -> BTreeMap<&'r str, i64> {
    let of_role = amounts.iter().filter_map(|(cell, bytes)| {
        let cell = report.cell(*cell).filter(|cell| fits(cell))?;
        Some((without_sum(cell.tag.as_deref()?).split('/').next()?, *bytes))
    });
    sums(of_role)
}

/// Returns the model with most of the activations, and its bytes of them, if no optimizer updates it and it requires gradients. If
/// the agent has not described the models, these are signs of it: the model has no optimizer state, another model has some, and its
/// gradients were kept through [`KEPT_STEPS`].
fn not_updated<'r>(
    report: &'r Report<'_>,
    device: &Device,
    amounts: &Amounts,
    time_ns: u64,
) -> Option<(&'r str, i64)> {
    let states = models(report, amounts, |cell| is_role(cell, Role::OptimizerState));
    let largest = models(report, amounts, is_activation).into_iter().max_by_key(|(_, bytes)| *bytes);
    let keeps_gradients = |model: &str| {
        !states.is_empty()
            && !states.contains_key(model)
            && steps_with_gradients(report, device, model, time_ns) >= KEPT_STEPS
    };
    let sizes = ModelSizes::of(report.run);
    largest.filter(|(model, _)| sizes.lacks_optimizer(model).unwrap_or_else(|| keeps_gradients(model)))
}

/// Returns the number of completed steps before `until_ns` through which a model kept gradients without interruption. A model that
/// an optimizer without state updates clears them in each step.
fn steps_with_gradients(report: &Report<'_>, device: &Device, model: &str, until_ns: u64) -> u64 {
    let has_gradients = |point: &&Point| {
        let bytes = models(report, &point.amounts, |cell| is_role(cell, Role::Gradient));
        bytes.get(model).is_some_and(|bytes| *bytes > 0)
    };
    let points = device.details.timeline.points.iter().rev();
    let kept = points.skip_while(|point| point.time_ns > until_ns).take_while(has_gradients);
    let Some(since) = kept.last() else { return 0 };
    let is_inside = |row: &&Iteration| row.start_ns >= since.time_ns && row.end_ns <= until_ns;
    let rows = device.details.iterations.rows.iter().filter(is_inside);
    rows.fold(0, |count, row| count.saturating_add(row.count))
}

/// Returns the least and most bytes that forward passes kept at the peak for a backward pass that did not follow. `None` if no step
/// ended after the peak, because activations are known from their backward pass; during a backward pass, which may repeat a forward
/// pass; and if few modules have the bytes, because outputs of these exist without gradients, too.
fn without_backward(report: &Report<'_>, device: &Device) -> Option<[i64; 2]> {
    let peak = &device.peak;
    device.details.iterations.rows.iter().find(|row: &&Iteration| row.end_ns > peak.time_ns)?;
    let is_in =
        |cell: &Cell, phase: Phase| cell.class == Class::Block && cell.phase.as_deref() == phase.name();
    let of_backward = |cell: &Cell| {
        is_role(cell, Role::Activation) || is_in(cell, Phase::Backward) && !is_role(cell, Role::Gradient)
    };
    let tags = peak.amounts.iter().filter_map(|(cell, bytes)| {
        let is_unused = |cell: &&Cell| cell.role.is_none() || is_role(cell, Role::Temporary);
        let cell = report.cell(*cell).filter(is_unused).filter(|cell| is_in(cell, Phase::Forward))?;
        Some((cell.tag.as_deref()?, *bytes))
    });
    let tags = sums(tags);
    let (bytes, largest) = (sum(tags.values().copied()), tags.values().copied().max()?);
    let is_small = |part: i64, share: f64| part as f64 <= bytes as f64 * share;
    let is_graph = is_small(held(report.run, &peak.amounts, of_backward), BACKWARD_SHARE);
    (is_graph && is_small(largest, MODULE_OF_GRAPH_SHARE))
        .then(|| [bytes.saturating_sub(largest.saturating_mul(2)), bytes])
}

/// Returns the value of [`Parts::data`].
fn data<'r>(report: &'r Report<'_>, amounts: &Amounts) -> Option<(&'r str, i64)> {
    let lines = amounts.iter().filter_map(|(cell, bytes)| {
        let is_of_step = |cell: &Cell| cell.phase.is_some() && cell.phase.as_deref() != Phase::Setup.name();
        let is_data = |cell: &&Cell| cell.class == Class::Block && cell.role.is_none() && !is_of_step(cell);
        let cell = report.cell(*cell).filter(is_data)?;
        Some((cell.tag.as_deref().filter(|tag| names::is_line(tag))?, *bytes))
    });
    sums(lines).into_iter().max_by_key(|(_, bytes)| *bytes)
}

impl<'r> Parts<'r> {
    fn of(report: &'r Report<'_>, device: &'r Device, oom: Option<&'r Oom>) -> Self {
        let run = report.run;
        let at_oom = oom.map(|oom| &oom.amounts).filter(|amounts| !amounts.is_empty());
        let amounts = at_oom.unwrap_or(&device.peak.amounts);
        let time_ns = oom.map_or(device.peak.time_ns, |oom| oom.time_ns);
        let bytes = |role: Role| held(run, amounts, |cell| is_role(cell, role));
        let is_of_optimizer = |cell: &Cell| cell.phase.as_deref() == Phase::Optimizer.name();
        let by_tag = |fits: &dyn Fn(&Cell) -> bool| {
            let tagged = |(index, bytes): &(u32, i64)| {
                Some((report.cell(*index).filter(|cell| fits(cell))?.tag.as_deref()?, *bytes))
            };
            sums(amounts.iter().filter_map(tagged))
        };
        let parameters_by_tag = by_tag(&|cell| is_role(cell, Role::Parameter));
        let not_updated = not_updated(report, device, amounts, time_ns);
        let is_updated =
            |tag: &str| not_updated.is_none_or(|(model, _)| tag.split('/').next() != Some(model));
        let gradients = by_tag(&|cell| is_role(cell, Role::Gradient)).into_iter();
        let gradients = gradients.filter(|(tag, _)| parameters_by_tag.contains_key(tag) && is_updated(tag));
        let gradients = sum(gradients.map(|(_, bytes)| bytes));
        let states = by_tag(&|cell| is_role(cell, Role::OptimizerState));
        let updated = parameters_by_tag.iter().filter(|(tag, _)| states.contains_key(*tag));
        let has_phase = |phase: Phase| run.cells.iter().any(|cell| cell.phase.as_deref() == phase.name());
        Parts {
            time_ns,
            parameters: bytes(Role::Parameter),
            optimizer: bytes(Role::OptimizerState),
            activations: held(run, amounts, is_activation),
            optimizer_temporaries: held(run, amounts, |cell| {
                is_role(cell, Role::Temporary) && is_of_optimizer(cell)
            }),
            short_lived: held(run, amounts, |cell| {
                let is_of_backward = cell.role.is_none() && cell.phase.as_deref() == Phase::Backward.name();
                is_role(cell, Role::Temporary) || cell.class == Class::Block && is_of_backward
            }),
            used: most_used(device).unwrap_or(0).max(oom.map_or(0, |oom| oom.tracked_bytes)).max(1),
            unused_gradients: held(run, amounts, |cell| {
                is_role(cell, Role::Gradient) && cell.tag.as_deref().is_some_and(|tag| !is_updated(tag))
            }),
            not_updated,
            without_backward: oom.is_none().then(|| without_backward(report, device)).flatten(),
            data: data(report, amounts),
            by_tag: by_tag(&is_activation),
            updated: sum(updated.map(|(_, bytes)| *bytes)),
            sizes: ModelSizes::of(run),
            has_small_state: run.cells.iter().any(|cell| cell.tag.as_deref().is_some_and(is_small_state)),
            gradients,
            trained: match bytes(Role::Gradient) {
                1.. => bytes(Role::Gradient).min(bytes(Role::Parameter)),
                _ => bytes(Role::Parameter),
            },
            buckets: bytes(Role::Gradient).saturating_sub(gradients),
            parameters_by_tag,
            is_inference: match oom {
                Some(oom) => oom.phase.as_deref() == Phase::Evaluation.name(),
                None => !has_phase(Phase::Backward) && !has_phase(Phase::Optimizer),
            },
        }
    }

    fn is_large(&self, bytes: i64) -> bool {
        bytes as f64 >= self.used as f64 * PART_SHARE
    }
}

/// Returns the changes that make the parts of the memory smaller, the one with the largest saving first.
pub(super) fn parts(report: &Report<'_>, device: &Device, oom: Option<&Oom>) -> Vec<Item> {
    let parts = Parts::of(report, device, oom);
    let mut items = activations::items(device, &parts, oom);
    items.extend(model::kept_gradients(device, &parts, oom));
    items.extend(model::optimizer(device, &parts, oom));
    items.extend(model::precision(device, &parts));
    items.extend(model::gradient_buckets(device, &parts));
    let data = parts.data.filter(|(_, bytes)| parts.is_large(*bytes) && has_forward_pass(report));
    items.extend(data.map(|(line, bytes)| {
        let change =
            "If {0} makes a data set, keep it on the host, and move each batch to the GPU when it is used";
        let item = Item::new(Kind::RetainedTensors, Memory::Data, device, change).named(line);
        item.estimated([0, bytes], format!("{} that this line allocates", mib(bytes)))
    }));
    items.extend(unused_yet(report, device, &parts, oom));
    // Some memory costs nothing to avoid, so it comes first if it is known to exist: temporaries of the optimizer, and float64.
    let is_free = |item: &Item| {
        let may_be_free = matches!(item.kind, Kind::OptimizerTemporaries | Kind::ParameterPrecision);
        may_be_free && item.saves_bytes.is_some_and(|[least, _]| least > 0)
    };
    items.sort_by_key(|item| (!is_free(item), Reverse(item.most())));
    items
}

/// Returns whether the program has begun a forward pass, or another phase of a step.
fn has_forward_pass(report: &Report<'_>) -> bool {
    report.run.cells.iter().any(|cell| {
        let phase = cell.phase.as_deref().and_then(Phase::from_name);
        phase.is_some_and(|phase| phase != Phase::Unknown && phase != Phase::Between)
    })
}

/// Returns the change for a program that fails before its first forward pass, so that the roles of its memory are unknown.
fn unused_yet(report: &Report<'_>, device: &Device, parts: &Parts<'_>, oom: Option<&Oom>) -> Option<Item> {
    let oom = oom?;
    let blocks = held(report.run, &oom.amounts, |cell| cell.class == Class::Block);
    (!has_forward_pass(report) && parts.is_large(blocks)).then(|| {
        let change = "Make the model in bfloat16, if it is float32 now, or split it over several GPUs{0}";
        let item =
            Item::new(Kind::ParameterPrecision, Memory::Parameters, device, change).named(place_of(oom));
        let formula = format!("1/2 x {} made before the first forward pass", mib(blocks));
        item.estimated([0, blocks / 2], formula)
    })
}
