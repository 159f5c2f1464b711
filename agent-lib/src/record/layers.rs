//! How each layer of names is: what the sender tells of it, and why.

use crate::base::locks::ForkMutex;
use gpumem_wire::{Layer, LayerState};
use std::sync::atomic::{AtomicU64, Ordering::*};

/// Of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// Which.
    pub layer: Layer,
    /// How it is.
    pub state: LayerState,
    /// Why, in words for people; empty where there is nothing to say.
    pub reason: String,
}

/// Not for callbacks.
static SAID: ForkMutex<Vec<Said>> = ForkMutex::new(Vec::new);
/// Changes: the sender compares.
static VERSION: AtomicU64 = AtomicU64::new(0);

/// How a layer is from now on. Not in a hook: this locks and allocates.
pub fn set(layer: Layer, state: LayerState, reason: &str) {
    let Ok(mut said) = SAID.lock() else { return };
    let now = Said { layer, state, reason: reason.to_owned() };
    match said.iter_mut().find(|said| said.layer == layer) {
        Some(before) if *before == now => return,
        Some(before) => *before = now,
        None => said.push(now),
    }
    VERSION.fetch_add(1, Release);
}

/// How a layer is, if that was said.
pub fn get(layer: Layer) -> Option<LayerState> {
    let said = SAID.lock().ok()?;
    said.iter().find(|said| said.layer == layer).map(|said| said.state)
}

/// In a child that starts anew.
pub fn renew() {
    SAID.reset_after_fork();
}

/// Grows with each change.
pub fn version() -> u64 {
    VERSION.load(Acquire)
}

/// All that was said.
pub fn all() -> Vec<Said> {
    SAID.lock().map(|said| said.clone()).unwrap_or_default()
}
