//! Changes for parameters, gradients, and the optimizer's state and temporaries.

use super::super::item::{Item, Kind, MIB, Memory, is_material, mib};
use super::cells::{is_inside, root};
use super::parts::Parts;
use crate::amounts::sum;
use crate::findings::{is_of_second_optimizer, state_of_earlier_steps};
use gpumem_model::names::Named;
use gpumem_model::run::{Device, Oom};
use gpumem_wire::Phase;
use std::collections::{BTreeMap, BTreeSet};

/// Size of the gradients, as a factor of the parameters, from which each gradient seems to be held twice.
const TWO_GRADIENTS: f64 = 1.2;
/// Maximum bytes of the rows that a batch uses, as a share of the tables, for sparse gradients to be small.
const ROWS_SHARE: f64 = 0.25;
/// Minimum bytes of all equal models but one, as a share of the process's memory.
const EQUAL_SHARE: f64 = 0.4;
/// Minimum share of the parameters in the memory for advice on their type to a program that fits.
const MOST_SHARE: f64 = 0.5;
/// Gradients of at least this many times the parameters are not explained by buckets.
const MOST_GRADIENTS: i64 = 3;

/// Start of the names of an adapter's parameters, or of the modules that have them, such as `lora_A.default`.
const ADAPTER: &str = "lora_";
/// Minimum share of the layers' own parameters that have a gradient or optimizer state.
const TRAINED_SHARE: f64 = 0.5;

/// Returns the change for gradients that are held twice. DistributedDataParallel makes its buckets, which are as large as all
/// gradients, before the first step.
pub(super) fn gradient_buckets(device: &Device, parts: &Parts<'_>) -> Option<Item> {
    let gradients = parts.gradients.saturating_add(parts.buckets_of_ddp);
    // Gradients in float32 of parameters in bfloat16 are twice as large, and not held twice: they have no buckets. With
    // gradient_as_bucket_view=True the gradients are not tensors of their own.
    let least = (parts.parameters as f64 * (TWO_GRADIENTS - 1.0)) as i64;
    let is_twice = gradients < parts.parameters.saturating_mul(MOST_GRADIENTS)
        && gradients > parts.parameters.saturating_add(least)
        && parts.gradients.min(parts.buckets_of_ddp) > least;
    (parts.parameters > 0 && is_twice && parts.is_large(gradients)).then(|| {
        let change = "If the program uses DistributedDataParallel, pass gradient_as_bucket_view=True to it";
        let item = Item::new(Kind::GradientBuckets, Memory::Gradients, device, change);
        let formula = format!(
            "{} of gradients for {} of parameters: gradients seem to be held twice",
            mib(gradients),
            mib(parts.parameters)
        );
        let doubled = (gradients - parts.parameters).min(parts.parameters);
        // When the second step begins, the buckets are made again beside the old ones, without activations.
        let of_pass = parts.activations.saturating_add(parts.short_lived);
        item.estimated([doubled.min(of_pass), parts.parameters], formula)
    })
}

/// Returns the change for a checkpoint that stays on the device after the model was loaded from it.
pub(super) fn loaded_checkpoint(device: &Device, parts: &Parts<'_>) -> Option<Item> {
    let (line, bytes) = parts.checkpoint.filter(|(_, bytes)| is_material(*bytes, parts.used))?;
    let change = "Load the checkpoint of {0} with map_location=\"cpu\", or delete it after load_state_dict()";
    let item = Item::new(Kind::LoadedCheckpoint, Memory::Data, device, change).named(line);
    let formula =
        format!("{} that this line loads and keeps, as many as a model's parameters have", mib(bytes));
    Some(item.estimated([bytes; 2], formula))
}

