//! What a program reports beside its memory: marks, counters, ranges, and the state of each way of naming memory.

use crate::history::counters::Counters;
use crate::history::ranges::Ranges;
use gpumem_model::program_data;
use gpumem_wire::{Layer, LayerState};
use std::collections::VecDeque;
use std::sync::Arc;

/// What a program reports beside its memory.
#[derive(Debug)]
pub(crate) struct ProgramData {
    pub layers: Layers,
    pub marks: Marks,
    pub counters: Counters,
    pub ranges: Ranges,
}

impl ProgramData {
    /// Of at most `most_spans` ranges begin and end are kept one by one.
    pub fn new(most_spans: usize) -> Self {
        ProgramData {
            layers: Layers::default(),
            marks: Marks::default(),
            counters: Counters::default(),
            ranges: Ranges::new(most_spans),
        }
    }

    /// A new part of the run: marks and ranges that have ended stay with the part before, values of counters go on.
    pub fn restart(&mut self, now_ns: u64) {
        self.marks = Marks::default();
        self.counters.restart(now_ns);
        self.ranges.restart();
    }

    /// Counters and ranges, with the names of their tags.
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

    /// Estimate of its memory.
    pub fn bytes(&self) -> usize {
        self.counters.bytes() + self.ranges.bytes()
    }
}

/// One way of naming memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerView {
    /// Which way.
    pub layer: Layer,
    /// Its state.
    pub state: LayerState,
    /// The reason, as text; empty if there is none.
    pub reason: String,
}

/// Longest reason that is kept: a peer wrote it.
const MAX_REASON_CHARS: usize = 200;

/// In the order of their first reports; at most as many as there are layers.
#[derive(Debug, Default)]
pub(crate) struct Layers(Vec<LayerView>);

impl Layers {
    pub fn say(&mut self, layer: Layer, state: LayerState, reason: &str) {
        if layer == Layer::Unknown {
            return; // a newer agent's
        }
        let said = LayerView { layer, state, reason: reason.chars().take(MAX_REASON_CHARS).collect() };
        match self.0.iter_mut().find(|known| known.layer == layer) {
            Some(known) => *known = said,
            None => self.0.push(said),
        }
    }

    /// Another program reports its own.
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

/// Marks that are kept of a process, of each origin. A program may make one for each step: the newest are kept.
pub const MAX_MARKS: usize = 128;

/// A moment with a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MarkView {
    /// When.
    pub time_ns: u64,
    /// Its name; `None` if a loss took it.
    pub name: Option<Arc<str>>,
    /// It was made with `gpumemctl`, not by the program.
    pub from_outside: bool,
}

/// Marks of a process.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    /// Those of the program, and those from outside: neither takes the other's room.
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

    /// By time.
    pub fn view(&self) -> Vec<MarkView> {
        let mut marks: Vec<MarkView> = self.kept.iter().flatten().cloned().collect();
        marks.sort_by_key(|mark| mark.time_ns);
        marks
    }
}
