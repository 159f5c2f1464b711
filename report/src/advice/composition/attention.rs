//! The change for attention of the transformers library that keeps the scores of all pairs of tokens, for its backward pass or as
//! outputs, when another module's request fails.

use super::super::item::{Item, Kind, Memory, mib};
use super::parts::Parts;
use crate::names;
use gpumem_model::cell::without_sum;
use gpumem_model::run::{Device, Oom};
use std::collections::BTreeMap;

/// Part of the path of a file of the library that defines a model.
const LIBRARY: &str = "/transformers/models/";
/// Minimum bytes of such a module, as a factor of its largest projection's. A fused operation keeps the projections, its output and one
/// number for each token and head.
const MANY_TIMES: i64 = 8;
/// Minimum number of projections: of queries, keys and values.
const LEAST_PROJECTIONS: usize = 3;

/// Returns the change for the attention modules, alike except for their numbers, with the most bytes.
pub(super) fn item(device: &Device, parts: &Parts<'_>, oom: Option<&Oom>) -> Option<Item> {
    let is_of_library = oom?.stack.as_deref().is_some_and(|stack| stack.contains(LIBRARY));
    let is_attention = |path: &str| {
        let name = path.to_lowercase();
        name.contains("attn") || name.contains("attention")
    };
    // Module -> number of the modules in it, and the largest one's bytes.
    let mut inner: BTreeMap<&str, (usize, i64)> = BTreeMap::new();
    for (tag, bytes) in &parts.by_tag {
        let Some((module, _)) = without_sum(tag).rsplit_once('/') else { continue };
        let (count, largest) = inner.entry(module).or_default();
        (*count, *largest) = (*count + 1, (*largest).max(*bytes));
    }
    let keeps_scores = |(tag, bytes): &(&&str, &i64)| {
        let projections = inner.get(**tag).filter(|(count, _)| *count >= LEAST_PROJECTIONS);
        projections.is_some_and(|(_, largest)| **bytes >= largest.saturating_mul(MANY_TIMES))
    };
    let scores = parts.by_tag.iter().filter(|(tag, _)| is_attention(tag)).filter(keeps_scores);
    let (tag, _) = scores.max_by_key(|(_, bytes)| **bytes)?;
    let bytes = parts.of_like_modules(tag);
    (is_of_library && parts.is_large(bytes)).then(|| {
        let change = "Load the model with attn_implementation=\"sdpa\" if its class supports it, and without output_attentions=True: {0} keep the scores of all pairs of tokens";
        let modules = names::group(tag, usize::MAX, true);
        let item = Item::new(Kind::LibrarySetting, Memory::Activations, device, change).named(modules);
        let formula = format!(
            "{} of these modules, each of which keeps at least {MANY_TIMES} x as much as its largest projection",
            mib(bytes)
        );
        item.estimated([bytes / 2, bytes], formula)
    })
}
