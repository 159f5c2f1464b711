//! The peak as collapsed stacks, for flame graph tools: a line per path, `frame;frame;frame bytes`. Lines are sorted and no path
//! is there twice; their sum is `used` at the peak, or what of it is known, over all devices.
//!
//! A count cannot be negative: paths that are (a report that contradicts itself) are left out here; `--treemap` and `--csv`
//! have them.

use super::Report;
use super::tree::Node;
use std::fmt::Write;

/// The lines.
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
        // Its separator has no escape of its own.
        path.push_str(&name.replace(';', "\\u{3b}"));
        lines(child, path, out);
        path.truncate(length);
    }
}
