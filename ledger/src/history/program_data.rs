//! Data that a program reports apart from its memory: marks, counters, ranges, and the state of each naming layer.

use crate::history::counters::Counters;
use crate::history::ranges::Ranges;
use gpumem_model::coverage::Mark;
use gpumem_model::layers::LayerReport;
use gpumem_model::names::Named;
use gpumem_model::program_data;
use gpumem_wire::{Layer, LayerState};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct ProgramData {
    pub layers: Layers,
    pub marks: Marks,
    pub counters: Counters,
    pub ranges: Ranges,
}

impl ProgramData {
    /// Returns empty data. `max_spans`: number of latest single ranges whose begin and end are kept.
    pub fn new(max_spans: usize) -> Self {
        ProgramData {
            layers: Layers::default(),
            marks: Marks::default(),
            counters: Counters::default(),
            ranges: Ranges::new(max_spans),
        }
    }

    /// Starts a new part of the run: clears marks and finished ranges; counters keep their values.
    pub fn restart(&mut self, now_ns: u64) {
        self.marks = Marks::default();
        self.counters.restart(now_ns);
        self.ranges.restart();
    }

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

    pub fn bytes(&self) -> usize {
        self.counters.bytes() + self.ranges.bytes()
    }
}

/// Maximum number of characters of the reason for a naming layer's state, which is untrusted text.
const MAX_REASON_CHARS: usize = 200;

/// State of each naming layer (a source of names, such as NVTX or Python frames) and its reason, as last reported.
#[derive(Debug, Default)]
pub(crate) struct Layers(BTreeMap<Layer, (LayerState, String)>);

impl Layers {
    pub fn report(&mut self, layer: Layer, state: LayerState, reason: &str) {
        // A newer agent may report layers that are unknown here.
        if layer != Layer::Unknown {
            self.0.insert(layer, (state, reason.chars().take(MAX_REASON_CHARS).collect()));
        }
    }

    /// Clears the states of all layers, because an agent reports all of them again after its `Hello`.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn view(&self) -> Vec<LayerReport> {
        let view = |(layer, (state, reason)): (&Layer, &(LayerState, String))| LayerReport {
            layer: layer.name_or_unknown().into(),
            state: state.name_or_unknown().into(),
            reason: reason.clone(),
        };
        self.0.iter().map(view).collect()
    }

    pub fn is(&self, layer: Layer, state: LayerState) -> bool {
        self.0.get(&layer).is_some_and(|(last, _)| *last == state)
    }
}

/// Maximum number of marks (named moments) from the program, and of marks from gpumemctl; the newest are kept.
pub const MAX_MARKS: usize = 128;

#[derive(Debug, Default)]
pub(crate) struct Marks {
    /// Marks (named moments): those that the program set, and those that gpumemctl set.
    marks: [VecDeque<Mark>; 2],
    pub dropped: u64,
}

impl Marks {
    pub fn add(&mut self, time_ns: u64, name: Option<&str>, from_outside: bool) {
        let marks = &mut self.marks[usize::from(from_outside)];
        if marks.len() == MAX_MARKS {
            marks.pop_front();
            self.dropped += 1;
        }
        let by = if from_outside { "gpumemctl" } else { "program" };
        marks.push_back(Mark { time_ns, name: name.map(str::to_owned), by: by.to_owned() });
    }

    pub fn view(&self) -> Vec<Mark> {
        let mut marks: Vec<Mark> = self.marks.iter().flatten().cloned().collect();
        marks.sort_by_key(|mark| mark.time_ns);
        marks
    }
}
