//! Whether the agent is armed, and what it says about itself.

use gpumem_wire::AgentState;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::*};

/// Whether callbacks and the C API do something.
static PHASE: AtomicU8 = AtomicU8::new(FRESH);
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
static STATE: AtomicU8 = AtomicU8::new(0);
/// Not for callbacks: set while starting, by the sender, and by pause and resume.
static DETAIL: Mutex<(u16, String)> = Mutex::new((0, String::new()));

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

/// What is said about itself.
pub fn set(state: AgentState, result: u16, detail: &str) {
    if let Ok(mut place) = DETAIL.lock() {
        if STATE.load(Relaxed) == state.to_code() && place.0 == result && place.1 == detail {
            return;
        }
        *place = (result, detail.to_owned());
        STATE.store(state.to_code(), Relaxed);
        VERSION.fetch_add(1, Release);
    }
}

/// Grows with each change.
pub fn version() -> u64 {
    VERSION.load(Acquire)
}

/// State, CUPTI's result, detail.
pub fn get() -> (AgentState, u16, String) {
    if PANICKED.load(Relaxed) {
        return (
            AgentState::Disarmed,
            0,
            "a fault in the agent: it has stopped watching this process".to_owned(),
        );
    }
    let (result, detail) = DETAIL.lock().map(|place| place.clone()).unwrap_or_default();
    (AgentState::from_code(STATE.load(Relaxed)), result, detail)
}

/// A panic was caught.
pub fn panicked() -> bool {
    PANICKED.load(Relaxed)
}