/// Returns the change for a second model that has as many frozen parameters as the base of a model with an adapter, and no others.
pub(super) fn copy_of_base(device: &Device, parts: &Parts<'_>) -> Option<Item> {
    let (model, copy, bytes) = parts.sizes.copy_of_base()?;
    let of_copy = parts.parameters_by_tag.iter().filter(|(tag, _)| root(tag) == copy);
    // A model on another device, or on the host, has no parameters here.
    let held = sum(of_copy.map(|(_, bytes)| *bytes)).min(bytes);
    is_material(held, parts.used).then(|| {
        let change = "If {1} is a copy of the frozen base of {0}, run {0} without its adapter in its place (peft: with model.disable_adapter()), and delete the copy";
        let item = Item::new(Kind::ModelCopy, Memory::Parameters, device, change).named(model).named(copy);
        let formula = format!(
            "{} of parameters of the second model, which has as many as the frozen ones of the first, and trains none",
            mib(held)
        );
        item.estimated([held; 2], formula)
    })
}

/// Returns the change for models of one class with the same sizes on one device, in a program that trains nothing, such as one for
/// each thread.
pub(super) fn equal_models(device: &Device, parts: &Parts<'_>) -> Option<Item> {
    let is_here = |model: &str| parts.parameters_by_tag.keys().any(|tag| is_inside(tag, model));
    let (name, count, bytes) = parts.sizes.equal_models(is_here).filter(|_| parts.is_evaluation)?;
    let saved = bytes.saturating_mul(count - 1);
    (count > 2 && saved <= parts.used && saved as f64 >= parts.used as f64 * EQUAL_SHARE).then(|| {
        let change = "If the {1} models like {0} have the same weights, share one: threads can call it at the same time in evaluation mode";
        let item = Item::new(Kind::EqualModels, Memory::Parameters, device, change).named(name).named(count.to_string());
        let formula = format!("{} x {} of parameters of a model; models of an ensemble differ", count - 1, mib(bytes));
        item.estimated([0, saved], formula)
    })
}

/// Returns the change for gradients that were not cleared before the forward pass. An optimizer step needs all gradients, so clearing
/// them earlier saves nothing if memory runs out there.
pub(super) fn kept_gradients(device: &Device, parts: &Parts<'_>, oom: Option<&Oom>) -> Option<Item> {
    if oom.is_some_and(|oom| oom.phase.as_deref() == Phase::Optimizer.name()) {
        return None;
    }
    let iterations = &device.details.iterations;
    let rows = || iterations.rows.iter().chain(&iterations.open);
    let step = rows().rev().find(|row| row.start_ns <= parts.time_ns)?;
    let bytes = parts.gradients.min(step.kept_gradients.peak_bytes.saturating_sub(parts.buckets));
    if !is_material(bytes, parts.used) {
        return None;
    }
    // Without these gradients, memory is highest in the backward pass, with all activations and its own temporary memory, or in the
    // optimizer's step, with new gradients and temporaries. So the saving overlaps with that of fewer activations.
    let of_backward = rows().map(|row| row.intermediate_gradients.peak_bytes).max().unwrap_or(0);
    let of_optimizer = rows().map(|row| row.temporaries.peak_bytes).max().unwrap_or(0);
    let of_pass = parts.activations.saturating_add(parts.short_lived);
    let least = bytes.saturating_sub(of_backward).min(of_pass.saturating_sub(of_optimizer)).max(0);
    let change = "Call optimizer.zero_grad() directly after optimizer.step(), without set_to_none=False";
    let item = Item::new(Kind::KeptGradients, Memory::Activations, device, change);
    let formula = format!(
        "{} of gradients from the previous step; at most the {} of the forward pass, less temporaries of later phases",
        mib(bytes),
        mib(of_pass)
    );
    Some(item.estimated([least, bytes.min(of_pass)], formula))
}

/// Returns the bytes of the optimizer's state, and whether they are those that a first step that failed needs. Such a step has not
/// made all of its state yet, or its temporaries are not known from its state. Adam's state has two values for each parameter. An
/// optimizer without any state, such as plain SGD, needs none.
fn state(device: &Device, parts: &Parts<'_>, oom: Option<&Oom>) -> (i64, bool) {
    let is_in_step = oom.is_some_and(|oom| oom.phase.as_deref() == Phase::Optimizer.name());
    let is_first_step = is_in_step && state_of_earlier_steps(device) == 0 && parts.optimizer > 0;
    let state = if is_first_step { parts.trained.saturating_mul(2) } else { parts.optimizer };
    (state, is_first_step)
}

