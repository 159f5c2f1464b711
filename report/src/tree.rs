//! Converts the peak of each device to a tree along tag paths, for flame graphs and treemaps:
//!
//! ```text
//! GPU 0 -> tracked -> model -> layers.17 -> mlp -> activation
//!                  -> pool idle -> torch
//!       -> Untrackable -> context
//! ```
//!
//! The bytes of a tree add up to `used` at the peak, or to the known part of `used`.

use super::Report;
use super::names::{is_line, library};
use crate::labels::{device_name, label};
use crate::lines::clean_name;
use crate::rules::NO_TAG;
use gpumem_model::escape::escape_key;
use gpumem_model::run::{Cell, Class, Device};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Maximum number of components in a path; deeper ones become one name. Readers of nested JSON allow 128 levels; a node uses two.
const DEEPEST: usize = 40;

/// A node of the tree.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Node {
    /// Child nodes by name.
    pub children: BTreeMap<String, Node>,
    /// The node's own bytes, without its children.
    pub own_bytes: i64,
}

impl Node {
    /// Returns the root of a tree. It has one child for each device with memory, named after the device.
    pub fn of(report: &Report<'_>) -> Node {
        let mut root = Node::default();
        for device in &report.run.devices {
            let mut name = escape_key(&device_name(device));
            if root.children.contains_key(&name) {
                name = format!("{name} {}", escape_key(&device.name));
            }
            let node = root.children.entry(name).or_default();
            fill(report, device, node);
        }
        root
    }

    /// Returns the bytes of the node and all nodes below it.
    pub fn bytes(&self) -> i64 {
        self.children.values().map(Node::bytes).fold(self.own_bytes, i64::saturating_add)
    }

    fn add<'p>(&mut self, path: impl IntoIterator<Item = &'p str>, bytes: i64) {
        let mut node = self;
        for name in path {
            node = node.children.entry(part(name)).or_default();
        }
        node.own_bytes = node.own_bytes.saturating_add(bytes);
    }
}

/// Returns a path component as it is printed; different components stay different.
fn part(name: &str) -> String {
    match escape_key(name) {
        name if name.is_empty() => "(blank)".to_owned(),
        name if name.trim().is_empty() => clean_name(&name),
        name => name,
    }
}

fn fill(report: &Report<'_>, device: &Device, node: &mut Node) {
    let moment = &device.peak;
    if moment.tracked_bytes.is_none() {
        node.add(["used (no agent)"], moment.used_bytes().unwrap_or(0));
        return;
    }
    for &(index, bytes) in &moment.amounts {
        match report.cell(index) {
            Some(cell) => node.add(std::iter::once("tracked").chain(path(cell)), bytes),
            None => node.add(["tracked", NO_TAG], bytes),
        }
    }
    if let Some(predates) = moment.predates_bytes.filter(|&bytes| bytes != 0) {
        node.add(["predates the agent"], predates);
    }
    let Some(parts) = moment.gap_parts() else { return };
    // Flame graphs cannot show negative parts; the sum of the parts is usually not negative.
    if parts.each().iter().any(|(_, _, bytes)| *bytes < 0) {
        node.add(["Untrackable"], parts.sum());
        return;
    }
    for (name, _, bytes) in parts.each().into_iter().filter(|(_, _, bytes)| *bytes != 0) {
        node.add(["Untrackable", &name.replace('_', " ")], bytes);
    }
}

/// Returns the path of a cell in the tree: the components of its tag, with its role at the end.
fn path(cell: &Cell) -> Vec<&str> {
    let pool = cell.pool.as_deref();
    match cell.class {
        Class::PoolIdle => {
            let pending = cell.pending.then_some("waits for a stream");
            ["pool idle"].into_iter().chain(pending).chain(pool).collect()
        }
        Class::Opaque => std::iter::once("opaque pools").chain(pool).collect(),
        Class::Direct | Class::Block => {
            let mut path: Vec<&str> = match (&cell.tag, &cell.library) {
                (Some(tag), _) if is_line(tag) => vec![&**tag],
                (Some(tag), _) => {
                    // MXNet separates the scopes in its tags with colons.
                    let separator = if tag.contains('/') { '/' } else { ':' };
                    tag.splitn(DEEPEST, separator).collect()
                }
                (None, Some(path)) => vec![NO_TAG, library(path)],
                (None, None) => vec![NO_TAG],
            };
            path.extend(cell.role.as_deref());
            path
        }
    }
}

/// Returns the tree as collapsed stacks for flame graph tools, one line for each path: `frame;frame;frame bytes`. Lines are
/// sorted and paths are unique.
///
/// Flame graphs have no negative counts, so paths with negative bytes (in a report that contradicts itself) are omitted here;
/// `--treemap` and `--csv` contain them.
pub fn collapsed(report: &Report<'_>) -> String {
    let mut out = String::new();
    lines(&Node::of(report), &mut String::new(), &mut out);
    out
}

fn lines(node: &Node, path: &mut String, out: &mut String) {
    if node.own_bytes > 0 {
        let _ = writeln!(out, "{path} {}", node.own_bytes);
    }
    for (name, child) in &node.children {
        let length = path.len();
        if !path.is_empty() {
            path.push(';');
        }
        // Stack lines have no escape for their separator, the semicolon.
        path.push_str(&name.replace(';', "\\u{3b}"));
        lines(child, path, out);
        path.truncate(length);
    }
}

/// Returns the tree as nested JSON for treemaps and sunbursts: `{name, children}` or `{name, value}`, in bytes, the largest
/// first. The root is the run, with one tree below it for each device. If a node with children also has own bytes, these are in a
/// child `(itself)`.
pub fn treemap(report: &Report<'_>) -> String {
    let root = value(&label(report.run), &Node::of(report));
    gpumem_model::escape::json(&root)
}

fn value(name: &str, node: &Node) -> Value {
    if node.children.is_empty() {
        return json!({ "name": name, "value": node.own_bytes });
    }
    let mut children: Vec<(i64, Value)> =
        node.children.iter().map(|(name, child)| (child.bytes(), value(name, child))).collect();
    if node.own_bytes != 0 {
        children.push((node.own_bytes, json!({ "name": "(itself)", "value": node.own_bytes })));
    }
    // The sort is stable: nodes of equal size stay in the order of their names.
    children.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    let children: Vec<Value> = children.into_iter().map(|(_, child)| child).collect();
    json!({ "name": name, "children": children })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_bounded_and_sums_stay() {
        let mut root = Node::default();
        let tag = "a/".repeat(127);
        let cell = Cell { class: Class::Block, tag: Some(tag), ..Cell::default() };
        assert_eq!(path(&cell).len(), DEEPEST);
        root.add(path(&cell), 5);
        root.add(["a"], 7);
        root.add(["a", ""], -3);
        root.add(["a", " "], 1);
        root.add(["a", "  "], 1);
        root.add(["a", "\u{1b}"], 1);
        root.add(["a", "\\u{1b}"], 1);
        assert_eq!(root.bytes(), 13);
        assert_eq!(root.children["a"].children.len(), 6, "what differs is apart: {:?}", root.children["a"]);
        assert_eq!(root.children["a"].own_bytes, 7);
        assert_eq!(root.children["a"].children["(blank)"].own_bytes, -3);
    }
}
