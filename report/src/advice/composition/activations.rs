//! Changes for activations: of passes that need no gradients, of one large output, of repeated modules, and of the batch.

use super::super::item::{Item, Kind, MIB, Memory, mib, place_of};
use super::cells::is_inside;
use super::graphs;
use super::not_updated::NotUpdated;
use super::parts::Parts;
use crate::amounts::sum;
use crate::{Report, findings, names};
use gpumem_model::cell::without_sum;
use gpumem_model::names::Named;
use gpumem_model::run::{Device, Oom};
use gpumem_model::units::signed;
use gpumem_wire::Phase;
use std::collections::BTreeMap;

/// Minimum share of the activations for advice on one module, or on a repeated one.
const MODULE_SHARE: f64 = 0.4;
/// Least saving by half the batch, as a divisor: two of three samples are left.
const LEAST_OF_BATCH: i64 = 3;
/// Minimum number of completed steps before one counts as an outlier, ...
const LEAST_STEPS: u64 = 8;
/// ... and minimum activations of it, as a factor of the most of an earlier step.
const OUTLIER: f64 = 3.0;
/// Parts into which the advice splits a large output.
const CHUNKS: i64 = 8;

/// Returns a module's path up to its first number, with `*` in place of the number, and the path with the number.
pub(super) fn repeated(tag: &str) -> Option<(String, &str)> {
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
/// unless the failed request, or the module's temporaries, have the size of the output: those of one layer are small. So the model's own
/// operations may compute the loss.
fn large_output<'r>(parts: &Parts<'r>, oom: Option<&Oom>) -> Option<(&'r str, i64, i64)> {
    let asked = |tag: &str| {
        let oom = oom.filter(|oom| oom.tag.as_deref() == Some(tag));
        oom.map_or(0, |oom| signed(oom.asked_bytes))
    };
    let beside = |tag: &str| parts.temporaries_by_tag.get(tag).copied().unwrap_or(0);
    let has_layers = |tag: &str| {
        let is_layer =
            |(_, layer): (String, &str)| layer.rsplit_once('/').is_some_and(|(path, _)| path == tag);
        parts.by_tag.keys().any(|other| repeated(without_sum(other)).is_some_and(is_layer))
    };
    let outputs = parts.by_tag.iter().filter(|(tag, bytes)| {
        let path = without_sum(tag);
        repeated(path).is_none() && (!has_layers(path) || asked(tag).max(beside(tag)) >= **bytes / 2)
    });
    outputs.max_by_key(|(_, bytes)| **bytes).map(|(tag, bytes)| (*tag, *bytes, asked(tag)))
}

