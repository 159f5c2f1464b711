//! Naming layers: the sources from which memory gets names (NVTX, Python frames, ...), with the states that the agent reports.

use crate::fields::fields;
use serde::{Deserialize, Serialize};

fields! {
    /// State of one naming layer (a source of names for memory, such as NVTX).
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct LayerReport {
        /// Name of the layer: `blocks`, `out_of_memory`, `scopes`, `nvtx`, `module_path`, `autograd`, `roles` or `stacks`.
        layer: String;
        /// State: `active`, `degraded`, `absent` (not needed by the program), `off` or `failed`.
        state: String;
        /// Reason for the state; may be empty.
        reason: String;
    }
}

impl LayerReport {
    pub(crate) fn hide_reason(&mut self) {
        self.reason.clear();
    }

    /// Whether the layer gives names to memory.
    pub fn works(&self) -> bool {
        matches!(self.state.as_str(), "active" | "degraded")
    }

    /// Whether the layer does less than it could, so that users should know.
    pub fn is_degraded(&self) -> bool {
        matches!(self.state.as_str(), "degraded" | "off" | "failed")
    }
}

/// Returns the most precise kind of names that a working layer gives; `None` if the agent reported no layers.
pub fn level(layers: &[LayerReport]) -> Option<&'static str> {
    if layers.is_empty() {
        return None;
    }
    let works = |name: &str| layers.iter().any(|layer| layer.layer == name && layer.works());
    let levels = [
        ("module_path", "module path"),
        ("nvtx", "NVTX ranges"),
        ("scopes", "scopes"),
        ("stacks", "Python stacks"),
    ];
    let best = levels.into_iter().find(|(layer, _)| works(layer)).map(|(_, level)| level);
    Some(best.unwrap_or("calling library"))
}

/// Describes the layers that do less than they could. `longest`: maximum number of characters of each reason.
pub fn describe_degraded(layers: &[LayerReport], longest: usize) -> Vec<String> {
    let words = |layer: &LayerReport| {
        let name = match layer.layer.as_str() {
            "blocks" => "PyTorch's blocks",
            "out_of_memory" => "out-of-memory word",
            "scopes" => "scopes",
            "nvtx" => "NVTX",
            "module_path" => "module path",
            "autograd" => "names in backward",
            "roles" => "roles",
            other => other,
        };
        let cut = if layer.reason.chars().count() > longest { ".." } else { "" };
        let reason = layer.reason.chars().take(longest).collect::<String>() + cut;
        let reason = if reason.is_empty() { String::new() } else { format!(": {reason}") };
        format!("{name} {}{reason}", layer.state)
    };
    layers.iter().filter(|layer| layer.is_degraded()).map(words).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(layer: &str, state: &str, reason: &str) -> LayerReport {
        LayerReport { layer: layer.into(), state: state.into(), reason: reason.into() }
    }

    #[test]
    fn the_best_level_that_works_is_named_and_what_lacks_is_said() {
        assert_eq!(level(&[]), None);
        let mut layers = vec![said("scopes", "active", ""), said("nvtx", "absent", "no range yet")];
        assert_eq!(level(&layers), Some("scopes"));
        layers.push(said("module_path", "failed", "CPython 3.15 is not known"));
        layers.push(said("autograd", "degraded", ""));
        assert_eq!(level(&layers), Some("scopes"));
        assert_eq!(
            describe_degraded(&layers, 26),
            ["module path failed: CPython 3.15 is not known", "names in backward degraded"]
        );
        assert_eq!(describe_degraded(&layers[2..3], 7), ["module path failed: CPython.."]);
        assert_eq!(level(&layers[1..2]), Some("calling library"));
        layers[2].state = "degraded".into();
        assert_eq!(level(&layers), Some("module path"));
    }
}