/// Returns the change for embedding tables whose gradients have all rows. The rows that a batch uses are activations, so these bound
/// the bytes of a sparse gradient. Beside it is one with each row once, while it is made.
pub(super) fn sparse_gradients(device: &Device, parts: &Parts<'_>) -> Option<Item> {
    let [tables, _] = parts.sizes.tables();
    let iterations = &device.details.iterations;
    let rows = iterations.rows.iter().chain(&iterations.open);
    let used = rows.map(|row| row.activations.peak_bytes.max(row.kept_activations.peak_bytes)).max();
    let rows = used.unwrap_or(0).max(parts.activations);
    let is_few = rows as f64 <= tables as f64 * ROWS_SHARE;
    let held = tables.min(parts.gradients);
    (is_few && parts.is_large(held.saturating_mul(2))).then(|| {
        let change = "Pass sparse=True to the nn.Embedding tables, and update them with SparseAdam (or SGD): their gradients have all rows, and a batch uses few. SparseAdam changes only the moments of these rows, and has no weight decay";
        // The optimizer's temporaries are among them, and SparseAdam has no smaller state.
        let item = Item::new(Kind::SparseGradients, Memory::OptimizerState, device, change);
        let formula = format!(
            "{} of gradients of embedding tables, less 2 x the rows of a batch (all activations have {}), and up to as many temporaries of the optimizer",
            mib(held),
            mib(rows)
        );
        item.estimated([held.saturating_sub(rows.saturating_mul(2)).max(0), held.saturating_mul(2)], formula)
    })
}