/// Returns the changes for activations: those of one large output, of repeated modules, and of the batch.
pub(super) fn items(device: &Device, parts: &Parts<'_>, oom: Option<&Oom>) -> Vec<Item> {
    let mut items = Vec::new();
    if let Some([least, most]) = parts.kept_graphs.filter(|[_, most]| parts.is_large(*most)) {
        let change = "Run the forward passes whose results need no gradients under torch.no_grad(), or keep only .detach() of the results: their graphs stay through later optimizer steps";
        let item = Item::new(Kind::EvaluationGradients, Memory::Activations, device, change);
        let formula = format!(
            "{} of forward passes that stay through most steps and that no backward pass frees, less the largest module's, which the program may need",
            mib(most)
        );
        items.push(item.estimated([least, most], formula));
    } else if let Some([least, most]) = parts.without_backward.filter(|[_, most]| parts.is_large(*most)) {
        let change = "Run the forward passes that have no backward pass under torch.no_grad(); if they are, keep fewer of their outputs";
        let item = Item::new(Kind::EvaluationGradients, Memory::Activations, device, change);
        let formula = format!(
            "{} of forward passes at the peak that no backward pass used, less the outputs of two modules",
            mib(most)
        );
        return vec![item.estimated([least, most], formula)];
    }
    if !parts.is_large(parts.activations) {
        items.extend(oom.into_iter().flat_map(|oom| of_failed_pass(device, parts, oom)));
        return items;
    }
    let has_share = |bytes: i64| bytes as f64 >= parts.activations as f64 * MODULE_SHARE;
    items.extend(
        parts
            .not_updated
            .filter(|module| has_share(module.activations))
            .map(|module| not_updated(device, parts, module)),
    );
    items.extend(graphs_at_once(device, parts).filter(|_| parts.kept_graphs.is_none()));
    if let Some((tag, bytes, asked)) = large_output(parts, oom).filter(|(_, bytes, _)| has_share(*bytes)) {
        let change = match parts.is_inference {
            false => {
                "Compute the output of {0} and its loss in chunks of the rows, each with its backward pass"
            }
            true => "Compute the output of {0} only for the rows that are needed, or in chunks of the rows",
        };
        let item = Item::new(Kind::LargeOutput, Memory::Activations, device, change).named(tag);
        let beside = parts.short_lived.saturating_add(asked);
        let of_beside = match beside {
            ..MIB => String::new(),
            _ => format!(", and up to {} of temporaries beside it", mib(beside)),
        };
        let formula = format!(
            "{}/{CHUNKS} x {} of this output{of_beside}, with {CHUNKS} chunks",
            CHUNKS - 1,
            mib(bytes)
        );
        let most = bytes.saturating_add(beside) / CHUNKS * (CHUNKS - 1);
        items.push(item.estimated([bytes / CHUNKS * (CHUNKS - 1), most], formula));
    }
    if !parts.is_inference {
        items.extend(checkpointing(device, parts));
    }
    let change = match parts.is_inference {
        false => {
            "If the batch is larger than 1, halve it, and accumulate gradients; else shorten or split the sequence"
        }
        true => "If the batch is larger than 1, halve it; else process the sample in pieces",
    };
    let item = Item::new(Kind::BatchSize, Memory::Activations, device, change);
    // Copies of weights do not become smaller with the batch.
    let bytes = parts.activations.saturating_sub(parts.autocast_copies);
    let formula = format!("1/2 x {} of activations, or 1/{LEAST_OF_BATCH} if 3 samples become 2", mib(bytes));
    items.push(item.estimated(of_half_batch(parts, bytes), formula));
    items
}

/// Returns the change for a step with many times the activations of all earlier ones, such as a batch with one very long sample.
/// Steps with more passes before their backward pass have more activations for that reason.
pub(super) fn outlier(report: &Report<'_>, device: &Device, parts: &Parts<'_>, oom: &Oom) -> Option<Item> {
    let rows = &device.details.iterations.rows;
    let steps = rows.iter().map(|row| row.count).sum::<u64>();
    let earlier = rows.iter().map(|row| row.activations.peak_bytes).max().filter(|bytes| *bytes > 0)?;
    let passes = rows.iter().map(|row| row.passes_at_once).max()?.max(1);
    let is_one_pass = oom.passes_without_backward.is_some_and(|now| now <= passes);
    let factor = parts.activations as f64 / earlier as f64;
    let is_outlier = steps >= LEAST_STEPS && factor >= OUTLIER && is_one_pass && !parts.is_inference;
    (is_outlier && parts.is_large(parts.activations)).then(|| {
        let change = "Bound the size of a batch, such as by cutting long samples or by batches of samples of like length: the activations of{0} are {1} times the most of an earlier step";
        let step = oom.step.map_or_else(|| " this step".to_owned(), |step| format!(" step {step}"));
        let item = Item::new(Kind::OutlierBatch, Memory::Activations, device, change);
        let item = item.named(step).named(format!("{factor:.0}"));
        let (of_steps, beyond) = findings::beyond_steps(report.run, device, oom);
        let saved = parts.activations - earlier;
        let formula = format!(
            "{} of activations so far, less {} in the largest of {steps} earlier steps; the least: down to the {} in use in these steps",
            mib(parts.activations),
            mib(earlier),
            mib(of_steps)
        );
        item.estimated([saved.min(beyond), saved], formula)
    })
}

