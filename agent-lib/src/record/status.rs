//! The agent's status: whether it is armed, and its reports about itself and about each layer of names.

use crate::base::hot::HOT_WORDS;
use crate::base::locks::ForkMutex;
use crate::record::panic;
use gpumem_wire::{AgentState, Layer, LayerState};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::*};

/// Whether callbacks and the C API do something: one of the following.
const PHASE: &AtomicU8 = &HOT_WORDS.phase;
/// No function of the library was called yet.
const FRESH: u8 = 0;
/// Armed: functions of the library record.
const ARMED: u8 = 1;
/// Functions of the library do nothing: disabled, replaced by another copy, or stopped by a fork (in the child), a panic or the
/// exit.
const SILENT: u8 = 2;
/// A panic was caught. The sender reports it.
static PANICKED: AtomicBool = AtomicBool::new(false);
/// Counts changes of the reports. The sender compares it with the last one that it sent.
static VERSION: AtomicU64 = AtomicU64::new(0);
/// Not for callbacks: locked while starting, by the sender, and by pause and resume.
static REPORTS: ForkMutex<Vec<StatusReport>> = ForkMutex::new(Vec::new);
/// Maximum number of reports to keep for daemons that connect later: they need the times in which the agent was blind.
const KEPT: usize = 65;

/// A report of the agent's state, and its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusReport {
    /// Number, from 1 on.
    pub number: u64,
    /// Time from which the state holds.
    pub time_ns: u64,
    /// The state.
    pub state: AgentState,
    /// CUPTI's result.
    pub(crate) result: u16,
    /// The holder of the subscription, or the reason.
    pub(crate) detail: String,
}

/// Whether the agent is active.
#[inline(always)]
pub fn armed() -> bool {
    PHASE.load(Relaxed) == ARMED
}

/// Whether no function of the library was called yet.
pub(crate) fn fresh() -> bool {
    PHASE.load(Acquire) == FRESH
}

/// Arms the agent, once all its parts exist.
pub(crate) fn arm() {
    PHASE.store(ARMED, Release);
}

/// Disarms the agent for good, except in a forked child that initialises CUDA itself.
pub(crate) fn disarm() {
    PHASE.store(SILENT, Release);
}

pub(crate) fn disarm_after_panic() {
    disarm();
    PANICKED.store(true, Relaxed);
    VERSION.fetch_add(1, Release);
}

/// Reports the agent's state since `time_ns`. Not in a callback: it locks and allocates.
pub(crate) fn report(time_ns: u64, state: AgentState, result: u16, detail: &str) {
    let Ok(mut said) = REPORTS.lock() else { return };
    let last = said.last();
    if last.is_some_and(|last| last.state == state && last.result == result && last.detail == detail) {
        return;
    }
    // Never before the last report: readers expect them in order.
    let time_ns = last.map_or(time_ns, |last| time_ns.max(last.time_ns));
    let number = last.map_or(1, |last| last.number + 1);
    if said.len() >= KEPT {
        said.drain(1..3); // drops a pause and its end; the first report stays
    }
    said.push(StatusReport { number, time_ns, state, result, detail: detail.to_owned() });
    VERSION.fetch_add(1, Release);
}

pub(crate) fn version() -> u64 {
    VERSION.load(Acquire)
}

/// Returns the reports after the number `after`, oldest first, and always the last one. Empty before CUPTI was searched for.
pub fn reports_after(after: u64, now_ns: u64) -> Vec<StatusReport> {
    let mut said = REPORTS.lock().map(|said| said.clone()).unwrap_or_default();
    let number = said.last().map_or(0, |last| last.number);
    said.retain(|said| said.number > after || said.number == number);
    if PANICKED.load(Relaxed) {
        let detail = format!(
            "a fault in the agent{}: it no longer observes this process",
            panic::first_panic_location()
        );
        said.push(StatusReport { number, time_ns: now_ns, state: AgentState::Disarmed, result: 0, detail });
    }
    said
}

/// Whether, according to the last report, driver calls are not observed. Not for callbacks.
pub(crate) fn is_blind() -> bool {
    let is_blind = |said: &StatusReport| {
        matches!(said.state, AgentState::Blocked | AgentState::Paused | AgentState::Disarmed)
    };
    REPORTS.lock().is_ok_and(|said| said.last().is_some_and(is_blind))
}

pub(crate) fn panicked() -> bool {
    PANICKED.load(Relaxed)
}

/// State of a layer of names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerReport {
    /// The layer.
    pub layer: Layer,
    /// State of the layer.
    pub state: LayerState,
    /// The reason, as text for the user; may be empty.
    pub reason: String,
}

/// Not for callbacks.
static LAYERS: ForkMutex<Vec<LayerReport>> = ForkMutex::new(Vec::new);
/// Counts changes of the layers' reports. The sender compares it with the last one that it sent.
static LAYERS_VERSION: AtomicU64 = AtomicU64::new(0);

/// Reports the state of a layer from now on. Not in a callback: it locks and allocates.
pub(crate) fn report_layer(layer: Layer, state: LayerState, reason: &str) {
    let Ok(mut layers) = LAYERS.lock() else { return };
    let before = layers.iter().position(|report| report.layer == layer);
    let now = || LayerReport { layer, state, reason: reason.to_owned() };
    match before.and_then(|at| layers.get_mut(at)) {
        Some(before) if before.state == state && before.reason == reason => return,
        Some(before) => *before = now(),
        None => layers.push(now()),
    }
    LAYERS_VERSION.fetch_add(1, Release);
}

/// Reports a layer that needs PyTorch as absent, or as switched off for the reason `off`, unless its state was reported before.
pub(crate) fn report_no_torch(what: Layer, is_torch_on: bool, is_on: bool, off: &str) {
    let (state, reason) = match (is_torch_on, is_on) {
        (false, _) => (LayerState::Off, "switched off with GPUMEM_TORCH=0"),
        (_, false) => (LayerState::Off, off),
        _ => (LayerState::Absent, "no PyTorch in this process"),
    };
    if layer(what).is_none() {
        report_layer(what, state, reason);
    }
}

/// Returns the state of a layer, if it was reported.
pub fn layer(layer: Layer) -> Option<LayerState> {
    let layers = LAYERS.lock().ok()?;
    layers.iter().find(|report| report.layer == layer).map(|report| report.state)
}

pub(crate) fn layers_version() -> u64 {
    LAYERS_VERSION.load(Acquire)
}

/// Returns the current report of each layer.
pub fn layers() -> Vec<LayerReport> {
    LAYERS.lock().map(|layers| layers.clone()).unwrap_or_default()
}
