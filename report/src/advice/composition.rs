//! Changes for memory that the program needs: by role and module at the failed request, or else at the peak.

use super::item::{Item, Kind, Memory, is_material, mib, place_of};
use crate::findings::{is_of_second_optimizer, state_of_earlier_steps};
use crate::names;
use crate::{Report, held, most_used, sum, sums};
use gpumem_model::cell::without_sum;
use gpumem_model::names::Named;
use gpumem_model::run::{Amounts, Cell, Class, Device, Iteration, Oom};
use gpumem_model::timeline::Point;
use gpumem_model::units::signed;
use gpumem_wire::{Phase, Role};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Minimum share of a part of the process's memory for advice on it.
const PART_SHARE: f64 = 0.2;
/// Minimum share of the activations for advice on one module, or on a repeated one.
const MODULE_SHARE: f64 = 0.4;
/// Minimum number of completed steps through which a model keeps its gradients if no optimizer updates it.
const KEPT_STEPS: u64 = 3;
/// Maximum share of one module in the memory of a forward pass that keeps its graph.
const MODULE_OF_GRAPH_SHARE: f64 = 0.25;
/// Maximum memory of backward passes, as a share of that memory, outside of a backward pass.
const BACKWARD_SHARE: f64 = 0.02;
/// Size of the gradients, as a factor of the parameters, from which each gradient seems to be held twice.
const TWO_GRADIENTS: f64 = 1.2;
/// Parts into which the advice splits a large output.
const CHUNKS: i64 = 8;

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
    /// Whether the failed request was made under `torch.no_grad()`, or the program never ran a backward pass.
    is_inference: bool,
    /// The model with most of the activations, and its bytes of them, if it has no optimizer state, another model has some, and its
    /// gradients were kept through [`KEPT_STEPS`].
    not_updated: Option<(&'r str, i64)>,
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

/// Returns the bytes of a role by model.
fn models<'r>(report: &'r Report<'_>, amounts: &Amounts, role: Role) -> BTreeMap<&'r str, i64> {
    let of_role = amounts.iter().filter_map(|(cell, bytes)| {
        let cell = report.cell(*cell).filter(|cell| is_role(cell, role))?;
        Some((without_sum(cell.tag.as_deref()?).split('/').next()?, *bytes))
    });
    sums(of_role)
}

/// Returns the value of [`Parts::not_updated`] at the time of `amounts`.
fn not_updated<'r>(
    report: &'r Report<'_>,
    device: &Device,
    amounts: &Amounts,
    time_ns: u64,
) -> Option<(&'r str, i64)> {
    let states = models(report, amounts, Role::OptimizerState);
    let largest = models(report, amounts, Role::Activation).into_iter().max_by_key(|(_, bytes)| *bytes);
    largest.filter(|(model, _)| {
        !states.is_empty()
            && !states.contains_key(model)
            && steps_with_gradients(report, device, model, time_ns) >= KEPT_STEPS
    })
}

