//! The agent's status: whether it is armed, that is, whether it observes the program. Also its reports about itself and about
//! each layer of names (a source of names, for example NVTX).

use crate::base::hot::HOT_WORDS;
use crate::base::locks::ForkMutex;
use crate::record::panic;
use gpumem_wire::{AgentState, Layer, LayerState};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::*};

/// Whether the agent works: `FRESH` (not started), `ARMED` (works) or `SILENT` (does nothing).
const PHASE: &AtomicU8 = &HOT_WORDS.phase;
/// The agent has not been started: no function of the library was called.
const FRESH: u8 = 0;
/// Callbacks and functions of the C API make records.
const ARMED: u8 = 1;
/// Callbacks and functions of the C API do nothing. The reason: the agent is disabled, another copy of it runs, this is a forked
/// child, the agent has panicked, or the program exits.
const SILENT: u8 = 2;
/// Whether a panic of the agent was caught. The sender reports it.
static PANICKED: AtomicBool = AtomicBool::new(false);
/// Number of changes to `REPORTS`. The sender sends the reports again when the number has changed.
static VERSION: AtomicU64 = AtomicU64::new(0);
/// Reports of the agent's state, oldest first. Not for callbacks: locked while starting, by the sender, and by pause and resume.
static REPORTS: ForkMutex<Vec<StatusReport>> = ForkMutex::new(Vec::new);
/// Maximum number of stored reports. A daemon that connects later reads from them when driver calls were not observed.
const MAX_REPORTS: usize = 65;

/// One report of the agent's state, with its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusReport {
    /// Number of the report, counted from 1.
    pub number: u64,
    /// Time (ns) since which the agent is in this state.
    pub time_ns: u64,
    pub state: AgentState,
    /// Error number of CUPTI, of the driver or of the system (errno) that led to this state; 0 for none.
    pub(crate) result: u16,
    /// The client that holds the CUPTI subscription, or the reason of the state.
    pub(crate) detail: String,
}

/// Whether the agent is armed: callbacks and functions of the C API make records.
#[inline(always)]
pub fn armed() -> bool {
    PHASE.load(Relaxed) == ARMED
}

/// Whether no function of the library was called yet.
pub(crate) fn fresh() -> bool {
    PHASE.load(Acquire) == FRESH
}

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

/// Reports that the agent is in `state` since `time_ns`. Not for callbacks: it locks and allocates.
pub(crate) fn report(time_ns: u64, state: AgentState, result: u16, detail: &str) {
    let Ok(mut reports) = REPORTS.lock() else { return };
    let last = reports.last();
    if last.is_some_and(|last| last.state == state && last.result == result && last.detail == detail) {
        return;
    }
    // Not earlier than the last report: readers expect times in order.
    let time_ns = last.map_or(time_ns, |last| time_ns.max(last.time_ns));
    let number = last.map_or(1, |last| last.number + 1);
    if reports.len() >= MAX_REPORTS {
        reports.drain(1..3); // keeps the first; drops the next two, usually a pause and its end
    }
    reports.push(StatusReport { number, time_ns, state, result, detail: detail.to_owned() });
    VERSION.fetch_add(1, Release);
}

pub(crate) fn version() -> u64 {
    VERSION.load(Acquire)
}

/// Returns the reports with numbers above `after`, oldest first, and always the last one. Empty before the first report.
pub fn reports_after(after: u64, now_ns: u64) -> Vec<StatusReport> {
    let mut reports = REPORTS.lock().map(|reports| reports.clone()).unwrap_or_default();
    let number = reports.last().map_or(0, |last| last.number);
    reports.retain(|report| report.number > after || report.number == number);
    if PANICKED.load(Relaxed) {
        let detail = format!(
            "the agent has a fault{} and no longer observes this process",
            panic::first_panic_location()
        );
        reports.push(StatusReport {
            number,
            time_ns: now_ns,
            state: AgentState::Disarmed,
            result: 0,
            detail,
        });
    }
    reports
}

/// Whether driver calls are not observed, according to the last report. Not for use in callbacks.
pub(crate) fn is_blind() -> bool {
    use AgentState::{Blocked, Disarmed, Paused};
    let is_blind = |last: &StatusReport| matches!(last.state, Blocked | Paused | Disarmed);
    REPORTS.lock().is_ok_and(|reports| reports.last().is_some_and(is_blind))
}

pub(crate) fn panicked() -> bool {
    PANICKED.load(Relaxed)
}

/// Report of the state of a layer of names (a source of names, for example NVTX).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerReport {
    /// The source of names that the report is about.
    pub layer: Layer,
    /// Whether and how well the layer works.
    pub state: LayerState,
    /// The reason, as text for the user; may be empty.
    pub reason: String,
}

/// Last report of each source of names. Not for use in callbacks.
static LAYERS: ForkMutex<Vec<LayerReport>> = ForkMutex::new(Vec::new);
/// Number of changes to `LAYERS` and `MODELS`. The sender sends the reports again when the number has changed.
static LAYERS_VERSION: AtomicU64 = AtomicU64::new(0);

/// Reports the new state of a layer of names. Not for callbacks: it locks and allocates.
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

/// Returns the last reported state of a layer of names; `None` before the first report.
pub fn layer(layer: Layer) -> Option<LayerState> {
    let layers = LAYERS.lock().ok()?;
    layers.iter().find(|report| report.layer == layer).map(|report| report.state)
}

/// Last description of the program's models; see `Body::Models`. `None` before the first model. Not for use in callbacks.
static MODELS: ForkMutex<Option<String>> = ForkMutex::new(|| None);

/// Reports the models of the program. Not for callbacks: it locks and allocates.
pub(crate) fn report_models(text: &str) {
    let Ok(mut models) = MODELS.lock() else { return };
    if models.as_deref().unwrap_or_default() != text {
        *models = Some(text.to_owned());
        LAYERS_VERSION.fetch_add(1, Release);
    }
}

/// Returns the last description of the program's models, which is empty when they are gone; `None` before the first model.
pub(crate) fn models() -> Option<String> {
    MODELS.lock().ok()?.clone()
}

pub(crate) fn layers_version() -> u64 {
    LAYERS_VERSION.load(Acquire)
}

/// Returns the last report of each layer of names.
pub fn layers() -> Vec<LayerReport> {
    LAYERS.lock().map(|layers| layers.clone()).unwrap_or_default()
}
