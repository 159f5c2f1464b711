//! How each way of naming memory is, as the agent says.

use gpumem_wire::{Layer, LayerState};

/// One way of naming memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerView {
    /// Which.
    pub layer: Layer,
    /// How it is.
    pub state: LayerState,
    /// Why, in words for people; empty where there is nothing to say.
    pub reason: String,
}

/// Longest reason that is kept: a peer wrote it.
const MAX_REASON_CHARS: usize = 200;

/// In the order in which they were first said; at most as many as there are layers.
#[derive(Debug, Default)]
pub(crate) struct Layers(Vec<LayerView>);

impl Layers {
    pub fn say(&mut self, layer: Layer, state: LayerState, reason: &str) {
        if layer == Layer::Unknown {
            return; // of a newer agent
        }
        let said = LayerView { layer, state, reason: reason.chars().take(MAX_REASON_CHARS).collect() };
        match self.0.iter_mut().find(|known| known.layer == layer) {
            Some(known) => *known = said,
            None => self.0.push(said),
        }
    }

    /// Another program says its own.
    pub fn forget(&mut self) {
        self.0.clear();
    }

    pub fn view(&self) -> Vec<LayerView> {
        let mut all = self.0.clone();
        all.sort_by_key(|said| said.layer);
        all
    }

    pub fn is(&self, layer: Layer, state: LayerState) -> bool {
        self.0.iter().any(|said| said.layer == layer && said.state == state)
    }
}
