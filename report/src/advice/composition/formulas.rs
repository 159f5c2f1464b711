//! Modules without parameters that hold many times their input, because they compute a formula in several operations: each keeps its
//! result for the backward pass, where one operation of PyTorch keeps its input only.

use super::super::item::{Item, Kind, Memory, mib};
use super::activations::repeated;
use super::parts::{Parts, is_inside};
use crate::names;
use gpumem_model::cell::without_sum;
use gpumem_model::run::Device;
use gpumem_model::units::plural;
use std::collections::BTreeMap;

/// Minimum bytes of such a module, as a factor of those of the largest module with parameters beside it. One operation keeps at most
/// its input and its output.
const MANY_TIMES: i64 = 3;

/// Returns the module that contains a module: `Net/layers` of `Net/layers/gelu`; empty for a root.
fn parent(tag: &str) -> &str {
    tag.rsplit_once('/').map_or("", |(parent, _)| parent)
}

/// Returns the bytes of the largest module with parameters that has the same parent as `tag`. It gives about the size of the input.
fn beside(parts: &Parts<'_>, tag: &str) -> i64 {
    let within = parent(tag);
    let has_parameters = |path: &str| parts.parameters_by_tag.keys().any(|name| parent(name) == path);
    // The output of a model is the input of a loss.
    let is_root =
        |path: &str| within.is_empty() && parts.parameters_by_tag.keys().any(|name| is_inside(name, path));
    let others = parts.by_tag.iter().filter(|(other, _)| {
        let path = without_sum(other);
        path != tag && is_inside(path, within) && (has_parameters(path) || is_root(path))
    });
    others.map(|(_, bytes)| *bytes).max().unwrap_or(0)
}

/// Returns the change for the modules without parameters, alike except for their numbers, that hold the most bytes.
pub(super) fn item(device: &Device, parts: &Parts<'_>) -> Option<Item> {
    // Without a name of a parameter inside of a model, all of its modules seem to have none.
    let is_known = |tag: &str| {
        let root = tag.split('/').next();
        parts.parameters_by_tag.keys().any(|name| name.split('/').next() == root || !tag.contains('/'))
    };
    let has_none = |tag: &str| !parts.parameters_by_tag.keys().any(|name| is_inside(name, tag));
    // Paths with `*` in place of the first number -> bytes, number of modules, one of them.
    let mut groups: BTreeMap<String, (i64, i64, &str)> = BTreeMap::new();
    for (tag, bytes) in &parts.by_tag {
        let path = without_sum(tag);
        if !names::is_line(path) && is_known(path) && has_none(path) {
            let alike = repeated(path).map(|(starred, own)| starred + &path[own.len()..]);
            let (all, count, _) = groups.entry(alike.unwrap_or(path.to_owned())).or_insert((0, 0, path));
            (*all, *count) = (all.saturating_add(*bytes), *count + 1);
        }
    }
    let (name, (bytes, count, first)) = groups.into_iter().max_by_key(|(_, (bytes, ..))| *bytes)?;
    let input = beside(parts, first);
    let is_many_times = input > 0 && bytes / count >= input.saturating_mul(MANY_TIMES);
    (is_many_times && !parts.is_inference && parts.is_large(bytes)).then(|| {
        let change = match count {
            // The backward pass would compute all of a single module again, and then needs all of its memory.
            1 => {
                "If {0} computes by a formula what PyTorch has as one operation, use that (such as F.cross_entropy with class indices in place of one-hot)"
            }
            _ => {
                "If {0} computes by a formula what PyTorch has as one operation, use that (such as F.gelu, F.scaled_dot_product_attention, or F.cross_entropy with class indices in place of one-hot); else checkpoint this module only"
            }
        };
        let item = Item::new(Kind::FusedOperation, Memory::Activations, device, change).named(name);
        let formula = format!(
            "{} of activations in {} without parameters, which is at least {MANY_TIMES} x an input of about {} each",
            mib(bytes),
            plural(count.unsigned_abs(), "module"),
            mib(input)
        );
        // The operations of the module are unknown: a large output, as of nn.Unfold, is needed. One operation keeps its input.
        let most = if count == 1 { bytes.saturating_sub(input) } else { bytes };
        item.estimated([0, most], formula)
    })
}
