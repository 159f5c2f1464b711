//! Changes for memory that the program needs: by role and module at the failed request, or else at the peak.

mod activations;
mod cells;
mod collected;
mod course;
mod data;
mod earlier;
mod evaluation;
mod formulas;
mod graphs;
pub(super) mod library;
mod model;
mod not_updated;
mod parts;
mod precision;

use self::cells::has_forward_pass;
use self::parts::Parts;
use super::is_full;
use super::item::{Item, Kind, Memory, mib, place_of};
use crate::{Report, held, most_used};
use gpumem_model::run::{Class, Device, Oom};
use gpumem_model::units::signed;
use std::cmp::Reverse;

/// Minimum saving by a change with a small price, in a program that fits: as a share of its memory, and of the device's.
const CHEAP_SHARE: f64 = 0.1;
const CHEAP_DEVICE_SHARE: f64 = 0.05;

/// Returns the changes that make the parts of the memory smaller, the one with the largest saving first.
pub(super) fn parts(report: &Report<'_>, device: &Device, oom: Option<&Oom>) -> Vec<Item> {
    of_parts(report, device, &Parts::of(report, device, oom), oom)
}

fn of_parts(report: &Report<'_>, device: &Device, parts: &Parts<'_>, oom: Option<&Oom>) -> Vec<Item> {
    let of_library = library::item(device, parts, oom);
    let has_library = of_library.is_some();
    // The pass in which a collection of results becomes too large has no part in it.
    let of_pass = (!library::is_kept(oom)).then(|| activations::items(device, parts, oom));
    let mut items: Vec<Item> = of_library.into_iter().chain(of_pass.into_iter().flatten()).collect();
    items.extend(formulas::item(device, parts));
    items.extend(formulas::own_operations(device, parts).filter(|_| !has_library));
    items.extend(formulas::of_line(device, parts));
    items.extend(precision::copy_of_output(report, device, parts, oom));
    items.extend(model::equal_models(device, parts));
    items.extend(model::kept_gradients(device, parts, oom));
    items.extend(model::unfrozen_base(device, parts));
    let sparse = model::sparse_gradients(device, parts);
    let of_tables = sparse.as_ref().map(Item::most);
    items.extend(sparse);
    items.extend(model::optimizer(device, parts, oom));
    items.extend(model::precision(device, parts, oom));
    items.extend(model::gradient_buckets(device, parts));
    items.extend(model::loaded_checkpoint(device, parts));
    items.extend(model::copy_of_base(device, parts));
    items.extend(oom.and_then(|oom| earlier::previous_result(report, device, oom)));
    // What an evaluation collects is the reason why it needs more than the training.
    let of_evaluation = || {
        collected::item(report, device, parts).or_else(|| evaluation::larger_than_training(report, device))
    };
    items.extend(oom.is_none().then(of_evaluation).flatten());
    let history = oom.is_none().then(|| data::history(report, device, parts)).flatten();
    let of_course = history.or_else(|| oom.is_none().then(|| course::item(report, device, parts)).flatten());
    let data = data::data_set(report, device, parts, oom);
    // Such a line did not make a data set before the first step.
    let is_same =
        |data: &Item| of_course.as_ref().is_some_and(|item| item.untrusted_names == data.untrusted_names);
    items.extend(data.filter(|data| !is_same(data)));
    items.extend(of_course);
    items.extend(unused_yet(report, device, parts, oom));
    // Changes with a small price come first if the memory is known to exist, and so does float64 if memory is short.
    let is_short = oom.is_some() || is_full(device);
    let is_first = |item: &Item| {
        let is_much = item.most() as f64 >= parts.used as f64 * CHEAP_SHARE;
        is_short && model::is_of_float64(item, parts) || item.is_cheap() && is_much
    };
    // Fewer bits for the whole model may cost accuracy, so the parameters alone decide how early that is advised.
    let rank = |item: &Item| match item.kind {
        Kind::ParameterPrecision if has_forward_pass(report) => item.most().min(parts.parameters / 2),
        // It excludes sparse gradients, whose state keeps its precision.
        Kind::OptimizerState => item.most().min(of_tables.unwrap_or(i64::MAX)),
        _ => item.most(),
    };
    // Of those, the one with the larger saving for sure; a price must be worth it.
    let value = |item: &Item| {
        let sure = item.saves_bytes.map_or(0, |[least, _]| least).midpoint(rank(item));
        if item.is_free() { sure } else { sure / 4 * 3 }
    };
    items.sort_by_key(|item| {
        let is_first = is_first(item);
        (!is_first, Reverse(if is_first { value(item) } else { rank(item) }))
    });
    // A request that failed was not held.
    for item in &mut items {
        item.saves_bytes = item.saves_bytes.map(|saved| saved.map(|bytes| bytes.min(parts.used)));
    }
    // A batch that is much larger than all others is the cause, whatever else could be smaller.
    if let Some(item) = oom.and_then(|oom| activations::outlier(report, device, parts, oom)) {
        let after = items.iter().take_while(|item| item.is_cheap()).count();
        items.insert(after, item);
    }
    // The size of the next attempt decides how much is saved.
    if let Some((item, is_certain)) = oom.and_then(|oom| earlier::failed_attempt(report, device, oom)) {
        items.insert(if is_certain { 0 } else { items.len() }, item);
    }
    items
}

/// Returns the changes for a program that fits: those with a small price that are known to save much, and those for most of its
/// memory, such as a data set or the parameters of a model that is not trained.
pub(super) fn cheap(report: &Report<'_>, device: &Device) -> Vec<Item> {
    let used = most_used(device).unwrap_or(0) as f64;
    let least = (used * CHEAP_SHARE).max(device.total_bytes.map_or(0, signed) as f64 * CHEAP_DEVICE_SHARE);
    let parts = Parts::of(report, device, None);
    let mut items = of_parts(report, device, &parts, None);
    items.retain(|item| {
        let is_advised = item.is_cheap()
            || model::is_of_float64(item, &parts)
            || model::is_of_inference(item, &parts)
            || item.kind == Kind::GraphsAtOnce && graphs::are_most(device, &parts)
            || formulas::is_most(item, &parts)
            || item.kind == Kind::EqualModels
            || collected::is_of_results(item)
            || data::is_most(report, device, item, &parts);
        is_advised && item.most() as f64 >= least
    });
    items
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
