//! The change for a model with LoRA adapters whose own parameters are trained, too: adapters are made to train few parameters.

use super::super::item::{Item, Kind, Memory, mib};
use super::parts::{Parts, is_inside};
use crate::sum;
use gpumem_model::run::Device;
use std::collections::{BTreeMap, BTreeSet};

/// Start of the names of an adapter's parameters, or of the modules that have them, such as `lora_A.default`.
const ADAPTER: &str = "lora_";
/// Minimum share of the layers' own parameters that have a gradient or optimizer state.
const TRAINED_SHARE: f64 = 0.5;

/// Returns the layer that has an adapter, by the path of the adapter's parameter.
fn adapted(tag: &str) -> Option<&str> {
    let (layer, _) = tag.split_once("/lora_")?;
    Some(layer)
}

/// Returns the model of a parameter. The layers of a `Sequential` have paths such as `Sequential.0`.
fn root(tag: &str) -> &str {
    tag.split(['/', '.']).next().unwrap_or(tag)
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
    let named = sum(parts.states_by_tag.iter().filter(|(tag, _)| tag.contains('/')).map(|(_, bytes)| *bytes));
    let unnamed = parts.optimizer.saturating_sub(named).saturating_add(parts.optimizer_temporaries).max(0);
    (is_trained && parts.is_large(saved)).then(|| {
        let change = "Freeze the base of {0}: it has LoRA adapters, and its other parameters are trained, too. Call requires_grad_(False) on all without lora_ in their names, after get_peft_model() as well";
        let item = Item::new(Kind::UnfrozenBase, Memory::OptimizerState, device, change).named(model);
        let formula = format!(
            "{} of gradients, and {} of optimizer state, of parameters beside the adapters; with what the optimizer has made for unknown ones, at most {} more",
            mib(gradients),
            mib(state),
            mib(unnamed)
        );
        item.estimated([saved, saved.saturating_add(unnamed)], formula)
    })
}
