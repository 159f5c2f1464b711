//! Whether the agent is armed, and what it reports about itself and about each layer of names.

use crate::base::hot::HOT_WORDS;
use crate::base::locks::ForkMutex;
use crate::record::panic;
use gpumem_wire::{AgentState, Layer, LayerState};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::*};

/// Whether callbacks and the C API do something.
const PHASE: &AtomicU8 = &HOT_WORDS.phase;
/// Nobody has called so far.
const FRESH: u8 = 0;
/// They do.
const ARMED: u8 = 1;
/// They do not: disabled, another copy does it, or stopped by a fork (in the child), a panic or the exit.
const SILENT: u8 = 2;
/// A panic was caught: the sender says so.
static PANICKED: AtomicBool = AtomicBool::new(false);
/// Changes of what the agent says: the sender compares.
static VERSION: AtomicU64 = AtomicU64::new(0);
/// Not for callbacks: set while starting, by the sender, and by pause and resume.
static REPORTS: ForkMutex<Vec<StatusReport>> = ForkMutex::new(Vec::new);
/// So many are kept for daemons that come later: they want to know when the agent was blind.
const KEPT: usize = 65;

/// What the agent said about itself, and since when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusReport {
    /// From 1 on.
    pub number: u64,
    /// Since when.
    pub time_ns: u64,
    /// What.
    pub state: AgentState,
    /// CUPTI's result.
    pub result: u16,
    /// Who or why.
    pub detail: String,
}

/// Whether to do anything.
#[inline(always)]
pub fn armed() -> bool {
    PHASE.load(Relaxed) == ARMED
}

/// Whether nobody has called so far.
pub fn fresh() -> bool {
    PHASE.load(Acquire) == FRESH
}

/// Once everything is there.
pub fn arm() {
    PHASE.store(ARMED, Release);
}

/// For good, but for a forked child that initialises CUDA itself.
pub fn disarm() {
    PHASE.store(SILENT, Release);
}

/// After a panic, on whatever thread it happened: for good.
pub fn disarm_after_panic() {
    disarm();
    PANICKED.store(true, Relaxed);
    VERSION.fetch_add(1, Release);
}

/// Reports what the agent is since a time.
pub fn report(time_ns: u64, state: AgentState, result: u16, detail: &str) {
    let Ok(mut said) = REPORTS.lock() else { return };
    let last = said.last();
    if last.is_some_and(|last| last.state == state && last.result == result && last.detail == detail) {
        return;
    }
    // Never before what was said last: a reader takes them in order.
    let time_ns = last.map_or(time_ns, |last| time_ns.max(last.time_ns));
    let number = last.map_or(1, |last| last.number + 1);
    if said.len() >= KEPT {
        said.drain(1..3); // a pause and its end; how it began stays
    }
    said.push(StatusReport { number, time_ns, state, result, detail: detail.to_owned() });
    VERSION.fetch_add(1, Release);
}

/// In a child that starts anew: what its parent said is not about it.
pub fn reset_after_fork() {
    REPORTS.reset_after_fork();
    LAYERS.reset_after_fork();
}

/// Grows with each change.
pub fn version() -> u64 {
    VERSION.load(Acquire)
}

/// What was said after the number `after`, oldest first; the last one also if it is not new. Empty: CUPTI was not looked
/// for so far.
pub fn reports_after(after: u64, now_ns: u64) -> Vec<StatusReport> {
    let mut said = REPORTS.lock().map(|said| said.clone()).unwrap_or_default();
    let number = said.last().map_or(0, |last| last.number);
    said.retain(|said| said.number > after || said.number == number);
    if PANICKED.load(Relaxed) {
        let detail = format!(
            "a fault in the agent{}: it has stopped watching this process",
            panic::first_panic_location()
        );
        said.push(StatusReport { number, time_ns: now_ns, state: AgentState::Disarmed, result: 0, detail });
    }
    said
}

/// It was said that driver calls are not heard. Not for callbacks.
pub fn is_blind() -> bool {
    let is_blind = |said: &StatusReport| {
        matches!(said.state, AgentState::Blocked | AgentState::Paused | AgentState::Disarmed)
    };
    REPORTS.lock().is_ok_and(|said| said.last().is_some_and(is_blind))
}

/// A panic was caught.
pub fn panicked() -> bool {
    PANICKED.load(Relaxed)
}

/// How a layer of names is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerReport {
    /// Which.
    pub layer: Layer,
    /// How it is.
    pub state: LayerState,
    /// Why, in words for people; empty where there is nothing to say.
    pub reason: String,
}

/// Not for callbacks.
static LAYERS: ForkMutex<Vec<LayerReport>> = ForkMutex::new(Vec::new);
/// Changes of what is reported about layers: the sender compares.
static LAYERS_VERSION: AtomicU64 = AtomicU64::new(0);

/// Reports how a layer is from now on. Not in a hook: this locks and allocates.
pub fn report_layer(layer: Layer, state: LayerState, reason: &str) {
    let Ok(mut layers) = LAYERS.lock() else { return };
    let now = LayerReport { layer, state, reason: reason.to_owned() };
    match layers.iter_mut().find(|report| report.layer == layer) {
        Some(before) if *before == now => return,
        Some(before) => *before = now,
        None => layers.push(now),
    }
    LAYERS_VERSION.fetch_add(1, Release);
}

/// How a layer is, if that was reported.
pub fn layer(layer: Layer) -> Option<LayerState> {
    let layers = LAYERS.lock().ok()?;
    layers.iter().find(|report| report.layer == layer).map(|report| report.state)
}

/// Grows with each change of what is reported about layers.
pub fn layers_version() -> u64 {
    LAYERS_VERSION.load(Acquire)
}

/// What is reported about each layer.
pub fn layers() -> Vec<LayerReport> {
    LAYERS.lock().map(|layers| layers.clone()).unwrap_or_default()
}