/// Returns the number of completed steps before `until_ns` through which a model kept gradients without interruption. A model that
/// an optimizer without state updates clears them in each step.
fn steps_with_gradients(report: &Report<'_>, device: &Device, model: &str, until_ns: u64) -> u64 {
    let has_gradients = |point: &&Point| {
        let bytes = models(report, &point.amounts, Role::Gradient);
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
    (is_graph && is_small(largest, MODULE_OF_GRAPH_SHARE)).then(|| [bytes.saturating_sub(2 * largest), bytes])
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
            not_updated,
            without_backward: oom.is_none().then(|| without_backward(report, device)).flatten(),
            data: data(report, amounts),
            by_tag: by_tag(&is_activation),
            updated: sum(updated.map(|(_, bytes)| *bytes)),
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
    let mut items = activations(device, &parts, oom);
    items.extend(kept_gradients(device, &parts, oom));
    items.extend(optimizer(device, &parts, oom));
    if parts.is_large(parts.parameters) {
        let change = "Load the parameters in bfloat16, if they are float32 now";
        let item = Item::new(Kind::ParameterPrecision, Memory::Parameters, device, change);
        let formula = format!("1/2 x {} of parameters", mib(parts.parameters));
        items.push(item.estimated([0, parts.parameters / 2], formula));
    }
    items.extend(gradient_buckets(device, &parts));
    let data = parts.data.filter(|(_, bytes)| parts.is_large(*bytes) && has_forward_pass(report));
    items.extend(data.map(|(line, bytes)| {
        let change =
            "If {0} makes a data set, keep it on the host, and move each batch to the GPU when it is used";
        let item = Item::new(Kind::RetainedTensors, Memory::Data, device, change).named(line);
        item.estimated([0, bytes], format!("{} that this line allocates", mib(bytes)))
    }));
    items.extend(unused_yet(report, device, &parts, oom));
    // The optimizer's temporaries cost nothing to avoid, so they come first if they are known to exist.
    let is_free = |item: &Item| {
        item.kind == Kind::OptimizerTemporaries && item.saves_bytes.is_some_and(|[least, _]| least > 0)
    };
    items.sort_by_key(|item| (!is_free(item), Reverse(item.most())));
    items
}

/// Returns the change for gradients that are held twice. DistributedDataParallel makes its buckets, which are as large as all
/// gradients, before the first step.
fn gradient_buckets(device: &Device, parts: &Parts<'_>) -> Option<Item> {
    let gradients = parts.gradients.saturating_add(parts.buckets);
    let is_twice = parts.parameters > 0 && gradients as f64 > parts.parameters as f64 * TWO_GRADIENTS;
    (is_twice && parts.is_large(gradients)).then(|| {
        let change = "If the program uses DistributedDataParallel, pass gradient_as_bucket_view=True to it";
        let item = Item::new(Kind::GradientBuckets, Memory::Gradients, device, change);
        let formula = format!(
            "{} of gradients for {} of parameters: gradients seem to be held twice",
            mib(gradients),
            mib(parts.parameters)
        );
        let doubled = (gradients - parts.parameters).min(parts.parameters);
        item.estimated([doubled, parts.parameters], formula)
    })
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

/// Returns a module's path up to its first number, with `*` in place of the number, and the path with the number.
fn repeated(tag: &str) -> Option<(String, &str)> {
    let mut end = 0;
    for component in tag.split('/') {
        end += component.len();
        let starred = names::group(component, 1, true);
        if starred != component || component == "*" || component.ends_with(".*") {
            let start = &tag[..end - component.len()];
            return Some((format!("{start}{starred}"), &tag[..end]));
        }
        end += 1;
    }
    None
}

/// Returns the tag of the largest output of a module that is not repeated, such as logits, its bytes, and those of the failed
/// request if it was made there, too. A module that calls its layers in a loop makes a tensor for each of them, and not one output;
/// unless the failed request has the size of the output.
fn large_output<'r>(parts: &Parts<'r>, oom: Option<&Oom>) -> Option<(&'r str, i64, i64)> {
    let asked = |tag: &str| {
        let oom = oom.filter(|oom| oom.tag.as_deref() == Some(tag));
        oom.map_or(0, |oom| signed(oom.asked_bytes))
    };
    let has_layers = |tag: &str| {
        let is_layer =
            |(_, layer): (String, &str)| layer.rsplit_once('/').is_some_and(|(path, _)| path == tag);
        parts.by_tag.keys().any(|other| repeated(without_sum(other)).is_some_and(is_layer))
    };
    let outputs = parts.by_tag.iter().filter(|(tag, bytes)| {
        let path = without_sum(tag);
        repeated(path).is_none() && (!has_layers(path) || asked(tag) >= **bytes / 2)
    });
    outputs.max_by_key(|(_, bytes)| **bytes).map(|(tag, bytes)| (*tag, *bytes, asked(tag)))
}

/// Returns the changes for activations: those of one large output, of repeated modules, and of the batch.
fn activations(device: &Device, parts: &Parts<'_>, oom: Option<&Oom>) -> Vec<Item> {
    if let Some([least, most]) = parts.without_backward.filter(|[_, most]| parts.is_large(*most)) {
        let change = "Run the forward passes that have no backward pass under torch.no_grad(); if they are, keep fewer of their outputs";
        let item = Item::new(Kind::EvaluationGradients, Memory::Activations, device, change);
        let formula = format!(
            "{} of forward passes at the peak that no backward pass used, less the outputs of two modules",
            mib(most)
        );
        return vec![item.estimated([least, most], formula)];
    }
    if !parts.is_large(parts.activations) {
        return Vec::new();
    }
    let has_share = |bytes: i64| bytes as f64 >= parts.activations as f64 * MODULE_SHARE;
    let mut items = Vec::new();
    if let Some((model, bytes)) = parts.not_updated.filter(|(_, bytes)| has_share(*bytes)) {
        let change =
            "Run {0} under torch.no_grad(), or call requires_grad_(False) on it, if no optimizer updates it";
        let item = Item::new(Kind::EvaluationGradients, Memory::Activations, device, change).named(model);
        items.push(item.estimated([0, bytes], format!("{} of activations of this model", mib(bytes))));
    }
    if let Some((tag, bytes, asked)) = large_output(parts, oom).filter(|(_, bytes, _)| has_share(*bytes)) {
        let change = match parts.is_inference {
            false => {
                "Compute the output of {0} and its loss in chunks of the rows, each with its backward pass"
            }
            true => "Compute the output of {0} only for the rows that are needed, or in chunks of the rows",
        };
        let item = Item::new(Kind::LargeOutput, Memory::Activations, device, change).named(tag);
        let beside = parts.short_lived.saturating_add(asked);
        let formula = format!(
            "{}/{CHUNKS} x {} of this output, and up to {} of temporaries beside it, with {CHUNKS} chunks",
            CHUNKS - 1,
            mib(bytes),
            mib(beside)
        );
        let most = bytes.saturating_add(beside) / CHUNKS * (CHUNKS - 1);
        items.push(item.estimated([bytes / CHUNKS * (CHUNKS - 1), most], formula));
    }
    if !parts.is_inference {
        items.extend(checkpointing(device, parts));
    }
    let change = match parts.is_inference {
        false => "Halve the batch, and accumulate gradients; if it has one sequence, shorten or split it",
        true => "Halve the batch; if it has one sequence, shorten it, or process it in pieces",
    };
    let item = Item::new(Kind::BatchSize, Memory::Activations, device, change);
    let formula = format!("1/2 x {} of activations", mib(parts.activations));
    items.push(item.estimated([parts.activations / 4, parts.activations / 2], formula));
    items
}

/// Returns the change for activations of repeated modules, with the share of the forward pass that runs again.
fn checkpointing(device: &Device, parts: &Parts<'_>) -> Option<Item> {
    let mut groups: BTreeMap<String, (i64, BTreeSet<&str>)> = BTreeMap::new();
    for (tag, bytes) in &parts.by_tag {
        let Some((starred, module)) = repeated(without_sum(tag)) else { continue };
        let group = groups.entry(starred).or_default();
        group.0 = group.0.saturating_add(*bytes);
        group.1.insert(module);
    }
    let groups = groups.into_iter().filter(|(_, (bytes, modules))| {
        *bytes as f64 >= parts.activations as f64 * MODULE_SHARE && modules.len() > 1
    });
    let (name, (bytes, modules)) = groups.max_by_key(|(_, (bytes, _))| *bytes)?;
    let count = modules.len() as i64;
    // The time of a forward pass on the GPU is unknown. Most of it is matrix products, whose operations grow with the parameters.
    let is_inside = |tag: &str| repeated(without_sum(tag)).is_some_and(|(starred, _)| starred == name);
    let inside = parts.parameters_by_tag.iter().filter(|(tag, _)| is_inside(tag)).map(|(_, bytes)| *bytes);
    let share = sum(inside).saturating_mul(100).checked_div(parts.parameters);
    let again = match share.filter(|share| *share > 0) {
        Some(share) => {
            format!("about {share} % of the forward pass runs twice (their share of the parameters)")
        }
        None => "how much of the forward pass runs twice is unknown".to_owned(),
    };
    let formula = format!(
        "{} of activations in {count} modules x {}/{count}, less their inputs; {again}",
        mib(bytes),
        count - 1
    );
    let saved = bytes / count * (count - 1);
    let change = "Checkpoint each module {0} (torch.utils.checkpoint)";
    let item = Item::new(Kind::Checkpointing, Memory::Activations, device, change).named(name);
    Some(item.estimated([saved / 4 * 3, saved], formula))
}

/// Returns the change for gradients that were not cleared before the forward pass. An optimizer step needs all gradients, so clearing
/// them earlier saves nothing if memory runs out there.
fn kept_gradients(device: &Device, parts: &Parts<'_>, oom: Option<&Oom>) -> Option<Item> {
    if oom.is_some_and(|oom| oom.phase.as_deref() == Phase::Optimizer.name()) {
        return None;
    }
    let iterations = &device.details.iterations;
    let mut rows = iterations.rows.iter().chain(&iterations.open).rev();
    let kept = rows.find(|row| row.start_ns <= parts.time_ns)?.kept_gradients.peak_bytes;
    let bytes = parts.gradients.min(kept.saturating_sub(parts.buckets));
    let change = "Call optimizer.zero_grad() directly after optimizer.step(), without set_to_none=False";
    // Without these gradients, memory is highest before the backward pass, with all activations, or after it, with new gradients. So
    // the saving overlaps with that of fewer activations.
    let item = Item::new(Kind::KeptGradients, Memory::Activations, device, change);
    let least = bytes.min(parts.activations);
    let formula = format!(
        "{} of gradients from the previous step; at most the activations, if these are smaller",
        mib(bytes)
    );
    is_material(bytes, parts.used).then(|| item.estimated([least, bytes], formula))
}

/// Returns the changes for the optimizer's state and temporaries.
fn optimizer(device: &Device, parts: &Parts<'_>, oom: Option<&Oom>) -> Vec<Item> {
    let mut items = Vec::new();
    let earlier = state_of_earlier_steps(device);
    let is_in_step = oom.is_some_and(|oom| oom.phase.as_deref() == Phase::Optimizer.name());
    // A first step that fails has not made all of its state yet, or its temporaries are not known from its state. Adam's state has
    // two values for each parameter. An optimizer without any state, such as plain SGD, needs none.
    let is_first_step = is_in_step && earlier == 0 && parts.optimizer > 0;
    let (state, formula) = match is_first_step {
        true => (2 * parts.trained, "2 x parameters with gradients, as Adam needs"),
        false => (parts.optimizer, "the state at that time"),
    };
    if is_of_second_optimizer(parts.optimizer, earlier) {
        let change = "If a second optimizer follows, delete the first one before the second one's first step";
        let item = Item::new(Kind::OptimizerState, Memory::OptimizerState, device, change);
        let formula = format!("{} of optimizer state in earlier steps", mib(earlier));
        items.push(item.estimated([earlier; 2], formula));
    } else if parts.is_large(state) && state >= parts.updated && !parts.has_small_state {
        let change = "Use an optimizer with 8-bit state, such as bitsandbytes.optim.Adam8bit";
        let item = Item::new(Kind::OptimizerState, Memory::OptimizerState, device, change);
        let formula = format!("3/4 x {} of float32 state ({formula})", mib(state));
        items.push(item.estimated([state / 2, state / 4 * 3], formula));
    }
    let beyond = if is_first_step { parts.optimizer.saturating_sub(state) } else { 0 };
    let (saved, formula) = match beyond > 0 {
        true => {
            let formula = format!(
                "{} beyond Adam's state of 2 x parameters with gradients; the temporaries are at most 1 x these parameters",
                mib(beyond)
            );
            ([beyond.min(parts.trained), parts.trained], formula)
        }
        false => ([0, parts.optimizer_temporaries], "temporaries of the optimizer at the peak".to_owned()),
    };
    if is_material(saved[1], parts.used) {
        let change = "Pass fused=True or foreach=False to the optimizer";
        let item = Item::new(Kind::OptimizerTemporaries, Memory::OptimizerState, device, change);
        items.push(item.estimated(saved, formula));
    }
    items
}
