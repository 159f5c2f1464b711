//! Checks whether callbacks still arrive. A client that finalizes CUPTI (Kineto) ends every subscription without notice.
//!
//! The check makes a driver call and no CUPTI call: a finalized CUPTI may return anything, and finalization may be in progress.
//! cuDeviceGetCount needs no context, takes no memory and changes nothing, and programs call it rarely. Its callback arrives on
//! the calling thread before the call returns, so its absence is known at once.

use crate::driver::core::Core;
use cupti_sys::{CUDA_ERROR_NOT_INITIALIZED, ids};
use std::sync::atomic::{AtomicU64, Ordering::*};

/// The call whose callback is subscribed only for this check.
pub(crate) const CALL: u32 = ids::cuDeviceGetCount;

/// Number of its callbacks, from any caller.
static HEARD: AtomicU64 = AtomicU64::new(0);

/// Counts a callback of a call without another meaning.
#[cold]
pub(crate) fn heard(id: u32) {
    if id == CALL {
        HEARD.fetch_add(1, Relaxed);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pulse {
    /// The driver refused the call, so nothing follows.
    Unknown,
    Heard,
    Silent,
}

/// Makes the call and checks for its callback. Not in a callback or inside of the agent, where callbacks are ignored.
pub(crate) fn ask(core: &Core) -> Pulse {
    let before = HEARD.load(Relaxed);
    if call(core) != Some(0) {
        return Pulse::Unknown; // not initialised yet, or not any more
    }
    if HEARD.load(Relaxed) == before { Pulse::Silent } else { Pulse::Heard }
}

/// Whether the driver is not initialised: cuInit failed or has not finished. Makes the same call as [`ask`].
pub(crate) fn is_uninitialised(core: &Core) -> bool {
    call(core) == Some(CUDA_ERROR_NOT_INITIALIZED)
}

/// Returns the result of the call; `None` without a driver that has it.
fn call(core: &Core) -> Option<u32> {
    let get = core.devices.driver()?.device_get_count?;
    let mut count = 0;
    // SAFETY: a function of the loaded driver, with room for its answer.
    Some(unsafe { get(&mut count) })
}

/// Whether the callback has arrived at least once. On a driver that never reports this call, its absence means nothing.
pub(crate) fn was_heard() -> bool {
    HEARD.load(Relaxed) != 0
}
