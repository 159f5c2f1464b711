//! Formulas that are computed in several operations: each keeps its result for the backward pass, where one operation of PyTorch keeps
//! its input only. They are found as modules without parameters that hold many times their input, as modules whose own operations hold
//! many times the outputs of the modules inside, and as lines outside of modules of which the backward pass makes more tensors.

use super::super::item::{Item, Kind, Memory, mib};
use super::activations::repeated;
use super::cells::{is_inside, parent, root};
use super::parts::Parts;
use crate::amounts::{is_about, sum};
use crate::names;
use gpumem_model::cell::without_sum;
use gpumem_model::run::Device;
use gpumem_model::units::plural;
use std::collections::BTreeMap;

/// Minimum bytes of such a module, as a factor of those of the largest module with parameters beside it. One operation keeps at most
/// its input and its output.
const MANY_TIMES: i64 = 3;

/// Minimum bytes of a module's own operations, as a factor of those of the largest module inside of it or beside it. Attention with
/// one operation has its inputs and outputs, and copies of them in other orders.
const MANY_OUTPUTS: i64 = 5;
/// Minimum share of the process's memory of a formula, for a program that fits.
const MOST_SHARE: f64 = 0.4;
/// Minimum number of tensors that the backward pass makes of a line's tensors, in their size: that of `F.cross_entropy` makes two, ...
const LEAST_TENSORS: i64 = 3;
/// ... and maximum difference from this size, as a share of it.
const SAME_SHARE: f64 = 0.02;
/// Minimum share of the process's memory of the line's tensors.
const LINE_SHARE: f64 = 0.1;

/// Returns whether a formula has so much of the memory that it is named in a program that fits, too.
pub(super) fn is_most(item: &Item, parts: &Parts<'_>) -> bool {
    item.kind == Kind::FusedOperation && item.most() as f64 >= parts.used as f64 * MOST_SHARE
}

/// Returns the change for a line outside of modules that keeps tensors for the backward pass, which makes more tensors of their size
/// outside of modules, such as the differences of all pairs of rows.
pub(super) fn of_line(device: &Device, parts: &Parts<'_>) -> Option<Item> {
    let lines = parts.by_tag.iter().filter(|(tag, _)| names::is_line(tag));
    let (line, bytes) = lines.max_by_key(|(_, bytes)| **bytes)?;
    let made = parts.backward_outside;
    let count = (made as f64 / (*bytes).max(1) as f64).round() as i64;
    let is_same = is_about(made, bytes.saturating_mul(count), SAME_SHARE);
    let is_large =
        *bytes as f64 >= parts.used as f64 * LINE_SHARE && parts.is_large(bytes.saturating_add(made));
    (is_same && count >= LEAST_TENSORS && is_large).then(|| {
        let change = "If {0} computes a formula of all pairs of rows, use one operation (such as torch.cdist for distances), or compute it in chunks of the rows, each with its backward pass";
        let item = Item::new(Kind::FusedOperation, Memory::Activations, device, change).named(*line);
        let formula = format!(
            "{} of activations of this line, and {count} x as much that the backward pass makes outside of modules",
            mib(*bytes)
        );
        item.estimated([0, bytes.saturating_add(made)], formula)
    })
}

/// Activations of modules that are alike except for their numbers.
#[derive(Debug, Default)]
struct OwnOperations {
    /// Bytes of the modules' own operations.
    bytes: i64,
    /// Bytes of the modules without parameters directly inside of them.
    inside: i64,
    /// Number of modules.
    count: i64,
    /// The largest bytes of a module with parameters inside of one of them, or beside it.
    largest: i64,
}

/// Returns the change for modules, alike except for their numbers, whose own operations keep many times as much as the largest module
/// with parameters inside of them or beside them, such as the scores or the mask of all pairs of tokens.
pub(super) fn own_operations(device: &Device, parts: &Parts<'_>) -> Option<Item> {
    let names = || parts.parameters_by_tag.keys();
    let is_composed = |path: &str| {
        names().any(|name| parent(name) != path && is_inside(name, path))
            && !names().any(|name| parent(name) == path)
    };
    let has_parameters = |path: &str| names().any(|name| is_inside(name, path));
    // The path with `*` in place of the first number.
    let alike = |path: &str| repeated(path).map(|(starred, own)| starred + &path[own.len()..]);
    let mut groups: BTreeMap<String, OwnOperations> = BTreeMap::new();
    for (tag, bytes) in &parts.by_tag {
        let path = without_sum(tag);
        let Some(name) = alike(path).filter(|_| !names::is_line(path) && is_composed(path)) else {
            continue;
        };
        let others = parts.by_tag.iter().map(|(other, bytes)| (without_sum(other), *bytes));
        // A module without parameters, such as a dropout, may work on what the own operations make.
        let (with, without): (Vec<_>, Vec<_>) = others.partition(|(other, _)| has_parameters(other));
        let is_other = |other: &str| alike(other).as_deref() != Some(name.as_str());
        let beside = with.into_iter().filter(|(other, _)| is_inside(other, parent(path)) && is_other(other));
        let largest = beside.map(|(_, bytes)| bytes).max().unwrap_or(0);
        let inside = without.into_iter().filter(|(other, _)| parent(other) == path);
        let group = groups.entry(name).or_default();
        group.bytes = group.bytes.saturating_add(*bytes);
        group.inside = group.inside.saturating_add(sum(inside.map(|(_, bytes)| bytes)));
        group.count += 1;
        group.largest = group.largest.max(largest);
    }
    let (name, group) = groups.into_iter().max_by_key(|(_, group)| group.bytes)?;
    let OwnOperations { bytes, inside, count, largest } = group;
    let is_many = largest > 0 && bytes / count >= largest.saturating_mul(MANY_OUTPUTS);
    (is_many && count > 1 && !parts.is_inference && parts.is_large(bytes)).then(|| {
        let change = "If {0} makes scores or a mask of all pairs of tokens, call F.scaled_dot_product_attention (with is_causal=True in place of a causal mask), or make one mask for all layers, without a dimension for the batch and the heads";
        let item = Item::new(Kind::FusedOperation, Memory::Activations, device, change).named(name);
        let formula = format!(
            "{} of activations of the own operations of {} and of modules without parameters inside; those with parameters inside and beside have at most {} each",
            mib(bytes.saturating_add(inside)),
            plural(count.unsigned_abs(), "module"),
            mib(largest)
        );
        item.estimated([0, bytes.saturating_add(inside)], formula)
    })
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
    let is_known =
        |tag: &str| parts.parameters_by_tag.keys().any(|name| root(name) == root(tag) || !tag.contains('/'));
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