/// Returns the changes for the optimizer's state and temporaries.
pub(super) fn optimizer(device: &Device, parts: &Parts<'_>, oom: Option<&Oom>) -> Vec<Item> {
    let mut items = Vec::new();
    let earlier = state_of_earlier_steps(device);
    let (state, is_first_step) = state(device, parts, oom);
    let formula = match is_first_step {
        true => "2 x parameters with gradients, as Adam needs",
        false => "the state at that time",
    };
    if is_of_second_optimizer(parts.optimizer, earlier) {
        let change = "If a second optimizer follows, delete the first one before the second one's first step";
        let item = Item::new(Kind::OptimizerState, Memory::OptimizerState, device, change);
        let formula = format!("{} of optimizer state in earlier steps", mib(earlier));
        items.push(item.estimated([earlier; 2], formula));
    } else if parts.is_large(state) && has_large_state(parts, state) && parts.sizes.tables()[1] < state / 4 {
        // Optimizers with 8-bit state take no sparse gradients.
        let change = "Use an optimizer with 8-bit state, such as bitsandbytes.optim.Adam8bit";
        let item = Item::new(Kind::OptimizerState, Memory::OptimizerState, device, change);
        let (item, kind) = match parts.sizes.state_kind() {
            Some(kind @ ("bfloat16" | "float16")) => {
                (item.estimated([state / 20 * 9, state / 2], "1/2"), kind)
            }
            Some(kind @ "float64") => (item.estimated([state / 5 * 4, state / 8 * 7], "7/8"), kind),
            // The scale of each block of values, and small tensors with 32 bits, are the rest.
            _ => (item.estimated([state / 10 * 7, state / 4 * 3], "3/4"), "float32"),
        };
        let formula = format!("{} x {} of {kind} state ({formula})", item.formula, mib(state));
        let item = Item { formula, ..item };
        items.push(if is_first_step { with_temporaries(item, parts) } else { item });
    }
    let beyond = if is_first_step { parts.optimizer.saturating_sub(state) } else { 0 };
    let (saved, formula) = match beyond > 0 {
        true => {
            let formula = format!(
                "{} beyond Adam's state of 2 x parameters with gradients; the temporaries are at most 1 x these parameters",
                mib(beyond)
            );
            // A loop over the parameters makes two temporaries of one parameter.
            let of_loop = parts.parameters_by_tag.values().max().map_or(0, |bytes| bytes.saturating_mul(2));
            let least = if is_foreach(oom) { parts.trained.saturating_sub(of_loop) } else { 0 };
            ([beyond.min(parts.trained).max(least), parts.trained], formula)
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

/// Adds the temporaries of a first step to the saving of an optimizer with 8-bit state, which makes none. Whether this one makes
/// them is unknown before its state is complete.
fn with_temporaries(item: Item, parts: &Parts<'_>) -> Item {
    let saves_bytes = item.saves_bytes.map(|[least, most]| [least, most.saturating_add(parts.trained)]);
    let formula = format!(
        "{}, and up to {} of temporaries, which those make none of",
        item.formula,
        mib(parts.trained)
    );
    Item { saves_bytes, formula, ..item }
}

/// Returns whether a request failed in an optimizer that makes the temporaries of all parameters at once.
fn is_foreach(oom: Option<&Oom>) -> bool {
    let stack = oom.and_then(|oom| oom.stack.as_deref()).unwrap_or_default();
    stack.lines().any(|line| line.starts_with("_multi_tensor_"))
}

/// Returns whether an optimizer's state has more than 8 bits for each value: by its element type, or else by its size and the
/// optimizer's name.
fn has_large_state(parts: &Parts<'_>, state: i64) -> bool {
    match parts.sizes.state_kind() {
        Some(kind) => !kind.ends_with("int8") && !kind.starts_with("float8"),
        None => state >= parts.updated && !parts.has_small_state,
    }
}

/// Returns the change for float32 weights of which autocast keeps copies in half precision, in a program that trains nothing.
fn weight_copies(device: &Device, parts: &Parts<'_>) -> Option<Item> {
    let copies = parts.autocast_copies;
    is_material(copies, parts.used).then(|| {
        let change = "Load the model in the type that autocast uses (torch_dtype=torch.bfloat16, or model.to(torch.bfloat16) on the host): autocast keeps a copy of each float32 weight";
        let item = Item::new(Kind::WeightCopies, Memory::Parameters, device, change);
        let formula = format!(
            "{} of copies of weights, and 1/2 x up to {} of parameters",
            mib(copies),
            mib(parts.parameters)
        );
        item.estimated([copies, copies.saturating_add(parts.parameters / 2)], formula)
    })
}

/// Returns whether the change makes float64 parameters smaller. Many programs have them by mistake, and some need their precision.
pub(super) fn is_of_float64(item: &Item, parts: &Parts<'_>) -> bool {
    item.kind == Kind::ParameterPrecision && parts.sizes.parameter_kind() == Some("float64")
}

/// Returns whether the change is for float32 parameters that are most of the memory of a program that never trained.
pub(super) fn is_of_inference(item: &Item, parts: &Parts<'_>) -> bool {
    let is_float32 = parts.sizes.parameter_kind() == Some("float32");
    let is_most = parts.parameters as f64 >= parts.used as f64 * MOST_SHARE;
    item.kind == Kind::ParameterPrecision && parts.is_evaluation && is_float32 && is_most
}

/// Returns the change for parameters with more bits than they may need. All tensors of a step have the type of the parameters.
pub(super) fn precision(device: &Device, parts: &Parts<'_>, oom: Option<&Oom>) -> Option<Item> {
    let kind = parts.sizes.parameter_kind();
    let state = state(device, parts, oom).0;
    let [parameters, followers] = parts.of_main_kind(state);
    let model = parameters.saturating_add(followers);
    let others = parts.activations.saturating_add(parts.short_lived);
    let of_others = match others {
        ..MIB => String::new(),
        _ => format!(", and 1/2 x up to {} of activations and temporaries", mib(others)),
    };
    let formula = format!("1/2 x {} of parameters, gradients and optimizer state{of_others}", mib(model));
    let both = [model / 2, model.saturating_add(others) / 2];
    let held = parts.allocator.max(model.saturating_add(others));
    let item = |change: &str| Item::new(Kind::ParameterPrecision, Memory::Parameters, device, change);
    match kind {
        Some("float64") => {
            let change = "If float32 is precise enough, make the model and its inputs float32: the parameters are float64, as after .double(), or as NumPy's numbers are";
            // Results of operations on these parameters are float64, too. Masks and indices are beside them.
            let least = model.saturating_add(parts.of_modules_of_one_kind() / 2) / 2;
            let formula = format!(
                "1/2 x up to {} that the allocator holds, of which the model has {}, and activations of its modules {}",
                mib(held),
                mib(model),
                mib(parts.activations)
            );
            is_material(held / 2, parts.used).then(|| item(change).estimated([least, held / 2], formula))
        }
        Some("float32") if parts.is_evaluation && parts.autocast_copies > 0 => weight_copies(device, parts),
        Some("float32") | None if parts.is_large(parameters) => {
            let (change, least) = match kind {
                Some(_) => ("Load the parameters in bfloat16: they are float32", both[0]),
                None => ("Load the parameters in bfloat16, if they are float32 now", 0),
            };
            Some(item(change).estimated([least, both[1]], formula))
        }
        _ => None,
    }
}

/// Returns the layer that has an adapter, by the path of the adapter's parameter.
fn adapted(tag: &str) -> Option<&str> {
    let (layer, _) = tag.split_once("/lora_")?;
    Some(layer)
}

/// Returns the change for the largest model with such adapters. In the layers with adapters the own parameters must have gradients,
/// or optimizer state: other layers may be trained by intention.
pub(super) fn unfrozen_base(device: &Device, parts: &Parts<'_>) -> Option<Item> {
    let layers: BTreeSet<&str> = parts.parameters_by_tag.keys().filter_map(|tag| adapted(tag)).collect();
    let is_adapter = |tag: &str| tag.split('/').any(|name| name.starts_with(ADAPTER));
    let is_of_layer = |tag: &str| layers.iter().any(|layer| is_inside(tag, layer));
    let base = parts.parameters_by_tag.iter().filter(|(tag, _)| !is_adapter(tag) && is_of_layer(tag));
    let base: Vec<(&str, i64)> = base.map(|(tag, bytes)| (*tag, *bytes)).collect();
    let has_any =
        |tag: &str| [&parts.gradients_by_tag, &parts.states_by_tag].iter().any(|of| of.contains_key(tag));
    let trained = base.iter().filter(|(tag, _)| has_any(tag));
    let bytes_of = |tags: &[(&str, i64)]| sum(tags.iter().map(|(_, bytes)| *bytes));
    let is_trained = sum(trained.map(|(_, bytes)| *bytes)) as f64 >= bytes_of(&base) as f64 * TRAINED_SHARE;
    let model = root(base.iter().max_by_key(|(_, bytes)| *bytes)?.0);
    let is_needless = |tag: &str| root(tag) == model && !is_adapter(tag);
    let of = |bytes: &BTreeMap<&str, i64>| {
        sum(bytes.iter().filter(|(tag, _)| is_needless(tag)).map(|(_, bytes)| *bytes))
    };
    let [gradients, state] = [&parts.gradients_by_tag, &parts.states_by_tag].map(of);
    let saved = gradients.saturating_add(state);
    // Without these gradients, memory may be highest when a backward pass begins, with all activations.
    let rows = device.details.iterations.rows.iter().chain(&device.details.iterations.open);
    let of_pass = rows.map(|row| row.activations.peak_bytes).max().unwrap_or(0);
    let of_pass = of_pass.saturating_sub(parts.activations).clamp(0, gradients);
    let named = sum(parts.states_by_tag.iter().filter(|(tag, _)| tag.contains('/')).map(|(_, bytes)| *bytes));
    let unnamed = parts.optimizer.saturating_sub(named).saturating_add(parts.optimizer_temporaries).max(0);
    (is_trained && parts.is_large(saved)).then(|| {
        let change = "Freeze the base of {0}: it has LoRA adapters, and its other parameters are trained, too. Call requires_grad_(False) on all without lora_ in their names, after get_peft_model() as well";
        let item = Item::new(Kind::UnfrozenBase, Memory::OptimizerState, device, change).named(model);
        let of_begin = match of_pass {
            ..MIB => String::new(),
            _ => format!("; less up to {} of activations, when a backward pass begins", mib(of_pass)),
        };
        let formula = format!(
            "{} of gradients, and {} of optimizer state, of parameters beside the adapters; with what the optimizer has made for unknown ones, at most {} more{of_begin}",
            mib(gradients),
            mib(state),
            mib(unnamed)
        );
        item.estimated([saved - of_pass, saved.saturating_add(unnamed)], formula)
    })
}