/// Returns the changes for a pass that failed at a large request, or with large temporaries, such as gradients of each sample.
fn of_failed_pass(device: &Device, parts: &Parts<'_>, oom: &Oom) -> Vec<Item> {
    let phase = oom.phase.as_deref().and_then(Phase::from_name);
    let is_pass = matches!(phase, Some(Phase::Forward | Phase::Backward | Phase::Evaluation));
    let asked = signed(oom.asked_bytes);
    let temporaries = parts.short_lived.saturating_sub(parts.optimizer_temporaries);
    let bytes = parts.activations.saturating_sub(parts.autocast_copies);
    let bytes = bytes.saturating_add(temporaries).saturating_add(asked);
    if !is_pass || !parts.is_large(bytes) {
        return Vec::new();
    }
    let request = parts.is_large(asked).then(|| {
        let change = "Make the tensor{0} only for the rows that are needed, or in chunks of the rows";
        let item = Item::new(Kind::LargeOutput, Memory::Activations, device, change).named(place_of(oom));
        let formula =
            format!("{}/{CHUNKS} x {} that were requested, with {CHUNKS} chunks", CHUNKS - 1, mib(asked));
        item.estimated([asked / CHUNKS * (CHUNKS - 1); 2], formula)
    });
    let change = "If the batch is larger than 1, halve it; else process the sample in pieces";
    let item = Item::new(Kind::BatchSize, Memory::Activations, device, change);
    let formula = format!(
        "1/2 x {} of activations, temporaries and the request, or 1/{LEAST_OF_BATCH} if 3 samples become 2",
        mib(bytes)
    );
    request.into_iter().chain([item.estimated(of_half_batch(parts, bytes), formula)]).collect()
}

/// Returns the least and most of these bytes that half the batch saves. Copies of weights that autocast may keep among them stay.
fn of_half_batch(parts: &Parts<'_>, bytes: i64) -> [i64; 2] {
    let copies = match parts.sizes.parameter_kind() {
        Some("float32") | None => (parts.parameters / 2).saturating_sub(parts.autocast_copies).max(0),
        Some(_) => 0,
    };
    [bytes.saturating_sub(copies).max(0) / LEAST_OF_BATCH, bytes / 2]
}

/// Returns the change for a module that no optimizer updates.
fn not_updated(device: &Device, parts: &Parts<'_>, module: NotUpdated<'_>) -> Item {
    let NotUpdated { activations, gradients, .. } = module;
    let change = match module.is_certain && gradients > 0 {
        true => {
            "No optimizer updates {0}: call requires_grad_(False) on it, or run it under torch.no_grad() if no gradient passes through it"
        }
        false => {
            "If no optimizer updates {0}, call requires_grad_(False) on it, or run it under torch.no_grad() if no gradient passes through it"
        }
    };
    let item = Item::new(Kind::EvaluationGradients, Memory::Activations, device, change).named(module.path);
    let formula = match gradients {
        0 => format!("{} of activations of this module", mib(activations)),
        _ => {
            format!("{} of activations and {} of gradients of this module", mib(activations), mib(gradients))
        }
    };
    // Under autocast, a pass without gradients still keeps a copy in half precision of each float32 weight that requires gradients.
    let inside = |tag: &str| is_inside(without_sum(tag), module.path);
    let weights = parts.parameters_by_tag.iter().filter(|(tag, _)| inside(tag)).map(|(_, bytes)| *bytes);
    let copies = match parts.sizes.parameter_kind() {
        Some("float32") if module.is_apart => sum(weights) / 2,
        _ => 0,
    };
    let formula = match copies {
        ..MIB => formula,
        _ => format!(
            "{formula}; torch.no_grad() alone saves {} less under autocast, which keeps copies of the weights",
            mib(copies)
        ),
    };
    // Gradients that pass through the module need its activations, and without them a pass still needs a few tensors.
    let own = parts.by_tag.iter().filter(|(tag, _)| inside(tag));
    let largest = own.map(|(_, bytes)| *bytes).max().unwrap_or(0);
    let needless = if module.is_apart { activations.saturating_sub(largest.saturating_mul(2)) } else { 0 };
    let least = needless.max(0).saturating_add(gradients).min(module.beyond_others);
    let least = if needless > 0 { least.saturating_sub(copies).max(gradients.min(least)) } else { least };
    item.estimated([least, activations.saturating_add(gradients)], formula)
}

