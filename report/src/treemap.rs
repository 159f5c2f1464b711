//! The peak as nested JSON, for treemaps and sunbursts: `{name, children}` or `{name, value}`, bytes, the largest first. The
//! root is the run, below it one tree per device. All values of a device add up to `used` at its peak, or to what of it is
//! known; a node with bytes of its own beside its children has them in a child `(itself)`.

use super::Report;
use super::text::label;
use super::tree::Node;
use serde_json::{Value, json};

/// The document.
pub fn json(report: &Report<'_>) -> String {
    let root = value(&label(report.run), &Node::of(report));
    gpumem_model::harmless::json(&root)
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
    // Equal ones stay in the order of their names.
    children.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    let children: Vec<Value> = children.into_iter().map(|(_, child)| child).collect();
    json!({ "name": name, "children": children })
}
