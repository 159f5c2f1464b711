//! Data that a program reports apart from its memory: marks, counters, ranges, and the state of each naming layer.

use crate::history::counters::Counters;
use crate::history::ranges::Ranges;
use gpumem_model::program_data;
use gpumem_wire::{Layer, LayerState};
use std::collections::VecDeque;
use std::sync::Arc;

/// Data that a program reports apart from its memory.
#[derive(Debug)]
pub(crate) struct ProgramData {
    pub layers: Layers,
    pub marks: Marks,
    pub counters: Counters,
    pub ranges: Ranges,
}

impl ProgramData {
    /// Returns empty data; begin and end of at most `most_spans` single ranges are kept.
    pub fn new(most_spans: usize) -> Self {
        ProgramData {
            layers: Layers::default(),
            marks: Marks::default(),
            counters: Counters::default(),
            ranges: Ranges::new(most_spans),
        }
    }

    /// Starts a new part of the run: clears marks and finished ranges; counters keep their values.
    pub fn restart(&mut self, now_ns: u64) {
        self.marks = Marks::default();
        self.counters.restart(now_ns);
        self.ranges.restart();
    }

    /// Returns counters and ranges with their names.
    pub fn view(&self, now_ns: u64, name: impl Fn(u32) -> Option<Arc<str>>) -> program_data::ProgramData {
        let counters = self.counters.view(now_ns, &name);
        let mut view = program_data::ProgramData {
            counters,
            counters_dropped: self.counters.dropped,
            ..Default::default()
        };
        self.ranges.view(&name, &mut view);
        view
    }

    /// Returns the estimated memory.
    pub fn bytes(&self) -> usize {
        self.counters.bytes() + self.ranges.bytes()
    }
}

/// State of one naming layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerView {
    /// The layer.
    pub layer: Layer,
    /// State of the layer.
    pub state: LayerState,
    /// The reason, as text; empty if there is none.
    pub reason: String,
}

/// Maximum length of a reason, which is untrusted text.
const MAX_REASON_CHARS: usize = 200;

/// Layers in the order of their first reports; at most one entry for each.
#[derive(Debug, Default)]
pub(crate) struct Layers(Vec<LayerView>);

impl Layers {
    pub fn say(&mut self, layer: Layer, state: LayerState, reason: &str) {
        if layer == Layer::Unknown {
            return; // from a newer agent
        }
        let said = LayerView { layer, state, reason: reason.chars().take(MAX_REASON_CHARS).collect() };
        match self.0.iter_mut().find(|known| known.layer == layer) {
            Some(known) => *known = said,
            None => self.0.push(said),
        }
    }

    /// Clears all layers, because another program reports its own.
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

/// Maximum number of marks of each origin. A program may set one for each step: the newest are kept.
pub const MAX_MARKS: usize = 128;

/// A named moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MarkView {
    /// Time of the mark.
    pub time_ns: u64,
    /// Name of the mark; `None` if its record was lost.
    pub name: Option<Arc<str>>,
    /// The mark was set with `gpumemctl`, not by the program.
    pub from_outside: bool,
}

/// Marks of a process.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    /// Marks of the program, and marks set from outside; each kind has separate room.
    kept: [VecDeque<MarkView>; 2],
    /// Marks that were dropped.
    pub dropped: u64,
}

impl Marks {
    pub fn add(&mut self, mark: MarkView) {
        let kept = &mut self.kept[usize::from(mark.from_outside)];
        if kept.len() == MAX_MARKS {
            kept.pop_front();
            self.dropped += 1;
        }
        kept.push_back(mark);
    }

    /// Returns all marks, by time.
    pub fn view(&self) -> Vec<MarkView> {
        let mut marks: Vec<MarkView> = self.kept.iter().flatten().cloned().collect();
        marks.sort_by_key(|mark| mark.time_ns);
        marks
    }
}