/// Returns the change for graphs of several forward passes that are alive together.
fn graphs_at_once(device: &Device, parts: &Parts<'_>) -> Option<Item> {
    let graphs = graphs::at_once(device, parts).filter(|graphs| parts.is_large(graphs.bytes))?;
    let change = match graphs.is_trained {
        true => {
            "If the forward passes are independent, and their losses are only added up, call backward() in each of them"
        }
        false => {
            "Keep no graphs: call backward() in each pass of training, and run the others under torch.no_grad()"
        }
    };
    let item = Item::new(Kind::GraphsAtOnce, Memory::Activations, device, change);
    let formula = format!(
        "{} of activations of {} forward passes, when the last of {} begins",
        mib(graphs.bytes),
        graphs.passes - 1,
        graphs.passes
    );
    // Passes may share a graph, or need the state of the pass before: then the bytes are needed.
    let least = if graphs.is_trained { 0 } else { graphs.bytes };
    Some(item.estimated([least, graphs.bytes], formula))
}

/// Activations of the modules whose paths differ in one number only.
#[derive(Debug, Default)]
struct Repeated<'r> {
    bytes: i64,
    /// Module -> bytes of its largest tag. The module's input, which a checkpoint keeps, has about that size at most.
    modules: BTreeMap<&'r str, i64>,
}

/// Returns the change for activations of repeated modules, with the share of the forward pass that runs again.
fn checkpointing(device: &Device, parts: &Parts<'_>) -> Option<Item> {
    let mut groups: BTreeMap<String, Repeated<'_>> = BTreeMap::new();
    for (tag, bytes) in &parts.by_tag {
        let Some((starred, module)) = repeated(without_sum(tag)) else { continue };
        let group = groups.entry(starred).or_default();
        group.bytes = group.bytes.saturating_add(*bytes);
        let largest = group.modules.entry(module).or_default();
        *largest = (*largest).max(*bytes);
    }
    let groups = groups.into_iter().filter(|(_, group)| {
        group.bytes as f64 >= parts.activations as f64 * MODULE_SHARE && group.modules.len() > 1
    });
    let (name, Repeated { bytes, modules }) = groups.max_by_key(|(_, group)| group.bytes)?;
    let count = modules.len() as i64;
    let is_inside = |tag: &str| repeated(without_sum(tag)).is_some_and(|(starred, _)| starred == name);
    let parameters = || parts.parameters_by_tag.iter().filter(|(tag, _)| is_inside(tag));
    // A module without parts keeps little more than its input, which is the output of the one before.
    let has_parts = |path: &str| repeated(path).is_some_and(|(_, module)| module != path);
    let is_composed = parameters().next().is_none() // unknown
        || parts.by_tag.keys().filter(|tag| is_inside(tag)).any(|tag| has_parts(without_sum(tag)))
        || parameters().any(|(tag, _)| tag.rsplit_once('/').is_some_and(|(path, _)| has_parts(path)));
    // The time of a forward pass on the GPU is unknown. Most of it is matrix products, whose operations grow with the parameters.
    let share = sum(parameters().map(|(_, bytes)| *bytes)).saturating_mul(100).checked_div(parts.parameters);
    let again = match share.filter(|share| *share > 0) {
        Some(share) => {
            format!("about {share} % of the forward pass runs twice (their share of the parameters)")
        }
        None => "how much of the forward pass runs twice is unknown".to_owned(),
    };
    let saved = bytes / count * (count - 1);
    let (change, inputs) = match is_composed {
        true => ("Checkpoint each module {0} (torch.utils.checkpoint)", sum(modules.into_values())),
        false => (
            "Checkpoint the modules {0} in groups of several (torch.utils.checkpoint.checkpoint_sequential)",
            bytes,
        ),
    };
    let formula = format!(
        "{} of activations in {count} modules x {}/{count}, less their inputs of up to {}; {again}",
        mib(bytes),
        count - 1,
        mib(inputs)
    );
    // The square root of the number of modules is the best number of groups: their inputs stay, and all of one group.
    let most = match is_composed {
        true => saved,
        false => bytes.saturating_sub((2.0 * bytes as f64 / (count as f64).sqrt()) as i64),
    };
    let item = Item::new(Kind::Checkpointing, Memory::Activations, device, change).named(name);
    (most > 0).then(|| item.estimated([saved.saturating_sub(inputs).max(0), most], formula))
}
