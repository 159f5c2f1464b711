//! Names the place that holds most of a part of the memory: a line of the program, a module, or a group of repeated modules.

use crate::amounts::{sum, sums};
use crate::category::OUTPUTS;
use crate::names::{group, is_line};
use crate::{GroupBy, Report};
use gpumem_model::cell::{HIDDEN_TAG, SUM, without_sum};
use gpumem_model::run::Amounts;
use std::collections::{BTreeMap, BTreeSet};

/// Minimum share of a part's bytes for its place to be named.
const SHARE: f64 = 0.4;
/// The same inside the program's only model, whose name alone says nothing.
const SHARE_OF_MODEL: f64 = 0.2;
/// Minimum share of a module's bytes for a module inside it to be named instead.
const INNER_SHARE: f64 = 0.6;
/// A module that has more than this share of its bytes itself, and not in modules inside it, is named without that distinction.
const WHOLE_SHARE: f64 = 0.95;

/// Categories of memory that passes make: a place says more about them than about the parts of a model.
pub(crate) const OF_PASSES: [&str; 4] = ["activations", OUTPUTS, "temporaries", "gradients or temporaries"];

/// Returns the place with most of a category of the structure, and its bytes. `None` if no place has much of it.
pub(crate) fn of_category(report: &Report<'_>, amounts: &Amounts, name: &str) -> Option<(String, i64)> {
    let tags = amounts.iter().filter_map(|(cell, bytes)| {
        let is_in = report.category(*cell, GroupBy::Structure) == Some(name);
        Some((report.cell(*cell).filter(|_| is_in)?.tag.as_deref().unwrap_or_default(), *bytes))
    });
    let paths = report.run.cells.iter().filter_map(|cell| cell.tag.as_deref()).filter(|tag| !is_line(tag));
    let models: BTreeSet<&str> = paths.filter_map(|path| Some(path.split_once('/')?.0)).collect();
    let only = if models.len() == 1 { models.first().copied() } else { None };
    of_tags(&sums(tags), only).filter(|(place, _)| place != name)
}

/// A place that contains tags.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    /// First components of the tags, with numbers replaced.
    path: String,
    /// Number of components.
    depth: usize,
    /// Whether the modules inside this one do not belong to it.
    is_itself: bool,
}

impl Place {
    /// Returns the place of a tag that has this number of components.
    fn of(tag: &str, depth: usize) -> Self {
        let own = if is_line(tag) { 1 } else { without_sum(tag).split('/').count() };
        Place { path: starred(tag, depth), depth: depth.min(own), is_itself: own < depth }
    }

    /// Returns the name of the place. It has its numbers if all its tags have the same ones.
    fn name<'t>(&self, tags: impl Iterator<Item = &'t str>) -> String {
        let within = tags.filter(|tag| starred(tag, self.depth) == self.path && !is_line(tag));
        let names: BTreeSet<String> = within.map(|tag| group(without_sum(tag), self.depth, false)).collect();
        let name = names.first().filter(|_| names.len() == 1).unwrap_or(&self.path);
        if self.is_itself { format!("{name} itself") } else { name.clone() }
    }
}

/// Returns the innermost place with much of the bytes. Modules whose paths differ in numbers only are one place, such as
/// `GPT/h.*/attn`. `only` is the name of the program's model, if it has one.
fn of_tags(tags: &BTreeMap<&str, i64>, only: Option<&str>) -> Option<(String, i64)> {
    let all = sum(tags.values().copied()) as f64;
    let is_named = |tag: &str| !tag.is_empty() && tag != HIDDEN_TAG && tag != SUM;
    let mut found: Option<(Place, i64)> = None;
    while found.as_ref().is_none_or(|(place, _)| !place.is_itself) {
        let depth = found.as_ref().map_or(0, |(place, _)| place.depth);
        let is_within = |tag: &str| found.as_ref().is_none_or(|(place, _)| starred(tag, depth) == place.path);
        let inner = tags.iter().filter(|(tag, _)| is_named(tag) && is_within(tag));
        let inner = sums(inner.map(|(tag, bytes)| (Place::of(tag, depth + 1), *bytes)));
        let has_inner = inner.keys().any(|place| !place.is_itself);
        let Some((place, bytes)) = inner.into_iter().max_by_key(|(_, bytes)| *bytes) else { break };
        let least = match &found {
            None => all * SHARE,
            Some((outer, _)) if Some(outer.path.as_str()) == only => all * SHARE_OF_MODEL,
            Some((_, outer)) => *outer as f64 * INNER_SHARE,
        };
        let is_whole = |outer: i64| place.is_itself && bytes as f64 >= outer as f64 * WHOLE_SHARE;
        let is_same = !has_inner || found.as_ref().is_some_and(|(_, outer)| is_whole(*outer));
        if is_same || bytes <= 0 || (bytes as f64) < least {
            break;
        }
        found = Some((place, bytes));
    }
    let (place, bytes) = found?;
    Some((place.name(tags.keys().copied()), bytes))
}

/// Returns the first components of a path, with numbers replaced; a line of the program is one component.
fn starred(tag: &str, depth: usize) -> String {
    if is_line(tag) { tag.to_owned() } else { group(without_sum(tag), depth, true) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(tags: &[(&str, i64)], only: Option<&str>) -> Option<(String, i64)> {
        of_tags(&tags.iter().copied().collect(), only)
    }

    fn named(name: &str, bytes: i64) -> Option<(String, i64)> {
        Some((name.to_owned(), bytes))
    }

    #[test]
    fn repeated_modules_are_one_place() {
        let layers: Vec<String> = (0..12).map(|layer| format!("GPT/h.{layer}/attn")).collect();
        let mut tags: Vec<(&str, i64)> = layers.iter().map(|tag| (tag.as_str(), 8)).collect();
        tags.extend([("GPT/h.0/mlp", 8), ("GPT/head", 10)]);
        assert_eq!(place(&tags, None), named("GPT/h.*/attn", 96));
        tags.push(("GPT/h.7/norm", 400));
        assert_eq!(place(&tags, None), named("GPT/h.7/norm", 400), "of one module");
    }

    #[test]
    fn a_line_of_the_program_is_a_place() {
        assert_eq!(place(&[("b.py:7 step", 6), ("Net/a", 3)], None), named("b.py:7 step", 6));
        assert_eq!(place(&[("b.py:7 step", 3), ("c.py:7 step", 3), ("d.py:7 step", 3)], None), None);
        assert_eq!(place(&[("", 9), ("b.py:7 step", 3)], None), None, "most has no name");
    }

    #[test]
    fn the_only_model_has_the_module_with_most() {
        let tags = [("A/x", 3), ("A/y", 2), ("A/z", 2), ("A/v", 2)];
        assert_eq!(place(&tags, None), named("A", 9), "beside other models");
        assert_eq!(place(&tags, Some("A")), named("A/x", 3));
        let tags = [("A", 4), ("A/x", 2), ("A/y", 2)];
        assert_eq!(place(&tags, Some("A")), named("A itself", 4));
        assert_eq!(place(&[("A/b", 99), ("A/b/x", 1)], Some("A")), named("A/b", 100), "nearly all");
        assert_eq!(place(&[("Loss", 4), ("A/x", 1), ("A/y", 1)], Some("A")), named("Loss", 4));
    }
}
